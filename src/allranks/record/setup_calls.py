"""Functions of torch.distributed that wait for other ranks and are no collectives. Runs in the rank.

A rank that hangs in `init_process_group` or `new_group` has made no call yet, and one that has destroyed its groups
makes none any more: the box says which of them it is inside, how many it has finished, and what it has destroyed.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from allranks.blackbox.layout import Item
from allranks.model.trace import SETUP_CALLS
from allranks.record.calls import Args, Kwargs
from allranks.record.torch_internals import Replaced, leave_graph

if TYPE_CHECKING:
    from allranks.record.hook import Hook


class SetupCalls:
    """The wrapped functions. `install` and `uninstall` own them."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._replaced = Replaced()

    def install(self) -> None:
        """Wraps the functions wherever a module has taken them by name, the user's own included."""
        for name in SETUP_CALLS:
            original = getattr(dist, name)
            wrapper = self._wrap(original, name)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is original:
                    self._replaced.put(module, name, wrapper, original)

    def uninstall(self) -> None:
        self._replaced.restore()

    def _wrap(self, original: Callable[..., object], name: str) -> Callable[..., object]:
        hook = self._hook
        assert hook.writer is not None
        number = hook.writer.box.intern(Item.NAME, name)

        @functools.wraps(original)
        def wrapper(*args: object, **kwargs: object) -> object:
            outer = hook.writer.box.get("inside") if hook.writer is not None else 0
            self._guarded(self._enter, number, name, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._guarded(self._leave, outer, name)

        leave_graph(wrapper)
        return wrapper

    def _guarded(self, note: Callable[..., None], *args: object) -> None:
        if self._hook.writer is None:
            return
        try:
            note(*args)
        except Exception as error:  # ours, never the user's
            self._hook.fault(error)

    def _enter(self, number: int, name: str, args: Args, kwargs: Kwargs) -> None:
        hook = self._hook
        assert hook.writer is not None
        if name == "init_process_group":
            given = {
                **dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), args, strict=False)),
                **kwargs,
            }
            rank, world_size = (
                value if isinstance(value := given.get(key), int) else -1 for key in ("rank", "world_size")
            )
            hook.on_rank(rank, world_size)
        elif name == "destroy_process_group":
            group = args[0] if args else kwargs.get("group")
            if group is None or isinstance(group, dist.ProcessGroup):  # a stranger to it passes a number
                hook.destroyed(None if group is dist.group.WORLD else group)
        hook.writer.box.set(inside_ns=time.time_ns(), inside=number)

    def _leave(self, outer: int, name: str) -> None:
        hook = self._hook
        assert hook.writer is not None
        box = hook.writer.box
        box.set(inside=outer, setups=box.get("setups") + 1, inside_ns=time.time_ns())
        if name == "init_process_group" and dist.is_initialized():
            hook.group(dist.group.WORLD)
