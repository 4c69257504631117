"""Where black boxes live, and how their files are made: 0700 folder, 0600 file, every byte reserved up front.

Runs in the rank. A page of a full tmpfs kills the writer with SIGBUS when it is first touched, so the whole
file is reserved with posix_fallocate before it is mapped: a full disk is an OSError here and never a crash later.
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
MAX_LEFT_BYTES = 256 << 20  # of all finished jobs together: shared memory is memory
NEW_S = 600.0  # a job that was heard of so lately may still run
SMALL_BYTES = 4096  # token and names of a job that is not recorded
KEPT_BOXES = 3  # of ended processes of one rank of a running job
KEEP_S = 3 * 86_400.0  # boxes of ended processes in our own folders live this long


def base_folder(uid: int | None = None) -> Path:
    """The folder that holds all of one user's jobs on this machine."""
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"allranks-{os.getuid() if uid is None else uid}"


def job_folder(job: str) -> Path:
    return base_folder() / (re.sub(r"[^\w.-]", "_", job).lstrip(".") or "job")


def make_folder(folder: Path) -> None:
    """Makes the folder, 0700 if new or below our own; refuses one that another user owns or that is a link."""
    bases = [base for base in _bases() if folder.is_relative_to(base)]
    for base in bases:  # first: nothing is made in a folder of somebody else, or where his link leads
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(base)
    missing = [folder, *folder.parents]
    missing = missing[: next((i for i, path in enumerate(missing) if path.exists()), len(missing))]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    if missing or bases:
        _check_ours(folder)


def _check_ours(folder: Path) -> None:
    """Somebody else may have made this name in a world-writable place before us."""
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to uid {facts.st_uid}, not to us")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)


def reserve_file(path: Path, size: int) -> int:
    """Makes a new file of `size` reserved bytes and returns its descriptor. Never reuses a file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def room_for_box(capacity: int = DEFAULT_CAPACITY, heap_bytes: int = DEFAULT_HEAP_BYTES) -> int:
    """The size of a black box, in whole megabytes: what a folder must have room for."""
    return -(-(HEADER_BYTES + ring_bytes(capacity) + heap_bytes) >> 20) << 20


def usable_folder(wanted: Path | None, job: str, record: bool = True) -> tuple[Path, str]:
    """The folder for a job's black boxes (without `record` only logs and small files), and what is wrong with the wanted one ("" when that is taken).

    OSError when there is no folder at all. The last resort has a name that nobody can take before us, as anybody can the others.
    """
    wanted_first = [wanted] if wanted is not None else []
    size, problem = room_for_box() if record else SMALL_BYTES, ""
    for folder in [*wanted_first, job_folder(job), fallback_folder(job)]:
        try:
            make_folder(folder)
            _try_out(folder, size)
            return folder, problem
        except OSError as error:
            problem = problem or f"{folder} cannot hold black boxes: {error.strerror or error}"
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{base_folder().name}-"))
    except OSError:
        raise OSError(problem) from None
    try:
        _try_out(folder, size)
    except OSError:
        folder.rmdir()
        raise OSError(problem) from None
    return folder, problem


def _try_out(folder: Path, size: int) -> None:
    probe = folder / f".probe-{os.getpid()}"
    os.close(reserve_file(probe, size))
    probe.unlink()


def fallback_folder(job: str) -> Path:
    """Where a job's boxes go when shared memory has no room."""
    return Path(tempfile.gettempdir()) / base_folder().name / job_folder(job).name


def _bases() -> set[Path]:
    return {base_folder(), fallback_folder("job").parent}


def job_folders() -> list[Path]:
    """Every folder of this machine that may hold boxes of this user's jobs; none that somebody else made in our name."""
    found = []
    for base in _bases():
        with contextlib.suppress(FileNotFoundError):
            found += subfolders(base) if base.lstat().st_uid == os.getuid() else []
    return sorted(found)


def recorded_users() -> set[int]:
    """Who has recorded jobs on this machine: their folders are readable to themselves and to root only."""
    found = set()
    for base in base_folder().parent.glob("allranks-[0-9]*"):
        with contextlib.suppress(OSError):
            uid = base.lstat().st_uid
            found |= {uid} if base.name == f"allranks-{uid}" else set()
    return found


def hint_at_other_users(uids: Iterable[int]) -> str:
    """How to see the jobs of those of these users who are not this one; "" when there are none."""
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
    """The folders in a folder; none of one that cannot be listed, or that somebody removes meanwhile."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def remove_earlier(folder: Path, begins: str, rank: int, keep: int = KEPT_BOXES) -> None:
    """Removes boxes of ended processes of one rank but the newest ones: a job that runs for weeks restarts ranks often.
    The evidence of an incident lies in its own folder. `begins`: how the names of the job's boxes begin."""
    ended = []
    for path in folder.iterdir():
        found = re.fullmatch(rf"{re.escape(begins)}\d+\.r{rank}\.p(\d+)(\.\w+)?\.box", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            ended.append((path.stat().st_mtime, path))
    for _, path in sorted(ended)[: max(0, len(ended) - keep)]:
        path.unlink(missing_ok=True)


def remove_old(now: float | None = None) -> None:
    """Removes boxes of processes that are gone from this user's default folders, so that they do not eat memory."""
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
    """Removes folders of finished jobs, the oldest first, until what finished jobs leave is within the limit.

    Returns what was removed. `keep` stays whatever it holds.
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
    """(bytes in a folder and below, when one of its files was changed last)."""
    size, newest = 0, 0.0
    with contextlib.suppress(FileNotFoundError):  # another run removes it meanwhile
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    size, newest = size + facts.st_blocks * 512, max(newest, facts.st_mtime)
    return size, newest


def _in_use(folder: Path) -> bool:
    """Whether a process that writes here, or the agent of the job, still runs; a sign of life of late counts too: the
    processes of a container may not be seen from here. Another run may remove the folder meanwhile."""
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
