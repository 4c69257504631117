"""Makes docs/gpu.md: `gpu_docs.py > docs/gpu.md`.

The numbers are those of benchmarks/results/gpu.json (written by scripts/gpu.sh, slices put together), what they mean is
written by hand in benchmarks/results/gpu_notes.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

HEAD = """# On a GPU

This page is made by `scripts/gpu_docs.py` from what `scripts/gpu.sh` measured. Several NCCL ranks share one GPU (each looks like a
host of its own, traffic goes over loopback sockets): times of collectives are not those of a cluster, the order of events is.

```console
$ scripts/gpu.sh --list                       # the checks, and how long each takes at most
$ scripts/gpu.sh --only record,manager        # in slices, if the machine is lent for minutes
$ scripts/gpu.sh --table                      # one table of all slices, and gpu.json
```

What does not hold is listed as such.
"""


def shown(value: Any) -> str:
    """A number, or the median and the worst of several."""
    if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        ordered = sorted(value)
        return f"median {ordered[len(ordered) // 2]}, worst {ordered[-1]} of {len(ordered)}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def rows(numbers: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in numbers.items():
        if key in {"stacks", "error", "exit_codes", "pass"}:
            continue
        if isinstance(value, dict):
            found += rows(value, f"{prefix}{key}: ")
        elif value not in ([], {}, None):
            found.append(f"| {prefix}{key} | {shown(value)} |")
    return found


def of_all_ranks(verdicts: dict[str, bool]) -> dict[str, bool]:
    """One claim for those that are made of every rank."""
    found: dict[str, bool] = {}
    for claim, holds in verdicts.items():
        name = re.sub(r"^rank \d+:", "every rank:", claim)
        found[name] = found.get(name, True) and holds
    return found


def page(results: dict[str, Any], notes: str) -> str:
    lines = [HEAD, notes]
    for name, found in results.items():
        machine = ", ".join(f"{key} {value}" for key, value in found.get("machine", {}).items())
        lines += [f"\n## {name.replace('_', ' ')}", f"{machine}.\n"]
        lines += [
            f"- {'holds' if holds else '**does not hold**'}: {claim}"
            for claim, holds in of_all_ranks(found["verdicts"]).items()
        ]
        numbers = rows(found["numbers"])
        lines += ["", "| measured | value |", "|---|---|", *numbers] if numbers else []
    return "\n".join(lines)


if __name__ == "__main__":
    found = json.loads((RESULTS / "gpu.json").read_text())
    print(page(found, (RESULTS / "gpu_notes.md").read_text()))
