"""Keys that are never sent, and the handshake in which both sides prove that they know one.

Keys are derived from the job token (HKDF, RFC 5869, with SHA-256). Each use of a connection has its own key, named by
its purpose: "quorum 1.7" for healing and votes of quorum 7 of epoch 1. Without a job token (`allranks lighthouse
--no-token`) anyone can derive the keys: there is no protection. The handshake:

    server: MAGIC, its nonce
    client: length and name of the purpose, its nonce, HMAC(key, "client" + both nonces + name of the server)
    server: HMAC(key, "server" + the same)

Both nonces are in both proofs, against replay; the sides differ, against reflection; the name of the server (its address,
where clients know it) is included, so that a proof for one server is useless at another. The data that follows is
neither signed nor encrypted: use TLS or a VPN against an attacker who can change packets.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import ConfigurationError
from allranks.model.files import write_atomically

log = logging.getLogger("allranks.channel")

_SALT = b"allranks job token"
MAX_TOKEN_CHARS = 4096
MOUNTED_HINT = "it is mounted, so chmod cannot help: give the volume of the secret `defaultMode: 0400` (Swarm: `mode: 0400`)"
_warned: set[str] = set()  # token files that were warned about


@dataclass(frozen=True)
class Credential:
    """A purpose of connections, and its key."""

    purpose: str
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Keyring:
    """All keys of a job."""

    token: str = field(default="", repr=False)

    def for_purpose(self, purpose: str) -> Credential:
        secret = hmac.digest(_SALT, self.token.encode(), "sha256")
        return Credential(purpose, hmac.digest(secret, purpose.encode() + b"\x01", "sha256"))

    def for_quorum(self, epoch: int, number: int) -> Credential:
        return self.for_purpose(f"quorum {epoch}.{number}")


def prove(credential: Credential, side: bytes, *parts: bytes) -> bytes:
    """Proves that one side ("client" or "server") knows the key, over these parts of the handshake."""
    lengths = b"".join(len(part).to_bytes(4, "big") for part in parts)
    return hmac.digest(credential.key, b"/".join((side, lengths, *parts)), "sha256")


def is_proof(given: str | bytes, credential: Credential, side: bytes, *parts: bytes) -> bool:
    """Whether `given` (hexadecimal, if it is text) is that proof."""
    right = prove(credential, side, *parts)
    if isinstance(given, bytes):
        return hmac.compare_digest(given, right)
    return hmac.compare_digest(given.encode(errors="replace"), right.hex().encode())


def find_token(environment: Mapping[str, str] = os.environ) -> str:
    """$ALLRANKS_TOKEN, or the content of the file $ALLRANKS_TOKEN_FILE; "" when neither is set."""
    if token := environment.get("ALLRANKS_TOKEN"):
        return token
    path = environment.get("ALLRANKS_TOKEN_FILE")
    return read_token(Path(path)) if path else ""


def read_token(path: Path, own: bool = False) -> str:
    """The token in a file; ConfigurationError when there is none. Does not wait for a pipe or a device.

    `own`: refuses links and files of other users; in a folder like /tmp any user can create the file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    try:
        with open(os.open(path, flags), encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if own and os.fstat(file.fileno()).st_uid != os.getuid():
                raise ConfigurationError(f"cannot read the job token: {path} belongs to another user")
            if not stat.S_ISREG(mode):
                raise ConfigurationError(f"cannot read the job token: {path} is not a regular file")
            token = file.read(MAX_TOKEN_CHARS + 1).strip()
            mounted = (
                bool(os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY)
                or (path.parent / "..data").is_symlink()
            )
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or error
        raise ConfigurationError(f"cannot read the job token in {path}: {why}") from error
    if not token:
        raise ConfigurationError(f"the token file {path} is empty")
    if len(token) > MAX_TOKEN_CHARS or not token.isprintable():
        raise ConfigurationError(f"the token file {path} holds no token: more than one line of text")
    if mode & (0o007 if mounted else 0o077) and str(path) not in _warned:  # fsGroup adds the group's right
        _warned.add(str(path))
        hint = MOUNTED_HINT if mounted else f"chmod 600 {path}"
        log.warning("other users may read or change the job token in %s: %s", path, hint)
    return token


def write_token(path: Path, token: str) -> None:
    """Writes a file readable by this user only. Agents that share a folder may write it at the same moment."""
    write_atomically(path, token + "\n")


MAGIC = b"allranks-auth-2\n"
NONCE_BYTES = 16
PROOF_BYTES = 32
GREETING_S = 10.0  # a busy rank may be slow to answer
_CLIENT_S = 60.0


class ChannelError(ConnectionError):
    """The other side closed the connection, failed to authenticate or sent invalid data."""


class ServerGreeting:
    """The server's side of a handshake, without I/O: send `hello`, then pass received bytes to `take`."""

    def __init__(self, keys: Keyring, kind: str, server: str = "") -> None:
        self._keys, self._kind, self._server = keys, kind, server.encode()
        self._nonce = os.urandom(NONCE_BYTES)
        self._received = b""
        self.hello = MAGIC + self._nonce

    @property
    def wanted(self) -> int:
        """How many bytes to read next, at most."""
        return (
            1 + self._received[0] + NONCE_BYTES + PROOF_BYTES - len(self._received) if self._received else 1
        )

    def take(self, data: bytes) -> tuple[str, bytes] | None:
        """(the client's purpose, our own proof), once complete. Raises ChannelError if the client does not know the key,
        or its purpose does not begin with the word `kind`."""
        self._received += data
        if self.wanted:
            return None
        answer = self._received[1 + self._received[0] :]
        purpose = self._received[1 : 1 + self._received[0]].decode("ascii", "replace")
        credential, nonces = self._keys.for_purpose(purpose), self._nonce + answer[:NONCE_BYTES]
        known = is_proof(answer[NONCE_BYTES:], credential, b"client", nonces, self._server)
        if not known or purpose.split(" ")[0] != self._kind:
            raise ChannelError("the client does not know the key")
        return purpose, prove(credential, b"server", nonces, self._server)


def greet_as_client(sock: socket.socket, credential: Credential, server: str = "") -> None:
    """Authenticates both sides, or raises ChannelError. `server` is the server's name.

    The socket's timeout, if set, limits the whole handshake.
    """
    before = sock.gettimeout()
    deadline = time.monotonic() + (before or _CLIENT_S)
    hello = _read(sock, len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise ChannelError("not an allranks server, or one of another version")
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
            raise ChannelError("the handshake timed out") from None
        if not piece:
            raise ChannelError("the other side closed the connection")
        data += piece
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChannelError("the handshake timed out")
    return left
