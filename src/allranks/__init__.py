"""allranks finds out why a distributed PyTorch job hangs, and keeps it training when machines fail."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as type checkers know it, without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.3.0"

# Public name -> module that defines it. Imported on first use: the base install has no torch.
_PUBLIC = {
    "record": "allranks.record",
    "Recorder": "allranks.record",
    "FlightRecorderHook": "allranks.record",
    "step": "allranks.record",
    "expect": "allranks.record",
    "phase": "allranks.record",
    "AllranksError": "allranks.errors",
    "Manager": "allranks.manager.manager",
    "Optimizer": "allranks.manager.optimizer",
    "DistributedDataParallel": "allranks.manager.ddp",
    "diagnose": "allranks.diagnose",
    "stacks": "allranks.stacks",
    "goodput": "allranks.goodput",
    "load_checkpoint_index": "allranks.api.functions",
    "jobs": "allranks.api.live",
    "status": "allranks.api.live",
    "examples": "allranks.examples",
}

_CALLABLE = frozenset({"record", "diagnose", "stacks", "goodput", "examples"})  # packages

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'allranks' has no attribute {name!r}")
    try:
        module = importlib.import_module(_PUBLIC[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from allranks.errors import MissingExtra

        raise MissingExtra(f"allranks.{name}", "torch") from error
    return module if name in _CALLABLE else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
