"""Mutual proof at the start of a connection: each side shows that it knows the key, which itself is never sent.

    server: MAGIC, its nonce
    client: length and name of the purpose, its nonce, HMAC(key, "client" + both nonces + name of the server)
    server: HMAC(key, "server" + the same)

Both nonces are in both proofs, so nothing recorded can be used again; the sides differ, so nothing can be sent
back; the name of the server (its address, where clients know it) keeps a proof meant for one from opening another.
What follows is neither signed nor encrypted: against one who can change packets on the way only TLS or a VPN helps.
"""

from __future__ import annotations

import os
import socket
import time

from allranks.channel.keys import Credential, Keyring, is_proof, prove

MAGIC = b"allranks-auth-2\n"
NONCE_BYTES = 16
PROOF_BYTES = 32
GREETING_S = 10.0  # a rank that computes may be slow to answer
_CLIENT_S = 60.0


class ChannelError(ConnectionError):
    """The other side closed, lied or sent garbage."""


class ServerGreeting:
    """The server's side of one connection, however its bytes come: send `hello`, then `take` what the client says."""

    def __init__(self, keys: Keyring, kind: str, server: str = "") -> None:
        self._keys, self._kind, self._server = keys, kind, server.encode()
        self._nonce = os.urandom(NONCE_BYTES)
        self._said = b""
        self.hello = MAGIC + self._nonce

    @property
    def wanted(self) -> int:
        """How many bytes of the client to read next, and no more."""
        return 1 + self._said[0] + NONCE_BYTES + PROOF_BYTES - len(self._said) if self._said else 1

    def take(self, data: bytes) -> tuple[str, bytes] | None:
        """(the purpose that the client has proved, our own proof for it), once all is there. Raises ChannelError for one
        that does not know the key, or whose purpose does not begin with the word `kind`."""
        self._said += data
        if self.wanted:
            return None
        answer = self._said[1 + self._said[0] :]
        purpose = self._said[1 : 1 + self._said[0]].decode("ascii", "replace")
        credential, nonces = self._keys.for_purpose(purpose), self._nonce + answer[:NONCE_BYTES]
        known = is_proof(answer[NONCE_BYTES:], credential, b"client", nonces, self._server)
        if not known or purpose.split(" ")[0] != self._kind:
            raise ChannelError("the caller does not know the key")
        return purpose, prove(credential, b"server", nonces, self._server)


def greet_as_client(sock: socket.socket, credential: Credential, server: str = "") -> None:
    """Proves who we are and checks who they are, or raises. `server` is the name the server goes by.

    The socket's timeout, if it has one, is the limit of the whole greeting.
    """
    before = sock.gettimeout()
    deadline = time.monotonic() + (before or _CLIENT_S)
    hello = _read(sock, len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise ChannelError("not a server of allranks, or of another version")
    nonce, purpose = os.urandom(NONCE_BYTES), credential.purpose.encode()
    nonces = hello[len(MAGIC) :] + nonce
    proof = prove(credential, b"client", nonces, server.encode())
    _send(sock, bytes([len(purpose)]) + purpose + nonce + proof, deadline)
    try:
        answer = _read(sock, PROOF_BYTES, deadline)
    except ChannelError:
        raise ChannelError("refused: do both sides have the same job token?") from None
    if not is_proof(answer, credential, b"server", nonces, server.encode()):
        raise ChannelError("the other side does not know the key")
    sock.settimeout(before)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _read(sock: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(_left(deadline))
        try:
            piece = sock.recv(length - len(data))
        except TimeoutError:
            raise ChannelError("no greeting in time") from None
        if not piece:
            raise ChannelError("the other side closed the connection")
        data += piece
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChannelError("no greeting in time")
    return left
