"""The calls as a Perfetto trace (protobuf), for ui.perfetto.dev: one process per rank, one track per group.

Names, sizes and stacks are interned: a call costs 76 bytes. All packets of calls have the same length (numbers are
padded varints, which every protobuf reader accepts), so that numpy writes them. The verdict is a marker, the missing call
a slice on the guilty rank's row, with arrows to the calls that wait for it. Slices of one track may not overlap: calls that do get
lanes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import Flag, Frame, RankTrace, State
from allranks.report.text import MISSING, clean, frame_text, headline_text, state_name

SEQUENCE = 1  # one writer, one table of interned strings
CLEARED, NEEDS_STATE = 1, 2
BEGIN, END, INSTANT = 1, 2, 3
NUMBER, STACK, DETAIL = 1, 2, 3  # interned names of what is shown of a call
MAX_FRAMES = 24
MAX_DETAILS = (1 << 21) - 1  # three bytes
MAX_ARROWS = 64  # to waiting ranks; more would hide the picture


def render(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Iterator[bytes]:
    span, waiting = find_span(traces), find_waiting(diagnosis, traces)
    uuids, tables = count(2), _Tables()
    guilty = set(() if diagnosis.verdict is None else diagnosis.verdict.ranks)
    yield _packet(_field(13, CLEARED | NEEDS_STATE) + _text(12, tables.names()))
    yield _track(1, "Verdict")
    yield _marker(
        1, headline_text(diagnosis), (waiting.since_ns if waiting else span.first_ns) - span.first_ns
    )
    for index, trace in enumerate(traces):
        rank = -1 if trace.header.rank is None else trace.header.rank
        process = next(uuids)
        yield _process(process, index, rank, trace, rank in guilty)
        if rank in guilty and waiting is not None:
            yield from _missing_call(next(uuids), process, waiting, span)
        yield from _calls(trace, process, uuids, span, tables, _arrows(index, waiting))


def _arrows(trace: int, waiting: Waiting | None) -> dict[int, int]:
    """row → arrow of the calls of a trace that wait."""
    if waiting is None:
        return {}
    return {row: arrow for arrow, (index, row) in enumerate(waiting.calls, 1) if index == trace}


def _calls(
    trace: RankTrace, process: int, uuids: Iterator[int], span: Span, tables: _Tables, arrows: dict[int, int]
) -> Iterator[bytes]:
    if not len(trace.calls):
        return
    details, stacks, names = tables.numbers(trace)
    if new := tables.fresh():
        yield _packet(_field(13, NEEDS_STATE) + _text(12, new))
    ends = ends_of(trace.calls, span)
    for label, rows in _lanes(trace, ends):
        uuid = next(uuids)
        yield _track(uuid, label, process)
        yield _slices(trace.calls[rows], ends[rows], span, uuid, names[rows], details[rows], stacks[rows])
        for row in rows[np.isin(rows, list(arrows))].tolist():
            yield _arrow_head(uuid, int(trace.calls["created_ns"][row]) - span.first_ns, arrows[row])


def _lanes(trace: RankTrace, ends: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, rows) of each track of a rank."""
    for number in np.unique(trace.calls["group"]).tolist():
        rows = np.flatnonzero(trace.calls["group"] == number)
        lanes = lanes_of(trace.calls["created_ns"][rows], ends[rows])
        group = trace.groups[number]
        label = clean((group.desc if group.desc != "undefined" else "") or group.name or "calls")
        for lane in range(int(lanes.max()) + 1):
            yield label + (f" ({lane + 1})" if lane else ""), rows[lanes == lane]


def _slices(
    calls: np.ndarray,
    ends: np.ndarray,
    span: Span,
    uuid: int,
    names: np.ndarray,
    details: np.ndarray,
    stacks: np.ndarray,
) -> bytes:
    """A begin and an end for every call, all of one length."""
    starts = calls["created_ns"] - span.first_ns
    begin, event = _Rows(len(calls)), _Rows(len(calls))
    event.fixed(_field(9, BEGIN) + _key(11, 0) + _padded(uuid, 4) + _key(10, 0))
    event.number(np.minimum(names, (1 << 14) - 1), 2)
    for name, width, key, values in (
        (NUMBER, 4, 4, np.clip(calls["seq"], 0, (1 << 28) - 1)),
        (STACK, 3, 17, stacks),
        (DETAIL, 3, 17, details),
    ):
        inner = _field(1, name) + _key(key, 0)
        event.fixed(_key(4, 2) + bytes([len(inner) + width]) + inner)
        event.number(values, width)
    _frame(begin, event, starts, state=True)
    end, closing = _Rows(len(calls)), _Rows(len(calls))
    closing.fixed(_field(9, END) + _key(11, 0) + _padded(uuid, 4))
    _frame(end, closing, np.maximum(ends - span.first_ns, starts + 1), state=False)
    return np.concatenate([begin.data(), end.data()], axis=1).tobytes()


def _frame(packet: _Rows, event: _Rows, times: np.ndarray, state: bool) -> None:
    """A packet around an event."""
    flags = _field(13, NEEDS_STATE) if state else b""
    body = event.data()
    head = _key(11, 2) + bytes([body.shape[1]])
    sequence = _field(10, SEQUENCE)
    packet.fixed(
        _key(1, 2) + bytes([9 + len(flags) + len(sequence) + len(head) + body.shape[1]]) + _key(8, 0)
    )
    packet.number(np.clip(times, 0, (1 << 56) - 1), 8)
    packet.fixed(flags + sequence + head)
    packet.parts.append(body)


def _missing_call(uuid: int, process: int, waiting: Waiting, span: Span) -> Iterator[bytes]:
    """A slice where the guilty rank should have been, with an arrow to each call that waits."""
    yield _track(uuid, "missing call", process)
    flows = b"".join(_key(47, 1) + arrow.to_bytes(8, "little") for arrow in range(1, len(waiting.calls) + 1))
    begin = _field(9, BEGIN) + _field(11, uuid) + _text(23, f"never entered {waiting.name}".encode()) + flows
    yield _event(begin, waiting.since_ns - span.first_ns)
    yield _event(_field(9, END) + _field(11, uuid), span.end_ns - span.first_ns)


def _arrow_head(uuid: int, at: int, arrow: int) -> bytes:
    """The head of an arrow, just inside a waiting call."""
    flow = _key(47, 1) + arrow.to_bytes(8, "little")
    return _event(_field(9, INSTANT) + _field(11, uuid) + _text(23, b"waits") + flow, at + 1)


def _marker(uuid: int, text: str, at: int) -> bytes:
    return _event(
        _field(9, INSTANT) + _field(11, uuid) + _text(23, clean(text).encode("utf-8", "replace")), at
    )


def _process(uuid: int, order: int, rank: int, trace: RankTrace, guilty: bool) -> bytes:
    host = f" ({trace.header.host})" if trace.header.host else ""
    name = clean(f"{'▶ ' if guilty else ''}rank {rank}{host}{' GUILTY' if guilty else ''}").encode(
        "utf-8", "replace"
    )
    body = _field(1, uuid) + _text(3, _field(1, rank + 1) + _text(6, name)) + _field(12, order)
    return _packet(_text(60, body))


def _track(uuid: int, name: str, parent: int = 0) -> bytes:
    body = _field(1, uuid) + _text(2, name.encode("utf-8", "replace"))
    return _packet(_text(60, body + (_field(5, parent) if parent else b"")))


def _event(body: bytes, at: int) -> bytes:
    return _packet(_field(8, max(0, at)) + _text(11, body))


def _packet(body: bytes) -> bytes:
    return _text(1, body + _field(10, SEQUENCE))


class _Rows:
    """Rows of bytes of the same length, built column by column."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.parts: list[np.ndarray] = []

    def fixed(self, data: bytes) -> None:
        self.parts.append(np.broadcast_to(np.frombuffer(data, np.uint8), (self.count, len(data))))

    def number(self, values: np.ndarray, width: int) -> None:
        """A varint padded to `width` bytes."""
        shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
        digits = (values.astype(np.uint64)[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
        digits[:, :-1] |= 0x80
        self.parts.append(digits)

    def data(self) -> np.ndarray:
        return np.concatenate(self.parts, axis=1)


@dataclass
class _Tables:
    """Strings that calls refer to by number; each is written once, before its first use."""

    _names: dict[str, int] = field(default_factory=dict)
    _values: dict[str, int] = field(default_factory=dict)
    _stacks: dict[tuple[Frame, ...], int] = field(default_factory=dict)
    _new: list[bytes] = field(default_factory=list)

    def names(self) -> bytes:
        """The names of what is shown of a call."""
        return b"".join(
            _interned(3, number, name)
            for number, name in ((NUMBER, "sequence"), (STACK, "stack"), (DETAIL, "call"))
        )

    def fresh(self) -> bytes:
        """What has come since the last time."""
        found, self._new = b"".join(self._new), []
        return found

    def numbers(self, trace: RankTrace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(details, stacks, names) of every call."""
        calls = trace.calls
        key = calls["shapes"].astype(np.int64) << 8 | calls["state"]
        used, inverse = np.unique(key, return_inverse=True)
        details = np.array([self._detail(trace, int(k) >> 8, int(k) & 255) for k in used], np.int64)[inverse]
        ops, op = np.unique(calls["op"], return_inverse=True)
        names = np.array([self._name(clean(trace.names[int(o)]) or "call") for o in ops], np.int64)[op]
        places, place = np.unique(calls["stack"], return_inverse=True)
        stacks = np.array([self._stack(trace.stacks[int(s)]) for s in places], np.int64)[place]
        return details, stacks, names

    def _detail(self, trace: RankTrace, shapes: int, state: int) -> int:
        one = trace.shapes[shapes]
        types = "/".join(dict.fromkeys(one.input_dtypes or one.output_dtypes))
        sizes = f"{[list(s) for s in one.inputs]} → {[list(s) for s in one.outputs]}"
        return self._value(clean(f"{state_name(state)}: {sizes} {types}")[:300])

    def _stack(self, stack: tuple[Frame, ...]) -> int:
        if stack not in self._stacks:
            self._stacks[stack] = self._value(
                "\n".join(frame_text(frame) for frame in stack[:MAX_FRAMES]) or "unknown"
            )
        return self._stacks[stack]

    def _value(self, text: str) -> int:
        if text not in self._values and len(self._values) < MAX_DETAILS:
            self._values[text] = len(self._values) + 1
            self._new.append(_interned(29, self._values[text], text))
        return self._values.get(text, 0)

    def _name(self, text: str) -> int:
        if text not in self._names:
            self._names[text] = len(self._names) + 1
            self._new.append(_interned(2, self._names[text], text))
        return self._names[text]


def _interned(table: int, number: int, text: str) -> bytes:
    return _text(table, _field(1, number) + _text(2, text.encode("utf-8", "replace")))


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _field(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _text(number: int, data: bytes) -> bytes:
    return _key(number, 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _padded(value: int, width: int) -> bytes:
    return bytes(value >> 7 * i & 0x7F | (0x80 if i < width - 1 else 0) for i in range(width))


@dataclass(frozen=True)
class Span:
    """The time that a trace covers, in epoch nanoseconds; unfinished calls are drawn to the end."""

    first_ns: int
    end_ns: int


@dataclass(frozen=True)
class Waiting:
    """The verdict in the picture: since when the call is missing, and which calls wait for it, as (trace, row)."""

    since_ns: int
    name: str
    calls: tuple[tuple[int, int], ...]


def find_span(traces: Sequence[RankTrace]) -> Span:
    """From the first entry to a little after the last event."""
    known = [trace.calls for trace in traces if len(trace.calls)]
    if not known:
        return Span(0, 1)
    first = min(int(calls["created_ns"].min()) for calls in known)
    last = max(int(max(calls["created_ns"].max(), calls["completed_ns"].max())) for calls in known)
    return Span(first, last + max(1_000_000, (last - first) // 20))


def ends_of(calls: np.ndarray, span: Span) -> np.ndarray:
    """When each call ended; the end of the trace for those that have not."""
    over = (calls["state"] == int(State.COMPLETED)) | ((calls["flags"] & int(Flag.RETIRED)) != 0)
    guess = np.where(over, calls["created_ns"] + 1000, span.end_ns)
    found: np.ndarray = np.where(calls["completed_ns"] > calls["created_ns"], calls["completed_ns"], guess)
    return found


def lanes_of(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The lane of each call of a group, 0 unless an earlier one still runs."""
    lanes = np.zeros(len(starts), np.int64)
    if len(starts) < 2 or (starts[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        return lanes
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    used = 0
    for index in np.argsort(starts, kind="stable").tolist():
        while busy and busy[0][0] <= starts[index]:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else used
        used = max(used, lane + 1)
        lanes[index] = lane
        heappush(busy, (int(ends[index]), lane))
    return lanes


def find_waiting(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Waiting | None:
    """The unfinished calls that wait for the guilty ranks; None when the verdict is not about a missing call."""
    verdict = diagnosis.verdict
    if verdict is None or verdict.cause not in MISSING:
        return None
    calls, since, name = [], 0, ""
    wanted = set(verdict.waiting) - set(verdict.ranks)
    for index, trace in enumerate(traces):
        if trace.header.rank not in wanted or not len(trace.calls):
            continue
        unfinished = trace.calls["state"] != int(State.COMPLETED)
        if verdict.sequence is not None:
            unfinished &= trace.calls["seq"] == verdict.sequence
        rows = np.flatnonzero(unfinished)
        if len(rows):
            call = trace.calls[rows[0]]
            calls.append((index, int(rows[0])))
            if not since or int(call["created_ns"]) < since:
                since = int(call["created_ns"])
                name = f"{trace.names[int(call['op'])]} #{int(call['seq'])}"
    return Waiting(since, clean(name), tuple(calls[:MAX_ARROWS])) if calls else None
