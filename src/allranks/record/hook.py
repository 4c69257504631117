"""Puts the recorder under torch.distributed. Runs in the rank; the only part of `record` that imports torch.

Where it hooks, and what each hook sees:

- methods of the pybind classes `ProcessGroup` and `Backend`: every call that comes from Python, on any backend
  (torch.distributed, FSDP, pipelines, object collectives, `_dist2`, bare Backend objects);
- `recording_group.py`: calls that C++ makes by itself (DDP's reducer, functional collectives);
- `Work.wait`: the moment at which the program knows that a call is over.

Recording is decided by one cell, so that `uninstall` is cheap and a forked child is silent at once.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from allranks.blackbox.layout import Item
from allranks.record import torch_internals as internals
from allranks.record.calls import CALLS, Call, Reader
from allranks.record.dtypes import dtype_name
from allranks.record.engine import fast
from allranks.record.groups import GroupState, describe_group, timeout_ms
from allranks.record.inplace import layout_of
from allranks.record.marker import EventMarker
from allranks.record.row_writer import Shapes
from allranks.record.setup_calls import SetupCalls
from allranks.record.writer import CallWriter, warn_once

#: Modules whose code runs under a collective.
OURS = (
    *(
        f"allranks.record.{name}"
        for name in ("hook", "recording_group", "writer", "row_writer", "stack", "calls")
    ),
    *(f"allranks.record.{name}" for name in ("groups", "dtypes", "marker", "torch_internals")),
    "allranks.blackbox.file_writer",
)
MAX_SHAPES = 100_000  # distinct sizes remembered; further ones are worked out on every call


class Hook:
    """The wrapped methods of torch.distributed and what they share. `fault` is told of our own errors."""

    def __init__(
        self,
        writer: CallWriter,
        fault: Callable[[BaseException], None],
        on_group: Callable[[GroupState, Any], None],
        on_rank: Callable[[int, int], None],
    ) -> None:
        self.writer: CallWriter | None = writer
        self._fault = fault
        self._on_group = on_group
        self.on_rank = on_rank  # told (rank, world size) of the process when init_process_group is entered
        self._groups: dict[int, GroupState] = {}  # by id of the group object, which is alive while it is here
        self._counters: dict[int, Any] = {}  # the same groups' counters, for the part in C
        self._shapes: dict[tuple[Any, ...], Shapes] = {}
        # For the part in C: by shape and dtype of a tensor that is input and output, or of one output and one input.
        self._plain_shapes: dict[tuple[Any, ...], Shapes] = {}
        # Ranks of groups that were split off and have made no call yet.
        self._members: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._proxies: Any = None
        self._setup: SetupCalls | None = None
        self._lost: set[str] = set()

    # -- installing ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wraps the methods. Those that this version of torch does not have are passed over."""
        assert self.writer is not None
        lost = internals.missing()
        if lost:
            warn_once(f"with torch {torch.__version__} these are not recorded: {'; '.join(lost)}")
        self.writer.original_wait = dist.Work.wait
        owners: tuple[Any, ...] = (dist.ProcessGroup, internals.Backend)
        wrappers = (
            (internals.START_BATCH, self._wrap_start), (internals.END_BATCH, self._wrap_end), ("split_group", self._wrap_split)
        )  # fmt: skip
        for owner in owners:
            for method, (op, reader) in CALLS.items():
                if method in vars(owner):
                    original = getattr(owner, method)
                    wrapper = self._wrap(original, op, reader)
                    self._replace(owner, method, self._fast_collective(original, wrapper, method, op))
            for method, wrap in wrappers:
                if method in vars(owner):
                    self._replace(owner, method, wrap(getattr(owner, method)))
        for kind in internals.work_classes():
            self._replace(kind, "wait", self._fast_wait(kind.wait, self._wrap_wait(kind.wait)))
        self._watch_cuda()
        try:
            from allranks.record.recording_group import RecordingProxies

            proxies = RecordingProxies(self)
            proxies.install()
            self._proxies = proxies
            internals.hide_from_compiler(*(sys.modules[name] for name in OURS if name in sys.modules))
        except Exception as error:  # another version of torch
            self.lost(internals.CPP_CALLS, error)
        self._setup = SetupCalls(self)
        self._setup.install()

    def lost(self, what: str, error: BaseException) -> None:
        """This version of torch does not let us see something: said once, the rest is recorded."""
        if what not in self._lost:
            self._lost.add(what)
            warn_once(f"not recorded with torch {torch.__version__}: {what}: {error!r}")

    def uninstall(self) -> None:
        """Puts every method back, unless somebody else has wrapped it since."""
        self.writer = None
        if self._proxies is not None:
            self._proxies.uninstall()
            self._proxies = None
        if self._setup is not None:
            self._setup.uninstall()
            self._setup = None
        while self._replaced:
            owner, name, wrapper, original = self._replaced.pop()
            if hasattr(wrapper, "enabled"):
                wrapper.enabled = False
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)

    def silence(self) -> None:
        """In a forked child: records nothing from now on. Touches nothing of C++, whose locks may be held for ever."""
        self.writer = None
        for _, _, wrapper, _ in self._replaced:
            if hasattr(wrapper, "enabled"):
                wrapper.enabled = False

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        original = vars(owner)[name]  # the descriptor itself: getattr would strip pybind's binding of self
        if hasattr(wrapper, "__name__"):
            wrapper.__name__ = name
            wrapper.__doc__ = getattr(owner, name).__doc__
            internals.leave_graph(wrapper)
        self._replaced.append((owner, name, wrapper, original))
        setattr(owner, name, wrapper)

    # -- groups and shapes --------------------------------------------------------------------------------------

    def group(self, group: Any) -> GroupState:
        """What is known of this group; described and written to the box at its first call."""
        state = self._groups.get(id(group))
        return state if state is not None else self._meet(group)

    def _meet(self, group: Any) -> GroupState:
        writer = self.writer
        assert writer is not None
        members = self._members.pop(group, ())
        name, desc, ranks, backend = describe_group(group, writer.box.get("world_size"), members)
        number = writer.box.append(Item.GROUP, [name, desc, list(ranks), backend])
        state = GroupState(number, name, ranks, backend, timeout_ms(group), writer.accelerate)
        self.adopt(group, state)
        self._on_group(state, group)
        return state

    def adopt(self, group: Any, state: GroupState) -> None:
        """Lets `group` be looked up as `state` for as long as the object lives."""
        key = id(group)
        groups, counters = self._groups, self._counters

        def forget(_: Any) -> None:
            groups.pop(key, None)
            counters.pop(key, None)

        state.ref = weakref.ref(group, forget)
        groups[key] = state
        counters[key] = state.counters

    def destroyed(self, group: Any) -> None:
        """Notes that the program destroys a group, or all of them (None)."""
        writer = self.writer
        if writer is None:
            return
        now = time.time_ns()
        states = list(self._groups.values()) if group is None else [self.group(group)]
        for number in sorted({state.counters.number for state in states}):
            writer.box.append(Item.DESTROYED, [number, now])

    def fault(self, error: BaseException) -> None:
        """An error of our own."""
        self._fault(error)

    def shapes(self, call: Call) -> Shapes:
        """Sizes and dtypes of a call, interned."""
        inputs, outputs = call.inputs, call.outputs
        same = outputs is inputs
        key = (
            tuple([(t.shape, t.dtype) for t in inputs]),
            None if same else tuple([(t.shape, t.dtype) for t in outputs]),
            tuple(call.input_splits),
            tuple(call.output_splits),
        )
        found = self._shapes.get(key)
        if found is None:
            found = self._new_shapes(key, call)
        return found

    def _new_shapes(self, key: tuple[Any, ...], call: Call) -> Shapes:
        writer = self.writer
        assert writer is not None
        payload = [
            [list(t.shape) for t in call.inputs],
            [list(t.shape) for t in call.outputs],
            [dtype_name(t.dtype) for t in call.inputs],
            [dtype_name(t.dtype) for t in call.outputs],
            list(call.input_splits),
            list(call.output_splits),
        ]
        found = (
            writer.box.intern(Item.SHAPES, payload) if call.inputs or call.outputs else 0,
            sum(t.numel() for t in call.inputs),
            sum(t.numel() for t in call.outputs),
        )
        if len(self._shapes) < MAX_SHAPES:
            self._shapes[key] = found
            if (
                len(call.inputs) == len(call.outputs) == 1
                and not call.input_splits
                and not call.output_splits
            ):
                tensors = call.inputs if call.outputs is call.inputs else (*call.outputs, *call.inputs)
                self._plain_shapes[tuple(part for t in tensors for part in (t.shape, t.dtype))] = found
        return found

    # -- wrappers -----------------------------------------------------------------------------------------------

    def _wrap(self, original: Callable[..., Any], op: str, reader: Reader) -> Callable[..., Any]:
        """A method that records, for every op and overload."""
        writer = self.writer
        assert writer is not None
        number_of_op = writer.box.intern(Item.NAME, op)
        groups, meet, shapes_of, fault, hook = self._groups, self._meet, self.shapes, self._fault, self
        begin, getframe = writer.begin, sys._getframe

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.writer is None:
                return original(self, *args, **kwargs)
            try:
                group = groups.get(id(self)) or meet(self)
                call = reader(args, kwargs)
                number = begin(
                    group, number_of_op, shapes_of(call), call.reduce_op,
                    call.root if call.root < 0 else group.global_rank(call.root),
                    call.peer if call.peer < 0 else group.global_rank(call.peer),
                    call.p2p, call.timeout_ms, getframe(), call.tag,
                )  # fmt: skip
            except Exception as error:  # ours, never the user's
                fault(error)
                return original(self, *args, **kwargs)
            try:
                work = original(self, *args, **kwargs)
            except BaseException as error:
                writer.failed(number, error)
                raise
            try:
                writer.returned(work, number, group, on_cpu=group.mixed and _on_cpu(call, op))
            except Exception as error:  # ours, or of a device that is broken
                fault(error)
            return work

        return wrapper

    def _fast_collective(
        self, original: Callable[..., Any], slow: Callable[..., Any], method: str, op: str
    ) -> Any:
        """The most frequent calls in C, in the form that torch.distributed makes them; the rest takes `slow`."""
        writer = self.writer
        assert writer is not None
        module = fast(writer.accelerate)
        layout = (
            layout_of(internals.FAST[method]) if module is not None and method in internals.FAST else None
        )
        if module is None or layout is None:
            return slow
        stacks = writer.stacks.engine if writer.stacks is not None else None
        return module.Collective(
            original, slow, writer.failed, writer.pending, writer.ring, self._counters, self._plain_shapes,
            writer.sweep, writer.no_work, stacks, writer.box.intern(Item.NAME, op), method in internals.MOVED, layout,
        )  # fmt: skip

    def _fast_wait(self, original: Callable[..., Any], slow: Callable[..., Any]) -> Any:
        """Waiting for a backend whose wait() means the end, in C."""
        writer = self.writer
        assert writer is not None
        module = fast(writer.accelerate)
        if module is None:
            return slow
        return module.Wait(original, slow, writer.failed, writer.pending, writer.ring)

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        writer = self.writer
        assert writer is not None
        pending, hook = writer.pending, self

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry = pending.get(id(self))
            if entry is None or hook.writer is None:
                return original(self, *args, **kwargs)
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                writer.wait_failed(self, error, limited=bool(args or kwargs))
                raise
            try:
                writer.waited(self, entry)
            except Exception as error:  # as above
                hook._fault(error)
            return result

        return wait

    def _wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hook = self

        def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.writer is not None:
                try:
                    group = hook.group(self)
                    group.counters.batch, group.parts = (0, 0), []
                except Exception as error:  # ours
                    hook._fault(error)
            return original(self, *args, **kwargs)

        return _start_coalescing

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hook, writer = self, self.writer
        assert writer is not None
        op = writer.box.intern(Item.NAME, "coalesced")

        def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.writer is None:
                return original(self, *args, **kwargs)
            try:
                group = hook.group(self)
                number, parts = writer.begin_end(group, op, sys._getframe())
            except Exception as error:  # ours
                hook._fault(error)
                return original(self, *args, **kwargs)
            try:
                work = original(self, *args, **kwargs)
            except BaseException as error:
                writer.failed(number, error, parts)
                raise
            try:
                writer.returned(work, number, group, parts)
            except Exception as error:  # as above
                hook._fault(error)
            return work

        return _end_coalescing

    def _wrap_split(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hook = self

        def split_group(self: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
            part = original(self, ranks, *args, **kwargs)
            if part is not None and hook.writer is not None:
                try:
                    parent = hook.group(self)
                    hook._members[part] = tuple(parent.global_rank(int(rank)) for rank in ranks)
                except Exception as error:  # ours
                    hook._fault(error)
            return part

        return split_group

    def capturing(self, change: int) -> None:
        """One more or one less CUDA graph is being captured."""
        writer = self.writer
        if writer is None:
            return
        if change > 0:
            writer.begin_capture()
        else:
            writer.capturing = max(0, writer.capturing - 1)
        for _, _, wrapper, _ in self._replaced:
            if hasattr(wrapper, "direct"):
                wrapper.direct = not writer.capturing

    def _watch_cuda(self) -> None:
        """Follows calls that leave no Work by events, and asks no event while any thread captures a CUDA graph."""
        graph = internals.cuda_graph()
        if graph is None:
            return
        writer = self.writer
        assert writer is not None

        def counted(original: Callable[..., Any], change: int) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if change > 0:
                    hook.capturing(+1)
                try:
                    return original(self, *args, **kwargs)
                finally:
                    if change < 0:
                        hook.capturing(-1)

            return method

        hook = self
        writer.mark_device = EventMarker.make
        self._replace(graph, "capture_begin", counted(graph.capture_begin, +1))
        self._replace(graph, "capture_end", counted(graph.capture_end, -1))


def _on_cpu(call: Call, op: str) -> bool:
    """Whether a call of a group with several backends goes to the one for CPU tensors."""
    tensor = next(iter(call.inputs or call.outputs), None)
    return op == "monitored_barrier" if tensor is None else bool(tensor.is_cpu)
