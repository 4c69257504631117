"""A finished black box made of a RankTrace in one go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from allranks.blackbox.file_writer import Box
from allranks.blackbox.header import HEADER_BYTES
from allranks.blackbox.layout import Item, packed_ranks
from allranks.model.trace import CALL, RankTrace

HEAP_BYTES = 8 << 20


def box_bytes(trace: RankTrace) -> bytes:
    """The black box that holds this trace. The ring is exactly as long as the calls."""
    ring = _ring(trace.calls.copy())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # tests replace tempfile.tempdir
        box = Box(Path(folder) / "x.box", len(ring), HEAP_BYTES)
        box.open()
        _fill_heap(box, trace, ring)
        _fill_header(box, trace, ring)
        box.memory[HEADER_BYTES : box.heap_offset] = ring.tobytes()
        used = box.get("heap_used")
        box.set(heap_bytes=used)
        data = bytes(box.memory[: box.heap_offset + used])
        box.close()
    return data


def _fill_heap(box: Box, trace: RankTrace, ring: np.ndarray) -> None:
    header = trace.header
    meta = {name: getattr(header, name) for name in ("host", "job", "backend")}
    met = {name: list(vars(getattr(header, name)).values()) for name in ("rendezvous", "launched")}
    met["first_error"] = list(trace.progress.first_error)
    box.intern(Item.META, {**meta, **met, "versions": dict(header.versions)})
    groups = [0] + [
        box.intern(Item.GROUP, [g.name, g.desc, packed_ranks(g.ranks), g.backend]) for g in trace.groups[1:]
    ]
    ring["group"] = np.array(groups, np.uint32)[ring["group"]]
    for column in ("op", "label"):
        _renumber(ring, column, lambda index: box.intern(Item.NAME, trace.names[index]))
    _renumber(ring, "shapes", lambda index: box.intern(Item.SHAPES, list(vars(trace.shapes[index]).values())))
    stacks = [[[frame.name, frame.file, frame.line] for frame in stack] for stack in trace.stacks]
    _renumber(ring, "stack", lambda index: box.intern(Item.STACK, stacks[index]))
    for thread, name in trace.threads.items():
        box.intern(Item.THREAD, [thread, name])
    for index, when in trace.destroyed.items():
        box.intern(Item.DESTROYED, [groups[index], when])


def _fill_header(box: Box, trace: RankTrace, ring: np.ndarray) -> None:
    source, progress = trace.header, trace.progress
    same = ("step", "step_ns", "calls_started", "calls_completed", "expect_until_ns", "inside_ns", "setups")
    box.set(
        next_id=int(ring["begin"].max()),
        rank=-1 if source.rank is None else source.rank,
        world_size=source.world_size or 0,
        attempt=source.attempt,
        pid=source.pid,
        start_ns=source.start_ns,
        last_call_ns=max(int(ring["created_ns"].max()), int(ring["completed_ns"].max())),
        phase=box.intern(Item.NAME, progress.phase) if progress.phase else 0,
        inside=box.intern(Item.NAME, progress.inside) if progress.inside else 0,
        **{name: getattr(progress, name) for name in same},
    )
    if progress.closed:
        box.mark_closed(progress.closed, source.written_ns)


def _renumber(calls: np.ndarray, column: str, number: Callable[[int], int]) -> None:
    """Replaces table indices by heap ids; 0 stays none."""
    used, inverse = np.unique(calls[column], return_inverse=True)
    ids = [number(int(index)) if index else 0 for index in used]
    calls[column] = np.array(ids, np.uint32)[inverse]


def _ring(calls: np.ndarray) -> np.ndarray:
    """Every record in its slot: id modulo capacity. Gaps in the ids leave slots empty."""
    if not len(calls):
        return np.zeros(1, CALL)
    span = int(calls["begin"].max() - calls["begin"].min()) + 1
    capacity = min(span, 4 * len(calls) + 64)
    if span > capacity:  # a filtered dump with large gaps: number the records anew
        calls["begin"] = calls["end"] = np.arange(1, len(calls) + 1)
        capacity = len(calls)
    ring = np.zeros(capacity, CALL)
    ring[((calls["begin"] - 1) % np.uint64(capacity)).astype(np.int64)] = calls
    return ring
