"""The bytes of one black box as a `RankTrace`, for the recorder's own dumps. Pure functions.

Takes a copy of the file taken at any moment, also while it was being written, also cut short. Never raises for
damage: what cannot be trusted is left out and said in `notes`. Nothing in the bytes is ever executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allranks.blackbox.layout import (
    HEADER,
    HEADER_BYTES,
    ITEM_HEADER_BYTES,
    MAGIC,
    READABLE,
    Item,
    as_current,
    whole_rows,
)
from allranks.errors import InputError
from allranks.model.trace import CALL, Frame, Group, Progress, RankTrace, Shapes, TraceHeader


@dataclass
class _Heap:
    """The interned items of a box; index 0 of every list means none."""

    meta: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=lambda: [Group("")])
    names: list[str] = field(default_factory=lambda: [""])
    shapes: list[Shapes] = field(default_factory=lambda: [Shapes()])
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    threads: dict[int, str] = field(default_factory=dict)
    destroyed: dict[int, int] = field(default_factory=dict)
    damaged: int = 0


@dataclass(frozen=True)
class BoxBytes:
    """A copy of a box. The two columns were read before and after the copy; None when nobody was writing."""

    data: bytes | memoryview
    ends_before: np.ndarray | None = None
    begins_after: np.ndarray | None = None


def decode(box: BoxBytes, path: str = "") -> RankTrace:
    """The trace in these bytes.

    Raises InputError only when this is no black box at all.
    """
    data = box.data
    header = read_header(data)
    notes: list[str] = []
    rows, torn = _rows(box, header, notes)
    as_current(rows, int(header["version"]))
    heap = _read_heap(data, header)
    if heap.damaged:
        notes.append(f"{heap.damaged} damaged items in the heap")
    if int(header["heap_full"]):
        notes.append("the heap was full: newer stacks and sizes are missing")
    if torn:
        notes.append(f"{torn} records were being written and are left out")
    for column, table in (
        ("group", heap.groups),
        ("op", heap.names),
        ("shapes", heap.shapes),
        ("stack", heap.stacks),
        ("label", heap.names),
    ):
        rows[column][rows[column] >= len(table)] = 0
    return RankTrace(
        header=_trace_header(header, heap.meta, rows),
        calls=rows,
        groups=tuple(heap.groups),
        names=tuple(heap.names),
        shapes=tuple(heap.shapes),
        stacks=tuple(heap.stacks),
        progress=_progress(header, heap.names),
        path=path,
        kind=f"black box {int(header['version'])}",
        notes=tuple(notes),
        torn=torn,
        threads=heap.threads,
        destroyed=heap.destroyed,
    )


def read_header(data: bytes | memoryview) -> np.void:
    """The HEADER row of these bytes; InputError when they are not a black box that this version can read."""
    if len(data) < HEADER_BYTES or bytes(data[:8]) != MAGIC:
        raise InputError("not a black box: the first bytes are not ALLRANKS")
    header: np.void = np.frombuffer(data, HEADER, count=1)[0]
    if int(header["version"]) not in READABLE or int(header["record_bytes"]) != CALL.itemsize:
        raise InputError(
            f"a black box of version {int(header['version'])}; this allranks reads {READABLE[0]} to {READABLE[-1]}"
        )
    return header


def _rows(box: BoxBytes, header: np.void, notes: list[str]) -> tuple[np.ndarray, int]:
    """The whole rows in the order of their ids, and how many torn ones were left out."""
    capacity = int(header["capacity"])
    there = min(capacity, (len(box.data) - HEADER_BYTES) // CALL.itemsize)
    if there < capacity:
        notes.append(f"the file is cut short: {there} of {capacity} slots are there")
    rows = np.frombuffer(box.data, CALL, count=there, offset=HEADER_BYTES)
    after = rows["begin"] if box.begins_after is None else box.begins_after[:there]
    before = None if box.ends_before is None else box.ends_before[:there]
    good = whole_rows(rows, after, before) & ((rows["begin"] - 1) % max(capacity, 1) == np.arange(there))
    torn = int(np.count_nonzero(((rows["begin"] != 0) | (rows["end"] != 0)) & ~good))
    found = rows[good]
    return found[np.argsort(found["begin"], kind="stable")], torn


def _read_heap(data: bytes | memoryview, header: np.void) -> _Heap:
    heap = _Heap()
    start = int(header["heap_offset"])
    stop = min(start + int(header["heap_used"]), len(data))
    while start + ITEM_HEADER_BYTES <= stop:
        length = int.from_bytes(data[start : start + 4], "little")
        kind = int.from_bytes(data[start + 4 : start + 6], "little")
        payload = bytes(data[start + ITEM_HEADER_BYTES : start + ITEM_HEADER_BYTES + length])
        if kind == 0 or start + ITEM_HEADER_BYTES + length > stop:
            heap.damaged += 1
            break
        _add_item(heap, kind, payload)
        start += (ITEM_HEADER_BYTES + length + 7) & ~7
    return heap


def _add_item(heap: _Heap, kind: int, payload: bytes) -> None:
    """Adds one item; a damaged one keeps its place so that later ids stay right."""
    try:
        value = json.loads(payload.decode())  # bytes would let json guess other encodings
    except ValueError:
        value = None
        heap.damaged += 1
    try:
        if kind == Item.META:
            heap.meta.update(value or {})
        elif kind == Item.GROUP:
            heap.groups.append(Group(value[0], value[1], tuple(value[2]), value[3]) if value else Group("?"))
        elif kind == Item.NAME:
            heap.names.append(str(value) if value is not None else "?")
        elif kind == Item.SHAPES:
            heap.shapes.append(_shapes(value) if value else Shapes())
        elif kind == Item.STACK:
            heap.stacks.append(tuple(Frame(*frame) for frame in value or ()))
        elif kind == Item.THREAD:
            heap.threads[int(value[0])] = str(value[1])
        elif kind == Item.DESTROYED:
            heap.destroyed[int(value[0])] = int(value[1])
    except (TypeError, IndexError, ValueError, AttributeError):
        heap.damaged += 1


def _shapes(value: list[Any]) -> Shapes:
    inputs, outputs, input_dtypes, output_dtypes, input_splits, output_splits = value
    return Shapes(
        tuple(tuple(shape) for shape in inputs),
        tuple(tuple(shape) for shape in outputs),
        tuple(input_dtypes),
        tuple(output_dtypes),
        tuple(input_splits),
        tuple(output_splits),
    )


def _trace_header(header: np.void, meta: dict[str, Any], rows: np.ndarray) -> TraceHeader:
    newest = int(rows["begin"][-1]) if len(rows) else int(header["next_id"])
    times = [int(header[name]) for name in ("start_ns", "step_ns", "last_call_ns", "closed_ns")]
    if len(rows):
        times.append(int(rows["completed_ns"].max()))
    versions = meta.get("versions") if isinstance(meta.get("versions"), dict) else {}
    return TraceHeader(
        rank=int(header["rank"]) if header["rank"] >= 0 else None,
        world_size=int(header["world_size"]) if header["world_size"] >= 0 else None,
        host=str(meta.get("host", "")),
        pid=int(header["pid"]),
        job=str(meta.get("job", "")),
        attempt=int(header["attempt"]),
        start_ns=int(header["start_ns"]),
        written_ns=max(times),
        backend=str(meta.get("backend", "")),
        versions=tuple((str(name), str(text)) for name, text in (versions or {}).items()),
        dropped=max(0, max(newest, int(header["next_id"])) - int(header["capacity"])),
    )


def _progress(header: np.void, names: list[str]) -> Progress:
    phase, inside = int(header["phase"]), int(header["inside"])
    return Progress(
        step=int(header["step"]),
        step_ns=int(header["step_ns"]),
        calls_started=int(header["calls_started"]),
        calls_completed=int(header["calls_completed"]),
        phase=names[phase] if 0 <= phase < len(names) else "",
        expect_until_ns=int(header["expect_until_ns"]),
        closed=bytes(header["closed"]).rstrip(b"\0").decode(errors="replace") if header["closed_ns"] else "",
        inside=names[inside] if 0 <= inside < len(names) else "",
        inside_ns=int(header["inside_ns"]),
        setups=int(header["setups"]) if int(header["version"]) > 1 else -1,
    )
