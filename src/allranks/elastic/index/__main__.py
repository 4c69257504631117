"""`python -m allranks.elastic.index …` is `allranks index …`; without a verb it is `build`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or words[0] not in {"build", "show", "verify", "-h", "--help"}:
        words = ["build", *words]
    sys.argv = ["allranks", "index", *words]
    runpy.run_module("allranks", run_name="__main__")
