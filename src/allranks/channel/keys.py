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
