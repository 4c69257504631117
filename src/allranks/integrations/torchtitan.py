"""torchtitan: its fault tolerance with allranks' manager.

    from allranks.integrations import torchtitan
    torchtitan.use()                  # before torchtitan is imported; then `fault_tolerance.enable` as documented there

torchtitan imports `torchft`; `use()` makes this name refer to `allranks.torchft` in this process. Or, without changing code:
`python -m allranks.integrations.torchtitan -m torchtitan.train ARGUMENTS`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from allranks.errors import ConfigurationError


class _Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchft` and its modules in `allranks.torchft`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchft" and not fullname.startswith("torchft."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(f"allranks.{spec.name}")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do: the import under its own name has run it."""


def use() -> None:
    """Makes `import torchft` import `allranks.torchft` in this process."""
    if any(isinstance(finder, _Names) for finder in sys.meta_path):
        return
    if "torchft" in sys.modules:
        raise ConfigurationError(
            "torchft is already imported: call allranks.integrations.torchtitan.use() first"
        )
    sys.meta_path.insert(0, _Names())


def main(words: list[str]) -> None:
    """Runs `-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS` with allranks' manager as torchft."""
    use()
    if not words or words == ["-m"]:
        raise SystemExit("usage: python -m allranks.integrations.torchtitan [-m MODULE | SCRIPT] ARGUMENTS")
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
