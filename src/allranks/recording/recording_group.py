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

from allranks.recording import torch_internals as internals
from allranks.recording.calls import Args, Function, Kwargs
from allranks.recording.options import TORCH_ERRORS

if TYPE_CHECKING:
    from allranks.recording.hook import Hook


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
    return call


for _method in internals.TRAMPOLINE:
    if hasattr(dist.ProcessGroup, _method):
        # Their code is that of `call`, nested in `_forward`.
        setattr(RecordingProxyGroup, _method, _forward(_method))


class RecordingProxies:
    """Makes proxies and hands them to C++."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._registered: dict[str, RecordingProxyGroup] = {}
        self._reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, RecordingProxyGroup] = (
            weakref.WeakKeyDictionary()
        )
        self._replaced = internals.Replaced()  # of the hook, once installed
        self._refused = False  # C++ did not take a proxy: it gets no other

    def install(self, replaced: internals.Replaced) -> None:
        """Wraps the places where C++ is handed a group, and re-registers the groups that exist already."""
        self._replaced = replaced
        for function in internals.DDP_FUNCTIONS:
            self._wrap_function(function, self._with_proxy)
        self._wrap_reducer()
        registry = (internals.REGISTER, internals.UNREGISTER, internals.RESOLVE)
        if not all(internals.homes_of(name)[1] for name in registry):
            return  # without one of them Python would get to see a proxy
        self._wrap_function(internals.RESOLVE, self._resolve)
        self._wrap_function(internals.REGISTER, self._register)
        self._wrap_function(internals.UNREGISTER, self._unregister)
        self._wrap_function(internals.UNREGISTER_ALL, self._unregister_all)
        for name, group in internals.named_groups():
            with contextlib.suppress(*TORCH_ERRORS):  # a group that is half gone
                self._swap(name, group)

    def take_back(self) -> None:
        """The registry holds the groups themselves again; C++ keeps the proxies that it holds, which work on unrecorded."""
        for name, proxy in list(self._registered.items()):
            with contextlib.suppress(*TORCH_ERRORS):  # gone meanwhile
                self._original(internals.UNREGISTER)(name)
                self._original(internals.REGISTER)(name, proxy.original)
        self._registered.clear()

    def proxy(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A recording proxy of a plain ProcessGroup; the group itself where that is impossible or not needed."""
        if type(group) is not dist.ProcessGroup or self._hook.writer is None or self._refused:
            return group
        made: dist.ProcessGroup | None = self._hook._part(internals.CPP_CALLS, self._make, group)
        return made or group

    def _make(self, group: dist.ProcessGroup) -> RecordingProxyGroup | None:
        if not internals.backends(group):
            return None  # unfinished: it would have no backend
        make: Any = RecordingProxyGroup
        # the constructor that takes a store cannot make a subclass
        proxy: RecordingProxyGroup = make(group.rank(), group.size())
        proxy.original = group
        # asked late: members are not known yet
        proxy.waits_block = lambda: bool(self._hook.guard(lambda: self._hook.group(group).counters.blocking))
        internals.make_like(group, proxy)
        internals.check_like(group, proxy)
        return proxy

    # -- the registry of names ----------------------------------------------------------------------------------

    def _swap(self, name: str, group: dist.ProcessGroup) -> None:
        proxy = self.proxy(group)
        if proxy is group:
            return
        self._original(internals.UNREGISTER)(name)
        self._original(internals.REGISTER)(name, proxy)
        self._registered[name] = proxy

    def _register(self, original: Function, args: Args, kwargs: Kwargs) -> object:
        result, proxy = self._hand_over(original, args, kwargs)
        if proxy is not None:
            self._registered[proxy.group_name] = proxy
        return result

    def _unregister(self, original: Function, args: Args, kwargs: Kwargs) -> object:
        self._hook.guard(self._forget, *args, *kwargs.values())
        return original(*args, **kwargs)

    def _forget(self, name: str, *_: object) -> None:
        self._registered.pop(name, None)

    def _unregister_all(self, original: Function, args: Args, kwargs: Kwargs) -> object:
        self._registered.clear()
        return original(*args, **kwargs)

    def _resolve(self, original: Function, args: Args, kwargs: Kwargs) -> object:
        group = original(*args, **kwargs)
        return group.original if isinstance(group, RecordingProxyGroup) else group

    # -- handing a proxy to C++ -----------------------------------------------------------------------------------

    def _with_proxy(self, original: Function, args: Args, kwargs: Kwargs) -> object:
        return self._hand_over(original, args, kwargs)[0]

    def _hand_over(
        self, original: Function, args: Args, kwargs: Kwargs
    ) -> tuple[Any, RecordingProxyGroup | None]:
        """Calls C++ with a proxy in the place of the group, wherever among the arguments that is; (result, proxy). Where
        C++ refuses the proxy before any collective is made, the group itself is used."""
        group = next((given for given in (*args, *kwargs.values()) if type(given) is dist.ProcessGroup), None)
        proxy, writer = group if group is None else self.proxy(group), self._hook.writer
        if not isinstance(proxy, RecordingProxyGroup) or writer is None:
            return original(*args, **kwargs), None
        made = writer.box.get("next_id")
        ours = {key: proxy if given is group else given for key, given in kwargs.items()}
        try:
            return original(*(proxy if given is group else given for given in args), **ours), proxy
        except Exception as error:
            if self._hook.writer is None or writer.box.get("next_id") != made:
                raise  # the ranks have talked: what was raised is the program's
            result = original(*args, **kwargs)  # raises the same where it was not about the proxy
            self._hook.lost(internals.CPP_CALLS, error)
            self._refused = True
            self._hook.guard(self.take_back)
            return result, None

    def _wrap_reducer(self) -> None:
        original = dist.Reducer.__init__
        proxies = self

        def __init__(*args: Any, **kwargs: object) -> None:
            _, proxy = proxies._hand_over(original, args, kwargs)
            if proxy is not None:
                proxies._reducers[args[0]] = proxy  # C++ keeps the group, not its Python half

        self._replaced.put(dist.Reducer, "__init__", __init__, vars(dist.Reducer)["__init__"])

    # -- wrapping functions -------------------------------------------------------------------------------------

    def _wrap_function(self, name: str, around: Function) -> None:
        """Wraps a function of _distributed_c10d in every module of torch that has taken it by name."""
        original, homes = internals.homes_of(name)

        def wrapper(*args: object, **kwargs: object) -> object:
            return around(original, args, kwargs)

        wrapper.__name__ = name
        internals.leave_graph(wrapper)
        for module in homes:
            self._replaced.put(module, name, wrapper, original)

    def _original(self, name: str) -> Function:
        found: Function = next(o for m, n, _, o in self._replaced if n == name)
        return found
