"""Folders and files of black boxes: 0700 folders, 0600 files, and removal of old ones. Runs in the rank and the agent.

Touching a new page of a full tmpfs kills the process with SIGBUS. The whole file is therefore reserved with posix_fallocate
before it is mapped, so that a full disk is an OSError.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from allranks.blackbox.header import HEADER_BYTES, find_header
from allranks.blackbox.layout import DEFAULT_CAPACITY, DEFAULT_HEAP_BYTES, ring_bytes

SHARED_MEMORY = Path("/dev/shm")
MAX_LEFT_BYTES = 256 << 20  # limit for all finished jobs together, because shared memory is memory
NEW_S = 600.0  # a job with activity this recent may still be running
SMALL_BYTES = 4096  # token and names of a job that is not recorded
KEPT_BOXES = 3  # boxes of exited processes that are kept per rank of a running job
KEEP_S = 3 * 86_400.0  # how long boxes of exited processes are kept


def base_folder(uid: int | None = None) -> Path:
    """The folder of all jobs of one user on this machine."""
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"allranks-{os.getuid() if uid is None else uid}"


def job_folder(job: str) -> Path:
    return base_folder() / (re.sub(r"[^\w.-]", "_", job).lstrip(".") or "job")


def make_folder(folder: Path) -> None:
    """Creates the folder with mode 0700; PermissionError if our base folder belongs to another user or is a link."""
    bases = [base for base in _bases() if folder.is_relative_to(base)]
    for base in bases:  # checked first, so that nothing is created in another user's folder
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(base)
    missing = [folder, *folder.parents]
    missing = missing[: next((i for i, path in enumerate(missing) if path.exists()), len(missing))]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    if missing or bases:
        _check_ours(folder)


def _check_ours(folder: Path) -> None:
    """Raises PermissionError if another user has created this name in a world-writable folder."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to uid {facts.st_uid}, not to uid {os.getuid()}")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)


def reserve_file(path: Path, size: int) -> int:
    """Creates a new file with `size` reserved bytes and returns its descriptor. Never reuses a file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def room_for_box(capacity: int = DEFAULT_CAPACITY, heap_bytes: int = DEFAULT_HEAP_BYTES) -> int:
    """The size of a black box, rounded up to whole megabytes."""
    return -(-(HEADER_BYTES + ring_bytes(capacity) + heap_bytes) >> 20) << 20


def usable_folder(wanted: Path | None, job: str, record: bool = True) -> tuple[Path, str]:
    """(folder for a job's black boxes, problem of the wanted folder, or ""). Without `record`, for small files only.

    OSError if no folder is usable. The last resort is a random name, because another user may have taken the others.
    """
    wanted_first = [wanted] if wanted is not None else []
    size, problem = room_for_box() if record else SMALL_BYTES, ""
    for folder in [*wanted_first, job_folder(job), fallback_folder(job)]:
        try:
            make_folder(folder)
            _probe(folder, size)
            return folder, problem
        except OSError as error:
            problem = problem or f"{folder} cannot hold black boxes: {error.strerror or error}"
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{base_folder().name}-"))
    except OSError:
        raise OSError(problem) from None
    try:
        _probe(folder, size)
    except OSError:
        folder.rmdir()
        raise OSError(problem) from None
    return folder, problem


def _probe(folder: Path, size: int) -> None:
    probe = folder / f".probe-{os.getpid()}"
    os.close(reserve_file(probe, size))
    probe.unlink()


def fallback_folder(job: str) -> Path:
    """The folder for a job's boxes if shared memory is full."""
    return Path(tempfile.gettempdir()) / base_folder().name / job_folder(job).name


def _bases() -> set[Path]:
    return {base_folder(), fallback_folder("job").parent}


def job_folders() -> list[Path]:
    """Every folder of this machine that may hold boxes of this user's jobs."""
    found = []
    for base in _bases():
        with contextlib.suppress(FileNotFoundError):
            found += subfolders(base) if base.lstat().st_uid == os.getuid() else []
    return sorted(found)


def recorded_users() -> set[int]:
    """The uids that have recorded jobs on this machine."""
    found = set()
    for base in base_folder().parent.glob("allranks-[0-9]*"):
        with contextlib.suppress(OSError):
            uid = base.lstat().st_uid
            found |= {uid} if base.name == f"allranks-{uid}" else set()
    return found


def hint_at_other_users(uids: Iterable[int]) -> str:
    """How to see the jobs of other users; "" if there are none."""
    others = [_user_name(uid) for uid in sorted({*uids} - {os.getuid()})]
    if not others:
        return ""
    return f"Jobs of other users ({', '.join(others)}): as that user, `sudo -u {others[0]} allranks …`."


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"  # as sudo takes it


def subfolders(folder: Path) -> list[Path]:
    """The subfolders of a folder; [] if it cannot be listed."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def remove_earlier(folder: Path, begins: str, rank: int, keep: int = KEPT_BOXES) -> None:
    """Removes the boxes of exited processes of one rank, except the newest: a long job restarts its ranks often.

    Incidents have their own copies. `begins` is the prefix of the job's box names.
    """
    ended = []
    for path in folder.iterdir():
        found = re.fullmatch(rf"{re.escape(begins)}\d+\.r{rank}\.p(\d+)(\.\w+)?\.box", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            ended.append((path.stat().st_mtime, path))
    for _, path in sorted(ended)[: max(0, len(ended) - keep)]:
        path.unlink(missing_ok=True)


def remove_old(now: float | None = None) -> None:
    """Removes old boxes of exited processes from this user's default folders."""
    limit = (time.time() if now is None else now) - KEEP_S
    for folder in job_folders():
        for place, _, names in os.walk(folder, topdown=False):
            for path in (Path(place, name) for name in names):
                pid = re.search(r"\.p(\d+)\.", path.name)
                ended = not (pid and Path(f"/proc/{pid[1]}").exists())
                with contextlib.suppress(OSError):
                    if ended and path.is_file() and path.stat().st_mtime < limit:
                        path.unlink()
            with contextlib.suppress(OSError):
                os.rmdir(place)  # only when empty


def remove_finished(keep: Path | None = None, max_bytes: int = MAX_LEFT_BYTES) -> list[Path]:
    """Removes folders of finished jobs, oldest first, until the rest is within the limit; returns the removed folders.

    `keep` is never removed.
    """
    sizes = {
        folder: folder_bytes(folder) for folder in job_folders() if folder != keep and not _in_use(folder)
    }
    removed: list[Path] = []
    for folder in sorted(sizes, key=lambda one: sizes[one][1]):
        if sum(size for size, _ in sizes.values()) <= max_bytes:
            break
        shutil.rmtree(folder, ignore_errors=True)
        del sizes[folder]
        removed.append(folder)
    return removed


def folder_bytes(folder: Path) -> tuple[int, float]:
    """(total bytes of a folder, latest modification time of its files)."""
    size, newest = 0, 0.0
    with contextlib.suppress(FileNotFoundError):  # removed by another run
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    size, newest = size + facts.st_blocks * 512, max(newest, facts.st_mtime)
    return size, newest


def _in_use(folder: Path) -> bool:
    """Whether a writer of these boxes or the agent of the job is running, or was active recently.

    Recent activity counts because processes of a container may be invisible from here.
    """
    try:
        heads = [find_header(path) for path in folder.rglob("*.box*")]
        signs = [head.last_sign_ns / 1e9 for head in heads if head is not None]
        if time.time() - max((folder.stat().st_mtime, *signs)) < NEW_S:
            return True
        pids = {match[1] for path in folder.rglob("*.p*.*") if (match := re.search(r"\.p(\d+)\.", path.name))}
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        pids.add(str(json.loads((folder / "job.json").read_text()).get("pid")))
    return any(Path(f"/proc/{pid}").exists() for pid in pids)
