"""torchft's smallest modules, in one file: MODULES says which names each has, and the package makes modules of them.

What has no counterpart here can be imported, and says what to use when it is called.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

from allranks.errors import ConfigurationError
from allranks.manager.optimizer import Optimizer, OptimizerWrapper
from allranks.torchft import coordination

log = logging.getLogger("allranks.torchft")


def not_offered(name: str, instead: str) -> Any:
    """A class of that name that cannot be made (nor called): both raise one sentence."""

    def refuse(self: object, *arguments: object, **named: object) -> None:
        raise ConfigurationError(f"allranks.torchft does not offer {name}: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not offered: {instead}.", "__module__": __name__})


def setup_logger(name: str) -> None:
    """Says once per name what is there instead when OpenTelemetry was asked for (TORCHFT_USE_OTEL)."""
    if os.environ.get("TORCHFT_USE_OTEL", "false").lower() not in ("false", "0", ""):
        log.warning(
            "%s: no OpenTelemetry export here; scrape /metrics of the lighthouse, or attach a handler", name
        )


def shutdown_logger() -> None:
    """Nothing was opened."""


MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "_torchft": (
        "Where torchft's compiled servers and clients live.",
        {name: getattr(coordination, name) for name in coordination.__all__},
    ),
    "optim": (
        "The optimizer that steps when all commit.",
        {"Optimizer": Optimizer, "OptimizerWrapper": OptimizerWrapper},
    ),
    "otel": (
        "Accepted: the manager logs through `logging`, the lighthouse serves /metrics for Prometheus.",
        {"setup_logger": setup_logger, "shutdown": shutdown_logger},
    ),
    "collectives": (
        "FP8 collectives.",
        {
            "allreduce_quantized": not_offered(
                "allreduce_quantized", "use Manager.allreduce, which reduces in full precision"
            ),
            "reduce_scatter_quantized": not_offered(
                "reduce_scatter_quantized", "use the group's reduce_scatter"
            ),
        },
    ),
    "parameter_server": (
        "A server of parameters.",
        {
            "ParameterServer": not_offered(
                "ParameterServer", "configure a ProcessGroupGloo of two ranks yourself for each session"
            )
        },
    ),
    "torchcomms": (
        "Groups over torchcomms.",
        {
            "ProcessGroupTorchComms": not_offered(
                "ProcessGroupTorchComms", "use ProcessGroupNCCL (CUDA) or ProcessGroupGloo (CPU)"
            )
        },
    ),
    "torchx": (
        "The component that starts replicas.",
        {
            "hsdp": not_offered(
                "torchx.hsdp", "start with `allranks run --replicas N --nproc-per-node M SCRIPT`"
            )
        },
    ),
}


def make_modules(package: str) -> dict[str, ModuleType]:
    """Makes them importable as modules of the package; returns them by name."""
    made = {}
    for name, (text, names) in MODULES.items():
        made[name] = module = ModuleType(f"{package}.{name}", text)
        vars(module).update(names, __all__=list(names))
        sys.modules[module.__name__] = module
    return made
