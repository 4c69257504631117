"""Module paths of earlier versions: importing one gives the names that it held, from where they are now, with a warning.

`old_modules.txt` says which: for a module of today, those of 0.1.0 to 0.3.0 whose names it holds. Modules of which no name
is left, and those inside of what is no package any more (`elastic.scaling.rules`), are not there. Nor is one whose package has something else of its name now (`elastic.config.check`, a function), which
the import would replace.
"""

from __future__ import annotations

import importlib
import warnings
from functools import lru_cache
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_RENAMED = {
    "manager.heal_wire": {
        "HealWireError": "ChannelError",
        "read_frame": "receive_json",
        "send_frame": "send_json",
    }
}


@lru_cache(maxsize=1)
def homes() -> dict[str, list[str]]:
    """Old module -> the modules that hold its names today, all without `allranks.`; a package that is gone has none."""
    found: dict[str, list[str]] = {}
    text = Path(__file__).with_suffix(".txt").read_text().replace("\n  ", " ")
    for line in text.splitlines():
        now, _, before = line.partition(": ")
        for old in before.split():
            found.setdefault(old, []).append(now)
            found.setdefault(old.split(".")[0], [])
    return found


def find_spec(name: str) -> ModuleSpec | None:
    """How to import `allranks.NAME`, when an earlier version had it; else None."""
    if name not in homes():
        return None
    return ModuleSpec(f"allranks.{name}", _OldModule(), is_package="." not in name)


class _OldModule(Loader):
    """Fills a module with the names of those that hold them today."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.removeprefix("allranks.")
        now = homes()[old]
        if not now:
            return
        where = " and ".join(f"allranks.{home}" for home in now)
        warnings.warn(f"{module.__name__} is now {where}", DeprecationWarning, stacklevel=2)
        for home in reversed(now):
            names = vars(importlib.import_module(f"allranks.{home}"))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})
        for before, name in _RENAMED.get(old, {}).items():
            vars(module)[before] = vars(module)[name]
