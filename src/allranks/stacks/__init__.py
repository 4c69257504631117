"""What is every rank doing? Finds processes, looks at them without stopping them, merges, and says the cause.

Runs outside the ranks, in the command or the agent; needs no torch. In: live processes or files; out: the
types of `allranks.model.stacks`.

    capture = collect(find_targets(Selection()), CollectOptions())    # live
    capture = read_capture("backtraces/")                             # from files
    report = classify(capture)                                        # pure
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.model.stacks import StacksReport
from allranks.stacks.bundle import join, read_capture, write_bundle
from allranks.stacks.classify import classify
from allranks.stacks.collect import CollectOptions, collect
from allranks.stacks.find import Selection, Target, find_targets, targets_of
from allranks.stacks.progress import Stillness

__all__ = [
    "CollectOptions",
    "Selection",
    "Stillness",
    "Target",
    "classify",
    "collect",
    "find_targets",
    "join",
    "read_bundle",
    "read_capture",
    "targets_of",
    "write_bundle",
]


def read_bundle(path: str | Path) -> StacksReport:
    """What every rank was doing when a bundle or a folder of raw captures was taken."""
    return classify(read_capture(path))


class _CallableModule(ModuleType):
    """Makes `allranks.stacks(…)` work although `allranks.stacks` is this package."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """By its name: a script that imported it can be sent to another process."""
        return importlib.import_module, (self.__name__,)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("allranks.api.functions").stacks(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
