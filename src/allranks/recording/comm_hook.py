"""A flight recorder for communicators with pre, post and abort hooks, with torchcomms' API. Runs in the rank.

    recorder = FlightRecorderHook(max_entries=1024, isolated=True)
    recorder.register_with_comm(comm)
    ...
    recorder.dump_json(); recorder.dump_file(rank)

A communicator is any object with `register_pre_hook(f)`, `register_post_hook(f)`, optionally
`register_abort_hook(f)`, and `get_rank()`, `get_size()`, `get_name()`, `get_backend()`. Unlike torchcomms' own hook
the records live in a black box that outlives the process, sequences count per communicator, send and recv know
their partner where the communicator tells it, and an abort writes a dump.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from allranks.blackbox.file_writer import Box
from allranks.blackbox.files import job_folder
from allranks.blackbox.layout import Item, packed_ranks
from allranks.blackbox.reader import read_trace
from allranks.model.files import write_atomically
from allranks.model.torch_dump import to_torch_json, to_torch_pickle
from allranks.model.trace import REDUCE_OPS, RankTrace
from allranks.recording.calls import dtype_name
from allranks.recording.groups import GroupState
from allranks.recording.options import from_environment, is_true
from allranks.recording.writer import CallWriter, fill_header, warn_once

DEFAULT_ENTRIES = 2048
DEFAULT_TIMEOUT_MS = 600_000  # torchcomms' own
MAX_UNFOLLOWED = 64
NOT_RECORDED = frozenset({"finalize"})
_counter = itertools.count(1)
_shared: _Store | None = None
_shared_lock = threading.Lock()


@dataclass
class _Store:
    """The ring that a hook writes to, and the numbers of the groups that hooks have added to it."""

    writer: CallWriter
    path: Path
    groups: set[int] = field(default_factory=set)
    written: int = 0  # calls ever recorded by hooks
    pid: int = field(default_factory=os.getpid)  # a forked child never writes into its parent's ring


class FlightRecorderHook:
    """Records the calls of the communicators that it is registered with.

    isolated=True: a ring of its own with `max_entries` records. isolated=False: the ring of the process's recorder
    when one runs, else one ring shared by all such hooks, of TORCHCOMM_FR_BUFFER_SIZE records.
    """

    def __init__(self, max_entries: int = DEFAULT_ENTRIES, isolated: bool = False) -> None:
        self.max_entries = max_entries
        self.isolated = isolated
        self._store: _Store | None = None
        self._handles: list[Any] = []
        # (communicator, op id) -> number of its record, and whether the program continues meanwhile
        self._open: dict[tuple[int, int], tuple[int, bool]] = {}
        self._unfollowed: dict[int, list[int]] = {}  # calls of a communicator whose work nobody gave us
        self._forget_until = 0  # records up to this one were reset away
        self._forgotten = 0
        self._rank = 0

    # -- torchcomms' API ----------------------------------------------------------------------------------------

    def register_with_comm(self, comm: Any) -> None:
        """Records every call of `comm` from now on, and of the communicators split off from it."""
        store = self._storage()
        if store is None:
            return
        self._rank = int(comm.get_rank())
        group = self._meet(store, comm)
        key = id(comm)
        self._handles += [
            comm.register_pre_hook(lambda *given: self._before(store, group, key, given)),
            comm.register_post_hook(lambda *given: self._after(store, group, key, given)),
        ]
        if hasattr(comm, "register_abort_hook"):
            self._handles.append(comm.register_abort_hook(self._aborted))

    def unregister(self) -> None:
        """Stops recording; what was recorded stays."""
        for handle in self._handles:
            if hasattr(handle, "remove"):
                handle.remove()
        self._handles.clear()

    def is_enabled(self) -> bool:
        """Whether calls can be recorded (there is a ring)."""
        return self._storage() is not None

    def size(self) -> int:
        """Calls recorded since the last reset; not limited by the ring."""
        return self._store.written - self._forgotten if self._store is not None else 0

    def __len__(self) -> int:
        return self.size()

    def reset(self) -> None:
        """Forgets what was recorded so far."""
        if self._store is not None:
            self._forgotten = self._store.written
            self._forget_until = self._store.writer.box.get("next_id")

    def dump_json(self, include_completed: bool = True) -> str:
        """The records as PyTorch 2.10 JSON, as torchcomms writes it."""
        dump = json.loads(to_torch_json(self._trace(), include_completed=include_completed))
        for config in dump["pg_config"].values():
            config["ranks"] = config["ranks"].replace(" ", "")
        return json.dumps(dump, separators=(",", ":"))

    def dump_file(self, rank: int, include_completed: bool = True) -> Path:
        """Writes the records as PyTorch 2.10 pickle where TORCHCOMM_FR_DUMP_TEMP_FILE says; returns the path."""
        path = dump_path(rank, os.environ)
        write_atomically(path, to_torch_pickle(self._trace(), include_completed=include_completed))
        return path

    def close(self) -> None:
        """Unregisters and lets go of the ring; an isolated ring's file stays on disk."""
        self.unregister()
        if self._store is not None and self.isolated:
            self._store.writer.ring.release()
            self._store.writer.box.mark_closed("closed", time.time_ns())
        self._store = None

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before(self, store: _Store, group: GroupState, comm: int, given: tuple[object, ...]) -> None:
        """Pre-hook: the call is about to be made. Never raises into it."""
        try:
            args = HookCall(*given)
            op = op_name(args)
            if op in NOT_RECORDED or os.getpid() != store.pid:
                return
            peer = _peer(args)
            number = store.writer.begin(
                group,
                store.writer.box.intern(Item.NAME, op),
                _shapes(store.writer.box, args),
                _reduce_op(args),
                _number(args, "root"),
                peer if peer < 0 else group.global_rank(peer),
                op in {"send", "recv"},
                _timeout_ms(args),
                sys._getframe(1),
            )
            store.written += 1
            self._open[(comm, int(getattr(args, "op_id", 0)))] = (
                number,
                getattr(args, "async_op", None) is True,
            )
        except Exception as error:  # ours, never the user's
            self._fault(error)

    def _after(self, store: _Store, group: GroupState, comm: int, given: tuple[object, ...]) -> None:
        """Post-hook: the call was made; it is over unless its work says otherwise."""
        try:
            args = HookCall(*given)
            known = self._open.pop((comm, int(getattr(args, "op_id", 0))), None)
            if known is not None and os.getpid() == store.pid:
                number, goes_on = known
                work = _living(getattr(args, "work", None))
                if work is not None and not _is_completed(work):
                    store.writer.track(work, number, group)
                elif work is None and goes_on:
                    self._keep(store, comm, number)
                else:
                    self._finish(store, comm, number)
            child = getattr(args, "new_comm", None)
            if child is not None:
                self.register_with_comm(child)
        except Exception as error:  # ours
            self._fault(error)

    def _keep(self, store: _Store, comm: int, number: int) -> None:
        """An asynchronous call without a work (torchcomms 0.3): it counts as over when a later call of its communicator
        was waited for, or when many were made since."""
        waiting = self._unfollowed.setdefault(comm, [])
        waiting.append(number)
        if len(waiting) > MAX_UNFOLLOWED:
            store.writer.finish(waiting.pop(0))

    def _finish(self, store: _Store, comm: int, number: int) -> None:
        for earlier in self._unfollowed.pop(comm, []):
            store.writer.finish(earlier)
        store.writer.finish(number)

    def _aborted(self, *given: object) -> None:
        """Abort hook: the process is about to end; write what is known."""
        try:
            if self._store is not None:
                self._store.writer.sweep(everything=True)
            self.dump_file(self._rank)
        except Exception as error:  # ours
            print(f"allranks: no dump on abort: {error}", file=sys.stderr)

    def _fault(self, error: BaseException) -> None:
        self.unregister()
        warn_once(
            f"the communicator hook is disabled after an error of its own: {error!r}; training continues"
        )

    # -- storage ------------------------------------------------------------------------------------------------

    def _storage(self) -> _Store | None:
        if self._store is None:
            self._store = _new_store(self.max_entries) if self.isolated else _shared_store()
        return self._store

    def _meet(self, store: _Store, comm: Any) -> GroupState:
        size = int(comm.get_size())
        ranks = tuple(map(int, comm.get_ranks() if hasattr(comm, "get_ranks") else range(size)))
        backend, name = str(comm.get_backend()), str(comm.get_name())
        number = store.writer.box.append(Item.GROUP, [name, backend, packed_ranks(ranks), backend])
        store.groups.add(number)
        timeout = getattr(getattr(comm, "get_options", lambda: None)(), "timeout", None)
        milliseconds = (
            int(timeout.total_seconds() * 1000) if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT_MS
        )
        if store.writer.box.get("rank") < 0:
            store.writer.box.set(rank=self._rank)
        return GroupState(number, name, ranks, backend, milliseconds)

    def _trace(self) -> RankTrace:
        """The hook's own calls since the last reset."""
        store = self._storage()
        if store is None:
            from allranks.errors import NotRecording

            raise NotRecording("the communicator hook has no ring")
        store.writer.sweep(everything=True)
        trace = read_trace(store.path)
        kept = sorted({0, *store.groups})
        mine = np.isin(trace.calls["group"], kept[1:]) & (trace.calls["begin"] > self._forget_until)
        calls = trace.calls[mine]
        calls["group"] = np.searchsorted(kept, calls["group"])
        groups = tuple(group for index, group in enumerate(trace.groups) if index in kept)
        return replace(trace, calls=calls, groups=groups)


def dump_path(rank: int, env: Mapping[str, str]) -> Path:
    """Where torchcomms writes: prefix + rank, or the whole name with …DYNAMIC_FILE_NAME=1."""
    prefix = env.get("TORCHCOMM_FR_DUMP_TEMP_FILE", "")
    if prefix and is_true(env.get("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME")):
        return Path(prefix)
    if not prefix:
        cache = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        prefix = os.path.join(cache, "torch", "comm_lib_trace_rank_")
    return Path(f"{prefix}{rank}")


def _shared_store() -> _Store | None:
    """The ring of the process's recorder, else one for all hooks of the process."""
    global _shared
    from allranks.recording import current

    with _shared_lock:
        recorder = current()
        if recorder is not None and recorder.writer is not None and recorder.path is not None:
            if _shared is None or _shared.writer is not recorder.writer:
                _shared = _Store(recorder.writer, recorder.path)
        elif _shared is None or not _shared.path.exists():
            _shared = _new_store(from_environment().capacity)
        return _shared


def _new_store(entries: int) -> _Store | None:
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
    return _Store(CallWriter(box, options), box.path)


# -- what a hook's arguments tell ----------------------------------------------------------------------------------


class HookCall:
    """What a hook was called with, in any released signature.

    torchcomms up to 0.2: `pre(args)`, `post(args)`, the name and the id inside; from 0.3: `pre(name, op_id, args)`,
    `post(op_id, args)`. The last one holds the facts; of the others a whole number is the id, the rest the name.
    """

    def __init__(self, *given: object) -> None:
        self._facts = given[-1] if given else None
        for value in given[:-1]:
            if isinstance(value, int) and not hasattr(value, "name"):  # an enum's member may be an int too
                self.op_id = value
            else:
                self.name = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


def op_name(args: object) -> str:
    """ "all_reduce" of an enum member, its text ("OpName.ALL_REDUCE") or a plain string."""
    name = getattr(args, "name", "")
    return str(getattr(name, "name", name)).rsplit(".", 1)[-1].lower()


def _tensors(args: object, side: str) -> list[Any]:
    """The tensors of one side; a communicator gives one or a list, and may give neither."""
    names = (f"{side}_tensors", f"{side}_tensor", side, "tensor")  # the last two: torchcomms 0.3
    found = next((value for name in names if (value := getattr(args, name, None)) is not None), ())
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _shapes(box: Box, args: object) -> tuple[int, int, int]:
    inputs, outputs = _tensors(args, "input"), _tensors(args, "output")
    payload = [
        [list(t.shape) for t in inputs],
        [list(t.shape) for t in outputs],
        [dtype_name(t.dtype) for t in inputs],
        [dtype_name(t.dtype) for t in outputs],
        list(getattr(args, "input_split_sizes", None) or ()),
        list(getattr(args, "output_split_sizes", None) or ()),
    ]
    number = box.intern(Item.SHAPES, payload) if inputs or outputs else 0
    return number, sum(t.numel() for t in inputs), sum(t.numel() for t in outputs)


def _number(args: object, name: str) -> int:
    value = getattr(args, name, None)
    return int(value) if isinstance(value, int) else -1


def _peer(args: object) -> int:
    return next((number for name in ("peer", "dst", "src") if (number := _number(args, name)) >= 0), -1)


def _reduce_op(args: object) -> int:
    op = getattr(args, "op", None) or getattr(args, "reduce_op", None)
    if op is None:
        return 0
    name = str(getattr(getattr(op, "type", op), "name", op)).rsplit(".", 1)[-1].lower()
    return REDUCE_OPS.index(name) if name in REDUCE_OPS else REDUCE_OPS.index("other")


def _timeout_ms(args: object) -> int:
    value = getattr(args, "timeout", None)
    return int(value.total_seconds() * 1000) if isinstance(value, timedelta) else 0


def _living(work: object) -> Any:
    """torchcomms hands out weak references to its works."""
    return work() if callable(work) and not hasattr(work, "is_completed") else work


def _is_completed(work: Any) -> bool:
    with contextlib.suppress(Exception):  # a work without the question counts as over
        return bool(work.is_completed())
    return True
