"""What can be set on a lighthouse. Frozen; relations between values are checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.errors import ConfigurationError


@dataclass(frozen=True)
class Options:
    """The rules of the quorum and of failure detection. All times in seconds."""

    min_replicas: int = 1
    max_replicas: int = 0  # 0: no limit; replicas beyond it are spares
    multiple_of: int = 1  # the number of members is a multiple of this
    divides: int = 0  # the number of members divides this (a global batch size); 0: no such rule
    expect_replicas: int = 0  # the first quorum waits for this many, until the join timeout; 0: for nobody
    join_timeout_s: float = 60.0  # how long those who ask wait for those who are alive but do not
    heartbeat_timeout_s: float = 5.0  # silence after which a replica counts as lost
    heartbeat_s: float = 0.0  # how often replicas beat; 0: a fifth of the timeout, at most 1 s
    quorum_tick_s: float = 0.1  # how often time alone may change a decision
    grace_s: float = 0.002  # after an orderly close without a good-bye: a process died
    reset_grace_s: float = 0.1  # after a reset or a network error: perhaps a blip, the session may come back
    presume_dead_s: float = 30.0  # a silent member counts as possibly training on for this long
    start_grace_s: float = 0.0  # a new lighthouse waits so long for members of an earlier one's quorum
    finished_hold_s: float = 600.0  # so long after its end a training is not begun anew by a few latecomers
    flap_limit: int = 5  # losses within the window that are forgiven
    flap_window_s: float = 60.0
    flap_backoff_s: float = 2.0  # first pause of a flapping replica; doubles with each further loss
    flap_backoff_max_s: float = 60.0
    stall_s: float = 0.0  # no progress for this long asks for evidence; 0: never

    def __post_init__(self) -> None:
        _check(self.min_replicas >= 1, f"min_replicas is {self.min_replicas}, must be at least 1")
        _check(self.multiple_of >= 1, f"multiple_of is {self.multiple_of}, must be at least 1")
        _check(self.divides >= 0, f"divides is {self.divides}, must not be negative")
        for name in _TIMES:
            _check(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}, must not be negative")
        _check(self.heartbeat_timeout_s > 0, "heartbeat_timeout_s is 0, must be more")
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
        """How often replicas beat, resolved."""
        return self.heartbeat_s or min(1.0, self.heartbeat_timeout_s / 5)

    @property
    def return_s(self) -> float:
        """How long members of a quorum that was taken over have to come back: a client asks a silent lighthouse
        for a sign of life after half a timeout, gives it up after another whole one, both to within a beat, and
        pauses between attempts."""
        return 1.5 * self.heartbeat_timeout_s + 2 * self.beat_s + 2.0

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
    """Where the lighthouse listens, whom it lets in, and what it bears."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    token: str = ""  # the job token; "" lets everybody in (only sensible on loopback)
    advertise: str = ""  # address that others are told; "": the bound one
    certificate: str = ""  # PEM files; a certificate switches TLS on
    key: str = ""
    client_ca: str = ""  # switches mTLS on: clients must show a certificate signed by it
    hello_timeout_s: float = 5.0
    max_connections: int = 16000
    max_strangers: int = 1000  # connections that have not said hello yet; the oldest is dropped beyond it
    max_frame_bytes: int = 16 << 20
    max_hello_bytes: int = 16 << 10
    drain_s: float = 2.0
    job: str = ""  # its name, for the page

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, f"port is {self.port}, must be 0 to 65535")
        _check(bool(self.certificate) or not self.key, "a TLS key needs a certificate too")
        _check(bool(self.certificate) or not self.client_ca, "mTLS (client_ca) needs a server certificate")


_TIMES = (
    "join_timeout_s", "heartbeat_timeout_s", "heartbeat_s", "quorum_tick_s", "grace_s", "reset_grace_s",
    "presume_dead_s", "start_grace_s", "finished_hold_s", "flap_window_s", "flap_backoff_s", "flap_backoff_max_s", "stall_s",
)  # fmt: skip


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(f"lighthouse: {message}")
