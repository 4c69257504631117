"""`allranks stacks --tree`: all processes of a job, their roles, and who waits for whom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from allranks.cli.terminal import note, write_whole
from allranks.diagnosis.process_verdict import explain_processes
from allranks.model.parsing import printable
from allranks.model.processes import JobLook, Process, ProcessFinding, ThreadLook
from allranks.stacktraces.debug_config import read_debug_options
from allranks.stacktraces.roles import with_roles
from allranks.stacktraces.tree import LookOptions, find_tree, look_at_processes, read_looks, write_look

Json = dict[str, object]


class Shown(Protocol):
    """The flags that say what is shown."""

    @property
    def for_s(self) -> float: ...

    @property
    def role(self) -> str: ...

    @property
    def json(self) -> bool: ...

    @property
    def bundle(self) -> str: ...

    @property
    def html(self) -> str: ...

    @property
    def config(self) -> str: ...


def show_tree(pids: Sequence[int], flags: Shown) -> int:
    """0 moving, 1 stuck or unclear."""
    rules = with_roles(read_debug_options(flags.config).roles) if flags.config else ()
    look = look_at_processes(find_tree(pids), LookOptions(flags.for_s, rules=rules))
    if flags.bundle:
        note(f"allranks stacks: Wrote {write_look(look, Path(flags.bundle))}")
    return _show(look, flags)


def join_bundles(folders: Sequence[str], flags: Shown) -> int:
    """The same from folders of --bundle, one of each node."""
    return _show(read_looks(folders), flags)


def _show(look: JobLook, flags: Shown) -> int:
    finding = explain_processes(look)
    if flags.html:
        from allranks.stacktraces.html import render_processes

        write_whole(flags.html, [render_processes(look, finding, time.time())])
    if flags.json:
        print(json.dumps(finding_json(finding, look, flags.role), indent=1))
    else:
        for line in render(finding, look, flags.role):
            print(printable(line, 100_000))
    return 0 if finding.state == "moving" else 1


def finding_json(finding: ProcessFinding, look: JobLook, role: str = "") -> Json:
    """The public shape; fields may be added, never taken away."""
    return {
        "schema": 1,
        "state": finding.state,
        "sentence": finding.sentence,
        "reason": finding.reason,
        "guilty": [asdict(one) for one in finding.guilty],
        "chain": [{"pid": one.pids[0], **asdict(one)} for one in finding.chain],
        "processes": [_process(one) for one in look.processes if role in one.name],
        "notes": list(look.notes),
    }


def _process(one: Process) -> Json:
    names = (
        "pid",
        "ppid",
        "node",
        "role",
        "number",
        "group",
        "title",
        "rank",
        "world",
        "alive",
        "ended",
        "ticks",
        "switches",
    )
    return {
        "name": one.name,
        **{name: getattr(one, name) for name in names},
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
    """What a process does: its thread that tells most."""
    if not process.alive:
        return f"has ended {process.ended}".strip()
    told = sorted(
        process.threads, key=lambda t: (t.wait.kind == "idle" or not t.wait.strong, not t.handles, not t.main)
    )
    if not told:
        return "not read" if process.read else "is not Python"
    user = told[0].user
    where = (
        f" at {user.file.rsplit('/', 1)[-1]}:{user.line} in {user.name.rsplit('.', 1)[-1]}"
        if user is not None
        else ""
    )
    return f"{told[0].wait.says}{where}"
