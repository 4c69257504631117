"""The old name of `allranks.drill`: `allranks.testing.faults` and `.ranks` still work, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings

for _name in ("faults", "ranks"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"allranks.drill.{_name}")
warnings.warn("allranks.testing is now allranks.drill", DeprecationWarning, stacklevel=2)
