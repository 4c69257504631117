"""Checkpoints in four tiers (memory, peer, NVMe, object store) with one verified restore.

Importing this package imports nothing else: the helper process that writes checkpoints lives here too and
must start without torch. The public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "CheckpointConfig": "config",
    "CheckpointLoadConfig": "config",
    "CheckpointTier": "config",
    "AsyncSavePolicy": "config",
    "CheckpointState": "state",
    "create_checkpoint_state": "state",
    "load_checkpoint_to_model": "state",
    "CheckpointManager": "manager",
    "MemorySnapshotBackend": "stores.backends",
    "NVMeBackend": "stores.backends",
    "S3Backend": "stores.backends",
    "SnapshotServer": "stores.peer_store",
    "StorageReader": "dcp",
    "StorageWriter": "dcp",
    "export_checkpoint": "convert",
    "import_checkpoint": "convert",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
