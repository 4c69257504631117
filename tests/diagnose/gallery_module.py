"""examples/hangs/gallery.py as a module, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HANGS = Path(__file__).parents[2] / "examples" / "hangs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery_of_hangs", HANGS / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gallery: Any = _load()
