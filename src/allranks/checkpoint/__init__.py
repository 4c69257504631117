"""Checkpoints in four tiers (memory, peer, NVMe, object store) with one verified restore.

Public names are imported on first use, because the helper process imports this package without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and IDEs see
    from allranks.checkpoint.config import AsyncSavePolicy as AsyncSavePolicy
    from allranks.checkpoint.config import CheckpointConfig as CheckpointConfig
    from allranks.checkpoint.config import CheckpointLoadConfig as CheckpointLoadConfig
    from allranks.checkpoint.config import CheckpointTier as CheckpointTier
    from allranks.checkpoint.convert import export_checkpoint as export_checkpoint
    from allranks.checkpoint.convert import import_checkpoint as import_checkpoint
    from allranks.checkpoint.dcp import StorageReader as StorageReader
    from allranks.checkpoint.dcp import StorageWriter as StorageWriter
    from allranks.checkpoint.manager import CheckpointManager as CheckpointManager
    from allranks.checkpoint.state import CheckpointState as CheckpointState
    from allranks.checkpoint.state import create_checkpoint_state as create_checkpoint_state
    from allranks.checkpoint.state import load_checkpoint_to_model as load_checkpoint_to_model
    from allranks.checkpoint.stores.backends import MemorySnapshotBackend as MemorySnapshotBackend
    from allranks.checkpoint.stores.backends import NVMeBackend as NVMeBackend
    from allranks.checkpoint.stores.backends import S3Backend as S3Backend
    from allranks.checkpoint.stores.peer_store import SnapshotServer as SnapshotServer

# Module -> the public names that it defines.
_MODULES = {
    "config": "CheckpointConfig CheckpointLoadConfig CheckpointTier AsyncSavePolicy",
    "state": "CheckpointState create_checkpoint_state load_checkpoint_to_model",
    "manager": "CheckpointManager",
    "stores.backends": "MemorySnapshotBackend NVMeBackend S3Backend",
    "stores.peer_store": "SnapshotServer",
    "dcp": "StorageReader StorageWriter",
    "convert": "export_checkpoint import_checkpoint",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
