"""all_to_all with splits: who gives or takes another amount than its partner, told in sizes that the ranks had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis import diagnose
from allranks.model.diagnosis import Finding
from allranks.model.trace import RankTrace, Shapes

from .histories import Do, run

WORLD = 3
Matrix = list[list[int]]
FAIR: Matrix = [[1, 2, 3], [2, 3, 1], [3, 1, 2]]  # giver → taker → rows


def _traces(gives: Matrix, takes: Matrix, width: int = 1, kind: str = "black box 1") -> list[RankTrace]:
    """One round of all_reduces, then one exchange in which `takes[r][k]` is what r expects of k."""
    programs = {
        rank: [*[Do("all_reduce")] * 3, Do("all_to_all_single", size=sum(gives[rank]) * width, line=50,
                                           out=sum(takes[rank]) * width)]
        for rank in range(WORLD)
    }  # fmt: skip
    traces = run({"world": tuple(range(WORLD))}, programs, kind=kind).traces()
    return [_with_splits(trace, gives[rank], takes[rank], width) for rank, trace in enumerate(traces)]


def _with_splits(trace: RankTrace, gives: list[int], takes: list[int], width: int) -> RankTrace:
    number = int(trace.calls["shapes"][-1])
    tail = (width,) if width > 1 else ()
    known = trace.kind.startswith("black box")
    even = len({*gives, *takes}) == 1
    splits = (tuple(gives), tuple(takes)) if known and not even else ((), ())
    shapes = Shapes(((sum(gives), *tail),), ((sum(takes), *tail),), ("Float",), ("Float",), *splits)
    return replace(trace, shapes=(*trace.shapes[:number], shapes, *trace.shapes[number + 1 :]))


def _changed(matrix: Matrix, *changes: tuple[int, int, int]) -> Matrix:
    rows = [list(row) for row in matrix]
    for rank, peer, value in changes:
        rows[rank][peer] = value
    return rows


def _verdict(traces: list[RankTrace]) -> Finding:
    result = diagnose(traces)
    assert result.verdict is not None, result.findings
    assert result.verdict.cause == "size_mismatch", result.verdict.sentence
    return result.verdict


@pytest.mark.parametrize("kind", ["black box 1", "torch pickle 2.10"])
def test_the_rank_that_gives_too_much_is_named(kind: str) -> None:
    """Its total is unlike the others'; the partner that expects less is innocent, and so is the third."""
    verdict = _verdict(_traces(_changed(FAIR, (1, 2, 2)), FAIR, kind=kind))
    assert verdict.ranks == (1,), verdict.sentence


def test_the_sentence_states_what_each_side_passed() -> None:
    """Elements, not rows, and of the two ranks that disagree."""
    verdict = _verdict(_traces(_changed(FAIR, (1, 2, 2)), FAIR, width=5))
    assert "gives rank 2 10 elements" in verdict.sentence
    assert "rank 2 expects 5" in verdict.sentence
    assert "rank 1: in [7, 5] out [6, 5]" in " ".join(verdict.evidence)
    assert "ranks 0, 2: size [6, 5]" in " ".join(verdict.evidence)


def test_a_rank_in_all_disagreements_is_named_whatever_the_totals() -> None:
    """It gives two partners other amounts than they expect; its total is that of the others."""
    assert _verdict(_traces(_changed(FAIR, (2, 0, 2), (2, 1, 2)), FAIR)).ranks == (2,)


def test_a_rank_that_expects_another_amount_is_named() -> None:
    """The taker may be the odd one as well."""
    verdict = _verdict(_traces(FAIR, _changed(FAIR, (0, 1, 4))))
    assert verdict.ranks == (0,), verdict.sentence
    assert "expects 4 elements of rank 1" in verdict.sentence


def test_even_splits_against_uneven_ones_are_compared() -> None:
    """Without splits every partner gets the same share."""
    even = [[2, 2, 2]] * WORLD
    assert _verdict(_traces(_changed(even, (1, 0, 1), (1, 2, 3)), even)).ranks == (1,)


def test_two_ranks_that_disagree_with_each_other_only_are_both_named_and_nobody_else() -> None:
    """All totals differ, as in a mixture of experts: nothing tells which of the two is wrong."""
    gives = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    takes = [list(row) for row in zip(*gives, strict=True)]
    verdict = _verdict(_traces(_changed(gives, (1, 2, 7)), takes))
    assert verdict.ranks == (1, 2)
    assert verdict.confidence <= 0.5
    assert "gives rank 2 7 elements" in verdict.sentence


def test_an_exchange_that_fits_is_not_accused() -> None:
    """Every rank passes other sizes, and all of them fit."""
    gives = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    takes = [list(row) for row in zip(*gives, strict=True)]
    findings = diagnose(_traces(gives, takes)).findings
    assert not [finding for finding in findings if finding.cause == "size_mismatch"]
