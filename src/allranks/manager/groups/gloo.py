"""Making and ending raw gloo backends: one gloo device per process, groups over it, their sockets known.

Runs in a rank. The device (and with it the listening port) is kept for the life of the process, so every
connected socket of every group is known by its ports, also while a group is still being made.

gloo offers no abort: `ProcessGroupGloo.abort()` leaves a pending operation hanging until its timeout. Shutting down the
group's connected sockets ends it within a millisecond. Sockets are recognised by port, never by guessing: every gloo
pair has our gloo listener's port on one side or a peer's on the other. The listener itself is never touched: gloo
terminates the process when accept() fails.
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
from typing import Protocol

import torch.distributed as dist

from allranks.channel.frames import cut, loopback, own_address
from allranks.manager.groups.group_spec import GroupSpec
from allranks.torch_private import gloo_options, limit_operations

_live: weakref.WeakSet[OwnsSockets] = weakref.WeakSet()


class OwnsSockets(Protocol):
    """What has connected sockets that a forked child must let go of."""

    def close_in_child(self) -> None:
        """In a forked child (a DataLoader's worker): else our death would show only when it dies too."""


def close_in_children(owner: OwnsSockets) -> None:
    """From now on forked children close this one's sockets."""
    if not _live:
        os.register_at_fork(after_in_child=_after_fork_in_child)
    _live.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_live):
        owner.close_in_child()
    _live.clear()


def find_connected(
    local_ports: Collection[int], remote_ports: Collection[int]
) -> Iterator[tuple[int, socket.socket]]:
    """(descriptor, duplicate) of every connected TCP socket with such a local or remote port; closes the duplicates."""
    for fd, held in _tcp_sockets():
        with held:
            if _matches(held, local_ports, remote_ports):
                yield fd, held


def cut_connected(local_ports: Collection[int], remote_ports: Collection[int]) -> None:
    """Ends every operation that is blocked on such sockets, here and at the peers."""
    for _, held in find_connected(local_ports, remote_ports):
        cut(held)


def listening_ports() -> set[int]:
    """Ports on which this process listens."""
    ports = set()
    for _, held in _tcp_sockets():
        with held, suppress(OSError, IndexError, TypeError):
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(held.getsockname()[1])
    return ports


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """(descriptor, duplicate, which is the caller's) of every TCP socket of this process.

    Duplicate first, look after: a descriptor that is closed and reused in between cannot fool us.
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


def _matches(held: socket.socket, local_ports: Collection[int], remote_ports: Collection[int]) -> bool:
    try:
        remote = held.getpeername()[1]  # fails on the listener, which must never be touched
        return remote in remote_ports or held.getsockname()[1] in local_ports
    except OSError:
        return False


_creation = threading.Lock()


@dataclass(eq=False)
class GlooMesh:
    """One gloo device and at most one group over it. `abort` may come from any thread at any time."""

    host: str = ""
    interface: str = ""
    _device: object = None
    _port: int = 0
    _remote_ports: set[int] = field(default_factory=set)  # gloo listeners of the other members
    _connected: bool = False  # or about to be

    @property
    def device(self) -> object:
        """Our gloo device; made on first use."""
        with _creation:
            if self._device is None:
                before = listening_ports()
                self._device = self._create_device()
                self._port = next(iter(listening_ports() - before), 0)
        return self._device

    @property
    def port(self) -> int:
        """On which the device listens: the other members must know it."""
        return self._port if self.device else 0

    def connect(self, meeting: GroupSpec, timeout_s: float) -> object:
        """Makes the backend: all members must do so at the same time."""
        self._remote_ports.update(meeting.remote_ports)
        options = gloo_options(self.device, meeting.limit_s or timeout_s)
        options.group_name = meeting.name
        options.global_ranks_in_group = list(meeting.global_ranks)
        self._connected = meeting.world_size > 1
        close_in_children(self)
        backend = dist.ProcessGroupGloo(meeting.store, meeting.rank, meeting.world_size, options)
        limit_operations(backend, timeout_s)
        return backend

    def hand_over(self, hold: Callable[[list[int], int], None], number: int) -> None:
        """Calls `hold` with the descriptors of the group's sockets, which it must duplicate, and the quorum's number."""
        with contextlib.ExitStack() as copies:
            descriptors = []
            for _, held in find_connected((self._port,), self._remote_ports):
                descriptors.append(os.dup(held.fileno()))  # socket.dup() would make it wait in gloo's loop
                copies.callback(os.close, descriptors[-1])
            hold(descriptors, number)

    def abort(self) -> None:
        """Ends the group, finished or in the making."""
        connected, self._connected = self._connected, False
        if connected:
            cut_connected((self._port,), self._remote_ports)
            self._remote_ports.clear()

    def close_in_child(self) -> None:
        for fd, _ in find_connected((self._port,), self._remote_ports):
            os.close(fd)

    def _create_device(self) -> object:
        interface = self.interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
        if interface:
            return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        return dist.ProcessGroupGloo.create_device(hostname=self.host or own_host())


def own_host(towards: str = "") -> str:
    """The address under which others reach this machine: that of the interface that leads to `towards`.

    Not what our name resolves to: that is often a loopback address, or the wrong network. `ALLRANKS_HOST` wins.
    """
    with contextlib.suppress(OSError, ValueError):
        return os.environ.get("ALLRANKS_HOST") or own_address(towards or f"{loopback()}:9")
    return loopback()
