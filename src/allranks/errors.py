"""The exceptions of allranks. Every one says what happened with the values, and carries a hint.

AllranksError                  anything we raise on purpose; `.hint` says what to do
├── MissingExtra               an optional dependency is not installed; names the pip command
├── InputError                 the user gave something unreadable (file, flag, plan)
│   └── ConfigurationError     a job configuration does not hold together
├── LighthouseError            talking to the lighthouse
│   ├── LighthouseUnreachable  nobody answers at any of its addresses
│   ├── LighthouseRefused      it said no: `.code` is token, version, superseded, full, draining ...
│   │   └── ReplicaEvicted     this replica was thrown out and not let in again
│   └── QuorumTimeout          no quorum in time; `.missing` names who we waited for
├── EtcdError                  no member of etcd gave a useful answer
├── CheckpointError            a checkpoint could not be saved, found or trusted; knows tier and path
│   ├── CheckpointSaveError    a save failed; training continues unless the policy is "fail"
│   ├── CheckpointLoadError    no (or not this) checkpoint could be loaded
│   │   └── CheckpointUnreachable  a store that may hold something newer did not answer
│   ├── CheckpointValidationError  what was read is not what was wanted; names the keys
│   │   └── CheckpointDamaged  bytes differ from what was written: belongs into quarantine
│   └── MemoryLimitExceeded    a snapshot does not fit into its memory bound
├── ManagerError               training together failed in this rank
│   ├── GroupAborted           a process group was taken down on purpose while somebody used it
│   ├── StateLost              all holders of the state are gone, and it must not start over
│   ├── StateDiffers           replicas hold different parameters or optimizer state
│   ├── HealingFailed          no peer could hand over the live state; knows how much had arrived
│   └── RetriesExhausted       too many steps in a row were not committed
│                              (TrainingFinished is not an error but a SystemExit with code 0: this replica came too late)
├── DistributedSetupError      the process group could not be set up; names the missing variables (RuntimeError)
├── TopologyChangeError        a change of the world is refused or failed; knows both sizes
├── DataLoadingError           training data or its index cannot be read; knows the file
├── NotRecording               a dump was asked of a process that records nothing
└── (each area adds its own branch below, in this file)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType


class AllranksError(Exception):
    """Base of all errors raised on purpose. `hint` is one or more lines that say what to do."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint
        if self.hint and hasattr(self, "add_note"):  # Python 3.11: a traceback shows it under the message
            self.add_note(self.hint)


class MissingExtra(AllranksError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra [{extra}]: pip install 'allranks[{extra}]'")
        self.feature = feature
        self.extra = extra


class InputError(AllranksError):
    """What the user gave cannot be read or used."""


class ConfigurationError(InputError):
    """A configuration value is wrong, or two of them contradict each other. `config_key` names the place."""

    def __init__(
        self, message: str, config_key: str = "", suggestions: Sequence[str] = (), *, hint: str = ""
    ) -> None:
        where = f"Configuration error in '{config_key}': {message}" if config_key else message
        super().__init__(where, hint=hint or _bullets("Suggestions", suggestions))
        self.config_key = config_key
        self.suggestions = list(suggestions)


class CheckpointError(AllranksError):
    """A checkpoint could not be saved, found or trusted. `tier` is a tier's name, `path` where it lies."""

    def __init__(self, message: str, *, tier: str = "", path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tier = tier
        self.path = path


class CheckpointSaveError(CheckpointError):
    """A save failed. The text people search for: `[NVME] Failed to save checkpoint to '...': why`."""

    def __init__(self, reason: str, *, tier: str, path: str, hint: str = "") -> None:
        where = f" to '{path}'" if path else ""
        super().__init__(
            f"[{tier}] Failed to save checkpoint{where}: {reason}", tier=tier, path=path,
            hint=hint or f"the last good one is untouched. What is there: allranks checkpoint ls '{_parent(path)}'",
        )  # fmt: skip
        self.reason = reason


class CheckpointLoadError(CheckpointError):
    """A load failed. `[TIER] Failed to load checkpoint from '...': why`, without tier when none was asked."""

    def __init__(self, reason: str, *, tier: str = "", path: str = "", hint: str = "") -> None:
        prefix = f"[{tier}] " if tier else ""
        where = f" from '{path}'" if path else ""
        super().__init__(
            f"{prefix}Failed to load checkpoint{where}: {reason}", tier=tier, path=path,
            hint=hint or f"what is whole: allranks checkpoint verify '{path or 'STORE'}'",
        )  # fmt: skip
        self.reason = reason


class CheckpointUnreachable(CheckpointLoadError):
    """A store did not answer, so nobody knows what is the newest checkpoint. Nothing was restored."""


class CheckpointValidationError(CheckpointError):
    """What was read lacks keys or does not fit. Never raised for a mere I/O failure."""

    def __init__(
        self,
        reason: str,
        missing_keys: tuple[str, ...] = (),
        invalid_keys: tuple[str, ...] = (),
        *,
        tier: str = "",
        path: str = "",
        hint: str = "",
    ) -> None:
        text = f"Checkpoint validation failed: {reason}"
        if missing_keys:
            text += f"\n  Missing keys: {sorted(missing_keys)}"
        if invalid_keys:
            text += f"\n  Invalid keys: {sorted(invalid_keys)}"
        super().__init__(
            text, tier=tier, path=path,
            hint=hint or f"damaged, or of another version? Look: allranks checkpoint verify '{path or 'STORE'}'",
        )  # fmt: skip
        self.reason = reason
        self.missing_keys = tuple(missing_keys)
        self.invalid_keys = tuple(invalid_keys)


class CheckpointDamaged(CheckpointValidationError):
    """Bytes are not what was written: flipped, cut short or missing. The checkpoint belongs into quarantine."""


class MemoryLimitExceeded(CheckpointError):
    """A snapshot does not fit into the memory it may use."""

    def __init__(self, requested_bytes: int, available_bytes: int, limit_bytes: int, *, tier: str) -> None:
        mb = 1 << 20
        super().__init__(
            f"Cannot save snapshot: {requested_bytes / mb:.1f}MB required, but only "
            f"{available_bytes / mb:.1f}MB available (limit: {limit_bytes / mb:.1f}MB)",
            tier=tier,
            hint="raise max_memory_mb, lower max_snapshots, or set memory_snapshot_interval=0",
        )
        self.requested_bytes = requested_bytes
        self.available_bytes = available_bytes
        self.limit_bytes = limit_bytes


class DistributedSetupError(AllranksError, RuntimeError):
    """The distributed environment is not there. `missing_vars` are the variables that were looked for."""

    def __init__(
        self,
        message: str,
        missing_vars: Sequence[str] = (),
        context: Mapping[str, str] | None = None,
        *,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing_vars = list(missing_vars)
        self.context = dict(context or {})


class TopologyChangeError(AllranksError):
    """A change of the number of ranks cannot continue."""

    hint = (
        "Possible solutions:\n"
        "  - lower elastic.min_nodes if the job may continue with fewer nodes\n"
        "  - bring nodes back or add new ones; the job waits for them at the rendezvous\n"
        "  - look why nodes were lost: allranks diagnose, allranks doctor explain LOG"
    )

    def __init__(
        self,
        message: str,
        old_world_size: int | None = None,
        new_world_size: int | None = None,
        *,
        hint: str = "",
    ) -> None:
        where = ""
        if old_world_size is not None and new_world_size is not None:
            where = f"Topology change ({old_world_size} -> {new_world_size} workers) failed: "
        super().__init__(where + message, hint=hint)
        self.old_world_size = old_world_size
        self.new_world_size = new_world_size


class DataLoadingError(AllranksError):
    """Training data or its index cannot be read. `file_path` is the file at fault."""

    def __init__(self, message: str, file_path: str = "", *, hint: str = "") -> None:
        where = f"Failed to load data from '{file_path}': " if file_path else ""
        super().__init__(where + message, hint=hint)
        self.file_path = file_path


def _parent(path: str) -> str:
    """The store of a checkpoint's path."""
    return path.rstrip("/").rpartition("/")[0] or "STORE"


def _bullets(title: str, lines: Sequence[str]) -> str:
    """A titled list for a hint; empty when there is nothing to list."""
    return "\n".join([f"{title}:", *(f"  - {line}" for line in lines)]) if lines else ""


class LighthouseError(AllranksError):
    """Something between a client and the lighthouse went wrong."""


class LighthouseUnreachable(LighthouseError):
    """Nobody answers. `addresses` are those that were tried."""

    def __init__(self, message: str, addresses: tuple[str, ...] = (), *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.addresses = addresses


class LighthouseRefused(LighthouseError):
    """The lighthouse said no. `code` is for programs, the message for people."""

    def __init__(self, message: str, code: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class ReplicaEvicted(LighthouseRefused):
    """This replica was thrown out of the job and stays out until it is let in."""


class QuorumTimeout(LighthouseError):
    """No quorum was formed in time. `missing` are the replicas that were waited for, as far as known."""

    def __init__(
        self, message: str, waited_s: float, reason: str = "", missing: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.waited_s = waited_s
        self.reason = reason
        self.missing = missing


def require(module: str, *, feature: str, extra: str) -> ModuleType:
    """Imports an optional module, or says in one sentence how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(feature, extra) from error


class EtcdError(AllranksError):
    """etcd did not answer, or refused."""


class ManagerError(AllranksError):
    """Training together failed in this rank."""


class GroupAborted(ManagerError):
    """A process group was taken down on purpose: a member went, the step is retried by the others."""


class HealingFailed(ManagerError):
    """No peer could hand over the live state. `received_bytes` of `total_bytes` had arrived."""

    def __init__(
        self, message: str, received_bytes: int = 0, total_bytes: int = 0, *, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.received_bytes = received_bytes
        self.total_bytes = total_bytes


class StateDiffers(ManagerError):
    """The replicas do not hold the same state (Manager(on_difference="stop")); the message names who and where."""


class StateLost(ManagerError):
    """All replicas that held the state are gone, and this one may not start over from step 0 (--on-state-loss stop)."""

    hint = "find out why no checkpoint was restored; --on-state-loss restart starts over from step 0"


class TrainingFinished(SystemExit):
    """The other replicas have finished the training: this one came too late and ends, with exit code 0.

    Raised out of the training loop, so that an unchanged script trains nothing, and saves nothing after the loop.
    """

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RetriesExhausted(ManagerError):
    """More steps in a row than `max_retries` were not committed."""


class NotRecording(AllranksError):
    """A dump was asked for, and nothing is recorded in this process."""

    hint = "call allranks.record() at the start of the script; ALLRANKS_RECORD=0 turns it off"
