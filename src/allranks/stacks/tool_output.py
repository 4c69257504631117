"""Reads what the tools print: py-spy, pystack, faulthandler, gdb, cuda-gdb. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache

from allranks.model.stacks import StackFrame, ThreadStack

_THREAD = re.compile(r'^Thread (?:0x)?([0-9A-Fa-f]+) \(([^)]*)\)(?:: "(.*)")?\s*$')
_FRAME = re.compile(r"^ {4}(\S.*) \((.*)\)\s*$")
_SOURCE_SUFFIXES = (".py", ".pyx", ".pyi", ">")
MAX_FRAMES = 2000  # a deeper stack is runaway recursion: its ends tell the story


@lru_cache(maxsize=200_000)
def frame(name: str, file: str, line: int, library: str) -> StackFrame:
    """One frame, shared: thousands of threads stand on the same lines. `library` is "" for Python."""
    return StackFrame(name, file, line, bool(library), library)


def parse_json(text: str) -> tuple[ThreadStack, ...]:
    """Threads of `py-spy dump --json`; raises ValueError when it is not that."""
    try:
        rows = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(rows, list):
        raise ValueError("not a list of threads")
    return tuple(_thread(row) for row in rows if isinstance(row, dict))


def _thread(row: dict[str, object]) -> ThreadStack:
    frames = row.get("frames")
    listed = frames if isinstance(frames, list) else []
    if len(listed) > MAX_FRAMES:
        listed = listed[: MAX_FRAMES // 2] + listed[-MAX_FRAMES // 2 :]
    return ThreadStack(
        tid=_number(row.get("os_thread_id")),
        name=str(row.get("thread_name") or ""),
        frames=tuple(_frame(item) for item in listed if isinstance(item, dict)),
        active=_flag(row.get("active")),
        owns_gil=_flag(row.get("owns_gil")),
    )


def _frame(row: dict[str, object]) -> StackFrame:
    return frame(
        str(row.get("name") or "?"),
        str(row.get("filename") or row.get("short_filename") or ""),
        _number(row.get("line")) or 0,
        str(row.get("module") or ""),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def parse_text(text: str) -> tuple[ThreadStack, ...]:
    """Threads of py-spy's plain text. It hides the GIL of a sleeping thread, so `owns_gil` is True or None."""
    found: list[tuple[re.Match[str], list[StackFrame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((head, []))
        elif found and len(found[-1][1]) < MAX_FRAMES and (match := _FRAME.match(line)):
            found[-1][1].append(_text_frame(match.group(1), match.group(2)))
    return tuple(_text_thread(head, tuple(frames)) for head, frames in found)


def _text_thread(head: re.Match[str], frames: tuple[StackFrame, ...]) -> ThreadStack:
    number, status, name = head.groups()
    tid = int(number) if number.isdigit() and len(number) <= 8 else None
    return ThreadStack(tid, name or "", frames, "active" in status, True if "gil" in status else None)


def _text_frame(name: str, place: str) -> StackFrame:
    file, colon, number = place.rpartition(":")
    if not colon or not number.isdigit():
        return frame(name, place, 0, "" if place.endswith(_SOURCE_SUFFIXES) else place)
    return frame(name, file, int(number), "" if file.endswith(_SOURCE_SUFFIXES) else file)


def process_title(text: str) -> str:
    """The command line in the head of a text dump, "" when it is not there."""
    match = re.search(r"^Process \d+: (.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def format_text(pid: int, title: str, stacks: tuple[ThreadStack, ...]) -> str:
    """Stacks in the layout of py-spy's own text, the main thread first, with the GIL of sleeping threads shown."""
    lines = [f"Process {pid}: {title}", ""]
    for stack in sorted(stacks, key=lambda one: (one.name != "MainThread", one.tid or 0)):
        status = ("active" if stack.active else "idle") + ("+gil" if stack.owns_gil else "")
        lines.append(f'Thread {stack.tid} ({status}): "{stack.name}"')
        lines += [f"    {one.name} ({one.file}:{one.line})" for one in stack.frames]
    return "\n".join(lines) + "\n"


_PYSTACK_THREAD = re.compile(r"^Traceback for thread (\d+)(?: \(([^)]*)\))? ?\[([^\]]*)\]")
_PYSTACK_FRAME = re.compile(r'^\s+\((Python|C)\) File "(.*)", line (\d+), in (.*)$')
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')
_GDB_THREAD = re.compile(r'^Thread \d+ \(.*?LWP (\d+)\)?.*?(?:"([^"]*)")?\)?:\s*$')
_GDB_FRAME = re.compile(r"^#\d+\s+(?:0x[0-9a-f]+ in )?(.+?) \(.*?\)(?: (?:at|from) (\S+?)(?::(\d+))?)?\s*$")
_KERNEL = re.compile(r"^\*?\s*\d+\s+\S+\s+\d+\s+\d+\s+.*?\s(\S.*)$")


def parse_pystack(text: str) -> tuple[ThreadStack, ...]:
    """Threads of `pystack remote`; it prints the source line under each frame, outermost first."""
    found: list[tuple[re.Match[str], list[StackFrame]]] = []
    frames: list[StackFrame] = []
    for line in text.splitlines():
        if match := _PYSTACK_THREAD.match(line):
            frames = []
            found.append((match, frames))
        elif match := _PYSTACK_FRAME.match(line):
            kind, file, number, function = match.groups()
            frames.append(StackFrame(function, file, int(number), kind == "C"))
        elif frames and line.startswith("        ") and not frames[-1].native:
            frames[-1] = replace(frames[-1], source=line.strip()[:400])
    threads = [
        ThreadStack(int(head[1]), head[2] or "", tuple(reversed(lines)), None, "Has the GIL" in head[3])
        for head, lines in found
    ]
    first = min((thread.tid or 0 for thread in threads), default=0)  # the main thread is the oldest
    return tuple(replace(one, name="MainThread") if one.tid == first else one for one in threads)


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """Threads of a faulthandler dump. It knows no thread ids of the kernel; the last one is the main thread."""
    found: list[tuple[str, list[StackFrame]]] = []
    for line in text.splitlines():
        if match := _FAULT_THREAD.match(line):
            found.append((match.group(2) or "", []))
        elif found and (match := _FAULT_FRAME.match(line)):
            file, number, function = match.groups()
            found[-1][1].append(StackFrame(function, file, int(number) if number.isdigit() else 0))
    last = len(found) - 1
    return tuple(
        ThreadStack(None, "MainThread" if index == last else name, tuple(frames))
        for index, (name, frames) in enumerate(found)
        if frames
    )


def parse_gdb(text: str) -> tuple[ThreadStack, ...]:
    """Threads of gdb's `thread apply all bt`: native frames only."""
    found: list[tuple[int, str, list[StackFrame]]] = []
    for line in text.splitlines():
        if match := _GDB_THREAD.match(line):
            found.append((int(match.group(1)), match.group(2) or "", []))
        elif found and (match := _GDB_FRAME.match(line)):
            function, file, number = match.groups()
            found[-1][2].append(StackFrame(function, file or "", int(number or 0), True))
    return tuple(ThreadStack(tid, name, tuple(frames)) for tid, name, frames in found)


def parse_kernels(text: str) -> tuple[str, ...]:
    """Names of the device kernels in cuda-gdb's `info cuda kernels` table, each once."""
    kernels: list[str] = []
    inside = False
    for line in text.splitlines():
        if "Kernel" in line and "Invocation" in line:
            inside = True
        elif inside and (match := _KERNEL.match(line)):
            name = match.group(1).split("(")[0].split("<<<")[0].strip().split(" ")[-1]
            name = _kernel_name(line) or name
            if name and name not in kernels:
                kernels.append(name)
        elif inside and not line.strip():
            inside = False
    return tuple(kernels)


def _kernel_name(line: str) -> str:
    """The invocation column: the text after the block and grid triples `(x,y,z)`."""
    tail = re.split(r"\(\d+,\d+,\d+\)", line)[-1].strip()
    return re.split(r"\((?!anonymous namespace\))|<<<", tail, maxsplit=1)[0].strip() if tail else ""
