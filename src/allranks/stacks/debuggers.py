"""The intrusive looks: gdb, cuda-gdb, a faulthandler signal, a GPU core dump. Each only when asked for."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from allranks.model.stacks import ThreadStack
from allranks.stacks import tools
from allranks.stacks.boxes import timeout_due_s
from allranks.stacks.find import Target
from allranks.stacks.other_output import parse_faulthandler, parse_gdb, parse_kernels
from allranks.stacks.procfs import catches, read_state

FAULTHANDLER_LIMIT_S = 3.0
CORE_LIMIT_S = 60.0


@dataclass(frozen=True)
class DebuggerLook:
    """What a debugger gave; `problem` says why it gave nothing."""

    text: str = ""
    stacks: tuple[ThreadStack, ...] = ()
    kernels: tuple[str, ...] = ()
    problem: str = ""


def look_with_gdb(target: Target, cuda: bool, guard_s: float) -> DebuggerLook:
    """Backtraces by gdb or cuda-gdb, unless a collective is about to time out or the process cannot be stopped."""
    name = "cuda-gdb" if cuda else "gdb"
    state = read_state(target.pid)
    if state not in ("R", "S"):
        return DebuggerLook(problem=f"{name} left process {target.pid} alone: its state is {state or 'gone'}")
    due = timeout_due_s(target.box, time.time()) if target.box is not None else None
    if due is not None and due < guard_s:
        return DebuggerLook(
            problem=f"{name} left process {target.pid} alone: a collective times out in {due:.0f} s (less than {guard_s:.0f} s)"
        )
    run = tools.run_gdb(target.pid, cuda=cuda)
    return DebuggerLook(
        text=run.output,
        stacks=parse_gdb(run.output),
        kernels=parse_kernels(run.output) if cuda else (),
        problem=f"{name} on process {target.pid}: {run.problem}" if run.problem else "",
    )


def ask_faulthandler(pid: int, number: int) -> tuple[tuple[ThreadStack, ...], str]:
    """Sends a signal that the process catches and reads what faulthandler then writes to its stderr file."""
    if not catches(pid, number):
        return (), f"process {pid} has no handler for signal {number}: it was not signalled"
    path = Path(f"/proc/{pid}/fd/2")
    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            return (
                (),
                f"the standard error of process {pid} is no file: faulthandler's output could not be read back",
            )
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


def dump_gpu_core(target: Target, folder: Path | None) -> str:
    """Triggers CUDA's user core dump; the process does not survive it. Returns what happened as a note."""
    if target.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        return (
            f"no GPU core dump of process {target.pid}: it was started without "
            "CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 and CUDA_COREDUMP_PIPE"
        )
    pipe = (
        target.environ.get("CUDA_COREDUMP_PIPE", "")
        .replace("%p", str(target.pid))
        .replace("%h", os.uname().nodename)
    )
    try:
        fd = os.open(f"/proc/{target.pid}/root{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"no GPU core dump of process {target.pid}: its pipe {pipe} does not open ({error.strerror})"
    try:
        os.write(fd, b"\0" * 4096)
    finally:
        os.close(fd)
    deadline = time.monotonic() + CORE_LIMIT_S
    core = (
        target.environ.get("CUDA_COREDUMP_FILE", "")
        .replace("%p", str(target.pid))
        .replace("%h", os.uname().nodename)
    )
    while time.monotonic() < deadline and not (core and Path(core).exists()):
        if read_state(target.pid) in ("", "Z"):
            break
        time.sleep(0.2)
    return f"GPU core dump of process {target.pid} was triggered (FATAL to it): {core or 'see its working folder'}"
