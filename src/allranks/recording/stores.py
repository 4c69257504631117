"""Where the members of a process group meet: the address of its store. Processes of different worlds that meet at one address
are in one group, whatever rank each has in its own world. Runs in the rank."""

from __future__ import annotations

import os
import socket
import weakref
from typing import Any

import torch.distributed as dist

from allranks.recording.auto import CLASSES
from allranks.recording.calls import Args, ErrorGuard, Kwargs
from allranks.recording.options import TORCH_ERRORS
from allranks.recording.torch_internals import Replaced, group_store


class Stores:
    """The stores of groups that are made without init_process_group: torch does not tell them afterwards."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self._prefixes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def install(self, replaced: Replaced) -> None:
        """Looks at what the classes of groups, and PrefixStore, are made with."""
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
        except TORCH_ERRORS:  # a group that torch does not know, or that is not finished
            return "", ""
        return address_of(store), self._prefixes.get(store, "")

    def elsewhere(self, group: Any) -> tuple[str, str]:
        """(address, prefix) of a group that does not meet where the world of this process does; "" for one that does."""
        address, prefix = self.find(group)
        if dist.is_initialized() and (group is dist.group.WORLD or address == self.find(dist.group.WORLD)[0]):
            return "", ""
        return address, prefix


def address_of(store: Any) -> str:
    """ "host:port" or the path of a file; "" for a store that only this process sees. A loopback address is this host's."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if path := getattr(store, "path", ""):
        return os.path.abspath(str(path))
    host, port = str(getattr(store, "host", "")), getattr(store, "port", 0)
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        host = socket.gethostname()
    return f"{host}:{port}" if host and port else ""
