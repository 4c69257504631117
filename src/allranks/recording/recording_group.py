"""Records calls made by C++: DDP's reducer on the autograd thread, functional collectives. Runs in the rank.

C++ ignores Python methods of a plain ProcessGroup, but calls those of a Python subclass. So C++ (the reducer, the registry of
group names, two functions of DDP's setup) gets a proxy: a ProcessGroup of the same name that shares the backends of the
original and records each call. Python code never gets a proxy: the registry returns the original. If anything here fails, C++
gets the original, and its calls are not recorded.
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
    """A proxy of the group `original` for C++."""

    original: dist.ProcessGroup
    waits_block: Callable[[], bool]  # whether wait() returns after completion, as in gloo


class WaitedWork(dist.Work):
    """A Work whose wait() calls Python, for C++: gloo's reduce_scatter does not report completion otherwise."""

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
        setattr(RecordingProxyGroup, _method, _forward(_method))


class RecordingProxies:
    """Creates proxies and passes them to C++."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._registered: dict[str, RecordingProxyGroup] = {}
        self._reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, RecordingProxyGroup] = (
            weakref.WeakKeyDictionary()
        )
        self._replaced = internals.Replaced()  # replaced by the hook's in `install`
        self._refused = False  # C++ has refused a proxy: no further ones are created

    def install(self, replaced: internals.Replaced) -> None:
        """Wraps the functions that pass a group to C++, and re-registers existing groups."""
        self._replaced = replaced
        for function in internals.DDP_FUNCTIONS:
            self._wrap_function(function, self._with_proxy)
        self._wrap_reducer()
        registry = (internals.REGISTER, internals.UNREGISTER, internals.RESOLVE)
        if not all(internals.homes_of(name)[1] for name in registry):
            return  # otherwise Python code could get a proxy
        self._wrap_function(internals.RESOLVE, self._resolve)
        self._wrap_function(internals.REGISTER, self._register)
        self._wrap_function(internals.UNREGISTER, self._unregister)
        self._wrap_function(internals.UNREGISTER_ALL, self._unregister_all)
        for name, group in internals.named_groups():
            with contextlib.suppress(*TORCH_ERRORS):  # the group is being destroyed
                self._swap(name, group)

    def take_back(self) -> None:
        """Registers the original groups again. Proxies that C++ still holds keep working, without recording."""
        for name, proxy in list(self._registered.items()):
            with contextlib.suppress(*TORCH_ERRORS):  # destroyed meanwhile
                self._original(internals.UNREGISTER)(name)
                self._original(internals.REGISTER)(name, proxy.original)
        self._registered.clear()

    def proxy(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A proxy of a plain ProcessGroup; the group itself if that is impossible or not needed."""
        if type(group) is not dist.ProcessGroup or self._hook.writer is None or self._refused:
            return group
        made: dist.ProcessGroup | None = self._hook._part(internals.CPP_CALLS, self._make, group)
        return made or group

    def _make(self, group: dist.ProcessGroup) -> RecordingProxyGroup | None:
        if not internals.backends(group):
            return None  # unfinished: the proxy would have no backend
        make: Any = RecordingProxyGroup
        # the constructor with a store does not support subclasses
        proxy: RecordingProxyGroup = make(group.rank(), group.size())
        proxy.original = group
        # evaluated late, because the members are unknown here
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

    # -- passing a proxy to C++ -----------------------------------------------------------------------------------

    def _with_proxy(self, original: Function, args: Args, kwargs: Kwargs) -> object:
        return self._hand_over(original, args, kwargs)[0]

    def _hand_over(
        self, original: Function, args: Args, kwargs: Kwargs
    ) -> tuple[Any, RecordingProxyGroup | None]:
        """Calls C++ with a proxy instead of the group among the arguments; (result, proxy). If C++ refuses the proxy before
        any collective, the call is repeated with the group."""
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
                raise  # collectives were made, so the error is not about the proxy
            result = original(*args, **kwargs)  # raises the same error if it was not about the proxy
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
        """Wraps a function of _distributed_c10d in every module of torch that has imported it by name."""
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
