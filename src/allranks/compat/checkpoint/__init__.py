"""elastic_harness.checkpoint"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.checkpoint.config import AsyncSavePolicy, CheckpointConfig, CheckpointLoadConfig, CheckpointTier
from allranks.checkpoint.manager import CheckpointManager
from allranks.checkpoint.state import CheckpointState, create_checkpoint_state, load_checkpoint_to_model
from allranks.checkpoint.stores.backends import NVMeBackend, S3Backend
from allranks.checkpoint.stores.memory import MemorySnapshotBackend
from allranks.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
    MemoryLimitExceeded,
)


class SharedMemorySnapshotBackend(MemorySnapshotBackend):
    """A placeholder there; here it keeps snapshots in this process. Those that outlive it are kept by `allranks run`."""

    def __init__(self, max_snapshots: int = 2, name: str = "elastic_training_snapshot") -> None:
        super().__init__(max_snapshots)
        self.name = name


@dataclass
class S3Config:
    """Only a shape: S3Backend takes what it needs as arguments."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    max_retries: int = 3
    retry_mode: str = "adaptive"


__all__ = [
    "AsyncSavePolicy",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointLoadConfig",
    "CheckpointLoadError",
    "CheckpointManager",
    "CheckpointSaveError",
    "CheckpointState",
    "CheckpointTier",
    "CheckpointValidationError",
    "MemoryLimitExceeded",
    "MemorySnapshotBackend",
    "NVMeBackend",
    "S3Backend",
    "S3Config",
    "SharedMemorySnapshotBackend",
    "create_checkpoint_state",
    "load_checkpoint_to_model",
]
