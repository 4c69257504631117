"""Hooks the recorder into torch.distributed. Runs in the rank.

The hooks and the calls that they see:

- methods of the pybind classes `ProcessGroup` and `Backend`: every call from Python, on any backend
  (torch.distributed, FSDP, pipelines, object collectives, `_dist2`, bare Backend objects);
- `recording_group.py`: calls made by C++ (DDP's reducer, functional collectives);
- `Work.wait`: the time when the program knows that a call is completed.

The methods are implemented in C (`_fast.Method`). They call Python for a new group, a new stack or new sizes, and to read
calls in an unusual form. A shared flag enables them, so that recording stops immediately in a forked child.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allranks.blackbox.layout import Item, packed_ranks
from allranks.model.trace import Rendezvous
from allranks.recording import setup_calls
from allranks.recording import torch_internals as internals
from allranks.recording.calls import (
    CALLS,
    Args,
    Call,
    ErrorGuard,
    Function,
    Kwargs,
    Method,
    intern_shapes,
    read_call,
)
from allranks.recording.options import TORCH_ERRORS, fast
from allranks.recording.setup_calls import Stores
from allranks.recording.torch_internals import describe_group, timeout_ms
from allranks.recording.writer import CallWriter, GroupState, Shapes, warn_once

if TYPE_CHECKING:
    from allranks.recording.recording_group import RecordingProxies

#: Modules whose code runs inside a collective.
_NAMES = "hook setup_calls recording_group writer stack calls torch_internals"
OURS = (*(f"{__package__}.{name}" for name in _NAMES.split()), "allranks.blackbox.file_writer")
MAX_SHAPES = 100_000  # distinct sizes cached, as in _fast.c; further ones are computed on every call
BATCH = "coalesced"  # op of the row for a whole batch


class Hook:
    """The wrapped methods of torch.distributed and their shared state. `fault` is called with an error of our own and
    disables recording. A method that cannot be wrapped is skipped, with one warning."""

    def __init__(
        self,
        writer: CallWriter,
        fault: Callable[[BaseException], None],
        on_group: Callable[[GroupState], None],
        on_rank: Callable[[int, Rendezvous], None],
    ) -> None:
        self.writer: CallWriter | None = writer
        self.guard = ErrorGuard(fault)
        self._on_group = on_group
        self.on_rank = on_rank  # called when init_process_group starts
        self._groups: dict[int, GroupState] = {}  # by id of the group object; removed when the object dies
        self._counters: dict[int, Any] = {}  # counters of the same groups, for _fast.c
        # members of split groups without a call yet
        self._members: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = (
            weakref.WeakKeyDictionary()
        )
        self._known_shapes: dict[Args, Shapes] = {}
        self._recording: Any = None  # shared state of the methods in C
        self._replaced = internals.Replaced()
        self._proxies: RecordingProxies | None = None
        self._stores = Stores(self.guard)
        self._lost: set[str] = set()

    # -- installing ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wraps the methods that this version of torch has."""
        writer = self.installed
        lost = internals.missing()
        if lost:
            warn_once(f"with torch {torch.__version__} these are not recorded: {'; '.join(lost)}")
        writer.original_wait = dist.Work.wait
        self._part("events on the device", self._use_markers)
        self._recording = fast().Recording(
            writer.ring,
            writer.pending,
            self._counters,
            writer.stacks.engine if writer.stacks is not None else None,
            writer.markers,
            self.guard.hold(lambda group: self.group(group).counters),
            self.guard.hold(lambda: writer.stack(sys._getframe())),
            self.guard.hold(writer.failed),
            self.guard.hold(writer.wait_failed),
            self.guard.hold(writer.sweep),
        )
        for owner in (dist.ProcessGroup, internals.Backend):
            for method in (*CALLS, internals.START_BATCH, internals.END_BATCH, "split_group", "reconfigure"):
                if method in vars(owner):
                    self._part(f"{owner.__name__}.{method}", self._wrap_method, owner, method)
        for kind in internals.work_classes():
            self._part(f"{kind.__name__}.wait", self._wrap_wait, kind)
        self._part("capture of CUDA graphs", self._watch_cuda)
        self._part("stores of groups", self._stores.install, self._replaced)
        self._part(internals.CPP_CALLS, self._install_proxies)
        setups = "init_process_group, new_group, destroy_process_group"
        self._part(setups, setup_calls.install, self, self._replaced)

    def _part(self, what: str, step: Function, *args: object) -> Any:
        """Runs a step that may fail in another version of torch; the rest is then still recorded."""
        return ErrorGuard(partial(self.lost, what))(step, *args)

    def _wrap_method(self, owner: Any, method: str) -> None:
        original = getattr(owner, method)
        if method in (*internals.TRAMPOLINE, "split_group", "reconfigure"):
            original = internals.below_frame(original, method)
        if method in CALLS:
            wrapper = self._collective(original, method)
        elif method in ("split_group", "reconfigure"):
            wrapper = (self._wrap_split if method == "split_group" else self._wrap_reconfigure)(original)
        else:
            c = fast()
            kind = c.BATCH_BEGIN if method == internals.START_BATCH else c.BATCH_CLOSE
            op = self.installed.box.intern(Item.NAME, BATCH)
            wrapper = c.Method(self._recording, original, kind, op)
        self._replace(owner, method, wrapper)

    def _wrap_wait(self, kind: Any) -> None:
        c = fast()
        self._replace(kind, "wait", c.Method(self._recording, kind.wait, c.WAIT, 0))

    def _install_proxies(self) -> None:
        if internals.version() < internals.FIRST_WITH_PROXIES:
            raise LookupError("they need torch 2.7")
        from allranks.recording.recording_group import RecordingProxies

        self._proxies = RecordingProxies(self)
        self._proxies.install(self._replaced)
        internals.hide_from_compiler(*(sys.modules[name] for name in OURS if name in sys.modules))

    @property
    def installed(self) -> CallWriter:
        """The writer, which must exist."""
        assert self.writer is not None
        return self.writer

    def lost(self, what: str, error: BaseException) -> None:
        """Warns once that something cannot be recorded with this version of torch."""
        if what not in self._lost:
            self._lost.add(what)
            warn_once(f"not recorded with torch {torch.__version__}: {what}: {error!r}")

    def uninstall(self) -> None:
        """Restores every method, unless other code has wrapped it since."""
        self.silence()
        if self._proxies is not None:
            self._proxies.take_back()
            self._proxies = None
        self._replaced.restore()
        self._recording = None

    def silence(self) -> None:
        """Stops recording without touching C++ objects, whose locks may be held forever in a forked child."""
        self.writer = None
        self.guard.active = False
        if self._recording is not None:
            self._recording.enabled = False

    def _replace(self, owner: object, name: str, wrapper: Function) -> None:
        original = vars(owner)[name]  # the descriptor, with pybind's binding of self
        if isinstance(wrapper, FunctionType):
            wrapper.__name__ = name
            wrapper.__doc__ = getattr(owner, name).__doc__
            internals.leave_graph(wrapper)
        self._replaced.put(owner, name, wrapper, original)

    # -- groups and shapes --------------------------------------------------------------------------------------

    def group(self, group: dist.ProcessGroup) -> GroupState:
        """The state of a group; at its first call, the group is written to the box."""
        state = self._groups.get(id(group))
        return state if state is not None else self._add_group(group)

    def _add_group(self, group: dist.ProcessGroup) -> GroupState:
        writer = self.installed
        members = self._members.pop(group, ())
        name, desc, ranks, backend = describe_group(group, writer.box.get("world_size"), members)
        store = self._own_store(group, name)
        if store is not None:  # its members are numbered from 0
            name, ranks = name or store[1], tuple(range(int(group.size())))
        about = [name, desc, packed_ranks(ranks), backend, *((store[0], store[2]) if store else ())]
        number = writer.box.append(Item.GROUP, about)
        state = GroupState(number, name, ranks, backend, timeout_ms(group))
        self.adopt(group, state)
        self._on_group(state)
        return state

    def _own_store(self, group: dist.ProcessGroup, name: str) -> tuple[str, str, int] | None:
        """(address, prefix, own index) of a group with another store than the world; None otherwise, and in replica mode."""
        if os.environ.get("ALLRANKS_RANK") or name.startswith(("replicas/", "votes/")):
            return None
        try:
            address, prefix = self._stores.elsewhere(group)
            return (address, prefix, int(group.rank())) if address else None
        except TORCH_ERRORS:  # not every backend has a rank
            return None

    def adopt(self, group: dist.ProcessGroup, state: GroupState) -> None:
        """Registers `state` for `group` until the object dies."""
        key = id(group)
        groups, counters = self._groups, self._counters

        def forget(_: object) -> None:
            groups.pop(key, None)
            counters.pop(key, None)

        state.ref = weakref.ref(group, forget)
        groups[key] = state
        counters[key] = state.counters

    def destroyed(self, group: dist.ProcessGroup) -> None:
        """Records that the program destroys a group, or all of them (None)."""
        writer = self.writer
        if writer is None:
            return
        now = time.time_ns()
        states = list(self._groups.values()) if group is None else [self.group(group)]
        for number in sorted({state.counters.number for state in states}):
            writer.box.append(Item.DESTROYED, [number, now])

    def _shapes(self, call: Call) -> Shapes:
        """Interned sizes and dtypes of a call."""
        sides = [tuple([(t.shape, t.dtype) for t in tensors]) for tensors in (call.inputs, call.outputs)]
        key = (*sides, tuple(call.input_splits), tuple(call.output_splits))
        found = self._known_shapes.get(key)
        if found is None:
            found = intern_shapes(self.installed.box, *call[:2], call.input_splits, call.output_splits)
            if len(self._known_shapes) < MAX_SHAPES:
                self._known_shapes[key] = found
        return found

    # -- wrappers -----------------------------------------------------------------------------------------------

    def _collective(self, original: Function, method: str) -> Any:
        """The wrapper of a collective or point-to-point method."""
        kind = CALLS[method]

        def read(args: Args, kwargs: Kwargs) -> Args:
            call, shapes = self._read(kind, args, kwargs)
            numbers = (call.reduce_op, call.root, call.peer, call.p2p, call.timeout_ms, call.tag)
            return shapes, *numbers, _on_cpu(call, kind)

        c, op = fast(), self.installed.box.intern(Item.NAME, kind.op)
        form = (op, self.guard.hold(read), *internals.form_of(kind))
        return c.Method(self._recording, original, c.COLLECTIVE, *form)

    def _read(self, kind: Method, args: Args, kwargs: Kwargs) -> tuple[Call, Shapes]:
        """A call and its sizes. A call in an unknown form is recorded without sizes."""
        try:
            call = read_call(kind, args, kwargs)
            return call, self._shapes(call)
        except Exception as error:  # an unknown form of arguments
            self.lost(f"sizes of some calls of {kind.op}", error)
            return Call(p2p=kind.p2p), (0, 0, 0)

    def _wrap_split(self, original: Function) -> Function:
        def before(args: Args, kwargs: Kwargs) -> tuple[int, ...]:
            parent = self.group(args[0])
            ranks: Any = args[1] if len(args) > 1 else kwargs["ranks"]
            return tuple(parent.global_rank(int(rank)) for rank in ranks)

        def after(members: tuple[int, ...], part: dist.ProcessGroup) -> None:
            if part is not None:
                self._members[part] = members

        return self.guard.around(original, before, after)

    def _wrap_reconfigure(self, original: Function) -> Function:
        """Wraps `reconfigure`, which makes the object a new group: same name, plus the number that all members share."""

        def before(args: Args, kwargs: Kwargs) -> tuple[Any, GroupState, Any]:
            return args[0], self.group(args[0]), args[1] if len(args) > 1 else next(iter(kwargs.values()))

        def after(known: tuple[Any, GroupState, Any], work: object) -> None:
            group, old, options = known
            box = self.installed.box
            ranks = internals.members_by_handles(options.handles, old.first_ranks)
            name = f"{old.name.partition('@')[0]}@{options.uuid}"
            box.append(Item.DESTROYED, [old.counters.number, time.time_ns()])
            number = box.append(Item.GROUP, [name, "reconfigured", packed_ranks(ranks), old.backend])
            state = GroupState(number, name, ranks, old.backend, old.counters.timeout_ms)
            state.first_ranks = old.first_ranks
            self.adopt(group, state)

        return self.guard.around(original, before, after)

    def _use_markers(self) -> None:
        """Uses events of the CUDA driver, if CUDA is available."""
        functions = internals.event_functions()
        if functions:
            self.installed.markers = fast().Markers(self.installed.ring, *functions)

    def _watch_cuda(self) -> None:
        """Stops queries of events while a thread captures a CUDA graph."""
        graph = internals.cuda_graph()
        if graph is None:
            return

        writer, around = self.installed, self.guard.around

        def begin(*_: object) -> bool:
            writer.begin_capture()
            return True

        def end(*_: object) -> None:
            writer.end_capture()

        self._replace(graph, "capture_begin", around(graph.capture_begin, begin, None, end))
        for name in internals.CAPTURE_ENDS:
            if name in vars(graph):
                self._replace(graph, name, around(getattr(graph, name), lambda *_: True, end, end))


def _on_cpu(call: Call, kind: Method) -> bool:
    """Whether a call uses the backend for CPU tensors, in a group with several backends."""
    tensor = next(iter(call.inputs or call.outputs), None)
    return kind.op == "monitored_barrier" if tensor is None else bool(tensor.is_cpu)
