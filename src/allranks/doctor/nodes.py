"""Compares the facts of all nodes of a job that must be the same.

srun -N 4 allranks doctor --json | allranks doctor compare -
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from allranks.doctor import CLOCK_LIMIT_S, Check, Status
from allranks.errors import InputError
from allranks.stacktraces.gpus import query_gpus

_ONE_IMAGE = "Use one image or environment"
#: fact -> (status of a difference, its cost, fix)
_FACTS: dict[str, tuple[Status, str, str]] = {
    "nccl": (
        "problem",
        "ncclCommInitRank fails or hangs between different NCCL versions",
        "pip install the same nvidia-nccl package everywhere, or use one image",
    ),
    "torch": ("problem", "ranks of different torch versions cannot communicate", _ONE_IMAGE),
    "allranks": ("problem", "agents and lighthouse of different versions may reject each other", _ONE_IMAGE),
    "cuda": ("problem", "kernels differ between nodes", _ONE_IMAGE),
    "python": ("warning", "pickled objects may be unreadable on other nodes", _ONE_IMAGE),
    "driver": ("warning", "the oldest driver limits all nodes", "Install the same driver on all nodes"),
    "gpus": ("warning", "ranks get different hardware: the slowest limits all", "Choose nodes of one kind"),
}


def read_facts(clock_offset_s: float | None = None) -> dict[str, str | float | None]:
    """The facts of this node. `clock_offset_s` is relative to the lighthouse; None if not measured."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "allranks": _version("allranks"),
        "torch": _version("torch"),
        "nccl": _version("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
        "cuda": _version("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
        **_gpus(),
        "clock_offset_s": clock_offset_s,
    }


def read_answers(lines: Iterable[str], name: str) -> list[dict[str, object]]:
    """The `facts` of doctor's output: one JSON object per line, or a single object over several lines."""
    text = "\n".join(lines)
    try:
        found = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name} holds no output of `allranks doctor --json`: {error}") from error
    facts = [answer.get("facts") for answer in found if isinstance(answer, dict)]
    if not facts or not all(isinstance(each, dict) for each in facts):
        raise InputError(f"{name} holds no output of `allranks doctor --json`")
    return facts  # type: ignore[return-value]


def compare(nodes: Sequence[Mapping[str, object]]) -> list[Check]:
    """One check per fact, and one of the clocks."""
    return [*(_agree(nodes, fact, *row) for fact, row in _FACTS.items()), _clocks(nodes)]


def _agree(nodes: Sequence[Mapping[str, object]], fact: str, worst: Status, cost: str, hint: str) -> Check:
    values: dict[str, list[str]] = {}
    for node in nodes:
        values.setdefault(str(node.get(fact) or "none"), []).append(str(node.get("host")))
    if len(values) == 1:
        value = next(iter(values))
        status: Status = "skipped" if value == "none" else "ok"
        return Check(f"{fact} across nodes", status, f"{value} on all {len(nodes)}")
    groups = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
    text = "; ".join(f"{value} on {_some(hosts)}" for value, hosts in groups)
    return Check(f"{fact} across nodes", worst, f"{text}: {cost}", hint)


def _clocks(nodes: Sequence[Mapping[str, object]]) -> Check:
    known = [(n.get("clock_offset_s"), str(n.get("host"))) for n in nodes]
    offsets = sorted((float(o), host) for o, host in known if isinstance(o, (int, float)) and abs(o) < 1e18)
    if len(offsets) < 2:
        return Check("clocks across nodes", "skipped", "needs `allranks doctor --lighthouse` on each node")
    (low, first), (high, last) = offsets[0], offsets[-1]
    text = f"{high - low:.1f} s between {first} and {last}"
    if high - low > CLOCK_LIMIT_S:
        return Check("clocks across nodes", "problem", text, "Start chrony or ntpd on all nodes")
    return Check("clocks across nodes", "ok", text)


def _some(hosts: list[str]) -> str:
    return ", ".join(sorted(hosts)[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _gpus() -> dict[str, str | None]:
    rows = query_gpus("--query-gpu=driver_version,name", 10.0)
    if not rows:
        return {"driver": None, "gpus": None}
    return {"driver": rows[0][0], "gpus": f"{len(rows)} x {rows[0][1]}"}


def read_files(paths: Sequence[str], stdin: Iterable[str]) -> list[dict[str, object]]:
    """The facts in files; "-" is standard input."""
    found = []
    for path in paths:
        if path == "-":
            found += read_answers(stdin, "standard input")
            continue
        try:
            text = Path(path).read_text(errors="replace")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        found += read_answers(text.splitlines(), path)
    return found
