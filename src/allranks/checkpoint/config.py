"""The settings of checkpointing: the names people know, each default written once. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.errors import ConfigurationError
from allranks.model.options import check_options, option


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
    """The settings of a manager, and of the `checkpoint` section of a job file; see docs/tasks/checkpoints.md.

    `job` is kept in every checkpoint: a job with a name restores its own and nameless ones, and those of `from_job`.
    A tier that cannot be read is asked again for `wait_for_stores_s`; then `on_unreachable` "raise" stops the restore,
    since it may hold something newer, and "ignore" continues without it.
    """

    checkpoint_interval: int = option(
        500, "between two checkpoints on disk and in the object store", unit="steps", above=0
    )
    memory_snapshot_interval: int = option(
        50, "between two snapshots in memory and at peers; 0: none", unit="steps", at_least=0
    )
    nvme_path: str | Path | None = option(None, "a folder of this job's own; none: no disk tier")
    s3_bucket: str | None = option(None, "a bucket, or a URL such as gs://name; none: no object store")
    s3_prefix: str = option("", "where in the bucket")
    async_save: bool = option(True, "save in the background")
    keep_last_n: int = option(3, "how many checkpoints stay in each store; 0: all", at_least=0)
    async_save_policy: AsyncSavePolicy | str = option(
        AsyncSavePolicy.WARN,
        "what a failed save does: log it, raise at the next call, or try again and then log it",
        choices=("warn", "fail", "retry"),
        title="save policy",
    )
    async_save_retries: int = option(3, "of the policy retry", at_least=0)
    async_save_retry_delay: float = option(5.0, "between two of them", unit="s", at_least=0)
    busy_policy: BusyPolicy | str = option(
        BusyPolicy.SKIP,
        "what is done while the last save still runs: leave this one out, or copy it and let it wait",
        choices=("skip", "queue"),
    )
    overlap_copy: bool = option(
        True, "copy during the next forward and backward where an optimizer is attached"
    )
    max_snapshots: int = option(2, "snapshots kept in memory", above=0)
    max_memory_mb: float | None = option(None, "bound of their memory; none: no bound", unit="MB", above=0)
    peers: tuple[str, ...] = option(
        (), "addresses of every node's snapshot keeper, in node order (`allranks run` sets them)"
    )
    peer_token: str = option("", "their secret")
    node_rank: int | None = option(
        None, "the number of this node's keeper; none: $GROUP_RANK, else 0", at_least=0
    )
    s3_endpoint_url: str | None = option(None, "URL of a server that speaks S3")
    s3_region: str | None = option(None, "none: $AWS_REGION")
    s3_options: Mapping[str, str] = option(
        dict, "further options of obstore: access_key_id, timeout_s, max_retries …"
    )
    save_on_close: bool = option(True, "`close()` saves the last step where a durable tier does not have it")
    job: str = option("", "kept in every checkpoint; a named job restores no other job's")
    from_job: str = option("", "another job whose checkpoints may be restored")
    on_unreachable: str = option(
        "raise", "what a restore does when a tier cannot be read", choices=("raise", "ignore")
    )
    wait_for_stores_s: float = option(60.0, "how long such a tier is asked again first", unit="s", at_least=0)
    commit_timeout_s: float = option(
        600.0, "how long the first rank waits for the others' parts", unit="s", above=0
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
                f"s3_bucket is {self.s3_bucket!r}: it names no bucket", hint="is a variable empty?"
            )
        if self.peers and not self.peer_token:
            raise ConfigurationError("peers need a peer_token", hint="the same secret for every node's agent")


def folder_problem(path: str) -> str:
    """Why a path would become a folder of an odd name; "": it is one."""
    if not path:
        return "it is empty: name a folder, or leave it out"
    if "://" in path and not path.startswith("file://"):
        return "it is a URL: an object store goes into s3_bucket"
    if any(part.startswith("$") for part in path.split("/")):
        return "variables are not written out here: name the folder (in Python: os.path.expandvars)"
    return ""


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
