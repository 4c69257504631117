"""Calls that C++ makes by itself: DDP's reducer on the autograd thread, functional collectives. Runs in the rank.

C++ does not look at Python methods of a plain ProcessGroup, but it does call those of a Python subclass. So where
C++ is handed a group (the reducer, the registry of group names, two functions of DDP's set-up), it gets a proxy: a
ProcessGroup of the same name that shares the backends of the original and records before it passes a call on.
Python code never sees a proxy: what it gets from the registry is turned back into the original. If anything here
fails, the original is handed over and only the recording of C++'s own calls is lost.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from allranks.record import torch_internals as internals
from allranks.record.calls import Function
from allranks.record.options import TORCH_ERRORS, fast

if TYPE_CHECKING:
    from allranks.record.hook import Hook


class RecordingProxyGroup(dist.ProcessGroup):
    """A group for C++ to hold. `original` is the group it stands for."""

    original: dist.ProcessGroup
    waits_block: Callable[[], bool]  # gloo: wait() returns when the call is over


class WaitedWork(dist.Work):
    """Hands C++ a Work whose wait() goes through Python: gloo's reduce_scatter never says by itself that it is over."""

    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return bool(self.inner.wait(timeout))


def _forward(method: str) -> Function:
    silent = method.startswith(("reduce_scatter", "_reduce_scatter"))

    def call(self: RecordingProxyGroup, *args: object) -> object:
        work = getattr(self.original, method)(*args)  # the wrapped method of ProcessGroup: it records
        return WaitedWork(work) if silent and work is not None and self.waits_block() else work

    call.__name__ = method
    return call if silent or _fast is None else _fast.Forward(method)


_fast = fast(True)
for _method in internals.TRAMPOLINE:
    if hasattr(dist.ProcessGroup, _method):
        # Their code is that of `call`, nested in `_forward`.
        setattr(RecordingProxyGroup, _method, _forward(_method))


class RecordingProxies:
    """Makes proxies and hands them to C++. `install` and `uninstall` own the wrapped functions."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._registered: dict[str, RecordingProxyGroup] = {}
        self._reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, RecordingProxyGroup] = (
            weakref.WeakKeyDictionary()
        )
        self._replaced = internals.Replaced()

    def install(self) -> None:
        """Wraps the places where C++ is handed a group, and re-registers the groups that exist already."""
        self._wrap_function(internals.REGISTER, self._register)
        self._wrap_function(internals.UNREGISTER, self._unregister)
        self._wrap_function(internals.UNREGISTER_ALL, self._unregister_all)
        self._wrap_function(internals.RESOLVE, self._resolve)
        for function in internals.DDP_FUNCTIONS:
            self._wrap_function(function, self._with_proxy)
        self._wrap_reducer()
        for name, group in internals.named_groups():
            with contextlib.suppress(*TORCH_ERRORS):  # a group that is half gone
                self._swap(name, group)

    def uninstall(self) -> None:
        """Puts everything back; C++ keeps the proxies it holds, which work on unrecorded."""
        for name, proxy in list(self._registered.items()):
            with contextlib.suppress(*TORCH_ERRORS):  # gone meanwhile
                self._original(internals.UNREGISTER)(name)
                self._original(internals.REGISTER)(name, proxy.original)
        self._registered.clear()
        self._replaced.restore()

    def proxy(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A recording proxy of a plain ProcessGroup; the group itself where that is impossible or not needed."""
        if type(group) is not dist.ProcessGroup or self._hook.writer is None:
            return group
        try:
            # unfinished: it would have no backend
            return self._make(group) if internals.backends(group) else group
        except Exception as error:  # another version of torch: C++'s own calls go unrecorded
            self._hook.lost(internals.CPP_CALLS, error)
            return group

    def _make(self, group: dist.ProcessGroup) -> RecordingProxyGroup:
        make: Any = RecordingProxyGroup
        # the constructor that takes a store cannot make a subclass
        proxy: RecordingProxyGroup = make(group.rank(), group.size())
        proxy.original = group
        # asked late: members are not known yet
        proxy.waits_block = lambda: self._hook.group(group).counters.blocking
        internals.make_like(group, proxy)
        return proxy

    # -- the registry of names ----------------------------------------------------------------------------------

    def _swap(self, name: str, group: dist.ProcessGroup) -> None:
        proxy = self.proxy(group)
        if proxy is group:
            return
        self._original(internals.UNREGISTER)(name)
        self._original(internals.REGISTER)(name, proxy)
        self._registered[name] = proxy

    def _register(self, original: Function, name: str, group: dist.ProcessGroup) -> object:
        proxy = self.proxy(group)
        result = original(name, proxy)
        if proxy is not group:
            self._registered[name] = proxy
        return result

    def _unregister(self, original: Function, name: str) -> object:
        self._registered.pop(name, None)
        return original(name)

    def _unregister_all(self, original: Function) -> object:
        self._registered.clear()
        return original()

    def _resolve(self, original: Function, name: str) -> object:
        group = original(name)
        return group.original if isinstance(group, RecordingProxyGroup) else group

    def _with_proxy(
        self, original: Function, process_group: dist.ProcessGroup, *args: object, **kwargs: object
    ) -> object:
        return self._called(process_group, lambda group: original(group, *args, **kwargs))

    def _called(self, group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], object]) -> object:
        """Calls C++ with a proxy. Where C++ refuses it before any collective is made, the group itself is used."""
        proxy, writer = self.proxy(group), self._hook.writer
        if proxy is group or writer is None:
            return call(group)
        made = writer.box.get("next_id")
        try:
            return call(proxy)
        except Exception as error:
            if self._hook.writer is None or writer.box.get("next_id") != made:
                raise  # the ranks have talked: what was raised is the program's
            result = call(group)  # raises the same where it was not about the proxy
            self._hook.lost(internals.CPP_CALLS, error)
            return result

    # -- DDP ----------------------------------------------------------------------------------------------------

    def _wrap_reducer(self) -> None:
        """The reducer takes its group as fourth argument or by name."""
        original = dist.Reducer.__init__
        proxies = self

        def __init__(self: object, *args: object, **kwargs: object) -> None:
            named, given = "process_group" in kwargs, len(args) > 3
            if not named and not given:
                original(self, *args, **kwargs)
                return

            def make(group: dist.ProcessGroup) -> None:
                if named:
                    original(self, *args, **{**kwargs, "process_group": group})
                else:
                    original(self, *args[:3], group, *args[4:], **kwargs)
                if isinstance(group, RecordingProxyGroup):
                    proxies._reducers[self] = group  # C++ keeps the group, not its Python half

            group: Any = kwargs["process_group"] if named else args[3]
            proxies._called(group, make)

        self._replaced.put(dist.Reducer, "__init__", __init__, vars(dist.Reducer)["__init__"])

    # -- wrapping functions -------------------------------------------------------------------------------------

    def _wrap_function(self, name: str, around: Function) -> None:
        """Wraps a function of _distributed_c10d in every module of torch that has taken it by name."""
        original, homes = internals.homes_of(name)

        def wrapper(*args: object, **kwargs: object) -> object:
            return around(original, *args, **kwargs)

        wrapper.__name__ = name
        internals.leave_graph(wrapper)
        for module in homes:
            self._replaced.put(module, name, wrapper, original)

    def _original(self, name: str) -> Function:
        found: Function = next(o for m, n, _, o in self._replaced if n == name)
        return found
