"""A replay as one Python file that needs torch only. Pure.

Nothing of the record becomes code: names are written as identifiers or as escaped comments, numbers as numbers.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from allranks.diagnosis.replay import Action, Await, DestroyGroup, EndProcess, MarkStep, PostCall, ReplayPlan
from allranks.model.formatting import ranks_text
from allranks.model.trace import Frame

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Byte": "uint8", "Char": "int8", "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_REDUCTIONS = {"avg": "SUM", "premul_sum": "SUM", "other": "SUM", "": "SUM"}
_COMMENT = 160

_HEAD = '''"""A recorded hang, repeated by {processes} processes over gloo on one machine. Needs torch only: `python {name}`

{about}

Each process posts the calls of one rank in the order in which that rank made them, with small tensors, and waits where the
rank waited. After {{QUIET_S:g}} s without a move the positions of all processes are printed and the processes are ended: exit code 1.
Under a launcher that sets RANK (torchrun, `allranks run`) each process is one rank. Written by `allranks replay`.
"""

import contextlib
import datetime
import multiprocessing
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

QUIET_S = 10.0
#: Process i stands for this rank of the recorded job.
RANKS = {ranks}
#: Members of each group; group 0 is all processes.
GROUPS = {groups}
LINES = []


def line(function):
    """A line of the recorded program that made calls: each is one function here, so that stacks differ where they differed."""
    LINES.append(function)
    return function


'''

_TAIL = '''

def tensors(sizes, dtype):
    return [torch.zeros(size, dtype=getattr(torch, dtype)) for size in sizes]


def arguments(op, group, given, taken, dtype, partner, more):
    """(function, its arguments) of one call."""
    g, gives, takes = group, tensors(given, dtype), tensors(taken, dtype)
    reduction = getattr(dist.ReduceOp, more[0]) if more and isinstance(more[0], str) else None
    if op in ("all_reduce", "all_reduce_coalesced"):
        return getattr(dist, op), (gives if op != "all_reduce" else gives[0], reduction, g, True)
    if op == "reduce":
        return dist.reduce, (gives[0], partner, reduction, g, True)
    if op == "broadcast":
        return dist.broadcast, ((gives or takes)[0], partner, g, True)
    if op == "all_gather":
        return dist.all_gather, (takes, gives[0], g, True)
    if op == "all_gather_into_tensor":
        return dist.all_gather_into_tensor, (takes[0], gives[0], g, True)
    if op == "reduce_scatter":
        return dist.reduce_scatter, (takes[0], gives, reduction, g, True)
    if op == "reduce_scatter_tensor":
        return dist.reduce_scatter_tensor, (takes[0], gives[0], reduction, g, True)
    if op == "all_to_all_single":
        half = len(more) // 2
        return dist.all_to_all_single, (takes[0], gives[0], list(more[:half]), list(more[half:]), g, True)
    if op == "gather":
        return dist.gather, (gives[0], takes or None, partner, g, True)
    if op == "scatter":
        return dist.scatter, (takes[0], gives or None, partner, g, True)
    if op == "barrier":
        return dist.barrier, (g, True)
    if op == "monitored_barrier":
        return dist.monitored_barrier, (g, datetime.timedelta(hours=1))
    peer = None if partner < 0 else partner
    if op == "irecv" and peer is None:
        return dist.recv, (takes[0], None, g, more[0])
    return getattr(dist, op), ((gives if op == "isend" else takes)[0], peer, g, more[0])


def mark(step):
    """Where allranks records, it knows the step."""
    if "allranks" in sys.modules:
        sys.modules["allranks"].step(step)


def run(process, position):
    """One process: the actions of its program, in order."""
    program = next(actions for members, actions in PROGRAMS if process in members)
    if program[0][0] == "end" and program[0][1] not in ("init_process_group", "exit"):
        end(program[0], [], position)
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
    groups = [dist.group.WORLD] + [dist.new_group(list(members)) for members in GROUPS[1:]]
    works = []
    for at, action in enumerate(program):
        position(at)
        try:
            perform(action, groups, works, position)
        except (RuntimeError, ValueError):
            if all(kind in ("end", "wait") for kind, *_ in program[at + 1 :]):
                raise  # the rank made no call after it


def perform(action, groups, works, position):
    kind, *rest = action
    if kind == "end":
        end(action, works, position)
    elif kind == "step":
        mark(*rest)
    elif kind == "wait":
        if works[rest[0]] is not None:
            works[rest[0]].wait()
    elif kind == "destroy":
        with contextlib.suppress(ValueError, AssertionError):  # with the group of all, the others went
            dist.destroy_process_group(groups[rest[0]])
    else:
        path, op, group, *sizes = rest
        works.append(None)
        works[-1] = LINES[path[0]](path[1:], *arguments(op, groups[group], *sizes))
        if kind == "call" and hasattr(works[-1], "wait"):
            works[-1].wait()


def end(action, works, position):
    """What the rank did last."""
    _, how, text = action
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError(text)
    if how == "new_group":
        dist.new_group()
    for work in works if how == "wait" else ():
        if hasattr(work, "wait"):
            work.wait()
    while how == "sleep":
        time.sleep(3600.0)  # the rank made no further call


def child(process, folder, positions):
    os.environ.update(RANK=str(process), WORLD_SIZE=str(len(RANKS)), MASTER_ADDR="127.0.0.1")
    init = dist.init_process_group

    def by_file(backend, **options):
        init(backend, init_method="file://" + folder + "/store", rank=process, world_size=len(RANKS), **options)

    dist.init_process_group = by_file

    def position(at):
        positions[process] = at + 1

    run(process, position)
    positions[process] = -1
    os._exit(0)


def where(process, at):
    program = next(actions for members, actions in PROGRAMS if process in members)
    done = [action for action in program[:at] if action[0] in ("call", "post")]
    if at < 0 or not done:
        return "has ended" if at < 0 else "has made no call"
    _, path, op, group, *_ = done[-1]
    line = LINES[path[0]].__code__.co_firstlineno
    return f"{op} of group {group}, line {line} of this file; then {program[at - 1][0]} {program[at - 1][1:2]}"


def main():
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), lambda at: None)
        return 0
    context = multiprocessing.get_context("fork")
    positions = context.Array("i", len(RANKS))
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=child, args=(i, folder, positions), daemon=True) for i in range(len(RANKS))]
        for process in processes:
            process.start()
        last, since = [], time.monotonic()
        while any(process.is_alive() for process in processes):
            if list(positions) != last:
                last, since = list(positions), time.monotonic()
            if time.monotonic() - since > QUIET_S:
                print(f"nothing has moved for {QUIET_S:g} s:")
                for process, at in enumerate(last):
                    gone = "" if processes[process].is_alive() else " (its process is gone)"
                    print(f"  process {process} (rank {RANKS[process]}): {where(process, at)}{gone}")
                for process in processes:
                    process.kill()
                return 1
            time.sleep(0.1)
    return max(abs(process.exitcode or 0) > 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
'''


def write_script(plan: ReplayPlan, name: str = "replay.py") -> str:
    """The text of the file."""
    frames = sorted(
        {
            frame
            for program in plan.programs
            for a in program
            if isinstance(a, PostCall)
            for frame in _path(a)
        },
        key=_order,
    )
    numbers = {frame: index for index, frame in enumerate(frames)}
    facts = {
        "processes": len(plan.ranks),
        "name": re.sub(r"[^\w.\-]", "_", name),
        "about": _about(plan),
        "ranks": repr(plan.ranks),
        "groups": repr(plan.groups),
    }
    parts = [_HEAD.format(**facts).replace("{QUIET_S:g}", "10")]
    parts += [_function(frame) for frame in frames]
    parts.append("\n#: (processes, what they do)\nPROGRAMS = [\n")
    programs: dict[tuple[Action, ...], list[int]] = {}
    for process, program in enumerate(plan.programs):
        programs.setdefault(program, []).append(process)
    for program, processes in programs.items():
        parts.append(
            f"    (\n        {tuple(processes)!r},  # {ranks_text(plan.ranks[p] for p in processes)}\n        [\n"
        )
        parts += [f"            {text}\n" for action in program for text in _action(action, numbers)]
        parts.append("        ],\n    ),\n")
    parts.append("]\n" + _TAIL)
    return "".join(parts)


_UNKNOWN = Frame("", "", 0)


def _path(post: PostCall) -> tuple[Frame, ...]:
    """The lines of a call, outermost first."""
    return post.path[::-1] or (_UNKNOWN,)


def _order(frame: Frame) -> tuple[str, int, str]:
    return frame.file, frame.line, frame.name


def _about(plan: ReplayPlan) -> str:
    verdict = plan.verdict
    if verdict is None:
        return "The record shows no fault."
    processes = ", ".join(map(str, plan.guilty))
    named = (
        f" (process {processes} here)" if plan.guilty and plan.ranks != tuple(range(len(plan.ranks))) else ""
    )
    return escaped(f"The record says: {verdict.sentence}", 600).replace('"', "'") + named


def escaped(text: str, limit: int = _COMMENT) -> str:
    """Text of a record as one line of printable ASCII without backslashes that mean anything."""
    found = text.encode("unicode_escape", "replace").decode("ascii").replace("\\", "/")
    return found if len(found) <= limit else found[: limit - 3] + "..."


def _function(frame: Frame) -> str:
    name = re.sub(r"\W", "_", frame.name, flags=re.ASCII)[:60] or "unknown"
    name = (
        f"{name}_"
        if keyword.iskeyword(name) or name in _TAKEN or not name.isidentifier() or name[0].isdigit()
        else name
    )
    name = name if name.isidentifier() else f"f_{name}"
    text = escaped(
        f"{frame.file}:{frame.line} in {frame.name or '?'}" if frame.file else "a line that is not recorded"
    )
    return (
        f"@line  # {text}\ndef {name}(path, function, args):\n"
        "    return LINES[path[0]](path[1:], function, args) if path else function(*args)\n\n\n"
    )


#: Names of the file's own.
_TAKEN = frozenset(re.findall(r"^(?:def|import) (\w+)", _HEAD + _TAIL, re.MULTILINE)) | {
    *(
        "dist",
        "torch",
        "RANKS",
        "GROUPS",
        "LINES",
        "PROGRAMS",
        "QUIET_S",
        "getattr",
        "isinstance",
        "list",
        "len",
        "next",
        "all",
        "any",
    ),
    *("hasattr", "enumerate", "int", "str", "print", "max", "abs", "range", "RuntimeError", "ValueError"),
}


def _action(action: Action, numbers: dict[Frame, int]) -> Iterator[str]:
    match action:
        case PostCall():
            path = tuple(numbers[frame] for frame in _path(action))
            more = tuple(
                _REDUCTIONS.get(part, part.upper()) if isinstance(part, str) else part for part in action.more
            )
            sizes = (action.given, action.taken, _DTYPES.get(action.dtype, "float32"), action.partner, more)
            values = ("call" if action.waits else "post", path, action.op, action.group, *sizes)
            inner = _path(action)[-1]
            at = (
                escaped(f"{inner.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{inner.line}", 60)
                if inner.file
                else ""
            )
            yield f"{values!r},  # #{action.number}{' ' + at if at else ''}"
        case Await(post):
            yield f"('wait', {post}),"
        case MarkStep(step):
            yield f"('step', {step}),"
        case DestroyGroup(group):
            yield f"('destroy', {group}),"
        case EndProcess(how, text):
            yield f"('end', {how!r}, {escaped(text, 600)!r}),"
