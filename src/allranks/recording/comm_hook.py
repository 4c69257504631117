"""A flight recorder with torchcomms' API, for communicators with pre, post and abort hooks. Runs in the rank.

    recorder = FlightRecorderHook(max_entries=1024, isolated=True)
    recorder.register_with_comm(comm)
    ...
    recorder.dump_json(); recorder.dump_file(rank)

A communicator is any object with `register_pre_hook(f)`, `register_post_hook(f)`, optionally `register_abort_hook(f)`, and
`get_rank()`, `get_size()`, `get_name()`, `get_backend()`. Differences from torchcomms' own hook: records survive the process
in a black box, sequences count per communicator, send and recv have their peer if known, and an abort writes a dump.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from allranks.blackbox.file_writer import Box
from allranks.blackbox.files import job_folder
from allranks.blackbox.layout import Item, packed_ranks
from allranks.blackbox.reader import read_trace
from allranks.errors import NotRecording
from allranks.model.files import write_atomically
from allranks.model.torch_dump import to_torch_json, to_torch_pickle
from allranks.model.trace import REDUCE_OPS, RankTrace
from allranks.recording.calls import ErrorGuard, intern_shapes
from allranks.recording.options import from_environment, is_true
from allranks.recording.writer import CallWriter, GroupState, fill_header, warn_once

DEFAULT_ENTRIES = 2048
DEFAULT_TIMEOUT_MS = 600_000  # as in torchcomms
MAX_UNFOLLOWED = 64
_counter = itertools.count(1)


class FlightRecorderHook:
    """Records the calls of the communicators that it is registered with.

    Uses the ring of the process's recorder; without one, or with isolated=True, its own ring with `max_entries` records.
    """

    def __init__(self, max_entries: int = DEFAULT_ENTRIES, isolated: bool = False) -> None:
        self.max_entries, self.isolated = max_entries, isolated
        self._guard = ErrorGuard(self._disable)
        self._writer: CallWriter | None = None
        self._own = False  # whether the ring is its own
        self._pid = os.getpid()  # a forked child must not write into its parent's ring
        self._handles: list[Any] = []
        self._groups = {0}  # ids of its groups in the ring
        # (communicator, op id) -> (number of its record, whether the call is asynchronous)
        self._open: dict[tuple[int, int], tuple[int, bool]] = {}
        self._unfollowed: dict[int, list[int]] = {}  # calls without a work, by communicator
        self._count = 0  # calls since the last reset
        self._forget_until = 0  # the last record before the last reset
        self._rank = 0

    # -- torchcomms' API ----------------------------------------------------------------------------------------

    def register_with_comm(self, comm: Any) -> None:
        """Records every call of `comm` and of communicators that are split off from it."""
        writer = self._ring()
        if writer is None:
            return
        self._rank = int(comm.get_rank())
        group, key = self._add_group(writer, comm), id(comm)
        before = self._guard.hold(lambda *given: self._before(writer, group, key, HookCall(*given)))
        after = self._guard.hold(lambda *given: self._after(writer, group, key, HookCall(*given)))
        self._handles += [comm.register_pre_hook(before), comm.register_post_hook(after)]
        if hasattr(comm, "register_abort_hook"):
            self._handles.append(comm.register_abort_hook(self._guard.hold(self._aborted)))

    def unregister(self) -> None:
        """Stops recording; keeps the records."""
        for handle in self._handles:
            if hasattr(handle, "remove"):
                handle.remove()
        self._handles.clear()

    def is_enabled(self) -> bool:
        """Whether calls can be recorded (there is a ring)."""
        return self._ring() is not None

    def size(self) -> int:
        """Number of calls since the last reset, not limited by the ring."""
        return self._count

    __len__ = size

    def reset(self) -> None:
        """Drops the records so far."""
        if self._writer is not None:
            self._count, self._forget_until = 0, self._writer.box.get("next_id")

    def dump_json(self, include_completed: bool = True) -> str:
        """The records as PyTorch 2.10 JSON, in torchcomms' format."""
        dump = json.loads(to_torch_json(self._trace(), include_completed=include_completed))
        for config in dump["pg_config"].values():
            config["ranks"] = config["ranks"].replace(" ", "")
        return json.dumps(dump, separators=(",", ":"))

    def dump_file(self, rank: int, include_completed: bool = True) -> Path:
        """Writes the records as PyTorch 2.10 pickle to the path in TORCHCOMM_FR_DUMP_TEMP_FILE; returns the path."""
        path = dump_path(rank, os.environ)
        write_atomically(path, to_torch_pickle(self._trace(), include_completed=include_completed))
        return path

    def close(self) -> None:
        """Unregisters and releases the ring; the file of its own ring stays on disk."""
        self.unregister()
        if self._writer is not None and self._own:
            self._writer.ring.release()
            self._writer.box.mark_closed("closed", time.time_ns())
        self._writer = None

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before(self, writer: CallWriter, group: GroupState, comm: int, args: HookCall) -> None:
        """Pre-hook, before the call."""
        op = op_name(args)
        if op == "finalize" or os.getpid() != self._pid:
            return
        peer = next((at for name in ("peer", "dst", "src") if (at := _number(args, name)) >= 0), -1)
        number = writer.begin(
            group,
            writer.box.intern(Item.NAME, op),
            _shapes(writer.box, args),
            _reduce_op(args),
            _number(args, "root"),
            peer if peer < 0 else group.global_rank(peer),
            op in {"send", "recv"},
            _milliseconds(getattr(args, "timeout", None), 0),
            sys._getframe(2),
        )
        self._count += 1
        unawaited = getattr(args, "async_op", None) is True
        self._open[comm, int(getattr(args, "op_id", 0))] = number, unawaited

    def _after(self, writer: CallWriter, group: GroupState, comm: int, args: HookCall) -> None:
        """Post-hook, after the call, which has ended unless it returned a running work."""
        known = self._open.pop((comm, int(getattr(args, "op_id", 0))), None)
        if known is not None and os.getpid() == self._pid:
            number, unawaited = known
            work: Any = getattr(args, "work", None)
            if callable(work) and not hasattr(work, "is_completed"):
                work = work()  # torchcomms hands out weak references to its works
            waiting = self._unfollowed.setdefault(comm, [])
            if hasattr(work, "is_completed"):
                writer.track(work, number, group)
                writer.sweep()
            elif work is None and unawaited:
                # torchcomms 0.3: counts as ended after a later synchronous call of its communicator, or after many
                # later calls
                waiting.append(number)
                if len(waiting) > MAX_UNFOLLOWED:
                    writer.finish(waiting.pop(0))
            else:
                for earlier in (*waiting, number):
                    writer.finish(earlier)
                waiting.clear()
        child = getattr(args, "new_comm", None)
        if child is not None:
            self.register_with_comm(child)

    def _aborted(self, *given: object) -> None:
        """Abort hook, before the process ends: writes a dump."""
        self.dump_file(self._rank)

    def _disable(self, error: BaseException) -> None:
        self.unregister()
        warn_once(
            f"the communicator hook is disabled after an error of its own: {error!r}; training continues"
        )

    # -- storage ------------------------------------------------------------------------------------------------

    def _ring(self) -> CallWriter | None:
        from allranks.recording import current

        recorder = None if self.isolated else current()
        if self._writer is None and recorder is not None and recorder.writer is not None:
            self._writer = recorder.writer
        elif self._writer is None:
            self._writer, self._own = _new_ring(self.max_entries), True
        return self._writer

    def _add_group(self, writer: CallWriter, comm: Any) -> GroupState:
        size = int(comm.get_size())
        ranks = tuple(map(int, comm.get_ranks() if hasattr(comm, "get_ranks") else range(size)))
        backend, name = str(comm.get_backend()), str(comm.get_name())
        number = writer.box.append(Item.GROUP, [name, backend, packed_ranks(ranks), backend])
        self._groups.add(number)
        options = comm.get_options() if hasattr(comm, "get_options") else None
        if writer.box.get("rank") < 0:
            writer.box.set(rank=self._rank)
        limit_ms = _milliseconds(getattr(options, "timeout", None), DEFAULT_TIMEOUT_MS)
        return GroupState(number, name, ranks, backend, limit_ms)

    def _trace(self) -> RankTrace:
        """The hook's own calls since the last reset."""
        writer = self._ring()
        if writer is None:
            raise NotRecording("the communicator hook has no ring")
        writer.sweep(everything=True)
        trace = read_trace(writer.box.path)
        kept = sorted(self._groups)
        mine = np.isin(trace.calls["group"], kept[1:]) & (trace.calls["begin"] > self._forget_until)
        calls = trace.calls[mine]
        calls["group"] = np.searchsorted(kept, calls["group"])
        groups = tuple(group for index, group in enumerate(trace.groups) if index in kept)
        return replace(trace, calls=calls, groups=groups)


def dump_path(rank: int, env: Mapping[str, str]) -> Path:
    """The path as in torchcomms: prefix + rank, or the whole name with …DYNAMIC_FILE_NAME=1."""
    prefix = env.get("TORCHCOMM_FR_DUMP_TEMP_FILE", "")
    if prefix and is_true(env.get("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME")):
        return Path(prefix)
    if not prefix:
        cache = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        prefix = os.path.join(cache, "torch", "comm_lib_trace_rank_")
    return Path(f"{prefix}{rank}")


def _new_ring(entries: int) -> CallWriter | None:
    options = from_environment(capacity=max(16, entries))
    folder = options.folder or job_folder(options.job)
    name = f"{options.job}.a{options.attempt}.r{options.rank}.p{os.getpid()}.comm{next(_counter)}.box"
    box = Box(folder / name.replace("/", "_"), entries, options.heap_bytes)
    try:
        box.open()
    except OSError as error:
        warn_once(f"the communicator hook is disabled: no black box in {folder}: {error}; training continues")
        return None
    fill_header(box, options)
    return CallWriter(box, options)


# -- arguments of hooks --------------------------------------------------------------------------------------------


class HookCall:
    """The arguments of a hook, in any released signature.

    torchcomms up to 0.2: `pre(args)`, `post(args)`, with name and id in `args`; from 0.3: `pre(name, op_id, args)`,
    `post(op_id, args)`.
    """

    def __init__(self, *given: object) -> None:
        self._facts = given[-1] if given else None
        for value in given[:-1]:
            if isinstance(value, int) and not hasattr(value, "name"):  # an enum member may be an int, too
                self.op_id = value
            else:
                self.name = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


def op_name(args: object) -> str:
    """ "all_reduce" for an enum member, its text ("OpName.ALL_REDUCE") or a plain string."""
    name = getattr(args, "name", "")
    return str(getattr(name, "name", name)).rsplit(".", 1)[-1].lower()


def _tensors(args: object, side: str) -> list[Any]:
    """The input or output tensors, which a communicator passes as one tensor, a list, or not at all."""
    names = (f"{side}_tensors", f"{side}_tensor", side, "tensor")  # the last two since torchcomms 0.3
    found = next((value for name in names if (value := getattr(args, name, None)) is not None), ())
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _shapes(box: Box, args: object) -> tuple[int, int, int]:
    splits = [getattr(args, f"{side}_split_sizes", None) or () for side in ("input", "output")]
    return intern_shapes(box, _tensors(args, "input"), _tensors(args, "output"), *splits)


def _number(args: object, name: str) -> int:
    value = getattr(args, name, None)
    return value if isinstance(value, int) else -1


def _reduce_op(args: object) -> int:
    op = getattr(args, "op", None) or getattr(args, "reduce_op", None)
    if op is None:
        return 0
    name = str(getattr(getattr(op, "type", op), "name", op)).rsplit(".", 1)[-1].lower()
    return REDUCE_OPS.index(name if name in REDUCE_OPS else "other")


def _milliseconds(value: object, default: int) -> int:
    return int(value.total_seconds() * 1000) if isinstance(value, timedelta) else default
