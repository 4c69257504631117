"""The exceptions of allranks. Every one says what happened with the values, and carries a hint.

AllranksError                  anything we raise on purpose; `.hint` holds the cure
├── MissingExtra               an optional dependency is not installed; names the pip command
├── InputError                 the user gave something unreadable (file, flag, plan)
│   └── ConfigurationError     a job configuration does not hold together
├── CheckpointError            a checkpoint could not be saved, found or trusted; knows tier and path
│   ├── CheckpointSaveError    a save failed; training goes on unless the policy is "fail"
│   ├── CheckpointLoadError    no (or not this) checkpoint could be loaded
│   ├── CheckpointValidationError  what was read is damaged or not a checkpoint; names the keys
│   └── MemoryLimitExceeded    a snapshot does not fit into its memory bound
└── (each area adds its own branch below, in this file)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType


class AllranksError(Exception):
    """Base of all errors raised on purpose. `hint` is one or more lines that name the cure."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint


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
            f"[{tier}] Failed to save checkpoint{where}: {reason}", tier=tier, path=path, hint=hint
        )
        self.reason = reason


class CheckpointLoadError(CheckpointError):
    """A load failed. `[TIER] Failed to load checkpoint from '...': why`, without tier when none was asked."""

    def __init__(self, reason: str, *, tier: str = "", path: str = "", hint: str = "") -> None:
        prefix = f"[{tier}] " if tier else ""
        where = f" from '{path}'" if path else ""
        super().__init__(
            f"{prefix}Failed to load checkpoint{where}: {reason}", tier=tier, path=path, hint=hint
        )
        self.reason = reason


class CheckpointValidationError(CheckpointError):
    """What was read is damaged, cut short, or lacks keys. Never raised for a mere I/O failure."""

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
        super().__init__(text, tier=tier, path=path, hint=hint)
        self.reason = reason
        self.missing_keys = tuple(missing_keys)
        self.invalid_keys = tuple(invalid_keys)


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


def _bullets(title: str, lines: Sequence[str]) -> str:
    """A titled list for a hint; empty when there is nothing to list."""
    return "\n".join([f"{title}:", *(f"  - {line}" for line in lines)]) if lines else ""


def require(module: str, *, feature: str, extra: str) -> ModuleType:
    """Imports an optional module, or says in one sentence how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(feature, extra) from error
