"""What is inside a coalesced batch is compared between ranks, call by call and tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.diagnosis import diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import Diagnosis, Finding

from .torch_dumps import Entry, entry, number, write

WORLD = 3


def _diagnose(folder: Path, batches: dict[int, list[Entry]]) -> Diagnosis:
    """Two finished all_reduces, then a batch that nobody finishes."""
    ranks = {rank: number([entry(seq=1), entry(seq=2), *batch]) for rank, batch in batches.items()}
    loaded = load_paths([str(write(folder, ranks))])
    return diagnose(loaded.traces, loaded.files)


def _verdict(result: Diagnosis) -> Finding:
    assert result.verdict is not None, result.findings
    return result.verdict


def _parts(*sizes: int, op: str = "all_reduce") -> list[Entry]:
    """Calls of their own, and the entry that stands for the batch: as torch writes them since format 2.7."""
    parts = [entry(op, seq=3, sizes=[[size]], state="scheduled", line=20 + i) for i, size in enumerate(sizes)]
    return [*parts, _end()]


def _end() -> Entry:
    return entry("coalesced", seq=3, sizes=[], out=[], state="scheduled", line=20)


def _tensors(*sizes: int) -> list[Entry]:
    """One call with several tensors, and the entry that stands for the batch: what _coalescing_manager makes."""
    together = entry(
        "allreduce_coalesced", seq=3, sizes=[[size] for size in sizes], state="scheduled", line=20
    )
    return [together, _end()]


@pytest.mark.parametrize("wrong", [(8, 5, 8), (8, 16)], ids=["size", "order"])
@pytest.mark.parametrize("make", [_parts, _tensors], ids=["calls", "tensors"])
def test_the_rank_with_another_size_inside_a_batch_is_named(
    tmp_path: Path, make: object, wrong: tuple[int, ...]
) -> None:
    """Also when all sizes together are as many elements as those of the others."""
    right = (8, 8, 8) if len(wrong) == 3 else (16, 8)
    batches = {rank: make(*(wrong if rank == 1 else right)) for rank in range(WORLD)}  # type: ignore[operator]
    verdict = _verdict(_diagnose(tmp_path, batches))
    assert (verdict.cause, verdict.ranks, verdict.sequence) == ("size_mismatch", (1,), 3), verdict.sentence
    assert "the programs agree" not in " ".join(verdict.evidence)


def test_the_call_inside_the_batch_is_named_with_its_line(tmp_path: Path) -> None:
    """Which of the calls, at which line, with which sizes."""
    batches = {rank: _parts(8, 5 if rank == 1 else 8, 8) for rank in range(WORLD)}
    sentence = _verdict(_diagnose(tmp_path, batches)).sentence
    assert "rank 1 called all_reduce (call 2 of a batch) #3" in sentence
    assert "train.py:21" in sentence
    assert "with size [5], where ranks 0, 2 had size [8]" in sentence


def test_a_batch_with_fewer_calls_is_a_mismatch(tmp_path: Path) -> None:
    """One rank left a call out of the batch."""
    batches = {rank: _parts(8, 8) if rank == 2 else _parts(8, 8, 8) for rank in range(WORLD)}
    verdict = _verdict(_diagnose(tmp_path, batches))
    assert (verdict.cause, verdict.ranks) == ("type_mismatch", (2,)), verdict.sentence
    assert "a batch of 2 calls" in verdict.sentence
    assert "ranks 0, 1 called a batch of 3 calls" in verdict.sentence


def test_another_operation_inside_a_batch_is_a_mismatch(tmp_path: Path) -> None:
    """A broadcast where the others reduce."""
    batches = {rank: _parts(8, op="broadcast" if rank == 0 else "all_reduce") for rank in range(WORLD)}
    verdict = _verdict(_diagnose(tmp_path, batches))
    assert (verdict.cause, verdict.ranks) == ("type_mismatch", (0,)), verdict.sentence


@pytest.mark.parametrize("make", [_parts, _tensors], ids=["calls", "tensors"])
def test_equal_batches_are_said_to_agree(tmp_path: Path, make: object) -> None:
    """Then it is true that sizes and types are the same."""
    verdict = _verdict(_diagnose(tmp_path, {rank: make(8, 4) for rank in range(WORLD)}))  # type: ignore[operator]
    assert verdict.cause == "none_finished"
    assert "the programs agree" in " ".join(verdict.evidence)


def test_a_batch_of_unknown_content_is_not_said_to_agree(tmp_path: Path) -> None:
    """Only the end of the batch was recorded: nobody knows what is in it."""
    verdict = _verdict(_diagnose(tmp_path, {rank: [_end()] for rank in range(WORLD)}))
    assert "the programs agree" not in " ".join(verdict.evidence)
    assert "the calls inside the batch" in " ".join(verdict.missing_evidence)
