"""Checkpoints as folders on a disk (tier NVME). No torch.

An attempt is a hidden folder. Commit is one rename, after all its files are synced to disk. A crash leaves either the whole
checkpoint or a hidden folder, which the next save removes. Readers hold a shared lock on the manifest; a locked checkpoint
is never removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from allranks.checkpoint.manifest import MANIFEST, PAGE_BYTES
from allranks.checkpoint.stores import MAX_JSON_BYTES, Attempt, KnownMount, Pieces, StoreSpec
from allranks.checkpoint.stores.listing import POINTER, check_list, decode, encode
from allranks.errors import CheckpointDamaged

QUARANTINE = "quarantine"
LOST_AND_FOUND = "lost+found"  # in the root of a disk; readable by root only
WRITE_BYTES = 32 << 20
#: A hidden folder younger than this may belong to a rank that has not locked it yet.
LEFT_BEHIND_S = 60.0
_NAME = re.compile(r"checkpoint_step_\d{8,}")
_REPLACED = ".replaced-"
_HIDDEN = (".saving-", ".removing-", _REPLACED)
#: Errors of flock on file systems without locks. NFS 4 returns EBADF for an exclusive lock on a read-only file.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


class FileStore:
    """A folder of checkpoints. Methods raise OSError if the storage fails, FileNotFoundError for a missing file."""

    tier = "NVME"
    attempt_in_names = False  # True: file names contain the attempt, because objects cannot be renamed

    def __init__(self, root: Path, spec: StoreSpec | None = None) -> None:
        self.root = root
        self.spec = spec or StoreSpec(str(root))
        self._locks: dict[str, int] = {}
        self._mount = KnownMount(root)

    def path_of(self, name: str) -> str:
        """The path of a checkpoint as shown to the user."""
        return str(self.root / name)

    def write(self, attempt: Attempt, file: str, pieces: Pieces, length: int) -> None:
        """Writes one file of an attempt; durable when it returns."""
        folder = self._folder(attempt)
        self._mount.check()
        folder.mkdir(parents=True, exist_ok=True)
        if attempt.token not in self._locks:  # locked until commit, or until this process ends
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            _lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._locks[attempt.token] = fd
        space = os.statvfs(folder)
        if space.f_blocks and length > space.f_bavail * space.f_frsize:  # 0 blocks: free space is unknown
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / file))
        unfinished = folder / f"{file}.part"
        _write_file(unfinished, pieces)
        # Renamed only when it is on disk: from then on the first rank may commit and rename the folder.
        unfinished.rename(folder / file)

    def staged(self, attempt: Attempt, file: str) -> bytes | None:
        """A small file of an attempt that is not committed yet; None if it does not exist yet."""
        try:
            return _read_small(self._folder(attempt) / file)
        except FileNotFoundError:
            return None

    def commit(self, attempt: Attempt, manifest: bytes) -> None:
        """Publishes the attempt under its name, replacing an older checkpoint of that name."""
        folder, final = self._folder(attempt), self.root / attempt.name
        _write_file(folder / MANIFEST, [memoryview(manifest)])
        for leftover in (*folder.glob("*.failed"), *folder.glob("*.part")):
            leftover.unlink()
        sync_folder(folder)
        self.leave(attempt)
        _rename_over(folder, final, self.root / f"{_REPLACED}{attempt.name}-{attempt.token}")
        with contextlib.suppress(OSError):
            self._point(attempt.name)
        sync_folder(self.root)
        self._mount.remember()

    def abandon(self, attempt: Attempt) -> None:
        self.leave(attempt)
        _remove_tree(self._folder(attempt))

    def leave(self, attempt: Attempt) -> None:
        """Releases the lock on the attempt; its files stay."""
        fd = self._locks.pop(attempt.token, None)
        if fd is not None:
            os.close(fd)

    def tidy(self) -> list[str]:
        """Removes hidden folders that are unlocked and have not changed for a while by the file system's clock."""
        removed = []
        there = self.root.iterdir() if self.root.is_dir() else ()
        hidden = {path: _changed(path) for path in there if path.name.startswith(_HIDDEN) and path.is_dir()}
        # the root folder changes with every commit; the clock of a file server may differ from ours
        now = max(filter(math.isfinite, [self.root.stat().st_mtime, *hidden.values()]), default=0.0)
        for folder, changed in hidden.items():
            old = changed < now - LEFT_BEHIND_S and (self.root / _own_name(folder.name)).exists()
            if old and _unlocked(folder) and _unlocked(folder / MANIFEST):
                _remove_tree(folder)
                removed.append(folder.name)
        return removed

    def names(self) -> list[str]:
        """The names of all checkpoints, valid or not."""
        for last in (False, True):
            found = self._scan()
            try:
                check_list(f"the list of {self.root}", {*self._known()} - {*found}, self._is_complete)
                break
            except OSError:  # a save may have committed since the scan: scan once more
                if last:
                    raise
        return sorted(found)

    def read(self, name: str, file: str) -> bytes:
        return _read_small(self.root / name / file)

    def open(self, name: str, file: str) -> FileSource:
        return FileSource(self.root / name / file)

    def remove(self, name: str) -> bool:
        """Deletes a checkpoint; returns False and does nothing while it is being read."""
        fd = _open_to_lock(self.root / name / MANIFEST)
        try:
            if not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
            hidden = self.root / f".removing-{name}-{os.getpid()}-{time.monotonic_ns()}"
            (self.root / name).rename(hidden)
        finally:
            os.close(fd)
        sync_folder(self.root)
        _remove_tree(hidden)
        return True

    def quarantine(self, name: str, reason: str) -> str:
        """Moves a damaged checkpoint to the quarantine folder; returns its new path."""
        folder = self.root / QUARANTINE
        folder.mkdir(exist_ok=True)
        target = folder / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.urandom(3).hex()}"
        try:
            (self.root / name).rename(target)
        except FileNotFoundError:
            return str(folder)  # another rank was faster
        (target / "QUARANTINED.txt").write_text(reason + "\n")
        return str(target)

    def quarantined(self) -> list[tuple[str, str]]:
        try:
            entries = sorted((self.root / QUARANTINE).iterdir())
        except FileNotFoundError:
            return []
        found = []
        for folder in entries:
            try:
                reason = (folder / "QUARANTINED.txt").read_text(errors="replace").strip()
            except FileNotFoundError:
                reason = "damaged"
            found.append((str(folder), reason))
        return found

    def set_aside(self) -> list[str]:
        """Moves all checkpoints and the quarantine to a new folder; returns its path in a list, or []."""
        self._mount.forget()
        names = [*self.names(), *([QUARANTINE] if self.quarantined() else [])]
        if not names:
            return []
        folder = self.root / f"set-aside-{time.strftime('%Y%m%dT%H%M%S')}-{os.urandom(3).hex()}"
        folder.mkdir()
        for name in names:
            (self.root / name).rename(folder / name)
        sync_folder(self.root)
        return [str(folder)]

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Protects the checkpoint from `remove` while open."""
        if not (self.root / name).exists():
            self.names()  # restores a checkpoint that an interrupted save had moved aside
        fd = _open_plain(self.root / name / MANIFEST)
        try:
            _lock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    def _scan(self) -> list[str]:
        try:
            entries = list(os.scandir(self.root))
        except FileNotFoundError:
            if self.root.is_symlink():  # its target is not mounted, which is not the same as empty
                raise
            entries = []
        folders = [entry.name for entry in entries if entry.name != LOST_AND_FOUND and entry.is_dir()]
        names = {self._restored_name(name) for name in folders}
        found = [name for name in names if not name.startswith(".") and _is_checkpoint(self.root / name)]
        if not found:
            self._mount.check()
        return found

    def _is_complete(self, name: str) -> bool:
        return (self.root / name / MANIFEST).exists()

    def _known(self) -> list[str]:
        """The names in the pointer file: a file server may list the folder as it was a minute ago."""
        try:
            return decode(_read_small(self.root / POINTER))
        except FileNotFoundError:
            return []

    def _point(self, name: str) -> None:
        known = [one for one in self._known() if (self.root / one).is_dir()]
        unfinished = self.root / f"{POINTER}.{os.getpid()}.part"
        _write_file(unfinished, [memoryview(encode(known, name))])
        unfinished.rename(self.root / POINTER)

    def _folder(self, attempt: Attempt) -> Path:
        return self.root / f".saving-{attempt.name}-{attempt.token}"

    def _restored_name(self, name: str) -> str:
        """The name, after undoing the rename of a checkpoint whose replacement was interrupted."""
        if not name.startswith(_REPLACED):
            return name
        own = _own_name(name)
        if not (self.root / own).exists():
            with contextlib.suppress(OSError):  # a read-only disk, or another process was faster
                (self.root / name).rename(self.root / own)
        return own


class FileSource:
    """One data file, read directly into the caller's memory.

    Each thread uses its own descriptor, because the kernel's read-ahead works per descriptor and stops if several threads
    seek in one. (POSIX_FADV_WILLNEED fills the page cache with single pages: twice the CPU time for this and later reads.)
    """

    wide_reads = False  # True: each read is a request, so adjacent shards are fetched together

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_plain(path)
        self.bytes = os.fstat(self._fd).st_size
        self._fds = {threading.get_ident(): self._fd}

    def read_views(self, start: int, views: Sequence[memoryview]) -> None:
        """Fills the views one after the other, starting at `start`."""
        fd, left = self._mine(), sum(map(len, views))
        while left:
            got = os.preadv(fd, views, start)
            if got == 0:
                raise EOFError(f"{self.path} ends at byte {start}, {left} bytes missing")
            start, left = start + got, left - got
            if left:  # a short read, by a signal or at the end of the file
                views = _after(views, got)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _mine(self) -> int:
        """This thread's descriptor of the same file, even if the file was renamed meanwhile."""
        fd = self._fds.get(threading.get_ident())
        if fd is None:
            try:
                fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # no /proc or no free descriptor: slower, but works
                return self._fd
            self._fds[threading.get_ident()] = fd
        return fd


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The views without their first `count` bytes."""
    found = []
    for view in views:
        found.append(view[count:])
        count = max(0, count - len(view))
    return found


def _open_plain(path: Path) -> int:
    """Opens a regular file for reading. CheckpointDamaged for a pipe or a device, which may never end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointDamaged(
            f"{path.name} is not a regular file", invalid_keys=(path.name,), path=str(path.parent)
        )
    return fd


def _read_small(path: Path) -> bytes:
    """Reads a whole JSON file of at most MAX_JSON_BYTES."""
    with open(_open_plain(path), "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length > MAX_JSON_BYTES:
            problem = f"{path.name} has {length} bytes, but at most {MAX_JSON_BYTES} are allowed"
            raise CheckpointDamaged(problem, invalid_keys=(path.name,), path=str(path.parent))
        return file.read(length)


def _write_file(path: Path, pieces: Pieces) -> None:
    """Writes and syncs a file. A page-aligned first piece bypasses the page cache: a tenth of the CPU time."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        offset = 0
        for piece in pieces:
            done = _write_direct(path, piece) if offset == 0 else 0
            while done < len(piece):
                done += os.pwrite(fd, piece[done : done + WRITE_BYTES], offset + done)
            offset += len(piece)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_direct(path: Path, piece: memoryview) -> int:
    """Writes the whole pages of an aligned piece with O_DIRECT; returns the number of bytes written."""
    whole = len(piece) // PAGE_BYTES * PAGE_BYTES
    if whole < (1 << 20) or piece.readonly:
        return 0
    if ctypes.addressof(ctypes.c_char.from_buffer(piece)) % PAGE_BYTES:
        return 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0  # no O_DIRECT on this filesystem
    done = 0
    try:
        while done < whole:
            done += os.pwrite(fd, piece[done : min(whole, done + WRITE_BYTES)], done)
            if done % PAGE_BYTES:
                return done  # a short write: the caller writes the rest
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
    return done


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, or the name of a checkpoint that has lost its manifest."""
    try:
        return stat.S_ISREG(os.stat(folder / MANIFEST).st_mode) or bool(_NAME.fullmatch(folder.name))
    except FileNotFoundError:
        return bool(_NAME.fullmatch(folder.name))


def _own_name(name: str) -> str:
    """The original name of a checkpoint that was moved aside to be replaced; "" for other folders."""
    return name.removeprefix(_REPLACED).rpartition("-")[0] if name.startswith(_REPLACED) else ""


def _changed(path: Path) -> float:
    """Latest modification time of a folder and its files; inf if the folder is gone."""
    try:
        return max(one.stat().st_mtime for one in (path, *path.iterdir()))
    except FileNotFoundError:
        return math.inf


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not supported, for example on CIFS
            raise
    finally:
        os.close(fd)


def _remove_tree(folder: Path) -> None:
    """Removes a checkpoint's folder as far as possible; a later `tidy` removes the rest."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                path.unlink()
        folder.rmdir()


def _lock(fd: int, how: int) -> bool:
    """Takes a lock; False while another process holds it. Without lock support only the age rules protect a folder."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _open_to_lock(path: Path) -> int:
    """Opens a file for writing if possible, because NFS requires that for an exclusive lock."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # a folder, or no write permission
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _unlocked(path: Path) -> bool:
    """Whether a file or folder is not locked, or does not exist."""
    try:
        fd = _open_to_lock(path)
    except FileNotFoundError:
        return True
    try:
        return _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _rename_over(folder: Path, final: Path, aside: Path) -> None:
    """Renames a folder; an older checkpoint of the same name is replaced atomically if the kernel supports it."""
    if not final.exists():
        folder.rename(final)
        return
    if not _exchange(folder, final):
        final.rename(aside)
        folder.rename(final)
        folder = aside
    if _unlocked(folder / MANIFEST):  # else the old one is still being read; `tidy` removes it later
        _remove_tree(folder)


def _exchange(one: Path, other: Path) -> bool:
    """renameat2(RENAME_EXCHANGE); False if kernel or filesystem do not support it."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(call(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0)
