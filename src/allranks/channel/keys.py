"""Keys that are never sent: whoever knows the job token derives them (HKDF, RFC 5869, with SHA-256).

Each use of a connection has a key of its own, named by its purpose: "quorum 1.7" for healing and votes of quorum
7 of epoch 1. Without a job token (`allranks lighthouse --no-token`) anybody can derive them: there is no protection then.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import ConfigurationError

log = logging.getLogger("allranks.channel")

_SALT = b"allranks job token"
MAX_TOKEN_CHARS = 4096
_warned: set[str] = set()  # of token files, each once


@dataclass(frozen=True)
class Credential:
    """What a client shows: the purpose of the connection, and the key that proves that it may."""

    purpose: str
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Keyring:
    """All keys of a job."""

    token: str = field(default="", repr=False)

    def for_purpose(self, purpose: str) -> Credential:
        """The key for one kind of connection."""
        secret = hmac.digest(_SALT, self.token.encode(), "sha256")
        return Credential(purpose, hmac.digest(secret, purpose.encode() + b"\x01", "sha256"))

    def for_quorum(self, epoch: int, number: int) -> Credential:
        """The key of the members of one quorum."""
        return self.for_purpose(f"quorum {epoch}.{number}")


def prove(credential: Credential, side: bytes, *said: bytes) -> bytes:
    """Shows that one side ("client" or "server") knows the key; good for these very words, nonces among them."""
    lengths = b"".join(len(part).to_bytes(4, "big") for part in said)
    return hmac.digest(credential.key, b"/".join((side, lengths, *said)), "sha256")


def is_proof(given: str | bytes, credential: Credential, side: bytes, *said: bytes) -> bool:
    """Whether `given` (as hexadecimal, if it is text) is that proof."""
    right = prove(credential, side, *said)
    if isinstance(given, bytes):
        return hmac.compare_digest(given, right)
    return hmac.compare_digest(given.encode(errors="replace"), right.hex().encode())


def find_token(environment: Mapping[str, str] = os.environ) -> str:
    """$ALLRANKS_TOKEN, or what the file $ALLRANKS_TOKEN_FILE holds; "" when there is neither."""
    if token := environment.get("ALLRANKS_TOKEN"):
        return token
    path = environment.get("ALLRANKS_TOKEN_FILE")
    return read_token(Path(path)) if path else ""


def read_token(path: Path) -> str:
    """What the file holds; an error when that is no token. A pipe or a device is not waited for."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigurationError(f"cannot read the job token: {path} is not a regular file")
            token = file.read(MAX_TOKEN_CHARS + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the job token: {error}") from error
    if not token:
        raise ConfigurationError(f"the token file {path} is empty")
    if len(token) > MAX_TOKEN_CHARS or not token.isprintable():
        raise ConfigurationError(f"the token file {path} holds no token: more than one line of text")
    if mode & 0o077 and str(path) not in _warned:
        _warned.add(str(path))
        log.warning("other users may read or change the job token in %s: chmod 600 %s", path, path)
    return token


def write_token(path: Path, token: str) -> None:
    """A new file, readable by this user only; never through a link or into a file that somebody else laid there.

    Agents that share a folder may write it at the same moment: each makes a file of its own, and the last one stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = path.with_name(f".{path.name}-{os.getpid()}")
    mine.unlink(missing_ok=True)
    handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(token + "\n")
    mine.replace(path)
