"""Starts the recorder without a call. allranks_record.pth imports this module if ALLRANKS_RECORD=auto.

Runs in every Python process of a command, including Ray workers and processes of an inference engine. The recorder starts
just before the program creates its first process group. An error of ours does not affect the program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MODULE = "torch.distributed.distributed_c10d"
#: Classes of groups. A store alone does not count, because launchers create one.
CLASSES = ("ProcessGroup", "ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupMPI", "ProcessGroupUCC")


class Finder:
    """Waits in sys.meta_path for the import of a module, and calls `then(module)` after it, once."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name = name
        self._then = then
        self._searching = False  # the other finders may call this one again

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Also called if a program only checks whether the module exists."""
        if name != self._name or self._searching:
            return None
        self._searching = True
        try:
            for finder in [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._follow(spec.loader)
                    return spec
        finally:
            self._searching = False
        return None

    def _follow(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)  # type: ignore[misc]
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    self._then(module)
                except Exception:  # for example an unknown version of torch
                    pass

        try:
            loader.exec_module = exec_module
        except AttributeError:  # no loader, or one without attributes
            pass


def arm(c10d: Any) -> None:
    """Starts the recorder at the first process group, and then removes all wrappers."""
    original = c10d.init_process_group
    kinds = [kind for name in CLASSES if (kind := getattr(c10d, name, None)) is not None]
    makers = [(kind, vars(kind)["__init__"]) for kind in kinds if "__init__" in vars(kind)]

    def start() -> None:
        for kind, maker in makers:
            kind.__init__ = maker
        makers.clear()
        for module in (c10d, sys.modules.get("torch.distributed")):
            if getattr(module, "init_process_group", None) is init_process_group:
                module.init_process_group = original  # type: ignore[union-attr]
        try:
            import allranks.recording

            allranks.recording.record()
        except Exception:
            pass

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        start()
        return sys.modules["torch.distributed"].init_process_group(*args, **kwargs)

    init_process_group.__wrapped__ = original  # type: ignore[attr-defined]
    c10d.init_process_group = init_process_group
    for kind, _ in makers:
        kind.__init__ = _starting(start, kind)


def _starting(start: Callable[[], None], kind: Any) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        start()
        kind.__init__(self, *args, **kwargs)  # the original, which `start` has restored

    return __init__


if os.environ.get("ALLRANKS_RECORD") == "auto":
    sys.meta_path.insert(0, Finder(MODULE, arm))
