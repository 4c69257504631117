"""The client's options: arguments, else environment, else defaults."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

from allranks.channel.keys import find_token
from allranks.errors import ConfigurationError


@dataclass(frozen=True)
class ClientOptions:
    """The lighthouse's addresses and the client's identity. Empty values come from the environment."""

    addresses: tuple[str, ...] = ()  # $ALLRANKS_LIGHTHOUSE, comma separated
    token: str = ""  # $ALLRANKS_TOKEN, or the file $ALLRANKS_TOKEN_FILE
    replica: str = ""
    node: str = ""  # the host's name
    session: str = ""  # one incarnation of the replica, shared by its ranks; "": a random one
    role: str = "replica"  # or "observer"
    rank: int = 0
    connections: int = 1
    beacon: bool = False
    black_box: str = ""
    ca: str = ""  # PEM files; `ca` switches TLS on. $ALLRANKS_CA
    certificate: str = ""  # mTLS
    key: str = ""

    def __post_init__(self) -> None:
        if self.role not in ("replica", "observer"):
            raise ConfigurationError(f"role is {self.role!r}, must be 'replica' or 'observer'")
        if self.role == "replica" and not self.replica:
            raise ConfigurationError("a replica needs a name: ClientOptions(replica=...)")
        if not 0 <= self.rank < self.connections:
            raise ConfigurationError(f"rank is {self.rank}, must be below connections ({self.connections})")

    def resolved(self, session: str) -> ClientOptions:
        """Fills in all empty values from the environment and the token file."""
        text = ",".join(self.addresses) or os.environ.get("ALLRANKS_LIGHTHOUSE", "")
        addresses = tuple(part.strip() for part in text.split(",") if part.strip())
        if not addresses:
            raise ConfigurationError(
                "no address of a lighthouse",
                hint="set ALLRANKS_LIGHTHOUSE=HOST:PORT, or start `allranks lighthouse`",
            )
        return replace(
            self,
            addresses=addresses,
            token=self.token or find_token(),
            session=session,
            node=self.node or socket.gethostname(),
            ca=self.ca or os.environ.get("ALLRANKS_CA", ""),
        )
