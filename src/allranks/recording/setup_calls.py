"""Records functions of torch.distributed that wait for other ranks, but are not collectives. Runs in the rank.

A rank that hangs in `init_process_group` or `new_group` has no call yet, and one that has destroyed its groups makes no more
calls. The box therefore contains the function that the rank is in, the number of finished ones, and the destroyed groups.

Also records the address of a group's store: processes of different worlds with the same address are in one group, whatever
their rank in their own world.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from allranks.blackbox.layout import Item
from allranks.model.trace import SETUP_CALLS, Rendezvous
from allranks.recording.auto import CLASSES
from allranks.recording.calls import Args, ErrorGuard, Kwargs
from allranks.recording.options import TORCH_ERRORS
from allranks.recording.side_thread import user_line
from allranks.recording.torch_internals import Replaced, group_store, leave_graph
from allranks.recording.writer import launched_at

if TYPE_CHECKING:
    from allranks.recording.hook import Hook

#: Of a group of more members they are not recorded while it is made.
MAX_MEMBERS = 64


class Stores:
    """The stores of groups that are created without init_process_group, which torch does not expose later."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self._prefixes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def install(self, replaced: Replaced) -> None:
        """Wraps the constructors of groups and of PrefixStore."""
        for name in (*CLASSES, "PrefixStore"):
            kind = getattr(dist, name, None)
            original = vars(kind).get("__init__") if kind is not None else None
            if original is not None:
                note = self._note_prefix if name == "PrefixStore" else self._note_group
                replaced.put(kind, "__init__", self._guard.around(original, note), original)

    def _note_group(self, args: Args, kwargs: Kwargs) -> None:
        store = next((one for one in (*args[1:2], *kwargs.values()) if isinstance(one, dist.Store)), None)
        if store is not None:
            self._stores[args[0]] = store

    def _note_prefix(self, args: Args, kwargs: Kwargs) -> None:
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix")
        if isinstance(prefix, str):
            self._prefixes[args[0]] = prefix

    def find(self, group: Any) -> tuple[str, str]:
        """(address, prefix) of the store of a group; "" unknown."""
        store = self._stores.get(group)
        try:
            store = group_store(group) if store is None else store
        except TORCH_ERRORS:  # unknown to torch, or unfinished
            return "", ""
        return address_of(store), self._prefixes.get(store, "")

    def elsewhere(self, group: Any) -> tuple[str, str]:
        """(address, prefix) of a group whose store is not that of this process's world, else ("", "")."""
        address, prefix = self.find(group)
        if dist.is_initialized() and (group is dist.group.WORLD or address == self.find(dist.group.WORLD)[0]):
            return "", ""
        return address, prefix


def address_of(store: Any) -> str:
    """ "host:port" or a file path; "" for a store inside this process. A loopback address becomes the host name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if path := getattr(store, "path", ""):
        return os.path.abspath(str(path))
    host, port = str(getattr(store, "host", "")), getattr(store, "port", 0)
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        host = socket.gethostname()
    return f"{host}:{port}" if host and port else ""


def install(hook: Hook, replaced: Replaced) -> None:
    """Wraps the functions in every module that has imported them by name, including the user's."""
    for name in SETUP_CALLS:
        original = getattr(dist, name)
        wrapper = _wrap(hook, original, name)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get(name) is original:
                replaced.put(module, name, wrapper, original)


def _wrap(hook: Hook, original: Callable[..., object], name: str) -> Callable[..., object]:
    box = hook.installed.box

    def before(args: Args, kwargs: Kwargs) -> tuple[int]:
        outer = box.get("inside")
        _enter(hook, name, args, kwargs)
        made = f"{name} {_members(args, kwargs)}" if name == "new_group" else name
        box.set(inside_ns=time.time_ns(), inside=box.intern(Item.NAME, made.strip()))
        return (outer,)

    wrapper = hook.guard.around(
        original,
        before,
        lambda known, result: _leave(hook, known[0], name, failed=False),
        lambda known, error: _leave(hook, known[0], name, failed=True),
    )
    leave_graph(functools.wraps(original)(wrapper))
    return wrapper


def _enter(hook: Hook, name: str, args: Args, kwargs: Kwargs) -> None:
    if name == "init_process_group":
        words = ("backend", "init_method", "timeout", "world_size", "rank")
        given = {**dict(zip(words, args, strict=False)), **kwargs}
        hook.on_rank(_number(given, "rank"), _meeting(given))
    elif name == "destroy_process_group":
        group = args[0] if args else kwargs.get("group")
        # a rank that is not in the group passes an int
        if group is None or isinstance(group, dist.ProcessGroup):
            hook.destroyed(None if group is dist.group.WORLD else group)


def _members(args: Args, kwargs: Kwargs) -> str:
    """The members that new_group is asked for, "0,2", and whether they alone make the group; "" all ranks, or too many."""
    given = dict(zip(("ranks", "", "", "", "use_local_synchronization"), args, strict=False)) | kwargs
    ranks = given.get("ranks")
    listed = sorted(map(int, ranks)) if isinstance(ranks, Iterable) else []
    if not 0 < len(listed) <= MAX_MEMBERS:
        return ""
    return ",".join(map(str, listed)) + (" local" if given.get("use_local_synchronization") else "")


def _leave(hook: Hook, outer: int, name: str, failed: bool) -> None:
    """Records the end of the call. A failed init_process_group does not count as finished, because the rank has not joined."""
    box = hook.installed.box
    if failed and name == "init_process_group":
        box.set(inside=outer)  # keeps the start time, which is more useful than the time of the failure
        return
    box.set(inside=outer, setups=box.get("setups") + 1, inside_ns=time.time_ns())
    if name == "init_process_group" and dist.is_initialized():
        hook.group(dist.group.WORLD)


def _number(given: dict[str, object], name: str) -> int:
    """An argument of init_process_group, or the variable that torch uses instead; -1 unknown."""
    value = given.get(name)
    if isinstance(value, int) and value >= 0:
        return value
    text = os.environ.get(name.upper(), "") if _by_environment(given) else ""
    return int(text) if text.isdecimal() else -1


def _by_environment(given: dict[str, object]) -> bool:
    method = given.get("init_method")
    return given.get("store") is None and (method is None or str(method).startswith("env://"))


def _meeting(given: dict[str, object]) -> Rendezvous:
    """The rendezvous of init_process_group; without an address if the program passes its own store."""
    address = store = ""
    if _by_environment(given):
        address = launched_at()
    elif given.get("store") is not None:
        store = address_of(given["store"])
    else:
        address = str(given.get("init_method")).partition("://")[2].partition("?")[0]
    return Rendezvous(address, max(0, _number(given, "world_size")), user_line(sys._getframe()), store)
