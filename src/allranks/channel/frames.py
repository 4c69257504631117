"""Frames, in which our processes send each other messages: u32 length, u8 kind, payload.

The lighthouse has a kind for every type of message (lighthouse/messages.py). Healing, votes, snapshots, evidence and the
checkpoint helper send JSON objects (kind 0), some followed by raw bytes of an announced length and an object with their
checksum. No pickle.
Also here: addresses (HOST:PORT, with brackets around IPv6), reachability, held ports, and socket options. Standard
library only: the liveness proxy uses it too.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from allranks.channel.keys import ChannelError

JsonObject = dict[str, Any]  # as json reads it
HEAD = struct.Struct("!IB")
JSON = 0
MAX_JSON_BYTES = 64 << 20  # the layout of a very large model
PIECE_BYTES = 512 << 10  # sent or received, then hashed while still in the cache
BUFFER_BYTES = 4 << 20
READ_BYTES = 64 << 10  # per read of small frames: above 128 KiB each read maps new memory, 15 us


class BadFrame(ChannelError, ValueError):
    """The other side sent an invalid frame."""


class Hasher(Protocol):
    """The part of a hashlib object used here."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def take_frames(buffer: bytearray, limit: int) -> list[tuple[int, bytes]]:
    """Removes the complete frames from the front of `buffer`. Raises BadFrame for one longer than `limit`."""
    found, start, size = [], 0, len(buffer)
    while size - start >= HEAD.size:
        length, kind = HEAD.unpack_from(buffer, start)
        check_length(length, limit)
        end = start + HEAD.size + length
        if end > size:
            break
        found.append((kind, bytes(buffer[start + HEAD.size : end])))
        start = end
    del buffer[:start]
    return found


def check_length(length: int, limit: int) -> None:
    """Raises BadFrame for a frame larger than any valid one."""
    if length > limit:
        raise BadFrame(f"a frame of {length} bytes, at most {limit} are allowed")


# ---- JSON objects over a blocking socket -----------------------------------------------------------------


def send_json(sock: socket.socket, message: JsonObject, fds: Sequence[int] = ()) -> None:
    """Sends one object, with descriptors over a local socket."""
    body = json.dumps(message, separators=(",", ":")).encode()
    frame = HEAD.pack(len(body), JSON) + body
    sent = socket.send_fds(sock, [frame], fds) if fds else 0
    sock.sendall(frame[sent:])


def receive_json(sock: socket.socket, limit: int = MAX_JSON_BYTES) -> JsonObject:
    """The next object, bounded in size; raises ChannelError when the other side has closed."""
    length, kind = HEAD.unpack(read_exactly(sock, HEAD.size))
    check_length(length, limit)
    return read_object(kind, read_exactly(sock, length))


def next_json(sock: socket.socket, limit: int = MAX_JSON_BYTES) -> JsonObject | None:
    """The next object; None when the other side has closed."""
    return receive_json(sock, limit) if sock.recv(1, socket.MSG_PEEK) else None


def read_object(kind: int, payload: bytes) -> JsonObject:
    try:
        message = json.loads(payload) if kind == JSON else None
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadFrame("not a JSON object")
    return message


class JsonReader:
    """Reads objects and descriptors (`fds`) from a local socket."""

    def __init__(self, sock: socket.socket, limit: int = 1 << 30) -> None:
        self._sock, self._limit = sock, limit
        self._buffer = bytearray()
        self._ready: list[tuple[int, bytes]] = []
        self.fds: list[int] = []

    def receive(self) -> JsonObject | None:
        """The next object; None when the other side has closed."""
        while not self._ready:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 8)
            except (
                ConnectionResetError
            ):  # it died with our replies unread; raised once, then its data follows
                continue
            self.fds += fds
            if not data:
                return None
            self._buffer += data
            self._ready = take_frames(self._buffer, self._limit)
        return read_object(*self._ready.pop(0))


# ---- raw bytes, with a checksum --------------------------------------------------------------------------


def read_exactly(sock: socket.socket, length: int) -> bytes:
    """`length` bytes; ChannelError when the other side closes before."""
    data = bytearray(length)
    read_into(sock, [memoryview(data)])
    return bytes(data)


def read_into(sock: socket.socket, views: Iterable[memoryview], hasher: Hasher | None = None) -> None:
    """Fills the views one after the other, straight from the socket."""
    for piece in _pieces(views):
        filled = 0
        while filled < len(piece):
            count = sock.recv_into(piece[filled:])
            if count == 0:
                raise ChannelError("the other side closed the connection")
            filled += count
        if hasher is not None:
            hasher.update(piece)


def send_from(sock: socket.socket, views: Iterable[memoryview], hasher: Hasher) -> int:
    """Sends the views one after the other; returns the number of bytes."""
    sent = 0
    for piece in _pieces(views):
        hasher.update(piece)
        sock.sendall(piece)
        sent += len(piece)
    return sent


def send_checksum(sock: socket.socket, hasher: Hasher) -> None:
    """Sends the checksum of the bytes sent before."""
    send_json(sock, {"checksum": hasher.hexdigest()})


def is_intact(sock: socket.socket, hasher: Hasher) -> bool:
    """Receives the checksum; whether it matches the bytes received before."""
    return receive_json(sock).get("checksum") == hasher.hexdigest()


def _pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def cut(sock: socket.socket) -> None:
    """Ends the connection at both ends, even if another process holds the socket too. It may have ended already."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def tune_for_bulk(sock: socket.socket, timeout_s: float) -> None:
    """Sets large buffers, NODELAY and a timeout."""
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Sets NODELAY, keepalive and TCP_USER_TIMEOUT on a connected TCP socket; ignores other sockets."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    whole = max(1, int(timeout_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(sock, idle_s=whole, every_s=max(1, whole // 3), count=3, limit_s=max(timeout_s, 0.5))


def watch_connection(sock: socket.socket, limit_s: float) -> None:
    """Makes the kernel end a connection whose other side acknowledges nothing for `limit_s`, even when idle.

    Only for small messages: with full buffers, a connection that the other side does not read is ended too.
    """
    _keep_alive(sock, idle_s=1, every_s=1, count=max(1, int(limit_s)), limit_s=limit_s)


def _keep_alive(sock: socket.socket, idle_s: int, every_s: int, count: int, limit_s: float) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"KEEPIDLE": idle_s, "KEEPINTVL": every_s, "KEEPCNT": count, "USER_TIMEOUT": int(limit_s * 1000)}
    for name, value in values.items():
        if hasattr(socket, f"TCP_{name}"):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


_LAST_ACK = struct.Struct("=I")
_LAST_ACK_AT = 56  # tcpi_last_ack_recv of Linux's tcp_info


def is_silent(sock: socket.socket, limit_s: float) -> bool:
    """Whether the other side's kernel has not answered a watched connection for this long; False when unknown."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    except (OSError, AttributeError):
        return False
    if len(info) < _LAST_ACK_AT + _LAST_ACK.size:
        return False
    return bool(_LAST_ACK.unpack_from(info, _LAST_ACK_AT)[0] >= limit_s * 1000)


def split_address(address: str, default_port: int = 29510) -> tuple[str, int]:
    """("host", port) of "host:port", "[::1]:port", "http://host:port" or "host". Raises ValueError."""
    text = address.strip().removeprefix("http://").removeprefix("https://").removeprefix("tcp://").rstrip("/")
    host, colon, port = text.rpartition(":")
    if not colon or (port and not port.isdigit()) or text.endswith("]"):
        host, port = text, str(default_port)
    if not port or not 0 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port" for other machines: this machine's name instead of a wildcard, brackets around an IPv6 address."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
        if not resolves(host):
            host = outward_address()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(toward: str) -> str:
    """The address of this host as seen from HOST:PORT; nothing is sent."""
    host, port = split_address(toward)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def resolves(name: str) -> bool:
    """Whether a name resolves. Python raises UnicodeError for a label of 64 characters."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def outward_address() -> str:
    """The address at which other machines reach this one, without a name server; loopback if there is none."""
    for elsewhere in ("192.0.2.1:9", "[2001:db8::1]:9"):  # reserved for documentation: routed by default
        with suppress(OSError):
            return own_address(elsewhere)
    return loopback()


def loopback() -> str:
    """ "127.0.0.1", or "::1" on a machine without IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A listening socket. "::" means all addresses of both families; 127.0.0.1 becomes ::1 on a machine without IPv4."""
    dual = host == "::" and socket.has_dualstack_ipv6()
    host = "0.0.0.0" if host == "::" and not dual else loopback() if host == "127.0.0.1" else host
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


class HeldPort:
    """Reserves a free port while this object lives. A server that sets SO_REUSEADDR, as all do, can still bind it."""

    def __init__(self, host: str = "") -> None:
        host = host or loopback()
        held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))  # does not listen, so that the server can
        self.number = int(held.getsockname()[1])
        self.close = weakref.finalize(self, held.close)


def find_unreachable(addresses: Iterable[str], limit_s: float) -> set[str]:
    """The addresses (HOST:PORT) that accept no connection within the limit, all tried at once.

    The kernel accepts, so a process that computes, or is stopped for a moment, is reachable.
    """
    failed, deadline = set(addresses), time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for address in failed:
            with suppress(OSError, ValueError):
                found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)[0]
                sock = stack.enter_context(socket.socket(found[0], socket.SOCK_STREAM))
                sock.setblocking(False)
                if sock.connect_ex(found[4]) in (0, errno.EINPROGRESS):
                    selector.register(sock, selectors.EVENT_WRITE, (sock, address))
        while selector.get_map() and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
            for key, _ in ready:
                sock, address = key.data
                selector.unregister(sock)
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed.discard(address)
    return failed
