"""The wire between a rank's helper and a node's snapshot keeper: framed JSON, then raw bytes with a checksum.

Torch-free, no pickle. Both sides prove that they know the token (HMAC over the other's nonce) before anything
else is said; the token itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
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


def greet_as_server(sock: socket.socket, token: str) -> bool:
    """Whether the client knows the token; tells it that we do, too."""
    nonce = secrets.token_hex(16)
    send_json(sock, {"allranks": "snapshots", "nonce": nonce})
    answer = receive_json(sock)
    if answer is None or not hmac.compare_digest(str(answer.get("proof")), _proof(token, "client", nonce)):
        send_json(sock, {"ok": False, "error": "wrong token"})
        return False
    send_json(sock, {"ok": True, "proof": _proof(token, "server", str(answer.get("nonce")))})
    return True


def greet_as_client(sock: socket.socket, token: str) -> None:
    """Proves the token and demands the same; PermissionError when either fails."""
    hello = receive_json(sock)
    if hello is None or hello.get("allranks") != "snapshots":
        raise PeerProtocolError("not a snapshot keeper")
    nonce = secrets.token_hex(16)
    send_json(sock, {"proof": _proof(token, "client", str(hello.get("nonce"))), "nonce": nonce})
    answer = receive_json(sock)
    if answer is None or not answer.get("ok"):
        raise PermissionError(13, "the snapshot keeper refused the token")
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "server", nonce)):
        raise PermissionError(13, "the snapshot keeper does not know the token")


def _proof(token: str, role: str, nonce: str) -> str:
    return hmac.new(token.encode(), f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()


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
