"""Keys that are never sent: whoever knows the job token derives them (HKDF, RFC 5869, with SHA-256).

Each use of a connection has a key of its own, named by its purpose: "quorum 1.7" for healing and votes of quorum
7 of epoch 1. Without a job token (`allranks lighthouse --no-token`) anybody can derive them: there is no protection then.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

_SALT = b"allranks job token"


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
