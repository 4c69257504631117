"""Records a function in ranks, reads the black boxes that they left behind, and stands in for works that finish later."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import allranks
from allranks.blackbox.file_writer import Box
from allranks.blackbox.layout import Item
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.model.trace import RankTrace, State
from allranks.recording import _fast
from allranks.recording.calls import CALLS
from allranks.recording.options import RecorderOptions
from allranks.recording.torch_internals import form_of
from allranks.recording.writer import CallWriter, GroupState


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
    """A writer of calls to a small box."""
    box = Box(tmp_path / "x.box", 32, 1 << 16)
    box.open()
    return CallWriter(box, RecorderOptions(stack_depth=0))


class Methods:
    """The methods of one group as the recorder makes them, around functions that stand in for those of torch."""

    def __init__(self, writer: CallWriter, group: GroupState) -> None:
        self._group, self._op = object(), writer.box.intern(Item.NAME, "send")
        self._recording = _fast.Recording(
            writer.ring, writer.pending, {id(self._group): group.counters}, None, writer.markers,
            _not_asked, _not_asked, writer.failed, writer.wait_failed, writer.sweep,
        )  # fmt: skip

    def send(self, original: Callable[..., Any]) -> Callable[[int, int], Any]:
        """send(peer, tag), of a tensor with `tag` elements on the CPU."""

        def read(args: Any, kwargs: Any) -> tuple[Any, ...]:
            return (0, args[2], args[2]), 0, -1, args[1], True, 0, args[2], True

        form = (_fast.COLLECTIVE, self._op, read, *form_of(CALLS["send"]))
        method = _fast.Method(self._recording, original, *form)
        return lambda peer, tag: method(self._group, [torch.ones(tag)], peer, tag)

    def batch(self, original: Callable[..., Any], op: int = 2) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The start and the end of a batch; `original` is its end."""
        start = _fast.Method(self._recording, lambda group: None, _fast.BATCH_BEGIN, op)
        end = _fast.Method(self._recording, original, _fast.BATCH_CLOSE, op)
        return lambda: start(self._group), lambda: end(self._group)

    def wait(self, original: Callable[..., Any] = lambda work: True) -> Any:
        """wait(work)."""
        return _fast.Method(self._recording, original, _fast.WAIT, 0)


def _not_asked(*_: object) -> None:
    raise AssertionError("nothing here is new")
