"""The wire between a rank's helper and a node's snapshot keeper: framed JSON, then raw bytes with a checksum.

Torch-free, no pickle. Both sides have proved that they know the token (channel/handshake.py) before anything else
is said.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

from allranks.checkpoint.checksum import PIECE_BYTES, new_hasher

MAX_HEADER_BYTES = 1 << 20


class PeerProtocolError(OSError):
    """The other side said something that does not belong into this conversation."""


def send_json(sock: socket.socket, message: dict[str, Any]) -> None:
    """One small message."""
    body = json.dumps(message).encode()
    sock.sendall(len(body).to_bytes(4, "big") + body)


def receive_json(sock: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other side has closed in between."""
    head = _exactly(sock, 4, may_end=True)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_HEADER_BYTES:
        raise PeerProtocolError(f"header of {length} bytes: not a snapshot connection")
    body = _exactly(sock, length)
    assert body is not None
    try:
        message = json.loads(body)
    except ValueError as error:
        raise PeerProtocolError("header is not JSON: not a snapshot connection") from error
    if not isinstance(message, dict):
        raise PeerProtocolError("header is not an object")
    return message


def send_bytes(sock: socket.socket, pieces: Iterable[memoryview], algorithm: str) -> None:
    """Raw bytes whose length the header has told, then their checksum."""
    hasher = new_hasher(algorithm)
    for piece in pieces:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            hasher.update(part)
            sock.sendall(part)
    send_json(sock, {"checksum": hasher.hexdigest()})


def receive_bytes(sock: socket.socket, view: memoryview, algorithm: str) -> None:
    """Fills `view` and checks what came."""
    hasher = new_hasher(algorithm)
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done : done + PIECE_BYTES])
        if not got:
            raise ConnectionError(f"connection lost after {done} of {len(view)} bytes")
        hasher.update(view[done : done + got])
        done += got
    trailer = receive_json(sock)
    if trailer is None or trailer.get("checksum") != hasher.hexdigest():
        raise PeerProtocolError(f"{len(view)} bytes came with the wrong checksum")


def _exactly(sock: socket.socket, count: int, may_end: bool = False) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            if may_end and not data:
                return None
            raise ConnectionError("connection lost in the middle of a message")
        data += got
    return bytes(data)
