"""Reads the per-thread facts of /proc, as JSON written by a collector, into data. Pure."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.model.stacks import RankState, StackFrame, StacksReport, ThreadFacts, ThreadStack
from allranks.stacks.procfs import parse_syscall
from allranks.stacks.views import is_user_file

_KERNEL_FRAME = re.compile(r"(?:\[<[^>]*>\] )?([A-Za-z_][\w.]*)(?:\+0x|$)")


@dataclass(frozen=True)
class ProcessFacts:
    """One sample of /proc/PID."""

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
    machine, listed, at = str(row.get("machine") or "x86_64"), row.get("threads"), row.get("at_s")
    threads = [item for item in listed if _is_thread(item)] if isinstance(listed, list) else []
    return ProcessFacts(
        pid=row["pid"] if isinstance(row.get("pid"), int) else None,
        title=str(row.get("cmdline") or ""),
        threads=tuple(_thread(item, machine) for item in threads),
        at_s=float(at) if isinstance(at, int | float) else None,
        inner={t["inner_tid"]: t["tid"] for t in threads if isinstance(t.get("inner_tid"), int)},
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
    found = (_KERNEL_FRAME.search(line.strip()) for line in text.splitlines())
    return tuple(match[1].split(".")[0] for match in found if match)


MAX_BYTES = 4 << 20
MAX_FRAMES = 3  # of the user's own, innermost


class SourceLines:
    """A cache of source files. A file changed since the process read it gives a wrong line: it is a hint only."""

    def __init__(self) -> None:
        self._files: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def attach(self, stacks: tuple[ThreadStack, ...], pid: int) -> tuple[ThreadStack, ...]:
        """The same stacks, with the text of the user's innermost lines."""
        return tuple(replace(stack, frames=self._frames(stack.frames, pid)) for stack in stacks)

    def _frames(self, frames: tuple[StackFrame, ...], pid: int) -> tuple[StackFrame, ...]:
        done, result = 0, []
        for frame in frames:
            if done < MAX_FRAMES and not frame.native and is_user_file(frame.file):
                done += 1
                frame = replace(frame, source=self._line(frame, pid))
            result.append(frame)
        return tuple(result)

    def _line(self, frame: StackFrame, pid: int) -> str:
        with self._lock:
            if frame.file not in self._files:
                self._files[frame.file] = self._read(frame.file, pid)
            lines = self._files[frame.file]
        return lines[frame.line - 1].strip()[:200] if 0 < frame.line <= len(lines) else ""

    def _read(self, file: str, pid: int) -> list[str]:
        if not file.startswith("/"):
            return []
        try:
            path = Path(f"/proc/{pid}/root{file}")
            if path.stat().st_size > MAX_BYTES or not path.is_file():
                return []
            return path.read_bytes().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


MAX_SUSPECTS = 16
#: Causes that Python frames and /proc have settled: native frames would add nothing.
_SETTLED_TEXT = (
    "stopped d_state healthy dataloader_wait stdin_wait subprocess_wait child_process_wait "
    "file_lock_wait pipe_write_blocked rendezvous_wait"
)
_SETTLED = frozenset(_SETTLED_TEXT.split())
_IDLE_CHILD = frozenset({"queue_wait", "healthy"})


def choose_suspects(report: StacksReport) -> set[tuple[int, int | None]]:
    """(rank, child) pairs: the culprits, the doubtful, and one of each group that waits alike."""
    chosen: dict[tuple[int, int | None], None] = {}
    for rank in report.culprits:
        state = report.ranks[rank]
        if state.cause not in _SETTLED:
            chosen.setdefault((rank, None))
        for child in state.children:
            if child.cause not in _SETTLED and child.cause not in _IDLE_CHILD:
                chosen.setdefault((rank, child.child))
    seen: set[tuple[str, str]] = set()
    for rank, state in report.ranks.items():
        site = (state.cause, state.where)
        if _doubtful(state) and site not in seen:
            seen.add(site)
            chosen.setdefault((rank, None))
    return set(list(chosen)[:MAX_SUSPECTS])


def _doubtful(state: RankState) -> bool:
    """Whether the pattern that matched was a weak one, or the wait has a hidden inside."""
    return state.confidence < 0.85 or (state.cause == "collective_wait" and "_engine_run" in state.evidence)
