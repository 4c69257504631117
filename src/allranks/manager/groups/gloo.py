"""Makes and aborts raw gloo backends: one gloo device per process, with groups whose sockets are known.

Runs in a rank. The device and its listener are kept while the process runs, so every connected socket of every group can be
found by its two ends, even while a group is being made.

gloo has no working abort: `ProcessGroupGloo.abort()` leaves a pending operation until its timeout. Shutting down the
group's connected sockets ends it within a millisecond. Sockets are identified by address: every gloo pair has our gloo
listener's "ip:port" on one side or a peer's on the other (other hosts use the same ports). The listener itself must not
be touched: gloo terminates the process when accept() fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from allranks.channel.frames import cut, loopback, own_address
from allranks.manager.groups.group_spec import GroupSpec
from allranks.torch_private import gloo_options, limit_operations

_live: weakref.WeakSet[OwnsSockets] = weakref.WeakSet()


class OwnsSockets(Protocol):
    """An owner of connected sockets that a forked child must close."""

    def close_in_child(self) -> None:
        """Closes the sockets in a forked child (a DataLoader's worker), which would hide our death from peers."""


def close_in_children(owner: OwnsSockets) -> None:
    """Makes forked children close this owner's sockets."""
    if not _live:
        os.register_at_fork(after_in_child=_after_fork_in_child)
    _live.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_live):
        owner.close_in_child()
    _live.clear()


def find_connected(local: Collection[str], remote: Collection[str]) -> Iterator[tuple[int, socket.socket]]:
    """(descriptor, duplicate) of every TCP socket connected from or to one of these "ip:port"; closes the duplicates."""
    for fd, held in _tcp_sockets():
        with held:
            if _matches(held, local, remote):
                yield fd, held


def cut_connected(local: Collection[str], remote: Collection[str]) -> None:
    """Shuts these sockets down, which ends all operations blocked on them, here and at the peers."""
    for _, held in find_connected(local, remote):
        cut(held)


def name_of(end: tuple[Any, ...]) -> str:
    """ "ip:port" of one end of a socket, the same on both sides, and for torch's store, whose sockets are all IPv6."""
    return f"{end[0].partition('%')[0].removeprefix('::ffff:')}:{end[1]}"


def listeners() -> set[str]:
    """The "ip:port" of all listening sockets of this process."""
    found = set()
    for _, held in _tcp_sockets():
        with held, suppress(OSError, IndexError, TypeError):
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(name_of(held.getsockname()))
    return found


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """(descriptor, duplicate) of every TCP socket of this process; the caller closes the duplicates.

    Inspects the duplicate, because the descriptor may be closed and reused meanwhile.
    """
    for name in os.listdir("/proc/self/fd"):
        held = _duplicate(int(name))
        if held is not None:
            yield int(name), held


def _duplicate(fd: int) -> socket.socket | None:
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return None
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if held.family in (socket.AF_INET, socket.AF_INET6):
        return held
    held.close()
    return None


def _matches(held: socket.socket, local: Collection[str], remote: Collection[str]) -> bool:
    try:
        other = name_of(held.getpeername())  # fails for the listener, which must not be touched
        return other in remote or name_of(held.getsockname()) in local
    except OSError:
        return False


_creation = threading.Lock()
_TRIES = 3


@dataclass(eq=False)
class GlooMesh:
    """One gloo device with at most one group. `abort` may come from any thread at any time."""

    host: str = ""
    _device: object = None
    _listener: str = ""
    _others: set[str] = field(default_factory=set)  # gloo listeners of the other members
    _connected: bool = False  # or about to be

    @property
    def device(self) -> object:
        """The gloo device, made on first use."""
        with _creation:
            for _ in range(_TRIES if self._device is None else 0):
                before = listeners()
                self._device = self._create_device()
                new = listeners() - before
                self._listener = next(iter(new), "")
                if len(new) == 1:  # else another thread has started to listen meanwhile
                    break
        return self._device

    @property
    def listener(self) -> str:
        """The device's "ip:port", which the other members must know."""
        return self._listener if self.device else ""

    def connect(self, spec: GroupSpec, timeout_s: float) -> object:
        """Makes the backend, together with all other members."""
        self._others.update(spec.listeners)
        options = gloo_options(self.device, spec.limit_s or timeout_s)
        options.group_name = spec.name
        options.global_ranks_in_group = list(spec.global_ranks)
        self._connected = spec.world_size > 1
        close_in_children(self)
        backend = dist.ProcessGroupGloo(spec.store, spec.rank, spec.world_size, options)
        limit_operations(backend, timeout_s)
        return backend

    def hand_over(self, hold: Callable[[list[int], int], None], number: int) -> None:
        """Calls `hold` with the group's descriptors, which it must duplicate, and the quorum's number."""
        with contextlib.ExitStack() as copies:
            descriptors = []
            for _, held in find_connected((self._listener,), self._others):
                descriptors.append(os.dup(held.fileno()))  # socket.dup() would make gloo's sockets blocking
                copies.callback(os.close, descriptors[-1])
            hold(descriptors, number)

    def abort(self) -> None:
        """Ends the group, also while it is being made."""
        connected, self._connected = self._connected, False
        if connected:
            cut_connected((self._listener,), self._others)
            self._others.clear()

    def close_in_child(self) -> None:
        for fd, _ in find_connected((self._listener,), self._others):
            os.close(fd)

    def _create_device(self) -> object:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", ""):
            return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        return dist.ProcessGroupGloo.create_device(hostname=self.host or own_host())


def own_host(towards: str = "") -> str:
    """The address at which others reach this machine: that of the interface that leads to `towards`.

    Not the address of the host name, which is often loopback or on the wrong network. `ALLRANKS_HOST` overrides it.
    """
    with contextlib.suppress(OSError, ValueError):
        return os.environ.get("ALLRANKS_HOST") or own_address(towards or f"{loopback()}:9")
    return loopback()
