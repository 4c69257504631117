"""The exceptions of allranks. Each has a message with the relevant values, and a hint.

AllranksError                  base class; `.hint` says what to do
├── MissingExtra               an optional dependency is not installed
├── InputError                 invalid input of the user (file, flag, plan)
│   └── ConfigurationError     an invalid configuration
├── LighthouseError            communication with the lighthouse failed
│   ├── LighthouseUnreachable  no response from any of its addresses
│   ├── LighthouseRefused      it refused a request: `.code` is token, version, superseded, full, draining ...
│   │   └── ReplicaEvicted     this replica was evicted and not readmitted
│   └── QuorumTimeout          no quorum in time; `.missing` are the missing replicas
├── EtcdError                  no usable response from etcd
├── CheckpointError            an operation on a checkpoint failed; has tier and path
│   ├── CheckpointSaveError    a save failed; training continues unless the policy is "fail"
│   ├── CheckpointLoadError    no checkpoint, or not the requested one, could be loaded
│   │   └── CheckpointUnreachable  a store that may hold a newer checkpoint did not respond
│   ├── CheckpointValidationError  a checkpoint does not match; has the keys
│   │   └── CheckpointDamaged  bytes differ from what was written: move it to quarantine
│   └── MemoryLimitExceeded    a snapshot exceeds its memory limit
├── ManagerError               fault-tolerant training failed in this rank
│   ├── GroupAborted           a process group was aborted on purpose while in use
│   ├── StateLost              all replicas with the state are gone, and training must not start over
│   ├── StateDiffers           replicas have different parameters or optimizer state
│   ├── HealingFailed          no peer could transfer the live state; has the number of received bytes
│   └── RetriesExhausted       too many consecutive steps were not committed
│                              (TrainingFinished is a SystemExit with code 0: this replica came too late)
├── DistributedSetupError      the process group could not be set up; has the missing variables (RuntimeError)
├── TopologyChangeError        a change of the world size failed; has both sizes
├── DataLoadingError           training data or its index cannot be read; has the file
└── NotRecording               a dump was requested, but this process is not recording
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Mapping, Sequence
from types import ModuleType


class AllranksError(Exception):
    """Base class of all errors. `hint` is one or more lines with advice."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint
        if self.hint and hasattr(self, "add_note"):  # Python 3.11: tracebacks show notes
            self.add_note(self.hint)


class MissingExtra(AllranksError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra [{extra}]: pip install 'allranks[{extra}]'")
        self.feature = feature
        self.extra = extra


class InputError(AllranksError):
    """Invalid input of the user."""


class ConfigurationError(InputError):
    """A configuration value is invalid, or two values contradict each other. `config_key` is the key."""

    def __init__(
        self, message: str, config_key: str = "", suggestions: Sequence[str] = (), *, hint: str = ""
    ) -> None:
        where = f"Configuration error in '{config_key}': {message}" if config_key else message
        super().__init__(where, hint=hint or _bullets("Suggestions", suggestions))
        self.config_key = config_key
        self.suggestions = list(suggestions)


class CheckpointError(AllranksError):
    """An operation on a checkpoint failed. `tier` is the name of the tier, `path` that of the checkpoint."""

    def __init__(self, message: str, *, tier: str = "", path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tier = tier
        self.path = path


class CheckpointSaveError(CheckpointError):
    """A save failed: `[NVME] Failed to save checkpoint to '...': reason`."""

    def __init__(self, reason: str, *, tier: str, path: str, hint: str = "") -> None:
        where = f" to '{path}'" if path else ""
        super().__init__(
            f"[{tier}] Failed to save checkpoint{where}: {reason}", tier=tier, path=path,
            hint=hint or f"the last good checkpoint is unchanged. List them: allranks checkpoint ls '{_parent(path)}'",
        )  # fmt: skip
        self.reason = reason


class CheckpointLoadError(CheckpointError):
    """A load failed: `[TIER] Failed to load checkpoint from '...': reason`."""

    def __init__(self, reason: str, *, tier: str = "", path: str = "", hint: str = "") -> None:
        prefix = f"[{tier}] " if tier else ""
        where = f" from '{path}'" if path else ""
        super().__init__(
            f"{prefix}Failed to load checkpoint{where}: {reason}", tier=tier, path=path,
            hint=hint or f"check it: allranks checkpoint verify '{path or 'STORE'}'",
        )  # fmt: skip
        self.reason = reason


class CheckpointUnreachable(CheckpointLoadError):
    """A store did not respond, so the newest checkpoint is unknown. Nothing was restored."""


class CheckpointValidationError(CheckpointError):
    """A checkpoint lacks keys or does not match. Not raised for I/O failures."""

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
            hint=hint or f"damaged, or from another version? Check: allranks checkpoint verify '{path or 'STORE'}'",
        )  # fmt: skip
        self.reason = reason
        self.missing_keys = tuple(missing_keys)
        self.invalid_keys = tuple(invalid_keys)


class CheckpointDamaged(CheckpointValidationError):
    """Bytes differ from what was written, or are missing."""


class MemoryLimitExceeded(CheckpointError):
    """A snapshot exceeds its memory limit."""

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
    """The distributed environment could not be set up. `missing_vars` are the missing variables."""

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
    """A change of the number of ranks failed."""

    hint = (
        "Possible solutions:\n"
        "  - lower elastic.min_nodes if the job may continue with fewer nodes\n"
        "  - restart nodes or add new ones; the job waits for them at the rendezvous\n"
        "  - check why nodes were lost: allranks diagnose, allranks doctor explain LOG"
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
    """Training data or its index cannot be read. `file_path` is the file."""

    def __init__(self, message: str, file_path: str = "", *, hint: str = "") -> None:
        where = f"Failed to load data from '{file_path}': " if file_path else ""
        super().__init__(where + message, hint=hint)
        self.file_path = file_path


def _parent(path: str) -> str:
    """The store of a checkpoint's path."""
    return path.rstrip("/").rpartition("/")[0] or "STORE"


def _bullets(title: str, lines: Sequence[str]) -> str:
    """A titled list for a hint; "" without lines."""
    return "\n".join([f"{title}:", *(f"  - {line}" for line in lines)]) if lines else ""


class LighthouseError(AllranksError):
    """Communication between a client and the lighthouse failed."""


class LighthouseUnreachable(LighthouseError):
    """No lighthouse responded. `addresses` are the ones tried."""

    def __init__(self, message: str, addresses: tuple[str, ...] = (), *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.addresses = addresses


class LighthouseRefused(LighthouseError):
    """The lighthouse refused a request. `code` is for programs, the message for users."""

    def __init__(self, message: str, code: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class ReplicaEvicted(LighthouseRefused):
    """This replica was evicted, until it is readmitted."""


class QuorumTimeout(LighthouseError):
    """No quorum was formed in time. `missing` are the missing replicas, as far as known."""

    def __init__(
        self, message: str, waited_s: float, reason: str = "", missing: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.waited_s = waited_s
        self.reason = reason
        self.missing = missing


def why(error: OSError) -> str:
    """The reason of a failed file operation, without a number: "no space left on /data"."""
    if error.errno == errno.ENOSPC and error.filename:
        return f"no space left on {os.path.dirname(os.path.abspath(os.fsdecode(error.filename)))}"
    return error.strerror or str(error)


def require(module: str, *, feature: str, extra: str) -> ModuleType:
    """Imports an optional module; MissingExtra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(feature, extra) from error


class EtcdError(AllranksError):
    """etcd did not respond, or refused a request."""


class ManagerError(AllranksError):
    """Fault-tolerant training failed in this rank."""


class GroupAborted(ManagerError):
    """A process group was aborted because a member left; the others retry the step."""


class HealingFailed(ManagerError):
    """No peer could transfer the live state. `received_bytes` of `total_bytes` had arrived."""

    def __init__(
        self, message: str, received_bytes: int = 0, total_bytes: int = 0, *, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.received_bytes = received_bytes
        self.total_bytes = total_bytes


class StateDiffers(ManagerError):
    """The replicas have different state (Manager(on_difference="stop"))."""


class StateLost(ManagerError):
    """All replicas with the state are gone, and this one may not start over from step 0 (--on-state-loss stop)."""

    hint = "check why no checkpoint was restored; --on-state-loss restart starts over from step 0"


class TrainingFinished(SystemExit):
    """The other replicas have finished training, so this one exits with code 0.

    Raised inside the training loop, so that an unchanged script does not train or save.
    """

    def __init__(self, message: str) -> None:
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RetriesExhausted(ManagerError):
    """More than `max_retries` consecutive steps were not committed."""


class NotRecording(AllranksError):
    """A dump was requested, but this process is not recording."""

    hint = "call allranks.record() at the start of the script; ALLRANKS_RECORD=0 turns it off"
