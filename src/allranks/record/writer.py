"""The recorder of one rank: gives every call a row in the black box and follows it to its end. Runs in the rank.

`begin` is called before the library is entered, `track` with the Work it returned, and `finish` when the call is
known to be over: by the program's own wait(), by the next call, or by the side thread. Nothing here blocks,
and nothing raises into the training step: `fault` turns recording off with one warning.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from allranks.model.blackbox import HEADER_BYTES, Item
from allranks.model.trace import Flag, State
from allranks.record.box import (
    COMPLETED_WORD,
    FIELD,
    ROW,
    ROW_BYTES,
    ROW_WORDS,
    STARTED_WORD,
    STATE_WORD,
    Box,
)
from allranks.record.groups import GroupState
from allranks.record.stack import Stacks

Shapes = tuple[int, int, int]  # (id, elements in, elements out)
Entry = tuple[Any, int, int, int, GroupState, tuple[tuple[int, int], ...]]

_NEXT, _CALLS, _LAST, _DONE = (
    FIELD[name] for name in ("next_id", "calls_started", "last_call_ns", "calls_completed")
)
_RING_WORD = HEADER_BYTES // 8
_RETIRED = int(Flag.RETIRED) << 32
_P2P, _PART, _END = int(Flag.P2P), int(Flag.COALESCED_PART), int(Flag.COALESCED_END)
_COMPLETED, _FAILED, _TIMED_OUT, _STARTED = (
    int(state) << 16 for state in (State.COMPLETED, State.FAILED, State.TIMED_OUT, State.STARTED)
)
_STATE_MASK = ~(0xFF << 16)


class CallWriter:
    """Writes calls into an open box. One per process; used by all its threads without a lock."""

    def __init__(self, box: Box, stack_depth: int) -> None:
        self.box = box
        self.on = True
        self.pending: dict[int, Entry] = {}  # id(work) -> the call it belongs to, oldest first
        self.step = -1
        self.label = 0
        self.stacks = (
            Stacks(lambda frames: box.intern(Item.STACK, frames), stack_depth) if stack_depth else None
        )
        self.main_thread = threading.main_thread().ident or 0
        self.capturing = 0  # CUDA graph captures in progress: no event may be queried
        self.on_timeout: Callable[[], None] | None = None
        self._ids = itertools.count()
        self._done = itertools.count(1)
        self._memory = box.memory
        self._words = box.words
        self._capacity = box.capacity

    def begin(
        self, group: GroupState, op: int, shapes: Shapes,
        reduce_op: int = 0, root: int = -1, peer: int = -1, p2p: bool = False, timeout_ms: int = 0, frame: Any = None,
        numbers: tuple[int, int] | None = None,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Writes the row of a call that is about to be made; returns (first word, record id + 1, state word)."""
        now = time.time_ns()
        if self.pending:
            self.sweep(now)
        flags = 0
        if numbers is not None:
            seq, p2p_seq = numbers[0] or group.last_seq, numbers[1]
            flags = _END | _P2P if p2p_seq else _END
        elif group.batch is not None:
            seq, p2p_seq, flags = self._batch_numbers(group, p2p)
        elif p2p:
            seq, p2p_seq, flags = group.last_seq, next(group.p2p_seqs), _P2P
        else:
            seq = group.last_seq = next(group.seqs)
            p2p_seq = 0
        stack = 0
        stacks = self.stacks
        if stacks is not None and frame is not None:
            stack = stacks.capture(frame)
            if stack < 0:
                stack = stacks.describe(frame)
        number = next(self._ids)
        begin = number + 1
        slot = number % self._capacity
        sizes, in_numel, out_numel = shapes
        words = self._words
        ROW.pack_into(
            self._memory, HEADER_BYTES + slot * ROW_BYTES,
            begin, now, 0, 0, seq, p2p_seq, next(group.op_ids), self.step, in_numel, out_numel,
            timeout_ms or group.timeout_ms, group.number, op, sizes, stack, self.label,
            threading.get_native_id(), peer, root, reduce_op, 0, flags, begin,
        )  # fmt: skip
        words[_NEXT] = begin
        words[_CALLS] = begin
        words[_LAST] = now
        first = _RING_WORD + slot * ROW_WORDS
        if flags & _PART:
            group.parts.append((first, begin))
        return first, begin, reduce_op | flags << 32

    def begin_end(
        self, group: GroupState, op: int, frame: Any
    ) -> tuple[tuple[int, int, int], tuple[tuple[int, int], ...]]:
        """Writes the row that stands for a whole coalesced group; returns its token and its parts."""
        seq, p2p_seq = group.batch or (0, 0)
        parts, group.batch, group.parts = tuple(group.parts), None, []
        first, begin, word = self.begin(group, op, (0, 0, 0), p2p=False, frame=frame, numbers=(seq, p2p_seq))
        return (first, begin, word), parts

    def track(
        self,
        work: Any,
        token: tuple[int, int, int],
        group: GroupState,
        parts: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """The library took the call and will finish it later; follows `work` until then."""
        first, begin, word = token
        if word >> 32 & _PART:
            return
        if group.blocking and self._words[first] == begin:
            self._words[first + STARTED_WORD] = time.time_ns()
            self._words[first + STATE_WORD] = word | _STARTED
        self.pending[id(work)] = (work, first, begin, word, group, parts)

    def finish(self, entry: Entry, now: int, state: int = _COMPLETED) -> None:
        """Writes the end of a call, unless the ring has already given its slot away."""
        _, first, begin, word, _, parts = entry
        words = self._words
        if words[first] == begin:
            words[first + COMPLETED_WORD] = now
            words[first + STATE_WORD] = word | state | _RETIRED
        if state == _COMPLETED:
            words[_DONE] = next(self._done)
        for first, begin in parts:
            if words[first] == begin:
                words[first + COMPLETED_WORD] = now
                words[first + STATE_WORD] = words[first + STATE_WORD] & _STATE_MASK | state | _RETIRED

    def done(self, token: tuple[int, int, int], group: GroupState, now: int = 0) -> None:
        """A call that was complete when the library returned from it."""
        first, begin, word = token
        if not word >> 32 & _PART:
            self.finish((None, first, begin, word, group, ()), now or time.time_ns())

    def failed(self, token: tuple[int, int, int], group: GroupState, error: BaseException) -> None:
        """The library refused the call or it ended with an error."""
        first, begin, word = token
        self.end_with_error((None, first, begin, word, group, ()), error)

    def end_with_error(self, entry: Entry, error: BaseException) -> None:
        """Marks a call failed or timed out; neither counts as completed."""
        timed_out = is_timeout(error)
        self.finish(entry, time.time_ns(), _TIMED_OUT if timed_out else _FAILED)
        if timed_out and self.on_timeout is not None:
            self.on_timeout()

    def sweep(self, now: int, everything: bool = False) -> None:
        """Notes the calls that have ended since; stops at the first that has not, unless asked for all."""
        if self.capturing:
            return
        pending = self.pending
        for key, entry in (
            list(pending.items())
            if everything or len(pending) < 8
            else list(itertools.islice(pending.items(), 8))
        ):
            try:
                if not entry[0].is_completed():
                    if everything:
                        continue
                    return
            except Exception as error:  # a Work may raise what its call ended with
                if pending.pop(key, None) is not None:
                    self.end_with_error(entry, error)
                continue
            if pending.pop(key, None) is not None:
                error_found = outcome(entry)
                if error_found is None:
                    self.finish(entry, now)
                else:
                    self.end_with_error(entry, error_found)

    def _batch_numbers(self, group: GroupState, p2p: bool) -> tuple[int, int, int]:
        """Calls inside a coalesced group share its numbers: one p2p number, one collective number."""
        seq, p2p_seq = group.batch or (0, 0)
        if p2p and not p2p_seq:
            p2p_seq = next(group.p2p_seqs)
        elif not p2p and not seq:
            seq = group.last_seq = next(group.seqs)
        group.batch = (seq, p2p_seq)
        return (seq or group.last_seq), (p2p_seq if p2p else 0), (_PART | _P2P if p2p else _PART)


def outcome(entry: Entry) -> BaseException | None:
    """How a completed Work ended, without blocking: None is success."""
    work, group = entry[0], entry[4]
    try:
        if group.blocking:
            original_wait(work)
            return None
        return _future_error(work)
    except Exception as error:  # whatever the call ended with
        return error


original_wait: Callable[[Any], Any] = lambda work: None  # noqa: E731  set by the hook to Work.wait before it was wrapped


def _future_error(work: Any) -> BaseException | None:
    """What NCCL's watchdog says of a call (torch 2.6 and later); None when it says nothing."""
    try:
        future = work.get_future_result()
        if not future.done():
            return None
        name = str(future.value())
    except Exception:  # not every backend has it
        return None
    if "SUCCESS" in name or not name:
        return None
    return TimeoutError("the call timed out") if "TIMEOUT" in name else RuntimeError(name)


def is_timeout(error: BaseException) -> bool:
    """Whether an error of a collective is a timeout; torch's backends tell only by their text."""
    if isinstance(error, TimeoutError):
        return True
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def warn_once(message: str) -> None:
    """One warning; never an exception, even where warnings are errors."""
    try:
        warnings.warn(f"allranks: {message}", RuntimeWarning, stacklevel=2)
    except Exception:  # -W error must not stop the training
        print(f"allranks: {message}", file=sys.stderr)


def process_start_ticks(pid: int | None = None) -> int:
    """Field 22 of /proc/PID/stat; 0 where there is no /proc."""
    try:
        with open(f"/proc/{os.getpid() if pid is None else pid}/stat") as stat:
            return int(stat.read().rsplit(")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
