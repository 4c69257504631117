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
import select
import socket
import stat
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from allranks.channel.frames import cut, loopback, own_address
from allranks.manager.groups.group_spec import GroupSpec
from allranks.torch_private import gloo_options, limit_operations

_live: weakref.WeakSet[SocketSet] = weakref.WeakSet()
_fork_watched = False


@dataclass(eq=False)
class SocketSet:
    """Duplicates of the connected sockets of one group, owned by us. Safe to abort from any thread."""

    _held: list[socket.socket] = field(default_factory=list)
    _originals: list[tuple[int, int]] = field(default_factory=list)  # descriptor and inode
    _lock: threading.Lock = field(default_factory=threading.Lock)
    aborted: bool = False

    def take(
        self, local_ports: Collection[int], remote_ports: Collection[int], without: Collection[int] = ()
    ) -> None:
        """Duplicates every connected socket of this process with one of these ports on the right side.

        `without`: inodes of sockets that belong to somebody else.
        """
        found = find_connected(local_ports, remote_ports, without)
        with self._lock:
            self._held += [held for _, held in found]
            self._originals += [(fd, _inode(held)) for fd, held in found]
            if self.aborted:
                self._shut()
        _remember(self)

    def add(self, own: socket.socket) -> None:
        """Takes a socket over."""
        with self._lock:
            self._held.append(own)
            if self.aborted:
                self._shut()
        _remember(self)

    def fds(self) -> list[int]:
        """The duplicates' numbers, for handing them to the liveness proxy."""
        with self._lock:
            return [held.fileno() for held in self._held]

    def any_closed(self) -> bool:
        """Whether a peer has closed its end already; nothing is read."""
        watch = select.poll()
        with self._lock:
            for held in self._held:
                watch.register(held.fileno(), select.POLLRDHUP)
            return bool(self._held) and bool(watch.poll(0))

    def abort(self) -> None:
        """Ends every operation that is blocked on these sockets, here and at the peers."""
        with self._lock:
            self.aborted = True
            self._shut()

    def close(self) -> None:
        """Gives the duplicates back; the group's own descriptors stay open until the group goes."""
        with self._lock:
            for held in self._held:
                held.close()
            self._held.clear()
            self._originals.clear()

    def close_in_child(self) -> None:
        """In a forked child: drop duplicates and originals, else our death would show only when it dies too.

        An original may be closed already and its number be another file's: it is dropped only if it is still it.
        """
        for held in self._held:
            held.close()
        for fd, inode in self._originals:
            with suppress(OSError):
                if os.fstat(fd).st_ino == inode and stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.close(fd)
        self._held.clear()
        self._originals.clear()

    def _shut(self) -> None:
        for held in self._held:
            cut(held)


def find_connected(
    local_ports: Collection[int], remote_ports: Collection[int], without: Collection[int] = ()
) -> list[tuple[int, socket.socket]]:
    """(descriptor, duplicate) of every connected TCP socket with such a local or remote port."""
    found = []
    for fd, held in _tcp_sockets():
        if _matches(held, local_ports, remote_ports) and _inode(held) not in without:
            found.append((fd, held))
        else:
            held.close()
    return found


def inodes(local_ports: Collection[int], remote_ports: Collection[int]) -> frozenset[int]:
    """What tells the connected sockets with such ports from later ones."""
    numbers = set()
    for _, held in find_connected(local_ports, remote_ports):
        with held:
            numbers.add(_inode(held))
    return frozenset(numbers)


def abort_connecting(local_ports: Collection[int], remote_ports: Collection[int]) -> None:
    """Shuts sockets down while their group is still being made."""
    for _, held in find_connected(local_ports, remote_ports):
        with held:
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


def _inode(held: socket.socket) -> int:
    return os.fstat(held.fileno()).st_ino


def _matches(held: socket.socket, local_ports: Collection[int], remote_ports: Collection[int]) -> bool:
    try:
        remote = held.getpeername()[1]  # fails on the listener, which must never be touched
        return remote in remote_ports or held.getsockname()[1] in local_ports
    except OSError:
        return False


def _remember(sockets: SocketSet) -> None:
    """Makes forked children (DataLoader workers) let go of the sockets; the hook is installed once."""
    global _fork_watched
    _live.add(sockets)
    if not _fork_watched:
        _fork_watched = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    for sockets in list(_live):
        sockets.close_in_child()
    _live.clear()


_creation = threading.Lock()


@dataclass(eq=False)
class GlooMesh:
    """One gloo device and at most one group over it. `abort` may come from any thread at any time."""

    host: str = ""
    interface: str = ""
    _device: object = None
    _port: int = 0
    _sockets: SocketSet | None = None
    _connecting: GroupSpec | None = None  # of the group that is being made
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        """The listening port of our gloo device; made on first use. The other members must know it."""
        with _creation:
            if self._device is None:
                before = listening_ports()
                self._device = self._create_device()
                self._port = next(iter(listening_ports() - before), 0)
        return self._port

    def connect(self, meeting: GroupSpec, timeout_s: float) -> object:
        """Makes the backend: all members must do so at the same time. One that was aborted meanwhile is cut."""
        port = self.port
        options = gloo_options(self._device, meeting.limit_s or timeout_s)
        options.group_name = meeting.name
        options.global_ranks_in_group = list(meeting.global_ranks)
        with self._lock:
            self._connecting = meeting
        ports = [port], meeting.remote_ports
        before = inodes(*ports)  # of groups that were abandoned while they were made
        sockets = SocketSet()
        with contextlib.ExitStack() as undo:
            undo.callback(self._connected, meeting, None)
            backend = dist.ProcessGroupGloo(meeting.store, meeting.rank, meeting.world_size, options)
            limit_operations(backend, timeout_s)
            sockets.take(*ports, before)
            undo.pop_all()
        if not self._connected(meeting, sockets):
            sockets.abort()
            sockets.close()
        return backend

    def _connected(self, meeting: GroupSpec, sockets: SocketSet | None) -> bool:
        """It is made, or could not be; whether it is still wanted."""
        with self._lock:
            wanted = self._connecting is meeting
            if wanted:
                self._connecting, self._sockets = None, sockets
        return wanted

    def descriptors(self) -> list[int]:
        """Duplicates of the current group's sockets, still owned by us."""
        sockets = self._sockets
        return sockets.fds() if sockets is not None else []

    def any_closed(self) -> bool:
        """Whether a peer has left the current group already."""
        sockets = self._sockets
        return sockets is not None and sockets.any_closed()

    def abort(self) -> None:
        """Ends the group, finished or in the making."""
        with self._lock:
            sockets, self._sockets = self._sockets, None
            connecting, self._connecting = self._connecting, None
        if connecting is not None:
            abort_connecting([self._port], connecting.remote_ports)
        if sockets is not None:
            sockets.abort()
            sockets.close()

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
