"""The snapshot keeper of a node: other processes' snapshots in this process's memory (tier PEER). Torch-free.

Runs in a node's agent, so that it outlives the ranks; ranks of this node and of the node before it keep their
snapshots here. Bytes by key, bounded in total, only for those who know the token.

    server = SnapshotServer(token=secret)
    server.start()
    ... server.address ...
    server.close()
"""

from __future__ import annotations

import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from allranks.channel.frames import is_intact, next_json, read_into, send_checksum, send_from, send_json
from allranks.channel.keys import ChannelError, Keyring
from allranks.channel.server import MemberServer
from allranks.checkpoint.checksum import best_algorithm, new_hasher

log = logging.getLogger("allranks.checkpoint")
PURPOSE = "snapshots"  # names the key that both sides prove
#: A request or an answer, as JSON.
Message: TypeAlias = dict[str, Any]
_BACKLOG = 512
MAX_REQUEST_BYTES = 1 << 20


@dataclass
class _Blob:
    data: mmap.mmap | None  # None: no bytes
    length: int
    version: int
    changed: float

    def view(self) -> memoryview:
        return memoryview(self.data)[: self.length] if self.data is not None else memoryview(b"")


class SnapshotServer:
    """Keeps at most `max_bytes` (default: half of the memory free at the start). `bind` is HOST:PORT."""

    def __init__(
        self,
        token: str,
        bind: str = "0.0.0.0:0",
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token = token
        self.bind = bind
        self.max_bytes = max_bytes
        self.clock = clock
        self.address = ""
        self._blobs: dict[str, _Blob] = {}
        self._reserved = 0  # bytes of blobs being received
        self._versions = 0
        self._lock = threading.Lock()
        self._members = MemberServer(Keyring(token), PURPOSE, self._serve, "allranks-snapshots")

    def start(self) -> None:
        """Listens; `address` is where, from now on."""
        host, _, port = self.bind.rpartition(":")
        if self.max_bytes is None:
            self.max_bytes = _available_bytes() // 2
        listener = socket.create_server((host, int(port)), backlog=_BACKLOG)
        self.address = f"{_reachable(host)}:{listener.getsockname()[1]}"
        self._members.start(listener)

    def close(self) -> None:
        """Stops, drops every connection and every byte."""
        self._members.close()
        self._blobs.clear()

    @property
    def used_bytes(self) -> int:
        """Bytes kept and being received."""
        with self._lock:
            return self._used()

    def _serve(self, connection: socket.socket, purpose: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # ends with the other side, or with close()
        while (request := next_json(connection, MAX_REQUEST_BYTES)) is not None:
            self._answer(connection, request)

    def _answer(self, connection: socket.socket, request: Message) -> None:
        operation = request["do"]
        if operation == "put":
            send_json(connection, self._put(connection, request))
        elif operation == "get":
            self._get(connection, request)
        elif operation == "list":
            with self._lock:
                found = [
                    [key, blob.changed, blob.length]
                    for key, blob in self._blobs.items()
                    if key.startswith(request["prefix"])
                ]
            send_json(connection, {"ok": True, "now": self.clock(), "keys": found})
        elif operation == "delete":
            with self._lock:
                for key in request["keys"]:
                    self._blobs.pop(key, None)
            send_json(connection, {"ok": True})
        else:
            send_json(connection, {"ok": False, "error": f"unknown operation {operation!r}"})

    def _put(self, connection: socket.socket, request: Message) -> Message:
        """Reserves room, accepts or refuses, receives, and stores the whole blob at once."""
        key, length = str(request["key"]), int(request["length"])
        refusal = self._reserve(key, length)
        send_json(connection, {"ok": not refusal, "error": refusal})
        if refusal:
            return {"ok": False, "error": refusal}
        try:
            data = mmap.mmap(-1, length) if length else None
            blob = _Blob(data, length, 0, self.clock())
            receive_bytes(connection, blob.view(), request["algorithm"])
            return self._place(key, blob, request)
        finally:
            with self._lock:
                self._reserved -= length

    def _reserve(self, key: str, length: int) -> str:
        with self._lock:
            assert self.max_bytes is not None
            left = self.max_bytes - self._used()
            if length > left:
                mb = 1 << 20
                return (
                    f"Cannot save snapshot: {length / mb:.1f}MB required, but only {left / mb:.1f}MB available "
                    f"(limit: {self.max_bytes / mb:.1f}MB)"
                )
            self._reserved += length
            return ""

    def _place(self, key: str, blob: _Blob, request: Message) -> Message:
        with self._lock:
            current = self._blobs.get(key)
            if "expected" in request:
                version = None if current is None else str(current.version)
                if version != request["expected"]:
                    return {"ok": False, "conflict": True, "error": "another saver was first"}
            self._versions += 1
            blob.version = self._versions
            self._blobs[key] = blob
            return {"ok": True, "version": str(blob.version)}

    def _get(self, connection: socket.socket, request: Message) -> None:
        with self._lock:
            blob = self._blobs.get(request["key"])
        if blob is None:
            send_json(connection, {"ok": False, "missing": True})
            return
        start = int(request.get("start", 0))
        length = min(int(request.get("length", blob.length)), max(0, blob.length - start))
        algorithm = best_algorithm()
        facts = {"length": length, "size": blob.length, "version": str(blob.version), "algorithm": algorithm}
        send_json(connection, {"ok": True, **facts})
        send_bytes(connection, [blob.view()[start : start + length]], algorithm)

    def _used(self) -> int:
        return self._reserved + sum(blob.length for blob in self._blobs.values())


def send_bytes(sock: socket.socket, pieces: Iterable[memoryview], algorithm: str) -> None:
    """Raw bytes whose length was announced, then their checksum."""
    hasher = new_hasher(algorithm)
    send_from(sock, pieces, hasher)
    send_checksum(sock, hasher)


def receive_bytes(sock: socket.socket, view: memoryview, algorithm: str) -> None:
    """Fills `view` and checks what came."""
    hasher = new_hasher(algorithm)
    read_into(sock, [view], hasher)
    if not is_intact(sock, hasher):
        raise ChannelError(f"{len(view)} bytes came with the wrong checksum")


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30


def _reachable(host: str) -> str:
    """An address other nodes can use for a server bound to every interface."""
    if host not in {"", "0.0.0.0", "::"}:
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel only picks the outward interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
