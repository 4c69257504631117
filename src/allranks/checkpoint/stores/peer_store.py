"""All nodes' snapshot keepers as one store (tier PEER). Torch-free.

What a rank writes goes to its own node's keeper and to the next node's: losing any one node loses nothing. Reads
ask its own keeper first, then the others. A keeper that does not answer is left alone for a while.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from allranks.channel.frames import receive_json, send_json
from allranks.channel.keys import ChannelError, Keyring, greet_as_client
from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.stores import Pieces, StoreSpec
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.checkpoint.stores.snapshot_server import PURPOSE, Message, receive_bytes, send_bytes
from allranks.errors import InputError

log = logging.getLogger("allranks.checkpoint")
CONNECT_S = 3.0
TRANSFER_S = 60.0  # without a byte
DOWN_S = 5.0
T = TypeVar("T")


def open_peers(spec: StoreSpec) -> KeyedStore:
    """Opens peer://HOST:PORT,HOST:PORT/JOB. Options: `token` (one, or one line per keeper), and `node`, the
    number of this node's keeper."""
    addresses, _, job = spec.url.removeprefix("peer://").partition("/")
    node = int(spec.options.get("node", "0"))
    for address in addresses.split(","):
        if not address.rpartition(":")[2].isdigit():
            raise InputError(f"'{address}' in '{spec.url}' is not HOST:PORT", hint="peer://HOST:PORT/JOB")
    blobs = PeerBlobs(addresses.split(","), job or "job", spec.options.get("token", ""), node)
    return KeyedStore(blobs, spec, "PEER", references=False)


class KeeperClient:
    """The client of one snapshot keeper. Connections are kept and used by one thread at a time."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.token = token
        self.down_until = 0.0
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """A greeted connection; closed, not kept, if anything goes wrong on it."""
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
        """Stores a blob; OSError says why not."""
        algorithm = best_algorithm()
        with self.connection() as sock:
            send_json(sock, {"do": "put", "key": key, "length": length, "algorithm": algorithm, **extra})
            answer = receive_json(sock)
            if answer["ok"]:
                send_bytes(sock, pieces, algorithm)
            result = receive_json(sock)
        if result.get("conflict"):
            raise FileExistsError(errno.EEXIST, "another saver has written this checkpoint's manifest")
        if not result["ok"]:
            raise OSError(errno.ENOMEM, result["error"])

    def get(self, key: str, start: int = 0, view: memoryview | None = None) -> tuple[memoryview, str, int]:
        """(bytes, version, size of the blob); FileNotFoundError."""
        request: Message = {"do": "get", "key": key, "start": start}
        if view is not None:
            request["length"] = len(view)
        with self.connection() as sock:
            send_json(sock, request)
            answer = receive_json(sock)
            if answer.get("missing"):
                raise FileNotFoundError(errno.ENOENT, f"{key} is not kept by {self.address}")
            target = memoryview(bytearray(answer["length"])) if view is None else view[: answer["length"]]
            receive_bytes(sock, target, answer["algorithm"])
        if view is not None and answer["length"] != len(view):
            raise EOFError(f"{key} ends at byte {answer['size']}")
        return target, answer["version"], answer["size"]

    def ask(self, request: Message) -> Message:
        """A request without bytes."""
        with self.connection() as sock:
            send_json(sock, request)
            return receive_json(sock)

    def close(self) -> None:
        """Closes idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        with ExitStack() as undo:
            sock = undo.enter_context(socket.create_connection((host, int(port)), timeout=CONNECT_S))
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
        homes = [self._at(self.node), self._at(self.node + 1)]
        self._everywhere(dict.fromkeys(homes), lambda k: k.put(self.prefix + key, parts, length, {}), key)

    def put_if(self, key: str, data: bytes, expected: str | None) -> None:
        """Every keeper gets the manifest; each checks that it knew none, or the one replaced."""

        def put(keeper: KeeperClient) -> None:
            try:
                version: str | None = keeper.get(self.prefix + key)[1] if expected is not None else None
            except FileNotFoundError:
                version = None
            keeper.put(self.prefix + key, [memoryview(data)], len(data), {"expected": version})

        self._everywhere(dict.fromkeys(self._nearest()), put, key)

    def get(self, key: str) -> tuple[bytes, str]:
        data, version, _ = self._anywhere(key, lambda k: k.get(self.prefix + key))
        return bytes(data), version

    def get_range(self, key: str, start: int, view: memoryview) -> None:
        self._anywhere(key, lambda k: k.get(self.prefix + key, start, view))

    def size(self, key: str) -> int:
        empty = memoryview(bytearray())
        return self._anywhere(key, lambda k: k.get(self.prefix + key, 0, empty))[2]

    def keys(self, prefix: str) -> list[tuple[str, float]]:
        """Times are ages below 0, by the clock of the keeper that has the key: nodes' clocks differ."""
        found: dict[str, float] = {}

        def ask(keeper: KeeperClient) -> None:
            answer = keeper.ask({"do": "list", "prefix": self.prefix + prefix})
            now = answer.get("now", max((changed for _, changed, _ in answer["keys"]), default=0.0))
            for key, changed, _ in answer["keys"]:
                name = key.removeprefix(self.prefix)
                found[name] = max(found.get(name, changed - now), changed - now)

        self._everywhere(dict.fromkeys(self._nearest()), ask, "the list")
        return sorted(found.items())

    def delete(self, keys: list[str]) -> None:
        if keys:
            request = {"do": "delete", "keys": [self.prefix + key for key in keys]}
            self._everywhere(dict.fromkeys(self._nearest()), lambda k: k.ask(request), "a deletion")

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.close()

    def _at(self, number: int) -> KeeperClient:
        return self.keepers[number % len(self.keepers)]

    def _nearest(self) -> list[KeeperClient]:
        """All keepers, this node's first."""
        return [self._at(self.node + distance) for distance in range(len(self.keepers))]

    def _everywhere(
        self, keepers: dict[KeeperClient, None], act: Callable[[KeeperClient], object], what: str
    ) -> None:
        """Acts on each; one success is enough, failures are logged."""
        done, first = 0, None
        for keeper in keepers:
            try:
                self._with(keeper, act)
                done += 1
            except FileExistsError:
                raise
            except OSError as error:
                first = first or error
                log.warning("[PEER] snapshot keeper %s: %s fails: %s", keeper.address, what, error)
        if not done:
            raise first or ConnectionRefusedError(errno.ECONNREFUSED, "no snapshot keeper answers")

    def _anywhere(self, key: str, act: Callable[[KeeperClient], T]) -> T:
        """The first keeper that has it. FileNotFoundError only if all of them answered that they do not."""
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
        raise FileNotFoundError(errno.ENOENT, f"{key} is kept by no snapshot keeper")

    def _with(self, keeper: KeeperClient, act: Callable[[KeeperClient], T]) -> T:
        if time.monotonic() < keeper.down_until:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{keeper.address} did not answer a moment ago")
        for attempt in (1, 2):  # a kept connection may be of a keeper that was restarted since
            try:
                return act(keeper)
            except (ConnectionError, TimeoutError):
                keeper.close()
                if attempt == 2:
                    keeper.down_until = time.monotonic() + DOWN_S
                    raise
        raise AssertionError("unreachable")
