"""Frames of the healing channel, after the handshake that lets only members in (channel/handshake.py).

Requests and answers: four bytes of length and JSON; an answer to "stripe" is followed by the raw bytes and a
frame with their checksum. No pickle anywhere.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.channel.handshake import ChannelError
from allranks.checkpoint.checksum import Hasher

MAX_FRAME_BYTES = 64 << 20  # a skeleton of a very large model; stripes are not frames
BUFFER_BYTES = 4 << 20
PIECE_BYTES = (
    512 << 10
)  # sent or received, and hashed, while it is in the cache: one pass over memory, not two


HealWireError = ChannelError


@dataclass(frozen=True)
class Segment:
    """A run of bytes of one tensor of the layout."""

    tensor: int
    offset: int
    length: int


def send_frame(sock: socket.socket, message: dict[str, Any]) -> None:
    """One JSON object."""
    body = json.dumps(message, separators=(",", ":")).encode()
    sock.sendall(struct.pack("!I", len(body)) + body)


def read_frame(sock: socket.socket) -> dict[str, Any]:
    """One JSON object, bounded in size."""
    (length,) = struct.unpack("!I", read_exactly(sock, 4))
    if length > MAX_FRAME_BYTES:
        raise HealWireError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    message = json.loads(read_exactly(sock, length))
    if not isinstance(message, dict):
        raise HealWireError("a frame must be a JSON object")
    return message


def read_exactly(sock: socket.socket, length: int) -> bytes:
    """`length` bytes, or HealWireError when the other side closes before."""
    data = bytearray(length)
    read_into(sock, [memoryview(data)])
    return bytes(data)


def read_into(sock: socket.socket, views: Sequence[memoryview], hasher: Hasher | None = None) -> None:
    """Fills the views one after the other, straight from the socket."""
    for piece in _pieces(views):
        filled = 0
        while filled < len(piece):
            count = sock.recv_into(piece[filled:])
            if count == 0:
                raise HealWireError("the other side closed the connection")
            filled += count
        if hasher is not None:
            hasher.update(piece)


def send_from(sock: socket.socket, views: Iterable[memoryview], hasher: Hasher) -> int:
    """Sends the views one after the other; says how many bytes they were."""
    sent = 0
    for piece in _pieces(views):
        hasher.update(piece)
        sock.sendall(piece)
        sent += len(piece)
    return sent


def _pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Large buffers, no delay, and no wait without a limit."""
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
