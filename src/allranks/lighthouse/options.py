"""The lighthouse's options. Frozen; relations between values are checked at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allranks.errors import ConfigurationError
from allranks.model.options import check_options, option


def _time(default: float, help: str, **bounds: Any) -> Any:
    """A time in seconds, given in milliseconds on the command line, as with torchft's lighthouse."""
    return option(default, help, unit="s", ms=True, group="quorum", **(bounds or {"at_least": 0}))


@dataclass(frozen=True)
class Options:
    """The rules of the quorum and of failure detection. All times in seconds."""

    min_replicas: int = option(
        1, "fewest members of a quorum", at_least=1, group="quorum", flags="--min-replicas --min_replicas"
    )
    max_replicas: int = option(
        0, "most members; more replicas are spares; 0: no limit", at_least=0, group="quorum"
    )
    multiple_of: int = option(1, "the number of members is a multiple of this", at_least=1, group="quorum")
    divides: int = option(
        0,
        "the number of members divides this, e.g. a global batch size; 0: no such rule",
        at_least=0,
        group="quorum",
    )
    expect_replicas: int = option(
        0, "the first quorum waits for this many replicas, until the join timeout; 0: for none", at_least=0
    )
    join_timeout_s: float = _time(60.0, "how long replicas that joined wait for live replicas that have not")
    heartbeat_timeout_s: float = _time(5.0, "silence after which a replica counts as lost", above=0)
    heartbeat_s: float = _time(
        0.0,
        "interval of heartbeats; 0: a fifth of the timeout, at most 1 s",
        at_least=0,
        key="heartbeat_interval_s",
    )
    quorum_tick_s: float = _time(0.1, "how often a decision is reconsidered when nothing happens")
    start_grace_s: float = _time(
        0.0,
        "how long a new lighthouse waits for members of an earlier quorum; `allranks lighthouse` waits 1.5 s "
        "unless it made its token itself",
    )
    grace_s: float = option(
        0.002, "wait after an orderly close without a shutdown message: the process died", at_least=0
    )
    reset_grace_s: float = option(
        0.1, "wait after a reset or a network error: the session may come back", at_least=0
    )
    presume_dead_s: float = option(30.0, "a silent member may still be training for this long", at_least=0)
    finished_hold_s: float = option(
        600.0, "for this long after its end a few late replicas do not restart a training", at_least=0
    )
    flap_limit: int = option(5, "losses within the window that have no consequence", at_least=0)
    flap_window_s: float = option(60.0, "window of the flap limit", at_least=0)
    flap_backoff_s: float = option(
        2.0, "first back-off of a flapping replica; doubles with each further loss", at_least=0
    )
    flap_backoff_max_s: float = option(60.0, "longest back-off", at_least=0)

    def __post_init__(self) -> None:
        check_options(self, "lighthouse: ")
        _check(
            self.beat_s * 2 <= self.heartbeat_timeout_s,
            f"heartbeat_s ({self.beat_s}) must be at most half of heartbeat_timeout_s ({self.heartbeat_timeout_s})",
        )
        _check(
            self.grace_s <= self.reset_grace_s <= self.heartbeat_timeout_s,
            "grace_s <= reset_grace_s <= heartbeat_timeout_s must hold, "
            f"is {self.grace_s}, {self.reset_grace_s}, {self.heartbeat_timeout_s}",
        )
        top = self.max_replicas or max(self.min_replicas, self.divides, self.multiple_of) * 2
        _check(
            any(self.allows(n) for n in range(self.min_replicas, top + 1)),
            f"no number of members fits: at least {self.min_replicas}, at most {self.max_replicas or 'any'}, "
            f"a multiple of {self.multiple_of}" + (f", dividing {self.divides}" if self.divides else ""),
        )

    @property
    def beat_s(self) -> float:
        """The interval of heartbeats, resolved."""
        return self.heartbeat_s or min(1.0, self.heartbeat_timeout_s / 5)

    @property
    def return_s(self) -> float:
        """How long members of an adopted quorum have to reconnect: a client pings a silent lighthouse after half a
        timeout, gives it up after another whole one, both to within a beat, and pauses between attempts."""
        return 1.5 * self.heartbeat_timeout_s + 2 * self.beat_s + 2.0

    @property
    def lease_s(self) -> float:
        """How long after its last contact a member may still commit: less than presume_dead_s, after which another process
        can get its name, because a broken connection may seem alive for heartbeat_timeout_s."""
        return max(self.presume_dead_s - self.heartbeat_timeout_s, self.heartbeat_timeout_s)

    def allows(self, size: int) -> bool:
        """Whether a quorum may have `size` members."""
        return (
            size >= self.min_replicas
            and (not self.max_replicas or size <= self.max_replicas)
            and size % self.multiple_of == 0
            and (not self.divides or self.divides % size == 0)
        )

    def largest_size(self, at_most: int) -> int:
        """The largest allowed number of members not above `at_most`; 0 when there is none."""
        return next((n for n in range(at_most, 0, -1) if self.allows(n)), 0)


@dataclass(frozen=True)
class ServerOptions:
    """Where the lighthouse listens, which clients it admits, and its limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "0: any free one", at_least=0, at_most=65535)
    token: str = option("", "the job token; empty: no authentication (only sensible on loopback)")
    advertise: str = option(
        "", "address given to others instead of the bound one", metavar="HOST:PORT", group="server"
    )
    certificate: str = option("", "switches TLS on", metavar="PEM", group="server")
    key: str = option("", "key of the certificate, if in another file", metavar="PEM", group="server")
    client_ca: str = option(
        "", "mTLS: clients must show a certificate signed by it", metavar="PEM", group="server"
    )
    hello_timeout_s: float = option(5.0, "within which a client must authenticate", above=0)
    max_connections: int = option(16000, "open connections", above=0)
    max_unauthenticated: int = option(
        1000,
        "connections before authentication; beyond it the host with most of them loses its oldest",
        above=0,
    )
    max_frame_bytes: int = option(16 << 20, "longest message", above=0)
    max_hello_bytes: int = option(16 << 10, "longest first message", above=0)
    drain_s: float = option(2.0, "for answers on shutdown", at_least=0)
    job: str = option("", "name of the job, for the page")
    history: str = option(
        "",
        "file with the last 24 hours of the page's charts (default: in memory)",
        metavar="FILE",
        group="server",
    )
    token_path: str = option("", "where people find the job token, for the page")

    def __post_init__(self) -> None:
        check_options(self, "lighthouse: ")
        _check(bool(self.certificate) or not self.key, "a TLS key needs a certificate too")
        _check(bool(self.certificate) or not self.client_ca, "mTLS (client_ca) needs a server certificate")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(f"lighthouse: {message}")
