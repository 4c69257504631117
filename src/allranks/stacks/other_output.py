"""Reads what pystack, faulthandler, gdb and cuda-gdb printed. Pure: text in, data out."""

from __future__ import annotations

import re
from dataclasses import replace

from allranks.model.stacks import StackFrame, ThreadStack

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
    threads: list[ThreadStack] = []
    tid, name, gil = 0, "", False
    frames: list[StackFrame] = []
    started = False
    for line in text.splitlines():
        if match := _PYSTACK_THREAD.match(line):
            if started:
                threads.append(ThreadStack(tid, name, tuple(reversed(frames)), None, gil))
            tid, name, gil = int(match.group(1)), match.group(2) or "", "Has the GIL" in match.group(3)
            frames, started = [], True
        elif match := _PYSTACK_FRAME.match(line):
            kind, file, number, function = match.groups()
            frames.append(StackFrame(function, file, int(number), kind == "C"))
        elif frames and line.startswith("        ") and not frames[-1].native:
            last = frames[-1]
            frames[-1] = StackFrame(last.name, last.file, last.line, False, line.strip()[:400])
    if started:
        threads.append(ThreadStack(tid, name, tuple(reversed(frames)), None, gil))
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
