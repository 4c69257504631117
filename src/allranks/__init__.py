"""allranks finds out why a distributed PyTorch job hangs, and keeps it training when machines fail."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

# Public name -> module that defines it. Imported on first use: the base install has no torch.
_PUBLIC = {
    "record": "allranks.record",
    "Recorder": "allranks.record",
    "FlightRecorderHook": "allranks.record",
    "step": "allranks.record",
    "expect": "allranks.record",
    "AllranksError": "allranks.errors",
    "Manager": "allranks.manager.manager",
    "Optimizer": "allranks.manager.optimizer",
    "DistributedDataParallel": "allranks.manager.ddp",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'allranks' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    return module if name == "record" else getattr(module, name)  # that package can be called


def __dir__() -> list[str]:
    return __all__
