"""Checks of what an investigation of a hang needs: tools that read stacks, permissions, recorder settings."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from allranks.doctor import Check, DoctorOptions, Status
from allranks.doctor.ptrace import may_read_siblings
from allranks.errors import NotRecording
from allranks.stacktraces.debuggers import CAP_SYS_PTRACE, find_cuda_gdb, find_pyspy, has_capability

MIN_BOX_BYTES = 32 << 20  # a few boxes


def check_stack_tools(options: DoctorOptions) -> list[Check]:
    """py-spy is installed and may read other processes; cuda-gdb is installed on nodes with GPUs."""
    found = [Check("py-spy", "ok", "found")]
    if find_pyspy() is None:
        text = "not found: no Python stacks when a rank hangs"
        found = [Check("py-spy", "warning", text, "pip install py-spy")]
    found.append(_check_ptrace())
    if shutil.which("nvidia-smi") and not find_cuda_gdb():
        text = "not found: GPU kernels of a hung rank cannot be named"
        hint = "Install the CUDA toolkit's cuda-gdb on the nodes"
        found.append(Check("cuda-gdb", "warning", text, hint))
    return found


def _check_ptrace() -> Check:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    able = may_read_siblings()
    if able is None:
        able = scope == 0 or has_capability(CAP_SYS_PTRACE)
    if able:
        return Check("ptrace", "ok", "stacks of other processes of this user can be read")
    why = f"yama ptrace_scope is {scope}" if scope else "the kernel or the container forbids it"
    return Check(
        "ptrace",
        "problem",
        f"a process may not read another's stack: {why}, and CAP_SYS_PTRACE is missing",
        "sysctl kernel.yama.ptrace_scope=0 on the node, or give the container --cap-add=SYS_PTRACE "
        "(Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])",
    )


#: torch reads these words as "no"
_OFF = frozenset({"0", "n", "no", "f", "false", "off"})
_ON = frozenset({"1", "y", "yes", "t", "true", "on"})
#: (variable, values that hurt, status, what it costs); the hint is to unset it
_SETTINGS: tuple[tuple[str, frozenset[str], Status, str], ...] = (
    ("TORCH_FR_BUFFER_SIZE", frozenset({"0"}), "warning", "torch's own flight recorder is off (allranks records anyway, torch's ring adds CUDA timing)"),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", frozenset({"0"}), "warning", "torch's own flight recorder is off (allranks records anyway, torch's ring adds CUDA timing)"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", _OFF, "warning", "a timed-out rank writes no dump"),
    ("TORCH_NCCL_ENABLE_MONITORING", _OFF, "warning", "a watchdog that hangs is not noticed, and writes no dump"),
    ("NCCL_RAS_ENABLE", _OFF, "warning", "NCCL's RAS is off: the cheapest evidence of a GPU hang is lost"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, "problem", "a failed collective waits for ever"),
    ("NCCL_ASYNC_ERROR_HANDLING", _OFF, "problem", "a failed collective waits for ever"),
    ("TORCH_NCCL_BLOCKING_WAIT", _ON, "warning", "ranks wait inside every collective, and a timeout only raises: no dump"),
    ("CUDA_LAUNCH_BLOCKING", _ON, "warning", "every kernel waits: training is slow and may deadlock with NCCL"),
    ("ALLRANKS_RECORD", _OFF, "warning", "ranks keep no black box: hangs are neither noticed nor explained"),
)  # fmt: skip

_TRUTH = frozenset({"0", "n", "no", "f", "false", "1", "y", "yes", "t", "true"})
#: variable -> the values that torch accepts
_WORDS: dict[str, frozenset[str]] = {
    "TORCH_DISTRIBUTED_DEBUG": frozenset({"off", "info", "detail"}),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _TRUTH,
    "TORCH_NCCL_ENABLE_MONITORING": _TRUTH,
    "TORCH_NCCL_BLOCKING_WAIT": _TRUTH,
}
_NUMBERS = (
    *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"),
)


def _misread() -> list[Check]:
    """Variables with values that torch cannot read: every rank raises, or reads another number."""
    found = []
    for name in (*_WORDS, *_NUMBERS):
        value, words = os.environ.get(name, "").strip(), _WORDS.get(name)
        if value and (value.lower() not in words if words else not value.isdigit()):
            cost = "torch rejects it in every rank" if words else "torch rejects it or reads only its digits"
            hint = f"one of {', '.join(sorted(words))}" if words else "a whole number"
            found.append(Check(name, "problem", f"is {value!r}: {cost}", f"set it to {hint}"))
    return found


def check_torch_settings(options: DoctorOptions) -> list[Check]:
    """Variables that lose evidence, or turn a hang into a silent wait."""
    get = os.environ.get
    found = [
        Check(name, status, f"is {get(name)!r}: {cost}", f"unset {name}")
        for name, bad, status, cost in _SETTINGS
        if (get(name) or "").strip().lower() in bad
    ]
    found += _misread()
    size = get("TORCH_FR_BUFFER_SIZE") or get("TORCH_NCCL_TRACE_BUFFER_SIZE") or ""
    if size.isdigit() and int(size) > 1_000_000:
        text = f"{size} is a number of entries, not of bytes"
        found.append(Check("TORCH_FR_BUFFER_SIZE", "warning", text, "export TORCH_FR_BUFFER_SIZE=2000"))
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if get(name):
            found += _check_dump_folder(name, Path(get(name) or "").parent)
    return found or [Check("torch settings", "ok", "nothing that loses evidence is set")]


def _check_dump_folder(name: str, folder: Path) -> list[Check]:
    """torch does not create the folder of its dumps; without it they are lost."""
    if not folder.exists():
        text = f"torch's dumps go to {folder}, which does not exist: they are lost"
        return [Check(name, "problem", text, f"mkdir -p {folder}")]
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"torch's dumps go to {folder}, which cannot be written: they are lost"
        return [Check(name, "problem", text, f"export {name} to a place that this user can write")]
    return []


def check_recorder(options: DoctorOptions) -> list[Check]:
    """The recorder's C extension was built when allranks was installed."""
    from allranks.recording.options import fast

    try:
        fast()
    except NotRecording as error:
        hint = (
            "install a C compiler and Python's headers (apt install gcc python3-dev), then "
            "pip install --force-reinstall --no-deps --no-binary allranks allranks"
        )
        return [Check("recorder", "problem", f"nothing is recorded: {error}", hint)]
    return [Check("recorder", "ok", "its C extension is installed")]


def check_recorder_folder(options: DoctorOptions) -> list[Check]:
    """The folder of the black boxes can be written."""
    named = os.environ.get("ALLRANKS_DIR")
    folder = Path(named or ("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()))
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    name = "black box folder"
    if not folder.exists() and os.access(above, os.W_OK | os.X_OK):
        return [Check(name, "warning", f"{folder} does not exist yet", f"mkdir -p -m 700 {folder}")]
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written: nothing will be recorded"
        return [Check(name, "problem", text, "export ALLRANKS_DIR to a folder of this user")]
    free = shutil.disk_usage(folder).free
    if free < MIN_BOX_BYTES:
        text = f"{folder} is full ({free >> 20} MiB free): ranks cannot keep black boxes"
        hint = f"Remove left-over files (du -sh {folder}/*), or export ALLRANKS_DIR to a folder with space"
        return [Check(name, "problem", text, hint)]
    return [Check(name, "ok", str(folder))]
