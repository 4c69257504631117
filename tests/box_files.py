"""A finished black box made of a RankTrace in one go."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np

from allranks.blackbox.header import CLOSED_BYTES, EXIT_MESSAGE_BYTES, HEADER_BYTES, MAGIC, VERSION, shorten
from allranks.blackbox.layout import HEADER, Item, packed_ranks
from allranks.model.trace import CALL, RankTrace


class _Heap:
    """Items as they will stand in the file; ids count from 1 per kind."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._ids: dict[tuple[Item, bytes], int] = {}
        self._counts: dict[Item, int] = {}

    def add(self, kind: Item, value: object) -> int:
        """The id of an item, which is written the first time."""
        payload = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        found = self._ids.get((kind, payload))
        if found is None:
            found = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._ids[kind, payload] = found
            self.data += struct.pack("<IHHI", len(payload), kind, 0, found) + payload
            self.data += bytes(-len(self.data) % 8)
        return found


def box_bytes(trace: RankTrace) -> bytes:
    """The black box that holds this trace. The ring is exactly as long as the calls."""
    header, heap = trace.header, _Heap()
    meta = {name: getattr(header, name) for name in ("host", "job", "backend")}
    met = {name: list(vars(getattr(header, name)).values()) for name in ("rendezvous", "launched")}
    met["first_error"] = list(trace.progress.first_error)
    heap.add(Item.META, {**meta, **met, "versions": dict(header.versions)})
    calls = trace.calls.copy()
    groups = [0] + [
        heap.add(Item.GROUP, [g.name, g.desc, packed_ranks(g.ranks), g.backend]) for g in trace.groups[1:]
    ]
    calls["group"] = np.array(groups, np.uint32)[calls["group"]]
    for column in ("op", "label"):
        _renumber(calls, column, lambda index: heap.add(Item.NAME, trace.names[index]))
    _renumber(calls, "shapes", lambda index: heap.add(Item.SHAPES, list(vars(trace.shapes[index]).values())))
    stacks = [[[frame.name, frame.file, frame.line] for frame in stack] for stack in trace.stacks]
    _renumber(calls, "stack", lambda index: heap.add(Item.STACK, stacks[index]))
    for thread, name in trace.threads.items():
        heap.add(Item.THREAD, [thread, name])
    for index, when in trace.destroyed.items():
        heap.add(Item.DESTROYED, [groups[index], when])
    inside = heap.add(Item.NAME, trace.progress.inside) if trace.progress.inside else 0
    phase = heap.add(Item.NAME, trace.progress.phase) if trace.progress.phase else 0
    ring = _ring(calls)
    head = _header(trace, ring, len(heap.data), (phase, inside)).tobytes()
    return head.ljust(HEADER_BYTES, b"\0") + ring.tobytes() + heap.data


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


def _header(trace: RankTrace, ring: np.ndarray, heap_bytes: int, names: tuple[int, int]) -> np.ndarray:
    source, progress = trace.header, trace.progress
    head = np.zeros(1, HEADER)
    values = {
        "magic": MAGIC,
        "version": VERSION,
        "record_bytes": CALL.itemsize,
        "capacity": len(ring),
        "heap_offset": HEADER_BYTES + ring.nbytes,
        "heap_bytes": heap_bytes,
        "heap_used": heap_bytes,
        "next_id": int(ring["begin"].max()),
        "rank": -1 if source.rank is None else source.rank,
        "world_size": source.world_size or 0,
        "local_rank": -1,
        "attempt": source.attempt,
        "pid": source.pid,
        "start_ns": source.start_ns,
        "step": progress.step,
        "step_ns": progress.step_ns,
        "calls_started": progress.calls_started,
        "calls_completed": progress.calls_completed,
        "last_call_ns": max(int(ring["created_ns"].max()), int(ring["completed_ns"].max())),
        "expect_until_ns": progress.expect_until_ns,
        "phase": names[0],
        "inside": names[1],
        "inside_ns": progress.inside_ns,
        "setups": progress.setups,
        "closed_ns": source.written_ns if progress.closed else 0,
        "closed": shorten(progress.closed, CLOSED_BYTES - 1),
        "exit_message": shorten(progress.closed, EXIT_MESSAGE_BYTES - 1),
    }
    for name, value in values.items():
        head[name] = value
    return head
