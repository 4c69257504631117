"""What `allranks stacks --tree` shows: all processes of a job, their roles, and who waits for whom. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from allranks.model.stacks import JobLook, Process, ProcessFinding, ThreadLook, Where

Json = dict[str, object]


def finding_json(finding: ProcessFinding, look: JobLook, role: str = "") -> Json:
    """The public shape; fields may be added, never taken away."""
    return {
        "schema": 1,
        "state": finding.state,
        "sentence": finding.sentence,
        "reason": finding.reason,
        "guilty": [asdict(one) for one in finding.guilty],
        "chain": [{"pid": one.pids[0], **asdict(one)} for one in finding.chain],
        "edges": [{"waits": _place(a), "for": _place(b)} for a, b in finding.edges],
        "processes": [_process(one) for one in look.processes if role in one.name],
        "notes": list(look.notes),
    }


def _place(where: Where) -> Json:
    return {"node": where[0], "pid": where[1]}


_FACTS = "pid ppid node role number group title rank world alive ended ticks switches"


def _process(one: Process) -> Json:
    return {
        "name": one.name,
        **{name: getattr(one, name) for name in _FACTS.split()},
        "threads": [_thread(thread) for thread in one.threads if thread.frames or thread.main],
    }


def _thread(one: ThreadLook) -> Json:
    stack = [f"{f.file.rsplit('/', 1)[-1]}:{f.line} in {f.name}" for f in one.frames[:40]]
    kind = {"wait": one.wait.kind, "says": one.wait.says, "moved": one.moved, "busy": one.busy}
    return {"tid": one.tid, "name": one.name, "task": one.task, **kind, "stack": stack}


def render(finding: ProcessFinding, look: JobLook, role: str = "") -> Iterator[str]:
    """The answer first, then the culprit, then the tree of roles."""
    yield f"{finding.state.upper()}: {finding.sentence}"
    if finding.reason:
        yield f"  {finding.reason}"
    guilty = {one.pid for one in finding.guilty}
    for one in finding.guilty:
        place = f"{one.file}:{one.line} in {one.function}" if one.file else "no line"
        yield f"  {one.role} (pid {one.pid}): {place}: {one.wait}"
    yield ""
    groups: dict[tuple[str, str], list[Process]] = {}
    for process in look.processes:
        if role in process.name and not process.ours:
            groups.setdefault((process.role, _does(process)), []).append(process)
    for (name, does), members in sorted(groups.items(), key=lambda item: _order(item[1], guilty)):
        numbers = f" ×{len(members)}" if len(members) > 1 else ""
        pids = ", ".join(str(p.pid) for p in members[:6]) + (" …" if len(members) > 6 else "")
        sign = " ◄" if guilty & {p.pid for p in members} else ""
        yield f"{name}{numbers}{sign} (pid {pids}): {does}"
    yield from (f"note: {text}" for text in look.notes)


def _order(members: list[Process], guilty: set[int]) -> tuple[bool, bool, int, int]:
    return not guilty & {p.pid for p in members}, members[0].system, len(members), members[0].pid


def _does(process: Process) -> str:
    return " at ".join(filter(None, process.does))
