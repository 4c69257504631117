"""Reads the black boxes that a test's ranks left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from allranks.blackbox.reader import find_boxes, read_trace
from allranks.model.trace import RankTrace


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
