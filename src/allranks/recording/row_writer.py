"""Rows of the ring, written from Python. Runs in the rank. `_fast.c` does the same in C when it was built.

A row is written by one `pack_into`, which fills ascending (`begin` first, `end` last) and cannot be interrupted by
another Python thread. There are no locks: a signal handler may run between any two instructions and may itself
record. A later change of a row is a single eight-byte store.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from collections.abc import Callable
from threading import get_native_id
from typing import Any

from allranks.blackbox.file_writer import FIELD, Box
from allranks.blackbox.header import HEADER_BYTES
from allranks.model.trace import CALL, Flag, State
from allranks.recording.options import fast

ROW_BYTES = CALL.itemsize
ROW = struct.Struct("<Q9q2i6I2iHBxHxxQ")
assert ROW.size == ROW_BYTES

_RING_WORD, _ROW_WORDS = HEADER_BYTES // 8, ROW_BYTES // 8
_STARTED_WORD, _COMPLETED_WORD, _STATE_WORD = 2, 3, 15  # the last holds reduce_op, state and flags
_NO_STATE, _RETIRED, _STARTED = ~(0xFF << 16), int(Flag.RETIRED) << 32, int(State.STARTED) << 16

MAX_TIMEOUT_MS = 2**31 - 1

Shapes = tuple[int, int, int]  # (id, elements in, elements out)


class PyRing:
    """Writes rows. A call is known by its number: record id + 1, the `begin` of its row."""

    def __init__(
        self,
        memory: mmap.mmap,
        capacity: int,
        next_field: int,
        calls_field: int,
        last_field: int,
        done_field: int,
    ) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._capacity = capacity
        self._next_field, self._calls_field = next_field, calls_field
        self._last_field, self._done_field = last_field, done_field
        self._numbers = itertools.count(1)
        self._done = itertools.count(1)
        self._step, self._label = -1, 0
        self._threads: set[int] = set()
        # called with the id of a thread at its first call
        self.on_thread: Callable[[int], object] | None = None

    def begin(
        self,
        group: int,
        op: int,
        shapes: Shapes,
        stack: int,
        seq: int,
        p2p_seq: int,
        op_id: int,
        timeout_ms: int,
        reduce_op: int,
        root: int,
        peer: int,
        flags: int,
        tag: int,
    ) -> int:
        """Writes the row of a call that is about to be made; returns its number."""
        thread = get_native_id()
        if thread not in self._threads:
            self._meet(thread)
        now = time.time_ns()
        begin = next(self._numbers)
        sizes, in_numel, out_numel = shapes
        words = self._words
        ROW.pack_into(
            self._memory,
            HEADER_BYTES + (begin - 1) % self._capacity * ROW_BYTES,
            begin,
            now,
            0,
            0,
            seq,
            p2p_seq,
            op_id,
            self._step,
            in_numel,
            out_numel,
            min(timeout_ms, MAX_TIMEOUT_MS),
            tag,
            group,
            op,
            sizes,
            stack,
            self._label,
            thread,
            peer,
            root,
            reduce_op,
            0,
            flags,
            begin,
        )
        words[self._next_field] = begin
        words[self._calls_field] = begin
        words[self._last_field] = now
        return begin

    def _meet(self, thread: int) -> None:
        self._threads.add(thread)
        if self.on_thread is not None:
            self.on_thread(thread)

    def started(self, begin: int) -> None:
        """The library has taken the call."""
        words = self._words
        first = _RING_WORD + (begin - 1) % self._capacity * _ROW_WORDS
        if words[first] == begin:
            words[first + _STARTED_WORD] = time.time_ns()
            words[first + _STATE_WORD] = words[first + _STATE_WORD] & _NO_STATE | _STARTED

    def finish(self, begin: int, state: int) -> None:
        """The call is over; its row is left alone when the ring has given the slot away."""
        self.finish_part(begin, state)
        if state == State.COMPLETED:
            self._words[self._done_field] = next(self._done)

    def finish_part(self, begin: int, state: int) -> None:
        """The same for a call inside a coalesced group, which is not counted by itself."""
        words = self._words
        first = _RING_WORD + (begin - 1) % self._capacity * _ROW_WORDS
        if words[first] == begin:
            words[first + _COMPLETED_WORD] = time.time_ns()
            words[first + _STATE_WORD] = words[first + _STATE_WORD] & _NO_STATE | state << 16 | _RETIRED

    def set_step(self, step: int, label: int) -> None:
        """The step and label of the calls from now on."""
        self._step, self._label = step, label

    def hand_over(self, pending: object) -> None:
        """The part in C keeps the call made last to itself; here all of them are in `pending` anyway."""

    def release(self) -> None:
        self._words.release()


def make_ring(box: Box, accelerate: bool) -> Any:
    """The ring of an open box: in C when that was built and is wanted, else in Python."""
    fields = [FIELD[name] for name in ("next_id", "calls_started", "last_call_ns", "calls_completed")]
    if (module := fast(accelerate)) is not None:
        return module.Ring(box.memory, box.capacity, *fields)
    return PyRing(box.memory, box.capacity, *fields)
