"""Runs the tools that look into a process, and reads what they print: py-spy, and only when asked for gdb, cuda-gdb, a
faulthandler signal, a GPU core dump. Says why one of them was refused, and what to do. Runs outside of the ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from allranks.blackbox.header import process_state
from allranks.model.stacks import StackFrame, ThreadStack
from allranks.stacktraces.boxes import timeout_due_s
from allranks.stacktraces.find import Target
from allranks.stacktraces.procfs import catches, memory_of, signal_set, status_of, turns_of_threads

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
    found = _by_thread(text, _THREAD, _FRAME)
    return tuple(_text_thread(head, tuple(_text_frame(m[1], m[2]) for m in lines)) for head, lines in found)


def _by_thread(
    text: str, thread: re.Pattern[str], frame: re.Pattern[str]
) -> list[tuple[re.Match[str], list[re.Match[str]]]]:
    """The lines that begin a thread, each with those of its frames."""
    found: list[tuple[re.Match[str], list[re.Match[str]]]] = []
    for line in text.splitlines():
        if head := thread.match(line):
            found.append((head, []))
        elif found and len(found[-1][1]) < MAX_FRAMES and (match := frame.match(line)):
            found[-1][1].append(match)
    return found


def _text_thread(head: re.Match[str], frames: tuple[StackFrame, ...]) -> ThreadStack:
    number, status, name = head.groups()
    tid = int(number) if number.isdigit() and len(number) <= 8 else None
    return ThreadStack(tid, name or "", frames, "active" in status, True if "gil" in status else None)


def _text_frame(name: str, place: str) -> StackFrame:
    file, colon, number = place.rpartition(":")
    if not colon or not number.isdigit():
        return frame(name, place, 0, "" if place.endswith(_SOURCE_SUFFIXES) else place)
    return frame(name, file, int(number), "" if file.endswith(_SOURCE_SUFFIXES) else file)


def process_title(text: str) -> tuple[int | None, str]:
    """The pid and the command line in the head of a text dump; (None, "") when they are not there."""
    match = re.search(r"^Process (\d{1,10}): (.*)$", text, re.MULTILINE)
    return (int(match[1]), match[2].strip()) if match else (None, "")


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
    threads = []
    for head, lines in _by_thread(text, _FAULT_THREAD, _FAULT_FRAME):
        frames = tuple(StackFrame(m[3], m[1], int(m[2]) if m[2].isdigit() else 0) for m in lines)
        threads.append(ThreadStack(None, head[2] or "", frames))
    named = [*threads[:-1], *(replace(one, name="MainThread") for one in threads[-1:])]
    return tuple(one for one in named if one.frames)


def parse_gdb(text: str) -> tuple[ThreadStack, ...]:
    """Threads of gdb's `thread apply all bt`: native frames only."""
    threads = []
    for head, lines in _by_thread(text, _GDB_THREAD, _GDB_FRAME):
        frames = tuple(StackFrame(m[1], m[2] or "", int(m[3] or 0), True) for m in lines)
        threads.append(ThreadStack(int(head[1]), head[2] or "", frames))
    return tuple(threads)


def parse_kernels(text: str) -> tuple[str, ...]:
    """Names of the device kernels in cuda-gdb's `info cuda kernels` table, each once."""
    kernels: list[str] = []
    inside = False
    for line in text.splitlines():
        if "Kernel" in line and "Invocation" in line:
            inside = True
        elif inside and (match := _KERNEL.match(line)):
            column = match.group(1).split("(")[0].split("<<<")[0].strip().split(" ")[-1]
            name = _kernel_name(line) or column
            if name and name not in kernels:
                kernels.append(name)
        elif inside and not line.strip():
            inside = False
    return tuple(kernels)


def _kernel_name(line: str) -> str:
    """The invocation column: the text after the block and grid triples `(x,y,z)`."""
    tail = re.split(r"\(\d+,\d+,\d+\)", line)[-1].strip()
    return re.split(r"\((?!anonymous namespace\))|<<<", tail, maxsplit=1)[0].strip() if tail else ""


PYSPY_LIMIT_S = 10.0
NATIVE_LIMIT_S = 30.0
GDB_LIMIT_S = 60.0
KILLED_S = 2.0  # a tool that is killed ends at once, if it can
CAP_SYS_PTRACE = 19


@dataclass(frozen=True)
class ToolRun:
    """What a tool gave. `problem` is one sentence, "" when it worked."""

    output: str
    problem: str


def find_pyspy() -> str | None:
    """The py-spy binary: $ALLRANKS_PYSPY, the virtual environment's, or the PATH's."""
    named = os.environ.get("ALLRANKS_PYSPY", "")
    places = [Path(named)] if named else []
    places += [Path(sys.prefix) / "bin" / "py-spy", Path(sys.executable).parent / "py-spy"]
    found = next((str(path) for path in places if os.access(path, os.X_OK)), None)
    return found or shutil.which("py-spy")


def run_pyspy(
    binary: str, pid: int, *, native: bool = False, limit_s: float = PYSPY_LIMIT_S, variables: bool = False
) -> ToolRun:
    """`py-spy dump --json`. Without native frames the target is not stopped at all."""
    extra = ["--native"] if native else ["--nonblocking"]
    extra += ["--locals"] if variables else []
    run = run_tool([binary, "dump", "--json", *extra, "--pid", str(pid)], limit_s)
    if run.problem:
        return ToolRun(run.output, explain_pyspy(run.problem, pid))
    return ToolRun(_with_thread_ids(pid, run.output), "") if '"os_thread_id": null' in run.output else run


def _with_thread_ids(pid: int, output: str) -> str:
    """Python 3.10 does not know the kernel's ids of its threads, and py-spy then not who is idle. The C library does."""
    try:
        rows = json.loads(output)
        ids = thread_ids(pid, [row["thread_id"] for row in rows])
    except (ValueError, TypeError, KeyError):  # who reads the stacks says that they are damaged
        return output
    for row in rows:
        tid, state = ids.get(row["thread_id"], (None, ""))
        row |= {"os_thread_id": tid, "active": state == "R"} if tid else {}
    return json.dumps(rows)


def thread_ids(pid: int, handles: Sequence[int]) -> dict[int, tuple[int, str]]:
    """The id of each pthread, as its process sees it, and its state: a pthread points to a structure that has the id."""
    found = [status_of(pid, tid) for tid in turns_of_threads(pid)]
    known = {int(one["NSpid"].split()[-1]): one["State"][:1] for one in found if "NSpid" in one}
    with memory_of(pid) as peek:
        data = [peek(handle, 1024) for handle in handles]
    for at in range(0, min(map(len, data), default=0) - 3, 4):
        ids = [int.from_bytes(one[at : at + 4], "little") for one in data]
        if len(known.keys() & ids) == len(ids):
            return {handle: (tid, known[tid]) for handle, tid in zip(handles, ids, strict=True)}
    return {}


def run_gdb(pid: int, *, cuda: bool = False, limit_s: float = GDB_LIMIT_S) -> ToolRun:
    """Native backtraces of all threads; with `cuda` the device kernels first. Stops the target for seconds."""
    name = "cuda-gdb" if cuda else "gdb"
    binary = find_cuda_gdb() if cuda else shutil.which("gdb")
    if binary is None:
        return ToolRun("", f"{name} is not installed")
    commands = ["set pagination off", "set width 0", "set print thread-events off"]
    commands += ["info cuda devices", "info cuda kernels"] if cuda else []
    commands += ["thread apply all bt 24" if cuda else "thread apply all bt"]
    words = [binary, "-nx", "-batch", "-iex", "set auto-load off", "-p", str(pid)]
    for command in commands:
        words += ["-ex", command]
    return run_tool(words, limit_s, ok_codes=(0, 1))


def find_cuda_gdb() -> str | None:
    """cuda-gdb from the PATH or the usual places of the toolkit."""
    named = os.environ.get("CUDA_HOME")
    homes = [Path(named)] if named else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    usual = (str(home / "bin/cuda-gdb") for home in homes if os.access(home / "bin/cuda-gdb", os.X_OK))
    return shutil.which("cuda-gdb") or next(usual, None)


def run_tool(words: list[str], limit_s: float, ok_codes: tuple[int, ...] = (0,)) -> ToolRun:
    """Runs a command to its end or its limit; its whole process group is killed then."""
    name, pipe = Path(words[0]).name, subprocess.PIPE
    how: dict[str, Any] = {"text": True, "encoding": "utf-8", "errors": "replace", "start_new_session": True}
    try:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **how)
    except OSError as error:
        return ToolRun("", f"{name} could not be started: {error}")
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return ToolRun(_end(child), f"{name} did not finish in {limit_s:.0f} s and was ended")
    except BaseException:  # interrupted
        _end(child)
        raise
    if child.returncode == 0 or (child.returncode in ok_codes and out.strip()):
        return ToolRun(out, "")
    lines = [line for line in err.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("Error")), lines[0] if lines else "no message")
    causes = [line.strip() for line in lines if line.lstrip()[:2] in ("0:", "1:", "2:") and "::" not in line]
    return ToolRun(out, " ".join([reason.strip(), *causes])[:400] or f"exit {child.returncode}")


def _end(child: subprocess.Popen[str]) -> str:
    """Kills a tool with its process group and returns what it printed. In a D state it stays, and so does one of its
    children in another group that keeps its output open: neither is waited for."""
    os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=KILLED_S)[0]
    except subprocess.TimeoutExpired:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        child.poll()
        return ""


_PTRACE_FIX = (
    "run as the same user or as root, with CAP_SYS_PTRACE: docker run --cap-add=SYS_PTRACE, Kubernetes "
    "securityContext.capabilities.add: [SYS_PTRACE], Slurm with pyxis: srun --container-name of the job's own container"
)


def explain_pyspy(message: str, pid: int) -> str:
    """py-spy's message with what it means and the exact fix; its own words can mislead."""
    if not Path(f"/proc/{pid}").exists():
        return f"process {pid} ended while it was looked at"
    denied = ("permission denied", "operation not permitted", "eperm", "os error 1", "os error 13")
    refused = any(word in message.lower() for word in (*denied, "failed to get process executable name"))
    if refused and not may_ptrace(pid):
        return f"py-spy may not look into process {pid} ({ptrace_obstacle(pid)}): {_PTRACE_FIX}"
    if "Failed to find python version" in message or "not a python process" in message.lower():
        return f"process {pid} is not a Python process, or its interpreter cannot be recognised"
    return f"py-spy: {message}"


def may_ptrace(pid: int) -> bool:
    """Whether the kernel lets us read the memory of a process, tried without stopping it."""
    try:
        with open(f"/proc/{pid}/mem", "rb"):
            return True
    except OSError:
        return False


def ptrace_obstacle(pid: int) -> str:
    """Which rule stands in the way."""
    parts = []
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        if uid != os.geteuid() and os.geteuid() != 0:
            parts.append(f"it belongs to uid {uid}, we are uid {os.geteuid()}")
    except OSError:
        pass
    if not has_capability(CAP_SYS_PTRACE):
        parts.append("no CAP_SYS_PTRACE")
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
        fix = f"yama ptrace_scope is {scope}; sysctl kernel.yama.ptrace_scope=0 lets the same user in"
        parts += [fix] if scope != "0" else []
    except OSError:
        pass
    return "; ".join(parts) or "a security module refuses ptrace"


def has_capability(number: int) -> bool:
    """Whether this process has one of the kernel's capabilities."""
    return bool(signal_set(os.getpid(), "CapEff") >> number & 1)


FAULTHANDLER_LIMIT_S = 3.0
CORE_LIMIT_S = 60.0


@dataclass(frozen=True)
class DebuggerOutput:
    """What a debugger gave; `problem` says why it gave nothing."""

    text: str = ""
    stacks: tuple[ThreadStack, ...] = ()
    kernels: tuple[str, ...] = ()
    problem: str = ""


def debug_with_gdb(target: Target, cuda: bool, guard_s: float) -> DebuggerOutput:
    """Backtraces by gdb or cuda-gdb, unless a collective is about to time out or the process cannot be stopped."""
    name = "cuda-gdb" if cuda else "gdb"
    state, alone = process_state(target.pid), f"{name} left process {target.pid} alone"
    if state not in ("R", "S"):
        return DebuggerOutput(problem=f"{alone}: its state is {state or 'gone'}")
    due = timeout_due_s(target.box, time.time()) if target.box is not None else None
    if due is not None and due < guard_s:
        soon = f"a collective times out in {due:.0f} s (less than {guard_s:.0f} s)"
        return DebuggerOutput(problem=f"{alone}: {soon}")
    run = run_gdb(target.pid, cuda=cuda)
    return DebuggerOutput(
        text=run.output,
        stacks=parse_gdb(run.output),
        kernels=parse_kernels(run.output) if cuda else (),
        problem=f"{name} failed on process {target.pid}: {run.problem}" if run.problem else "",
    )


def ask_faulthandler(pid: int, number: int) -> tuple[tuple[ThreadStack, ...], str]:
    """Sends a signal that the process catches and reads what faulthandler then writes to its stderr file."""
    if not catches(pid, number):
        return (), f"process {pid} has no handler for signal {number}: it was not signalled"
    path = Path(f"/proc/{pid}/fd/2")
    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            problem = f"the standard error of process {pid} is not a file: faulthandler's output could not be read back"
            return (), problem
        os.kill(pid, number)
        return _read_back(path, before.st_size), ""
    except OSError as error:
        return (), f"faulthandler of process {pid}: {error}"


def _read_back(path: Path, start: int) -> tuple[ThreadStack, ...]:
    deadline = time.monotonic() + FAULTHANDLER_LIMIT_S
    text = ""
    while time.monotonic() < deadline:
        with open(path, "rb") as file:
            file.seek(start)
            now = file.read(4 << 20).decode("utf-8", "replace")
        if now and now == text:
            break
        text = now
        time.sleep(0.05)
    return parse_faulthandler(text)


def _named(target: Target, variable: str) -> str:
    """The path in one of CUDA's variables, which the driver fills in."""
    path = target.environ.get(variable, "")
    return path.replace("%p", str(target.pid)).replace("%h", os.uname().nodename)


def dump_gpu_core(target: Target) -> str:
    """Triggers CUDA's user core dump; the process does not survive it. Returns what happened as a note."""
    none = f"no GPU core dump of process {target.pid}"
    if target.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        needed = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 and CUDA_COREDUMP_PIPE"
        return f"{none}: it was started without {needed}"
    pipe = _named(target, "CUDA_COREDUMP_PIPE")
    try:
        fd = os.open(f"/proc/{target.pid}/root{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"{none}: its pipe {pipe} does not open ({error.strerror})"
    try:
        # The process chose the name: it must not make us write to a file.
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return f"{none}: {pipe} is not a pipe"
        os.write(fd, b"\0" * 4096)
    finally:
        os.close(fd)
    deadline = time.monotonic() + CORE_LIMIT_S
    core = _named(target, "CUDA_COREDUMP_FILE")
    while time.monotonic() < deadline and not (core and Path(core).exists()):
        if process_state(target.pid) in ("", "Z"):
            break
        time.sleep(0.2)
    return f"GPU core dump of process {target.pid} was triggered (FATAL to it): {core or 'see its working folder'}"
