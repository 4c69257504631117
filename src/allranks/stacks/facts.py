"""Reads the per-thread facts of /proc, as JSON written by a collector, into data. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allranks.model.stacks import ThreadFacts, ThreadStack
from allranks.stacks.syscalls import parse_syscall

_KERNEL_FRAME = re.compile(r"(?:\[<[^>]*>\] )?([A-Za-z_][\w.]*)(?:\+0x|$)")


@dataclass(frozen=True)
class ProcessFacts:
    """One look at /proc/PID."""

    pid: int | None
    title: str
    threads: tuple[ThreadFacts, ...]
    at_s: float | None = None
    inner: Mapping[int, int] = field(default_factory=dict)  # thread id in its PID namespace -> id outside


def parse_facts(text: str) -> ProcessFacts:
    """Facts from the JSON of a capture; raises ValueError when it is not that."""
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    machine = str(row.get("machine") or "x86_64")
    threads = row.get("threads")
    at = row.get("at_s")
    return ProcessFacts(
        pid=row["pid"] if isinstance(row.get("pid"), int) else None,
        title=str(row.get("cmdline") or ""),
        threads=tuple(
            _thread(item, machine)
            for item in (threads if isinstance(threads, list) else [])
            if _is_thread(item)
        ),
        at_s=float(at) if isinstance(at, int | float) else None,
        inner={
            item["inner_tid"]: item["tid"]
            for item in (threads if isinstance(threads, list) else [])
            if _is_thread(item) and isinstance(item.get("inner_tid"), int)
        },
    )


def renumber(stacks: tuple[ThreadStack, ...], inner: Mapping[int, int]) -> tuple[ThreadStack, ...]:
    """Stacks of a process in another PID namespace, with thread ids as seen from here.

    py-spy names threads by their inner ids, and cannot look up whether they run.
    """
    if not inner:
        return stacks
    return tuple(
        replace(one, tid=inner[one.tid], active=None) if one.tid is not None and one.tid in inner else one
        for one in stacks
    )


def _is_thread(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("tid"), int)


def _thread(row: dict[str, object], machine: str) -> ThreadFacts:
    name, args = parse_syscall(str(row.get("syscall") or ""), machine)
    tid, owner = row["tid"], row.get("mutex_owner")
    return ThreadFacts(
        tid=tid if isinstance(tid, int) else 0,
        comm=str(row.get("comm") or ""),
        state=str(row.get("state") or "")[:1],
        wchan=_symbol(str(row.get("wchan") or "")),
        syscall=name,
        args=args,
        ticks=_count(row.get("utime")) + _count(row.get("stime")),
        kernel_stack=kernel_functions(str(row.get("kstack") or "")),
        mutex_owner=owner if isinstance(owner, int) else None,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _symbol(wchan: str) -> str:
    """`poll_schedule_timeout.constprop.0` is `poll_schedule_timeout`; "0" means not waiting."""
    name = wchan.split(".")[0].strip()
    return "" if name == "0" else name


def kernel_functions(text: str) -> tuple[str, ...]:
    """Function names of a kernel stack, innermost first."""
    names = []
    for line in text.splitlines():
        if match := _KERNEL_FRAME.search(line.strip()):
            names.append(match.group(1).split(".")[0])
    return tuple(names)
