"""Making and ending raw gloo backends: one gloo device per process, groups over it, their sockets known.

Runs in a rank. The device (and with it the listening port) is kept for the life of the process, so every
connected socket of every group can be told by its ports, also while a group is still being made.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field

import torch.distributed as dist

from allranks.channel.frames import loopback, own_address
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.groups.sockets import SocketSet, abort_connecting, inodes, listening_ports
from allranks.torch_private import gloo_options, limit_operations

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
