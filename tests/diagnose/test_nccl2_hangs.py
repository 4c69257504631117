"""Some kinds of examples/hangs on torch 2.15's nccl2: ranks on one H200, calls only enqueued (scripts/gpu_hangs.py).

Its calls are recorded by torch's hook, which asks once a second what has ended.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .facts import false_statements
from .gallery_module import gallery, outcome

CASES = sorted((Path(__file__).parent / "nccl2_hangs").iterdir())
#: Kinds of which torch's own dumps tell less: nothing of ranks that have ended.
DUMPS_TELL_LESS = frozenset(("batch_without_partner", "ddp_models_in_other_order", "killed"))


def _name(path: Path) -> str:
    return path.name.removesuffix(".tar.xz")


@pytest.mark.parametrize("path", CASES, ids=_name)
def test_the_black_boxes_of_an_nccl2_hang_get_the_verdict_of_the_table(path: Path, tmp_path: Path) -> None:
    """Rank, cause and line are those of the same script on gloo, and nothing false is said."""
    found = outcome(path, "boxes", tmp_path)
    assert gallery.is_right(found) == (True, True, True), found.diagnosis.verdict
    assert false_statements(found.diagnosis, found.traces, found.seen) == []


@pytest.mark.parametrize("path", [path for path in CASES if _name(path) not in DUMPS_TELL_LESS], ids=_name)
def test_the_dumps_of_an_nccl2_hang_get_the_verdict_of_the_table(path: Path, tmp_path: Path) -> None:
    """A call that reads unfinished may have ended since the hook asked."""
    found = outcome(path, "dumps", tmp_path)
    assert found.traces[0].kind.startswith("torch hook")
    assert gallery.is_right(found) == (True, True, True), found.diagnosis.verdict


def test_a_rank_without_a_dump_may_have_ended(tmp_path: Path) -> None:
    """Only ranks that wait write a dump: of the others nothing is known, and nothing is claimed."""
    path = next(path for path in CASES if _name(path) == "killed")
    verdict = outcome(path, "dumps", tmp_path).diagnosis.verdict
    assert verdict is not None and 1 in verdict.ranks and verdict.confidence <= 0.6
    assert "or ended before it: there is no dump of them" in verdict.sentence


def test_the_jobs_are_all_there() -> None:
    """An emptied folder would pass every other test."""
    assert len(CASES) >= 12
