"""The table of outages in docs/checkpoint.md, cell by cell, for a whole job, for replicas and for elastic jobs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .outages import in_two_ranks, make, start
from .s3server import S3Server

pytestmark = pytest.mark.timeout(900)  # for hanging only: one fixture makes all cells of the whole job

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint.md"
TIERS = ("MEMORY", "PEER", "NVME", "S3")


def _table() -> dict[tuple[str, str, bool], str]:
    """(outage, tier, whether another tier has an older one) → what the documentation promises."""
    lines = DOCS.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.strip().startswith("| outage |"))
    cells = {}
    for line in lines[first + 2 :]:
        if not line.strip().startswith("|"):
            break
        outage, tiers, alone, other = (
            re.sub(r"\(.*?\)|`", "", text).strip() for text in line.strip(" |").split("|")
        )
        for tier in tiers.split(", "):
            cells[outage, tier, False], cells[outage, tier, True] = alone, other
    return cells


CELLS = _table()
IDS = [f"{outage}-{tier}-{'older' if other else 'alone'}" for outage, tier, other in CELLS]


def test_the_table_names_every_outage_and_every_tier() -> None:
    """What a tier cannot suffer is left out: memory has no key, a disk no password."""
    outages = {outage for outage, _, _ in CELLS}
    assert outages == {
        "down at start", "down in the middle", "wrong key", "no permission", "empty", "newest damaged", "all damaged", "slow",
        "down while training",
    }  # fmt: skip
    assert {tier for _, tier, _ in CELLS} == set(TIERS)
    reachable = {(o, t) for o, t, _ in CELLS if t != "MEMORY" and o in ("down at start", "down in the middle", "empty", "newest damaged", "all damaged", "down while training")}  # fmt: skip
    assert len(reachable) == 6 * 3


@pytest.mark.parametrize("mode", ["replicas", "elastic"])
@pytest.mark.parametrize("cell", CELLS, ids=IDS)
def test_a_start_in_an_outage_does_what_the_table_says(
    cell: tuple[str, str, bool], mode: str, tmp_path: Path, s3: S3Server
) -> None:
    """And so does the restart after it."""
    outage, tier, other = cell
    tmp_path.chmod(0o755)
    with contextlib.ExitStack() as stack:
        setup = make(tier, outage, other, tmp_path, s3, stack)
        outcomes = start(setup, mode)
    assert set(outcomes) == {CELLS[cell]}


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[list[dict[str, Any]]]:
    """All cells in one pair of ranks."""
    with contextlib.ExitStack() as stack:
        setups = {}
        for number, ((outage, tier, other), name) in enumerate(zip(CELLS, IDS, strict=True)):
            folder = tmp_path_factory.mktemp(f"cell{number}")
            setups[name] = make(tier, outage, other, folder, s3, stack)
        yield in_two_ranks(setups)


@pytest.mark.parametrize("cell", CELLS, ids=IDS)
def test_a_whole_job_in_an_outage_does_what_the_table_says_on_all_ranks(
    cell: tuple[str, str, bool], whole_job: list[dict[str, Any]]
) -> None:
    """Two ranks of one process group, started twice."""
    name = dict(zip(CELLS, IDS, strict=True))[cell]
    assert {outcome for rank in whole_job for outcome in rank[name]} == {CELLS[cell]}
