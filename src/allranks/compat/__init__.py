"""A door for scripts written for elastic_harness: its documented names, backed by ours.

    from allranks.compat.scaling import ElasticScalingManager     # change the imports, or

    import allranks.compat
    allranks.compat.install()                                     # leave them: `import elastic_harness…` works
    from elastic_harness.checkpoint import CheckpointManager

Each submodule re-exports; nothing is implemented here but a few shapes that only old tests and files need.
The table of names is docs/compat.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from allranks.errors import InputError

#: elastic_harness module -> ours. The deeper names are where its classes were defined.
MODULES = {
    "elastic_harness.agent": "allranks.compat.agent",
    "elastic_harness.agent.elastic_agent": "allranks.compat.agent",
    "elastic_harness.checkpoint": "allranks.compat.checkpoint",
    "elastic_harness.checkpoint.checkpointing": "allranks.compat.checkpoint",
    "elastic_harness.checkpoint.memory_snapshot": "allranks.compat.checkpoint",
    "elastic_harness.checkpoint.storage_backends": "allranks.compat.checkpoint",
    "elastic_harness.config_validator": "allranks.compat.config_validator",
    "elastic_harness.data": "allranks.compat.data",
    "elastic_harness.data.index_builder": "allranks.compat.data",
    "elastic_harness.data.resumable_dataset": "allranks.compat.data",
    "elastic_harness.errors": "allranks.compat.errors",
    "elastic_harness.metrics": "allranks.compat.metrics",
    "elastic_harness.scaling": "allranks.compat.scaling",
    "elastic_harness.scaling.lr_scaling": "allranks.compat.scaling",
}


def install() -> None:
    """Makes `elastic_harness` importable in this process, as ours. Refuses when the real one is installed."""
    if getattr(sys.modules.get("elastic_harness"), "__allranks__", False):
        return
    if "elastic_harness" in sys.modules or importlib.util.find_spec("elastic_harness") is not None:
        raise InputError(
            "elastic_harness itself is installed: remove it, or import from allranks.compat instead"
        )
    top = ModuleType("elastic_harness", "allranks under the names of elastic_harness")
    top.__path__ = []  # a package: `import elastic_harness.scaling` looks here, and finds sys.modules
    top.__dict__["__allranks__"] = True
    sys.modules["elastic_harness"] = top
    for old, new in MODULES.items():
        module = importlib.import_module(new)
        sys.modules[old] = module
        if old.count(".") == 1:
            setattr(top, old.rpartition(".")[2], module)
