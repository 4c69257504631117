"""Where the time of a job went: the ledger of each rank's seconds, what slow ranks cost, nodes across jobs, advice.

Agents feed the ledger with what they sample anyway (`agent.py`); everything that decides is pure.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """Makes `allranks.goodput(…)` work although `allranks.goodput` is this package."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        import importlib  # the function stands above this package and is looked up when it is called

        return importlib.import_module("allranks.api.functions").goodput(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
