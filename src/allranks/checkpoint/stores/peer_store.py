"""Snapshots in the memory of the nodes (tier PEER): the server of one node, and the servers of all nodes as one store.

`SnapshotServer` runs in a node's agent, so that it outlives the ranks. It stores bytes by key, up to a limit, for the ranks
of its own node and of the previous node. Clients must know the token. No torch.

    server = SnapshotServer(token=secret)
    server.start()
    ... server.address ...
    server.close()

A rank writes to the server of its own node and of the next node, so the loss of one node loses no snapshot. It reads from
its own server first, then from the others. A server that does not respond is skipped for a few seconds.
"""

from __future__ import annotations

import errno
import logging
import mmap
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from allranks.channel import frames
from allranks.channel.keys import ChannelError, Keyring, greet_as_client
from allranks.channel.server import MemberServer
from allranks.checkpoint.checksum import best_algorithm, new_hasher
from allranks.checkpoint.stores import MAX_JSON_BYTES, Pieces, StoreSpec
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.errors import InputError

log = logging.getLogger("allranks.checkpoint")
PURPOSE = "snapshots"  # selects the key that both sides prove
Message: TypeAlias = dict[str, Any]  # a request or response, as JSON
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


@dataclass(eq=False, repr=False)  # repr would show the token
class SnapshotServer:
    """Keeps at most `max_bytes` (default: half of the memory available at the start). `bind` is HOST:PORT."""

    token: str
    bind: str = "0.0.0.0:0"
    max_bytes: int | None = None
    clock: Callable[[], float] = time.monotonic
    transfer_s: float = 60.0  # limit without a byte; a whole transfer may take this plus one second per MiB
    address: str = ""
    _blobs: dict[str, _Blob] = field(default_factory=dict)
    _reserved: int = 0  # bytes of blobs being received
    _versions: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._members = MemberServer(Keyring(self.token), PURPOSE, self._serve, "allranks-snapshots")

    def start(self) -> None:
        """Starts listening and sets `address`."""
        host, port = frames.split_address(self.bind)
        if self.max_bytes is None:
            self.max_bytes = _available_bytes() // 2
        listener = frames.listen(host, port, _BACKLOG)
        bound, port = listener.getsockname()[:2]
        self.address = frames.join_address(
            frames.outward_address() if bound in ("0.0.0.0", "::") else bound, port
        )
        self._members.start(listener)

    def close(self) -> None:
        """Stops, closes all connections and drops all snapshots."""
        self._members.close()
        self._blobs.clear()

    @property
    def used_bytes(self) -> int:
        """Bytes stored or being received."""
        with self._lock:
            return self._used()

    def _serve(self, connection: socket.socket, purpose: str) -> None:
        frames.tune(connection, TRANSFER_S)  # keep-alive detects a node that is gone
        while True:
            connection.settimeout(None)  # waits for the next request until the client or close() ends it
            request = frames.next_json(connection, MAX_REQUEST_BYTES)
            if request is None:
                return
            connection.settimeout(self.transfer_s)
            self._answer(connection, request)

    def _answer(self, connection: socket.socket, request: Message) -> None:
        operation = request["do"]
        if operation == "put":
            frames.send_json(connection, self._put(connection, request))
        elif operation == "get":
            self._get(connection, request)
        elif operation == "list":
            with self._lock:
                every = [[key, blob.changed, blob.length] for key, blob in self._blobs.items()]
            found = [entry for entry in every if str(entry[0]).startswith(request["prefix"])]
            frames.send_json(connection, {"ok": True, "now": self.clock(), "keys": found})
        elif operation == "delete":
            with self._lock:
                for key in request["keys"]:
                    self._blobs.pop(key, None)
            frames.send_json(connection, {"ok": True})
        else:
            frames.send_json(connection, {"ok": False, "error": f"unknown operation {operation!r}"})

    def _put(self, connection: socket.socket, request: Message) -> Message:
        """Reserves memory, accepts or refuses, receives, and then stores the whole blob."""
        key, length = str(request["key"]), int(request["length"])
        refusal = self._reserve(key, length)
        frames.send_json(connection, {"ok": not refusal, "error": refusal})
        if refusal:
            return {"ok": False, "error": refusal}
        try:
            data = mmap.mmap(-1, length) if length else None
            blob = _Blob(data, length, 0, self.clock())
            limit = _cut_after(connection, self.transfer_s + length / (1 << 20))
            try:
                receive_bytes(connection, [blob.view()], request["algorithm"])
            finally:
                limit.cancel()
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
                    return {"ok": False, "conflict": True, "error": "another saver was faster"}
            self._versions += 1
            blob.version = self._versions
            self._blobs[key] = blob
            return {"ok": True, "version": str(blob.version)}

    def _get(self, connection: socket.socket, request: Message) -> None:
        with self._lock:
            blob = self._blobs.get(request["key"])
        if blob is None:
            frames.send_json(connection, {"ok": False, "missing": True})
            return
        start = int(request.get("start", 0))
        length = min(int(request.get("length", blob.length)), max(0, blob.length - start))
        algorithm = best_algorithm()
        facts = {"length": length, "size": blob.length, "version": str(blob.version), "algorithm": algorithm}
        frames.send_json(connection, {"ok": True, **facts})
        send_bytes(connection, [blob.view()[start : start + length]], algorithm)

    def _used(self) -> int:
        return self._reserved + sum(blob.length for blob in self._blobs.values())


def send_bytes(sock: socket.socket, pieces: Iterable[memoryview], algorithm: str) -> None:
    """Sends raw bytes, whose length the receiver knows, then their checksum."""
    hasher = new_hasher(algorithm)
    frames.send_from(sock, pieces, hasher)
    frames.send_checksum(sock, hasher)


def receive_bytes(sock: socket.socket, views: Sequence[memoryview], algorithm: str) -> None:
    """Fills `views` and verifies the checksum."""
    hasher = new_hasher(algorithm)
    frames.read_into(sock, views, hasher)
    if not frames.is_intact(sock, hasher):
        raise ChannelError(f"checksum mismatch in {sum(map(len, views))} received bytes")


def _available_bytes() -> int:
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 8 << 30


def _cut_after(connection: socket.socket, seconds: float) -> threading.Timer:
    """Shuts a connection down after a total time: the timeout of a socket only limits the wait for each byte."""

    def cut() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    return timer


CONNECT_S = 3.0
TRANSFER_S = 60.0  # limit without a byte
DOWN_S = 5.0  # how long a keeper that did not respond is skipped
T = TypeVar("T")


def open_peers(spec: StoreSpec) -> KeyedStore:
    """Opens peer://HOST:PORT,HOST:PORT/JOB. Options: `token` (one, or one line per keeper) and `node` (index of this
    node's keeper)."""
    addresses, _, job = spec.url.removeprefix("peer://").partition("/")
    node = int(spec.options.get("node", "0"))
    for address in addresses.split(","):
        if not address.rpartition(":")[2].isdigit():
            raise InputError(f"'{address}' in '{spec.url}' is not HOST:PORT", hint="peer://HOST:PORT/JOB")
    blobs = PeerBlobs(addresses.split(","), job or "job", spec.options.get("token", ""), node)
    return KeyedStore(blobs, spec)


@dataclass(eq=False, repr=False)  # repr would show the token
class KeeperClient:
    """The client of one snapshot keeper. Connections are pooled; each is used by one thread at a time."""

    address: str
    token: str
    down_until: float = 0.0
    _idle: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """An authenticated connection; it returns to the pool unless an error occurs."""
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        if sock is None:
            sock = self._connect()
        with ExitStack() as undo:
            undo.callback(sock.close)
            yield sock
            undo.pop_all()
        with self._lock:
            self._idle.append(sock)

    def put(self, key: str, pieces: list[memoryview], length: int, extra: Message) -> None:
        """Stores a blob; OSError if the keeper refuses it."""
        algorithm = best_algorithm()
        with self.connection() as sock:
            frames.send_json(
                sock, {"do": "put", "key": key, "length": length, "algorithm": algorithm, **extra}
            )
            answer = frames.receive_json(sock)
            if answer["ok"]:
                send_bytes(sock, pieces, algorithm)
            result = frames.receive_json(sock)
        if result.get("conflict"):
            raise FileExistsError(errno.EEXIST, "another saver has written this checkpoint's manifest")
        if not result["ok"]:
            raise OSError(errno.ENOMEM, result["error"])

    def get(
        self, key: str, start: int = 0, views: Sequence[memoryview] | None = None
    ) -> tuple[memoryview, str, int]:
        """(bytes, version, size of the blob). With `views`, reads a part of the blob into them."""
        request: Message = {"do": "get", "key": key, "start": start}
        wanted = None if views is None else sum(map(len, views))
        if wanted is not None:
            request["length"] = wanted
        with self.connection() as sock:
            frames.send_json(sock, request)
            answer = frames.receive_json(sock)
            if answer.get("missing"):
                raise FileNotFoundError(errno.ENOENT, f"{self.address} does not have {key}")
            length = int(answer["length"])
            if not 0 <= length <= (MAX_JSON_BYTES if wanted is None else wanted):
                raise ValueError(f"it has {length} bytes of {key}")
            whole = views if views is not None and length == wanted else [memoryview(bytearray(length))]
            receive_bytes(sock, whole, answer["algorithm"])
        if wanted not in (None, length):
            raise EOFError(f"{key} ends at byte {answer['size']}")
        return whole[0] if views is None else memoryview(b""), answer["version"], answer["size"]

    def request(self, request: Message) -> Message:
        with self.connection() as sock:
            frames.send_json(sock, request)
            return frames.receive_json(sock)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _connect(self) -> socket.socket:
        with ExitStack() as undo:
            sock = undo.enter_context(
                socket.create_connection(frames.split_address(self.address), timeout=CONNECT_S)
            )
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(TRANSFER_S)
            try:
                greet_as_client(sock, Keyring(self.token).for_purpose(PURPOSE))
            except ChannelError as error:
                raise PermissionError(13, f"the snapshot keeper refused the token: {error}") from error
            undo.pop_all()
        return sock


class PeerBlobs:
    """The `keyed_store.BlobStore` of all keepers together."""

    def __init__(self, addresses: list[str], job: str, token: str, node: int) -> None:
        tokens = token.split("\n")
        each = tokens if len(tokens) == len(addresses) else [token] * len(addresses)
        self.keepers = [
            KeeperClient(address, secret) for address, secret in zip(addresses, each, strict=True)
        ]
        self.prefix = f"{job}/"
        self.node = node % len(addresses)

    def put(self, key: str, pieces: Pieces, length: int) -> None:
        parts = list(pieces)
        homes = self._nearest()[:2]
        self._everywhere(homes, lambda k: k.put(self.prefix + key, parts, length, {}), key)

    def put_if(self, key: str, data: bytes, expected: str | None) -> None:
        """Writes the manifest to every keeper; each checks that it has none, or the one being replaced."""

        def put(keeper: KeeperClient) -> None:
            try:
                version: str | None = keeper.get(self.prefix + key)[1] if expected is not None else None
            except FileNotFoundError:
                version = None
            keeper.put(self.prefix + key, [memoryview(data)], len(data), {"expected": version})

        self._everywhere(self._nearest(), put, key)

    def get(self, key: str) -> tuple[bytes, str]:
        data, version, _ = self._anywhere(key, lambda k: k.get(self.prefix + key))
        return bytes(data), version

    def get_range(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        self._anywhere(key, lambda k: k.get(self.prefix + key, start, views))

    def size(self, key: str) -> int:
        return self._anywhere(key, lambda k: k.get(self.prefix + key, 0, []))[2]

    def keys(self, prefix: str) -> list[tuple[str, float]]:
        """(key, negative age) of each blob, by the clock of its keeper: the clocks of nodes differ."""
        found: dict[str, float] = {}

        def add_keys(keeper: KeeperClient) -> None:
            answer = keeper.request({"do": "list", "prefix": self.prefix + prefix})
            now = answer["now"]
            for key, changed, _ in answer["keys"]:
                name = key.removeprefix(self.prefix)
                found[name] = max(found.get(name, changed - now), changed - now)

        self._everywhere(self._nearest(), add_keys, "the list")
        return sorted(found.items())

    def delete(self, keys: list[str]) -> None:
        if keys:
            request = {"do": "delete", "keys": [self.prefix + key for key in keys]}
            self._everywhere(self._nearest(), lambda k: k.request(request), "a deletion")

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.close()

    def _nearest(self) -> list[KeeperClient]:
        """All keepers, this node's first, then the next node's."""
        return [*self.keepers[self.node :], *self.keepers[: self.node]]

    def _everywhere(
        self, keepers: list[KeeperClient], act: Callable[[KeeperClient], object], what: str
    ) -> None:
        """Calls `act` on each keeper; one success is enough, failures are logged."""
        done, first = 0, None
        for keeper in keepers:
            try:
                self._with(keeper, act)
                done += 1
            except FileExistsError:
                raise
            except OSError as error:
                first = first or error
                log.warning("[PEER] snapshot keeper %s: %s failed: %s", keeper.address, what, error)
        if not done:
            raise first or ConnectionRefusedError(errno.ECONNREFUSED, "no snapshot keeper responds")

    def _anywhere(self, key: str, act: Callable[[KeeperClient], T]) -> T:
        """The result of the first keeper that has the key. FileNotFoundError only if no keeper has it."""
        silent: OSError | None = None
        for keeper in self._nearest():
            try:
                return self._with(keeper, act)
            except FileNotFoundError:
                continue
            except OSError as error:
                silent = silent or error
                log.info("[PEER] snapshot keeper %s: %s", keeper.address, error)
        if silent is not None:
            raise silent
        raise FileNotFoundError(errno.ENOENT, f"no snapshot keeper has {key}")

    def _with(self, keeper: KeeperClient, act: Callable[[KeeperClient], T]) -> T:
        if time.monotonic() < keeper.down_until:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{keeper.address} did not respond a moment ago")
        for attempt in (1, 2):  # a pooled connection breaks if the keeper was restarted
            try:
                return act(keeper)
            except (ConnectionError, TimeoutError):
                keeper.close()
                if attempt == 2:
                    keeper.down_until = time.monotonic() + DOWN_S
                    raise
            except (KeyError, TypeError, ValueError) as error:
                raise ChannelError(f"invalid response from {keeper.address}: {error!r}") from error
        raise AssertionError("unreachable")
