"""Checks of memory-backed and disk folders: space, permission and real write speed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

from allranks.doctor import Check, DoctorOptions

PROBE_BYTES = 32 << 20
SLOW_MB_S = 100.0


def check_shared_memory(options: DoctorOptions) -> list[Check]:
    """/dev/shm holds DataLoader tensors and black boxes."""
    path = Path("/dev/shm")
    if not path.exists():
        return [
            Check(
                "shared memory",
                "warning",
                "there is no /dev/shm; black boxes go to the temp folder",
                "Mount a tmpfs at /dev/shm",
            )
        ]
    usage = shutil.disk_usage(path)
    text = f"/dev/shm has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.total <= 64 << 20:
        return [
            Check(
                "shared memory",
                "problem",
                f"{text}: a container's default; DataLoader workers will die of it",
                "docker run --shm-size=16g (Kubernetes: an emptyDir with medium Memory at /dev/shm)",
            )
        ]
    if usage.free < 512 << 20:
        return [
            Check(
                "shared memory",
                "warning",
                text,
                "Remove left-over files (ls -la /dev/shm), or make it larger",
            )
        ]
    return [Check("shared memory", "ok", text)]


def check_folders(options: DoctorOptions) -> list[Check]:
    """Each checkpoint folder can be written, has space, and is not slow."""
    found = []
    for name in options.checkpoint_folders:
        found.append(_check_folder(Path(name)))
    return found or [Check("checkpoint folders", "skipped", "none given (--checkpoint-folder PATH)")]


def _check_folder(path: Path) -> Check:
    name = f"folder {path}"
    if not path.exists():

        def make() -> str:
            path.mkdir(parents=True)
            return f"made {path}"

        return Check(name, "problem", "it does not exist", f"mkdir -p {path}", make)
    try:
        speed = _write_speed(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Check(
                name,
                "problem",
                f"full: {error.strerror}",
                f"allranks checkpoint prune {path} --keep-last N, or remove what is not needed (du -sh {path}/*; df -h {path})",
            )
        return Check(
            name,
            "problem",
            f"cannot be written: {error.strerror}",
            f"Check owner and mount: ls -ld {path}; df -h {path}; df -i {path}",
        )
    free = shutil.disk_usage(path).free
    text = f"{free / 2**30:.1f} GiB free, {speed:.0f} MB/s with fsync"
    if free < 10 << 30:
        return Check(
            name, "warning", text, f"allranks checkpoint prune {path} --keep-last N, or a larger disk"
        )
    if speed < SLOW_MB_S:
        return Check(
            name,
            "warning",
            f"{text}: saves will take long",
            "Use a local NVMe folder, and the object store as the last tier",
        )
    return Check(name, "ok", text)


def _write_speed(path: Path) -> float:
    """MB/s of one file written and fsynced."""
    block = os.urandom(1 << 20)
    handle, name = tempfile.mkstemp(prefix=".allranks-doctor-", dir=path)
    try:
        begin = time.monotonic()
        with os.fdopen(handle, "wb") as out:
            for _ in range(PROBE_BYTES // len(block)):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        return PROBE_BYTES / 1e6 / max(1e-6, time.monotonic() - begin)
    finally:
        os.unlink(name)
