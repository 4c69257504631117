"""Checks of what will be needed after a hang: tools that read stacks, permission, recorder settings."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from allranks.doctor.checks import Check, DoctorOptions

CAP_SYS_PTRACE = 19


def check_stack_tools(options: DoctorOptions) -> list[Check]:
    """py-spy is there and may read other processes; cuda-gdb where there are GPUs."""
    beside = Path(sys.executable).parent / "py-spy"
    found = []
    if shutil.which("py-spy") is None and not beside.exists():
        found.append(
            Check(
                "py-spy",
                "warning",
                "not found: no Python stacks when a rank hangs",
                "pip install 'allranks[stacks]'",
            )
        )
    else:
        found.append(Check("py-spy", "ok", "found"))
    found.append(_check_ptrace())
    if shutil.which("nvidia-smi") and not shutil.which("cuda-gdb"):
        found.append(
            Check(
                "cuda-gdb",
                "warning",
                "not found: GPU kernels of a hung rank cannot be named",
                "Install the CUDA toolkit's cuda-gdb on the nodes",
            )
        )
    return found


def _check_ptrace() -> Check:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    capable = _has_capability(CAP_SYS_PTRACE)
    if capable or scope == 0:
        return Check("ptrace", "ok", "stacks of other processes of this user can be read")
    return Check(
        "ptrace",
        "problem",
        f"yama ptrace_scope is {scope} and this process lacks CAP_SYS_PTRACE",
        "sysctl kernel.yama.ptrace_scope=0, or give the container --cap-add=SYS_PTRACE",
    )


def _has_capability(number: int) -> bool:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    except (OSError, ValueError):
        pass
    return False


def check_torch_settings(options: DoctorOptions) -> list[Check]:
    """Variables that throw evidence away, or turn a hang into a silent wait."""
    found = []
    get = os.environ.get
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if get(name) == "0":
            found.append(
                Check(
                    name,
                    "warning",
                    "torch's own flight recorder is off",
                    f"unset {name} (allranks records anyway, torch's ring adds CUDA timing)",
                )
            )
    if (get("TORCH_FR_BUFFER_SIZE") or "").isdigit() and int(get("TORCH_FR_BUFFER_SIZE") or 0) > 1_000_000:
        found.append(
            Check(
                "TORCH_FR_BUFFER_SIZE",
                "warning",
                f"{get('TORCH_FR_BUFFER_SIZE')} is a number of entries, not of bytes",
                "export TORCH_FR_BUFFER_SIZE=2000",
            )
        )
    if get("TORCH_NCCL_DUMP_ON_TIMEOUT") in ("0", "false"):
        found.append(
            Check(
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
                "warning",
                "a timed-out rank writes no dump",
                "unset TORCH_NCCL_DUMP_ON_TIMEOUT",
            )
        )
    if get("NCCL_RAS_ENABLE") == "0":
        found.append(
            Check(
                "NCCL_RAS_ENABLE",
                "warning",
                "NCCL's RAS is off: the cheapest look at a GPU hang is lost",
                "unset NCCL_RAS_ENABLE",
            )
        )
    if get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0" or get("NCCL_ASYNC_ERROR_HANDLING") == "0":
        found.append(
            Check(
                "NCCL async errors",
                "problem",
                "a failed collective waits for ever",
                "unset TORCH_NCCL_ASYNC_ERROR_HANDLING and NCCL_ASYNC_ERROR_HANDLING",
            )
        )
    if get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append(
            Check(
                "CUDA_LAUNCH_BLOCKING",
                "warning",
                "every kernel waits: training is slow and may deadlock with NCCL",
                "unset CUDA_LAUNCH_BLOCKING after debugging",
            )
        )
    return found or [Check("torch settings", "ok", "nothing that loses evidence is set")]


def check_recorder(options: DoctorOptions) -> list[Check]:
    """The recorder's hot path was built when allranks was installed."""
    from allranks.record.engine import fast

    if fast(True) is not None:
        return [Check("recorder", "ok", "the hot path is in C")]
    return [
        Check(
            "recorder",
            "warning",
            "pure Python: a recorded call costs ten to thirty microseconds instead of two",
            "install a C compiler and Python's headers (apt install gcc python3-dev), then "
            "pip install --force-reinstall --no-deps --no-binary allranks allranks",
        )
    ]


def check_recorder_folder(options: DoctorOptions) -> list[Check]:
    """Black boxes can be written where they will go."""
    named = os.environ.get("ALLRANKS_DIR")
    folder = Path(named or ("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()))

    def make() -> str:
        folder.mkdir(mode=0o700, parents=True)
        return f"made {folder}"

    if not folder.exists():
        return [
            Check(
                "black box folder",
                "warning",
                f"{folder} does not exist yet",
                f"mkdir -p -m 700 {folder}",
                make,
            )
        ]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [
            Check(
                "black box folder",
                "problem",
                f"{folder} cannot be written: nothing will be recorded",
                "export ALLRANKS_DIR to a folder of this user",
            )
        ]
    return [Check("black box folder", "ok", str(folder))]
