"""Checkpoint settings. No torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.errors import ConfigurationError
from allranks.model.options import check_options, option


class CheckpointTier(enum.Enum):
    """Where a checkpoint is stored, fastest first."""

    MEMORY = "memory"  # this process
    PEER = "peer"  # the memory of other nodes' agents
    NVME = "nvme"  # local (or shared) disk
    S3 = "s3"  # any object store


class AsyncSavePolicy(str, enum.Enum):
    """What a failed save does: log a warning, raise at the next call, or retry and then log a warning."""

    WARN = "warn"
    FAIL = "fail"
    RETRY = "retry"


class BusyPolicy(str, enum.Enum):
    """What `step` does while the last save is still running: skip this one, or copy it and queue it."""

    SKIP = "skip"
    QUEUE = "queue"


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of a CheckpointManager and of the `checkpoint` section of a job file; see docs/tasks/checkpoints.md.

    Each checkpoint stores the name `job`. A named job restores checkpoints of that name, of `from_job`, and unnamed ones.
    A restore retries a tier that it cannot read for `wait_for_stores_s`. After that, `on_unreachable` decides: "raise"
    fails the restore, because the tier may hold a newer checkpoint; "ignore" continues without the tier.
    """

    checkpoint_interval: int = option(
        500, "between two checkpoints on disk and in the object store", unit="steps", above=0
    )
    memory_snapshot_interval: int = option(
        50, "between two snapshots in memory and at peers; 0: none", unit="steps", at_least=0
    )
    nvme_path: str | Path | None = option(None, "a folder used by this job only; none: no disk tier")
    s3_bucket: str | None = option(None, "a bucket, or a URL such as gs://name; none: no object store")
    s3_prefix: str = option("", "prefix of the keys in the bucket")
    async_save: bool = option(True, "save in the background")
    keep_last_n: int = option(3, "checkpoints kept in each store; 0: all", at_least=0)
    async_save_policy: AsyncSavePolicy | str = option(
        AsyncSavePolicy.WARN,
        "what a failed save does: log it, raise at the next call, or retry and then log it",
        choices=("warn", "fail", "retry"),
        title="save policy",
    )
    async_save_retries: int = option(3, "retries of the save policy retry", at_least=0)
    async_save_retry_delay: float = option(5.0, "delay between two retries", unit="s", at_least=0)
    busy_policy: BusyPolicy | str = option(
        BusyPolicy.SKIP,
        "while the last save is still running: skip this one, or copy it and queue it",
        choices=("skip", "queue"),
    )
    overlap_copy: bool = option(
        True, "copy during the next forward and backward pass if an optimizer is attached"
    )
    max_snapshots: int = option(2, "snapshots kept in memory", above=0)
    max_memory_mb: float | None = option(
        None, "memory limit of these snapshots; none: no limit", unit="MB", above=0
    )
    peers: tuple[str, ...] = option(
        (), "addresses of the snapshot keepers of all nodes, in node order (`allranks run` sets them)"
    )
    peer_token: str = option("", "shared secret of the snapshot keepers")
    node_rank: int | None = option(
        None, "index of this node's keeper in peers; none: $GROUP_RANK, else 0", at_least=0
    )
    s3_endpoint_url: str | None = option(None, "URL of an S3-compatible server")
    s3_region: str | None = option(None, "region of the bucket; none: $AWS_REGION")
    s3_options: Mapping[str, str] = option(
        dict, "further options for obstore: access_key_id, timeout_s, max_retries …"
    )
    save_on_close: bool = option(True, "`close()` saves the last step to durable tiers that lack it")
    job: str = option("", "stored in every checkpoint; a named job restores no other job's checkpoints")
    from_job: str = option("", "another job whose checkpoints may be restored")
    on_unreachable: str = option(
        "raise", "what a restore does when a tier cannot be read", choices=("raise", "ignore")
    )
    wait_for_stores_s: float = option(
        60.0, "how long a restore retries a tier that it cannot read", unit="s", at_least=0
    )
    commit_timeout_s: float = option(
        600.0, "how long the first rank waits for the parts of the other ranks", unit="s", above=0
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "async_save_policy", AsyncSavePolicy(self.async_save_policy))
        object.__setattr__(self, "busy_policy", BusyPolicy(self.busy_policy))
        path = None if self.nvme_path is None else str(self.nvme_path)
        if path is not None and (problem := folder_problem(path)):
            raise ConfigurationError(f"nvme_path is {path!r}", hint=problem)
        if path is not None and path.startswith("~"):
            object.__setattr__(self, "nvme_path", Path(path).expanduser())
        if self.s3_bucket and not self.s3_bucket.rpartition(":")[2].strip("/"):
            raise ConfigurationError(
                f"s3_bucket is {self.s3_bucket!r}, which names no bucket", hint="is a variable empty?"
            )
        if self.peers and not self.peer_token:
            raise ConfigurationError(
                "peers need a peer_token", hint="the same secret for the agents of all nodes"
            )


def folder_problem(path: str) -> str:
    """Why a path is probably not the folder that the user meant; "" if nothing is wrong with it."""
    if not path:
        return "the path is empty: name a folder, or omit the setting"
    if "://" in path and not path.startswith("file://"):
        return "this is a URL: use s3_bucket for an object store"
    if any(part.startswith("$") for part in path.split("/")):
        return "variables are not expanded here: write the full path (in Python: os.path.expandvars)"
    return ""


@dataclass(frozen=True)
class CheckpointLoadConfig:
    """How to load legacy `.pt` files, the only ones that can contain code.

    `safe_mode` unpickles tensors and plain containers only. `trusted_source` allows full unpickling, which runs any
    code in the file. `validate_structure` checks that the required keys are present.
    """

    safe_mode: bool = True
    validate_structure: bool = True
    warn_on_unsafe: bool = True
    trusted_source: bool = False
