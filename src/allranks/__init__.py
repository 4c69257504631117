"""allranks finds out why a distributed PyTorch job hangs, and keeps it training when machines fail.

Ask why:    diagnose("dumps/")   stacks(pid=4711)   status("my-job")   goodput("my-job")   jobs()
Record:     record()   step(n, loss=…)   expect("eval", up_to_s=600)   phase("rollout")
Survive:    Manager, Optimizer, DistributedDataParallel
Try it on:  diagnose(examples.missing_rank)

The commands are in `allranks --help`. Every error is an AllranksError whose `hint` says what to do.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as type checkers know it, without the cost of importing typing
if TYPE_CHECKING:
    from allranks import examples as examples
    from allranks.api.functions import diagnose as diagnose
    from allranks.api.functions import goodput as goodput
    from allranks.api.functions import jobs as jobs
    from allranks.api.functions import load_checkpoint_index as load_checkpoint_index
    from allranks.api.functions import stacks as stacks
    from allranks.api.functions import status as status
    from allranks.errors import AllranksError as AllranksError
    from allranks.manager.ddp import DistributedDataParallel as DistributedDataParallel
    from allranks.manager.manager import Manager as Manager
    from allranks.manager.optimizer import Optimizer as Optimizer
    from allranks.recording import expect as expect
    from allranks.recording import phase as phase
    from allranks.recording import record as record
    from allranks.recording import step as step
    from allranks.recording.comm_hook import FlightRecorderHook as FlightRecorderHook
    from allranks.recording.recorder import Recorder as Recorder

__version__ = "0.4.0"

# Public name -> module that defines it. Imported on first use: the base install has no torch.
_PUBLIC = {
    "record": "allranks.recording",
    "Recorder": "allranks.recording",
    "FlightRecorderHook": "allranks.recording",
    "step": "allranks.recording",
    "expect": "allranks.recording",
    "phase": "allranks.recording",
    "AllranksError": "allranks.errors",
    "Manager": "allranks.manager.manager",
    "Optimizer": "allranks.manager.optimizer",
    "DistributedDataParallel": "allranks.manager.ddp",
    "diagnose": "allranks.api.functions",
    "stacks": "allranks.api.functions",
    "goodput": "allranks.api.functions",
    "load_checkpoint_index": "allranks.api.functions",
    "jobs": "allranks.api.functions",
    "status": "allranks.api.functions",
    "examples": "allranks",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'allranks' has no attribute {name!r}")
    try:
        if name == "examples":
            return importlib.import_module("allranks.examples")
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from allranks.errors import MissingExtra

        raise MissingExtra(f"allranks.{name}", "torch") from error


def __dir__() -> list[str]:
    return __all__
