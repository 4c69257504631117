"""The merged tree and the text of rank sets: decisions without a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    Snapshot,
    StackFrame,
    ThreadStack,
)
from allranks.stacktraces import classify, read_capture
from allranks.stacktraces.text import compress, find_outliers, grow_tree, render_text

CASES = Path(__file__).parent / "cases"


def test_rank_sets_are_written_as_people_write_them() -> None:
    """Runs of three and more become spans."""
    assert compress([*range(4), 5, *range(7, 1024)]) == "0-3,5,7-1023"
    assert compress([1, 0]) == "0,1"
    assert compress([]) == ""


@given(st.sets(st.integers(0, 300)))
def test_a_rank_set_can_be_read_back(ranks: set[int]) -> None:
    """Compressing loses nothing."""
    found: set[int] = set()
    for part in filter(None, compress(ranks).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ranks


def test_the_tree_parts_where_the_ranks_part_and_names_the_odd_one() -> None:
    """Rank 2 leaves the common path at the line that differs."""
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    root = grow_tree(capture)[0]
    assert root.ranks == (0, 1, 2, 3)
    assert root.looks == 8
    ranks, node = find_outliers([root])[0]
    assert ranks == (2,)
    assert node.frame is not None and node.frame.line == 20
    assert node.looks == 2  # in both snapshots


def test_how_python_imports_a_module_is_not_shown() -> None:
    """A rank that imports torch had a hundred lines of importlib."""
    importing = "<frozen importlib._bootstrap>"
    frames = (StackFrame("<module>", "/x/torch/_ops.py", 11), StackFrame("_find_and_load", importing, 1176))
    frames += (
        StackFrame("<module>", "/home/user/train.py", 3),
        StackFrame("_run_code", "<frozen runpy>", 88),
    )
    stack = ThreadStack(7, "MainThread", frames)
    capture = Capture((ProcessCapture(0, None, 7, snapshots=(Snapshot(1, None, (stack,)),)),))
    lines = list(render_text(classify(capture), grow_tree(capture)))
    assert lines[-2:] == ["  [0] ◄ <module> (train.py:3)", "  <module> (_ops.py:11)"]


def test_forked_children_are_cut_at_the_fork() -> None:
    """The worker's tree starts at its bootstrap, not in the training loop it was forked from."""
    roots = grow_tree(read_capture(CASES / "hangs" / "dataloader_worker_sleep"), all_threads=True)
    child = next(root for root in roots if root.role == "child")
    assert [node.frame.name for node in child.children if node.frame] == ["BaseProcess._bootstrap"]
    assert any("QueueFeederThread" in root.role for root in roots)


def test_a_thousand_ranks_are_merged_into_one_small_tree() -> None:
    """1,024 ranks with 30 threads give a report and a tree of a few lines, with the odd rank named."""
    capture = _many(1024, odd=517)
    report = classify(capture)
    lines = list(render_text(report, grow_tree(capture, all_threads=True)))
    assert report.culprits == (517,)
    assert len(lines) < 60
    assert any("0-516,518-1023" in line for line in lines)


def _many(count: int, odd: int) -> Capture:
    source = read_capture(CASES / "hangs" / "dataloader_worker_sleep")
    starved, waiting = (next(p for p in source.processes if p.rank == r and p.child is None) for r in (0, 1))
    helper = next(t for t in waiting.snapshots[0].stacks if t.name != "MainThread")
    extra = tuple(replace(helper, tid=900_000 + number, name=f"helper-{number}") for number in range(28))

    def grown(process: ProcessCapture, rank: int) -> ProcessCapture:
        shots = tuple(replace(shot, stacks=shot.stacks + extra) for shot in process.snapshots)
        return replace(process, rank=rank, snapshots=shots)

    processes = tuple(grown(starved if rank == odd else waiting, rank) for rank in range(count))
    return replace(
        source, processes=processes, marks=tuple(replace(source.marks[0], rank=r) for r in range(count))
    )


def test_a_very_deep_stack_is_no_problem() -> None:
    """Runaway recursion of thousands of frames is merged and shown without recursion of ours."""
    frames = tuple(StackFrame(f"f{number}", "/home/user/deep.py", number) for number in range(5000))
    shot = Snapshot(1, None, (ThreadStack(1, "MainThread", frames, True, True),))
    capture = Capture((ProcessCapture(0, None, 1, snapshots=(shot,)),))
    roots = grow_tree(capture)
    assert list(render_text(classify(capture), roots))
    from allranks.stacktraces.html import render_html

    assert "f4999" in render_html(classify(capture), roots)
