"""Checkpoints in four tiers (memory, peer, NVMe, object store) with one verified restore.

Importing this package imports nothing else: the helper process that writes checkpoints lives here too and
must start without torch. The public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
