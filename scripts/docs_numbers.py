"""The tables of numbers in README.md and docs/benchmarks.md, from benchmarks/results/*.json (scripts/measure.py).

A table after `<!-- numbers: readme -->` or `<!-- numbers: measured -->` is written anew by scripts/docs.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- numbers: (\w+) -->\n)((?:\|.*\n)*)")
Text = Callable[[Any], str]  # makes a cell from the numbers of a result


@dataclass(frozen=True)
class Row:
    """One line of the tables. `short` is what README calls it; "": it is not there."""

    result: str
    what: str
    ours: Text
    peer: Text
    short: str = ""


#: torchft cannot be installed on every machine: measured once, beside 0.1.0, by the same scripts on the same kind of machine.
TORCHFT = {"kill": "torchft 5.07 s", "leave": "torchft 5.3 s", "step": "torchft 1.8 ms"}
TORCHS_RING = "added by torch's own recorder"


def _best_dcp(numbers: Any, what: str) -> float:
    saves = numbers["2048mb"]["saves"]
    return min(entry[what] for name, entry in saves.items() if name.startswith("dcp"))


def _saves_and_loads(numbers: Any, which: str) -> str:
    parts = ("save", "load_cold", "load_warm", "restart_warm")
    return " / ".join(f"{numbers['2048mb'][part + which]:.2f}" for part in parts) + " s"


def _torchfrtrace(world: Any) -> str:
    peer = f"torchfrtrace {world['torchfrtrace']['cpu_s']:.1f} s, " if "torchfrtrace" in world else ""
    return f"{peer}unpickling alone {world['floor_cpu_s']:.1f} s"


ROWS = (
    Row(
        "recovery",
        "kill -9 of a replica until the next committed step (worst round)",
        lambda n: f"{n['allranks_kill_s']:.3f} s ({n['allranks_kill_worst_s']:.3f})",
        lambda n: f"{TORCHFT['kill']} (with 0.1.0)",
        short="kill -9 of a replica until the next committed step",
    ),
    Row(
        "recovery",
        "clean exit of a replica until the next committed step",
        lambda n: f"{n['allranks_leave_s']:.3f} s",
        lambda n: f"{TORCHFT['leave']} (with 0.1.0)",
    ),
    Row(
        "recovery",
        "cost of a step over plain DDP",
        lambda n: f"{n['step_allranks_ms'] - n['step_plain_ms']:.2f} ms of {n['step_plain_ms']:.2f}",
        lambda n: f"{TORCHFT['step']} (with 0.1.0)",
    ),
    Row(
        "record_overhead",
        "recording one gloo all_reduce, without / with 8-frame stacks",
        lambda n: f"{n['added by ours']:.1f} / {n['added by ours with stacks']:.1f} µs",
        lambda n: f"torch's own ring {n[TORCHS_RING]:.1f} µs, lost with the process",
        short="recording one collective, without / with stacks",
    ),
    Row(
        "record_overhead",
        "the same without communication",
        lambda n: (
            f"{n['added by ours, no communication']:.1f} / {n['added by ours with stacks, no communication']:.1f} µs"
        ),
        lambda n: "–",
    ),
    Row(
        "diagnose",
        "verdict on 256 ranks × 2,000 calls, CPU: pickles / black boxes",
        lambda n: (
            f"{n['ranks']['256']['pickles']['cpu_s']:.1f} / {n['ranks']['256']['boxes']['cpu_s']:.2f} s"
        ),
        lambda n: _torchfrtrace(n["ranks"]["256"]),
        short="verdict on 256 ranks × 2,000 calls, CPU: pickles / black boxes",
    ),
    Row(
        "checkpoint",
        "2 GB checkpoint: training time lost / until durable",
        lambda n: (
            f"{n['2048mb']['saves']['allranks']['lost_s']:.2f} / {n['2048mb']['saves']['allranks']['total_s']:.1f} s"
        ),
        lambda n: (
            f"DCP async_save at its best {_best_dcp(n, 'lost_s'):.2f} / {_best_dcp(n, 'total_s'):.1f} s, "
            f"raw write + fsync {n['2048mb']['raw_write_fsync_s']:.1f} s"
        ),
        short="2 GB checkpoint: training time lost / until durable",
    ),
    Row(
        "checkpoint_against",
        "2 GB against 0.1.0, in turns: until durable / back in place, cold / warm / into a new model, warm",
        lambda n: _saves_and_loads(n, "_s"),
        lambda n: f"0.1.0: {_saves_and_loads(n, '_before_s')}",
    ),
    Row(
        "startup",
        "`allranks --help`: wall time, best / median",
        lambda n: f"{n['help']['best_s'] * 1000:.0f} / {n['help']['median_s'] * 1000:.0f} ms",
        lambda n: (
            f"promise 100 ms; bare `python -c pass` {n['python']['best_s'] * 1000:.0f} / "
            f"{n['python']['median_s'] * 1000:.0f} ms"
        ),
    ),
    Row(
        "startup",
        "`import allranks` beyond the interpreter: wall time, best / median",
        lambda n: (
            f"{n['import_beyond_python']['best_s'] * 1000:.1f} / {n['import_beyond_python']['median_s'] * 1000:.1f} ms"
        ),
        lambda n: "promise 30 ms",
    ),
    Row(
        "job_page",
        "lighthouse CPU for one refresh of the job page, 1,000 replicas",
        lambda n: f"{n['refresh_ms']:.0f} ms, {n['bytes'] / 1000:.0f} kB",
        lambda n: "promise 100 ms",
    ),
    Row(
        "trace_size",
        "Perfetto trace of 256 ranks × 2,000 calls",
        lambda n: f"{n['perfetto_mb']:.1f} MB",
        lambda n: "promise 40 MB",
    ),
)


def with_numbers(text: str) -> str:
    """The text of a page with its tables of numbers written anew. A line whose benchmark has no kept result stays."""
    return TABLE.sub(lambda match: match[1] + "\n".join(KINDS[match[2]](match[3])) + "\n", text)


def _readme(before: str) -> Iterator[str]:
    yield from ("| | allranks | peer |", "|---|---|---|")
    for row in ROWS:
        if row.short and (result := _read(row.result)):
            ours = row.ours(result["numbers"]).partition(" (")[0]
            yield f"| {row.short} | {ours} | {row.peer(result['numbers'])} |"
        elif row.short:
            yield from (line for line in before.splitlines() if line.startswith(f"| {row.short} |"))


def _measured(before: str) -> Iterator[str]:
    yield from ("| what | allranks | beside it | command | when |", "|---|---|---|---|---|")
    for row in ROWS:
        if result := _read(row.result):
            command = result["command"].removeprefix("benchmarks/")
            load = result.get("load", result["machine"].get("load"))
            when = result["date"] + ("" if load is None else f", load {load:.0f}")
            cells = (row.ours(result["numbers"]), row.peer(result["numbers"]), f"`{command}`", when)
            yield f"| {' | '.join((row.what, *cells))} |"


def _read(name: str) -> Any:
    """The result of a benchmark; None before it was measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


KINDS = {"readme": _readme, "measured": _measured}
