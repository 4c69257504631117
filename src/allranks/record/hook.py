"""Puts the recorder under torch.distributed. Runs in the rank; the only part of `record` that imports torch.

Where it hooks, and what each hook sees:

- methods of the pybind classes `ProcessGroup` and `Backend`: every call that comes from Python, on any backend
  (torch.distributed, FSDP, pipelines, object collectives, `_dist2`, bare Backend objects);
- `twin.py`: calls that C++ makes by itself (DDP's reducer, functional collectives);
- `Work.wait`: the moment at which the program knows that a call is over.

Recording is decided by one cell, so that `uninstall` is cheap and a forked child is silent at once.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from allranks.model.blackbox import Item
from allranks.record import writer as core
from allranks.record.calls import CALLS, Call, Reader
from allranks.record.groups import GroupState, describe_group, timeout_ms
from allranks.record.writer import CallWriter, Shapes

_DTYPES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """torch's C++ name of a dtype, as its own recorder writes it."""
    known = _DTYPES.get(dtype)
    return known if known else str(dtype).removeprefix("torch.").replace("float8_", "Float8_")


class Hook:
    """The wrapped methods of torch.distributed and what they share. `fault` is told of our own errors."""

    def __init__(
        self,
        writer: CallWriter,
        fault: Callable[[BaseException], None],
        on_group: Callable[[GroupState, Any], None],
    ) -> None:
        self.writer: CallWriter | None = writer
        self._fault = fault
        self._on_group = on_group
        self._groups: dict[int, GroupState] = {}
        self._shapes: dict[tuple[Any, ...], Shapes] = {}
        self._originals: list[tuple[Any, str, Any]] = []
        self.original: dict[str, Callable[..., Any]] = {}

    # -- installing ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wraps the methods. Those that this version of torch does not have are passed over."""
        core.original_wait = c10d.Work.wait
        for owner in (c10d.ProcessGroup, c10d.Backend):
            for method, (op, reader) in CALLS.items():
                if method in vars(owner):
                    self._replace(owner, method, self._wrap(getattr(owner, method), op, reader))
            self._replace(owner, "_start_coalescing", self._wrap_start(owner._start_coalescing))
            self._replace(owner, "_end_coalescing", self._wrap_end(owner._end_coalescing))
        self._replace(c10d.Work, "wait", self._wrap_wait(c10d.Work.wait))
        self._watch_graph_capture()

    def uninstall(self) -> None:
        """Puts every method back, unless somebody else has wrapped it since."""
        self.writer = None
        while self._originals:
            owner, name, original = self._originals.pop()
            if getattr(getattr(owner, name, None), "_allranks", None) is self:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        original = getattr(owner, name)
        wrapper.__name__ = name
        wrapper.__doc__ = getattr(original, "__doc__", None)
        wrapper._allranks = self
        self._originals.append((owner, name, original))
        setattr(owner, name, wrapper)

    # -- groups and shapes --------------------------------------------------------------------------------------

    def group(self, group: Any) -> GroupState:
        """What is known of this group; described and written to the box at its first call."""
        state = self._groups.get(id(group))
        return state if state is not None else self._meet(group)

    def _meet(self, group: Any) -> GroupState:
        writer = self.writer
        assert writer is not None
        name, desc, ranks, backend = describe_group(group, writer.box.get("world_size"))
        number = writer.box.append(Item.GROUP, [name, desc, list(ranks), backend])
        state = GroupState(number, name, ranks, backend, timeout_ms(group))
        self.adopt(group, state)
        self._on_group(state, group)
        return state

    def adopt(self, group: Any, state: GroupState) -> None:
        """Lets `group` be looked up as `state` for as long as the object lives."""
        key = id(group)
        state.ref = weakref.ref(group, lambda _, key=key, groups=self._groups: groups.pop(key, None))
        self._groups[key] = state

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
        return found if found is not None else self._new_shapes(key, call)

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
        if len(self._shapes) < 100_000:
            self._shapes[key] = found
        return found

    # -- wrappers -----------------------------------------------------------------------------------------------

    def _wrap(self, original: Callable[..., Any], op: str, reader: Reader) -> Callable[..., Any]:
        writer = self.writer
        assert writer is not None
        number = writer.box.intern(Item.NAME, op)
        groups, meet, shapes_of, fault = self._groups, self._meet, self.shapes, self._fault
        begin, track = writer.begin, writer.track
        frame_of = sys._getframe if writer.stacks is not None else None
        hook = self

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.writer is None:
                return original(self, *args, **kwargs)
            try:
                group = groups.get(id(self)) or meet(self)
                call = reader(args, kwargs)
                token = begin(
                    group, number, shapes_of(call), call.reduce_op,
                    call.root if call.root < 0 else group.global_rank(call.root),
                    call.peer if call.peer < 0 else group.global_rank(call.peer),
                    call.p2p, call.timeout_ms, frame_of(1) if frame_of is not None else None,
                )  # fmt: skip
            except Exception as error:  # ours, never the user's
                fault(error)
                return original(self, *args, **kwargs)
            try:
                work = original(self, *args, **kwargs)
            except BaseException as error:
                writer.failed(token, group, error)
                raise
            if work is None:
                writer.done(token, group)
            else:
                track(work, token, group)
            return work

        return wrapper

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        writer = self.writer
        assert writer is not None
        pending, finish, clock, hook = writer.pending, writer.finish, time.time_ns, self

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry = pending.get(id(self))
            if entry is None or hook.writer is None:
                return original(self, *args, **kwargs)
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                if pending.pop(id(self), None) is not None:
                    writer.end_with_error(entry, error)
                raise
            if (entry[4].blocking or (not writer.capturing and self.is_completed())) and pending.pop(
                id(self), None
            ) is not None:
                finish(entry, clock())
            return result

        return wait

    def _wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hook = self

        def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.writer is not None:
                try:
                    group = hook.group(self)
                    group.batch, group.parts = (0, 0), []
                except Exception as error:  # ours
                    hook._fault(error)
            return original(self, *args, **kwargs)

        return _start_coalescing

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hook, writer = self, self.writer
        assert writer is not None
        number = writer.box.intern(Item.NAME, "coalesced")

        def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            token = None
            if hook.writer is not None:
                try:
                    group = hook.group(self)
                    token, parts = writer.begin_end(group, number, sys._getframe(1))
                except Exception as error:  # ours
                    hook._fault(error)
            if token is None:
                return original(self, *args, **kwargs)
            try:
                work = original(self, *args, **kwargs)
            except BaseException as error:
                writer.failed(token, group, error)
                raise
            if work is None:
                writer.done(token, group)
            else:
                writer.track(work, token, group, parts)
            return work

        return _end_coalescing

    def _watch_graph_capture(self) -> None:
        """No event may be queried while any thread captures a CUDA graph."""
        graph = getattr(torch._C, "_CUDAGraph", None) or getattr(
            getattr(torch, "cuda", None), "CUDAGraph", None
        )
        if graph is None or "capture_begin" not in dir(graph):
            return
        writer = self.writer
        assert writer is not None

        def counted(original: Callable[..., Any], change: int) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if change > 0:
                    writer.capturing += 1
                try:
                    return original(self, *args, **kwargs)
                finally:
                    if change < 0:
                        writer.capturing = max(0, writer.capturing - 1)

            return method

        self._replace(graph, "capture_begin", counted(graph.capture_begin, +1))
        self._replace(graph, "capture_end", counted(graph.capture_end, -1))


def in_main_thread() -> bool:
    """Whether this is the thread that runs the user's script."""
    return threading.current_thread() is threading.main_thread()
