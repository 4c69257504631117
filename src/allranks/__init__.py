"""allranks finds out why a distributed PyTorch job hangs, and keeps it training when machines fail."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # as type checkers know it, without the cost of importing typing
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

__version__ = "0.3.0"

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
    "diagnose": "allranks.diagnose",
    "stacks": "allranks.stacks",
    "load_checkpoint_index": "allranks.api.functions",
}

_CALLABLE = frozenset({"record", "diagnose", "stacks"})  # packages that can be called

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


class _OldModules:
    """The last finder: asked for modules of allranks that do not exist, which an earlier version may have had."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("allranks."):
            return None
        from allranks import old_modules

        return old_modules.find_spec(name.removeprefix("allranks."))


if not any(getattr(finder, "__qualname__", "") == _OldModules.__qualname__ for finder in sys.meta_path):
    sys.meta_path.append(_OldModules)
