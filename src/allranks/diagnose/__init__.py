"""Dumps of all ranks in, the guilty rank and the cause out. Pure functions: no torch, files, sockets or clock.

align    RankTrace per rank → Job: groups as the whole job knows them, one lane per (group, rank)
program  what ranks of one program share, worked out once
disbelief  completions that cannot be, taken back
match    calls of one collective compared across ranks, by what the operation demands
p2p      sends and receives paired by peer and order
shift    an extra or a skipped call, found by aligning sequences and stacks
waits    who waits in which call for whom
graph    the wait-for graph and its sinks
absent, entered, misfit, cycles, crossed, quiet  from sinks to findings; verdict puts the root cause first
"""

import sys
from types import ModuleType
from typing import Any

from allranks.diagnose.verdict import DiagnoseOptions, diagnose

__all__ = ["DiagnoseOptions", "diagnose"]


class _CallableModule(ModuleType):
    """Makes `allranks.diagnose(…)` work although `allranks.diagnose` is this package."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        import importlib  # the function stands above the stations and is looked up when it is called

        return importlib.import_module("allranks.api.functions").diagnose(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
