"""The settings of checkpointing: the names people know, each default written once. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import ConfigurationError


class CheckpointTier(enum.Enum):
    """Where a checkpoint lies, fastest first."""

    MEMORY = "memory"  # this process
    PEER = "peer"  # the memory of other nodes' agents
    NVME = "nvme"  # local (or shared) disk
    S3 = "s3"  # any object store


class AsyncSavePolicy(str, enum.Enum):
    """What a failed save does: say it, stop training, or try again and then say it."""

    WARN = "warn"
    FAIL = "fail"
    RETRY = "retry"


class BusyPolicy(str, enum.Enum):
    """What `step` does when the last save still runs: leave this one out, or copy it and let it wait."""

    SKIP = "skip"
    QUEUE = "queue"


@dataclass(frozen=True)
class CheckpointConfig:
    """Intervals count steps; 0 disables memory (and peer) snapshots. `nvme_path` None: no disk tier.

    `job` is kept in every checkpoint: a job with a name restores its own and nameless ones, and those of `from_job`.
    A tier that cannot be read is asked again for `wait_for_stores_s`; then `on_unreachable` "raise" stops the restore,
    since it may hold something newer, and "ignore" goes on without it.

    `peers` are the addresses of every node's agent in node order; each snapshot goes to this node's own
    agent and to the next one's. `keep_last_n` 0 keeps everything. `max_memory_mb` None does not bound memory.
    """

    checkpoint_interval: int = 500
    memory_snapshot_interval: int = 50
    nvme_path: str | Path | None = None
    s3_bucket: str | None = None
    s3_prefix: str = ""
    async_save: bool = True
    keep_last_n: int = 3
    async_save_policy: AsyncSavePolicy | str = AsyncSavePolicy.WARN
    async_save_retries: int = 3
    async_save_retry_delay: float = 5.0
    busy_policy: BusyPolicy | str = BusyPolicy.SKIP
    overlap_copy: bool = True  # copy during the next forward and backward where an optimizer is attached
    read_back: bool = False  # read what was written from the disk again, and compare, before it counts
    max_snapshots: int = 2
    max_memory_mb: float | None = None
    peers: tuple[str, ...] = ()
    peer_token: str = ""
    node_rank: int | None = None  # None: $GROUP_RANK, else 0
    s3_endpoint_url: str | None = None
    s3_region: str | None = None
    s3_options: Mapping[str, str] = field(default_factory=dict)
    save_on_close: bool = True  # close() saves the last step if a durable tier does not have it
    job: str = ""
    from_job: str = ""
    on_unreachable: str = "raise"
    wait_for_stores_s: float = 60.0
    commit_timeout_s: float = 600.0  # how long the first rank waits for the others' parts

    def __post_init__(self) -> None:
        _positive("checkpoint_interval", self.checkpoint_interval)
        if self.memory_snapshot_interval < 0:
            raise ConfigurationError(
                f"memory_snapshot_interval ({self.memory_snapshot_interval}) must not be negative",
                hint="0 disables memory snapshots",
            )
        _positive("max_snapshots", self.max_snapshots)
        if self.keep_last_n < 0:
            raise ConfigurationError(
                f"keep_last_n ({self.keep_last_n}) must not be negative", hint="0 keeps all"
            )
        object.__setattr__(self, "async_save_policy", _choice(AsyncSavePolicy, self.async_save_policy))
        object.__setattr__(self, "busy_policy", _choice(BusyPolicy, self.busy_policy))
        if self.on_unreachable not in ("raise", "ignore"):
            raise ConfigurationError(
                f"on_unreachable is {self.on_unreachable!r}", hint='it must be "raise" or "ignore"'
            )
        if self.wait_for_stores_s < 0:
            raise ConfigurationError(f"wait_for_stores_s ({self.wait_for_stores_s}) must not be negative")
        if self.peers and not self.peer_token:
            raise ConfigurationError("peers need a peer_token", hint="the same secret for every node's agent")

    @property
    def s3_url(self) -> str:
        """The address of the object store; `s3_bucket` may be a name (S3) or a URL (gs://…, az://…)."""
        bucket = self.s3_bucket or ""
        base = bucket if "://" in bucket else f"s3://{bucket}"
        return "/".join(part for part in (base.rstrip("/"), self.s3_prefix.strip("/")) if part)


@dataclass(frozen=True)
class CheckpointLoadConfig:
    """How much a checkpoint file is trusted. Only a legacy `.pt` file can hold code; ours never does.

    `safe_mode` unpickles nothing but tensors and plain containers. `trusted_source` allows a full unpickling,
    which runs whatever code the file holds. `validate_structure` checks the keys people rely on.
    """

    safe_mode: bool = True
    validate_structure: bool = True
    warn_on_unsafe: bool = True
    trusted_source: bool = False


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ConfigurationError(f"{name} ({value}) must be positive")


def _choice(kind: type[enum.Enum], value: object) -> enum.Enum:
    try:
        return kind(value)
    except ValueError as error:
        options = [member.value for member in kind]
        raise ConfigurationError(f"unknown {kind.__name__} {value!r}. Valid options: {options}") from error
