"""Records a function in ranks, reads the black boxes that they left behind, and stands in for works that finish later."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import allranks
from allranks.blackbox.file_writer import Box
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.model.trace import RankTrace, State
from allranks.recording.options import RecorderOptions
from allranks.recording.writer import CallWriter


def traces(folder: Path) -> dict[int, RankTrace]:
    """The trace of every rank in a folder."""
    found = [read_trace(path) for path in find_boxes(folder)]
    return {trace.header.rank if trace.header.rank is not None else -1: trace for trace in found}


def ops(trace: RankTrace) -> list[str]:
    """The ops of a trace in order."""
    return [trace.names[int(row["op"])] for row in trace.calls]


def last(trace: RankTrace, op: str) -> np.void:
    """The last call of this op."""
    return [row for row in trace.calls if trace.names[int(row["op"])] == op][-1]


def where(trace: RankTrace, row: np.void) -> list[str]:
    """Function names of a call's stack, innermost first."""
    return [frame.name for frame in trace.stacks[int(row["stack"])]]


def states(trace: RankTrace) -> list[State]:
    """The states of its calls in order."""
    return [State(int(value)) for value in trace.calls["state"]]


def record_ranks(function: Any, folder: Path, world: int = 2, **options: Any) -> dict[int, RankTrace]:
    """Runs a function in recorded ranks; their traces."""
    with Ranks(record_one, world, (function,), **options) as ranks:
        ranks.values(timeout_s=90)
    return traces(folder)


def record_one(rank: int, world: int, function: Any) -> None:
    """Body of such a rank."""
    warnings.simplefilter("ignore")
    recorder = allranks.record()
    assert recorder.active
    function(rank, world)
    recorder.close()


class LateWork:
    """Stands for a Work of a library that finishes later, as NCCL's."""

    def __init__(self) -> None:
        self.over = False
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over


def make_writer(tmp_path: Path) -> CallWriter:
    """A writer of calls to a small box, in C or in Python."""
    box = Box(tmp_path / "x.box", 32, 1 << 16)
    box.open()
    return CallWriter(box, RecorderOptions(stack_depth=0))
