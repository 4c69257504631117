"""The scripts of examples/hangs as real gloo jobs: right rank, cause and line, no healthy job blamed, no false statement."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import diagnose

from .facts import false_statements
from .gallery_module import HANGS, gallery
from .histories import on_shared_tables
from .test_properties import PLANTS, plant

pytest.importorskip("torch")
TRUTH = gallery.truth()
#: One real job for each cause, and for each way in which calls are recorded. The others run in `make test-all`; their
#: recorded boxes are judged always (test_recorded.py).
_REAL = """
    stuck_before_all_reduce killed uncaught_exception absent_at_init new_group_without_one fsdp_skipped_module ddp_unused_layer
    async_cycle recv_recv batch_without_partner message_tags all_to_all_splits coalesced_sizes dtypes reduce_operations
    broadcast_roots different_operations logging_on_rank_0 interpreter_lock_held ok_training ok_pipeline
"""
REAL = frozenset(_REAL.split())
NAMES = [name if name in REAL else pytest.param(name, marks=pytest.mark.everything) for name in TRUTH]


@cache
def _outcome(name: str, folder: Path) -> Any:
    gallery.preload()
    return gallery.run_hang(TRUTH[name], folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_on_a_real_hang_is_that_of_the_table(name: str, folder: Path) -> None:
    """Rank, cause and line; where nothing is wrong, nobody is blamed."""
    outcome = _outcome(name, folder)
    verdict = outcome.diagnosis.verdict
    assert gallery.is_right(outcome) == (True, True, True), f"{verdict}\n{gallery.said(folder / name)}"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_false_is_said_of_a_real_hang(name: str, folder: Path) -> None:
    """Every rank, call, size, tag, step and line that findings name is in the calls."""
    outcome = _outcome(name, folder)
    assert false_statements(outcome.diagnosis, outcome.traces, outcome.seen) == []


@pytest.mark.parametrize("kind", PLANTS)
def test_nothing_false_is_said_of_generated_jobs(kind: str) -> None:
    """As above, over jobs of many groups with a fault planted anywhere."""
    for seed in range(12):
        world, _ = plant(kind, random.Random(f"facts {kind} {seed}"))
        traces = on_shared_tables(world.traces())
        assert false_statements(diagnose(traces), traces) == [], (kind, seed)


def test_the_table_lists_every_script_and_at_least_sixty_kinds_of_hang() -> None:
    """A script without a row would never be run."""
    scripts = {path.stem for path in HANGS.glob("*.py")} - {"gallery"}
    assert scripts == set(TRUTH) and set(TRUTH) >= REAL
    assert sum(bool(case.ranks) for case in TRUTH.values()) >= 60


def test_a_false_statement_is_noticed() -> None:
    """The check itself: a sentence with a rank, call and line that nobody has."""
    from dataclasses import replace

    world, _ = plant("missing", random.Random(1))
    traces = on_shared_tables(world.traces())
    result = diagnose(traces)
    assert result.verdict is not None
    wrong = replace(
        result.verdict, sentence="rank 99 entered all_reduce #777 of group default_pg at other.py:3"
    )
    assert len(false_statements(replace(result, findings=(wrong,)), traces)) == 4
