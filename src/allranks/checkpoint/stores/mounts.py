"""Whether the disk that a folder of checkpoints lies on is mounted. Torch-free.

A share that is not mounted is an empty folder: a restore would begin at step 1, and a save would fill the disk below, out
of sight once the share is back. Where a store lies is known from /etc/fstab, and from a note that the first save to it
leaves in the home folder of its user, for this machine alone: on others the same path may be a folder of the root disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from pathlib import Path

FSTAB, MOUNTS = Path("/etc/fstab"), Path("/proc/self/mounts")


class KnownMount:
    """The mount point of one folder of checkpoints, as it is expected to be."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        place = f"{os.uname().nodename}:{self.folder}"
        name = hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
        self.note = Path(state) / "allranks" / "mounts" / f"{name}.json"

    def check(self) -> None:
        """Raises OSError (ENODEV) if what should be mounted is not: it may be a moment later."""
        noted = self._from_note()
        point = _nearest(self.folder, _points(FSTAB)) if noted is None else noted
        if point:
            with contextlib.suppress(OSError):  # an automounter mounts what is opened
                os.close(os.open(os.path.join(point, "."), os.O_RDONLY | os.O_DIRECTORY))
            mounted = _points(MOUNTS)
            if mounted and not mounted & {point, os.path.realpath(point)}:
                raise OSError(errno.ENODEV, f"{point} is not mounted", str(self.folder))

    def remember(self) -> None:
        """Notes where the folder lies now, once; nothing where that is the root of all, or no note can be written."""
        point = _nearest(Path(os.path.realpath(self.folder)), _points(MOUNTS))
        if point != (self._from_note() or ""):
            self._write(point)

    def forget(self) -> None:
        """The user wants to start from scratch, wherever the folder lies, also below a mount point of /etc/fstab."""
        if _nearest(self.folder, _points(FSTAB)):
            self._write("")
        else:
            with contextlib.suppress(OSError):
                self.note.unlink()

    def _write(self, point: str) -> None:
        with contextlib.suppress(OSError):
            self.note.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.note.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"folder": str(self.folder), "mounted_at": point}))
            unfinished.replace(self.note)

    def _from_note(self) -> str | None:
        """The mount point of the last save, "" for none; None without a note."""
        try:
            return str(json.loads(self.note.read_text())["mounted_at"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _nearest(folder: Path, points: set[str]) -> str:
    """The mount point that a folder lies below; "" for the root of all."""
    above = (str(path) for path in (folder, *folder.parents))
    return next((path for path in above if path in points and path != "/"), "")


def _points(table: Path) -> set[str]:
    """The second field of each line, in which blanks are written as \\040."""
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    fields = [line.split() for line in lines if not line.lstrip().startswith("#")]
    written = {entry[1] for entry in fields if len(entry) > 1 and entry[1].startswith("/")}
    return {re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path) for path in written}
