"""Makes files slow to open, as a disk or file server under load is: anyone who opens one of them waits.

A lease of the kernel is held on each file; an open by anybody else waits until it is given up, `DELAY_S` later.
Run as a program with the files as arguments; says "ready" when all leases are held, and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DELAY_S = 0.3


class SlowFiles:
    """Holds the leases in a process of its own from `__init__` to `close`."""

    def __init__(self, files: Sequence[Path]) -> None:
        words = [sys.executable, __file__, *map(str, files)]
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    def close(self) -> int:
        """Gives the leases up; returns how many opens had to wait."""
        out, _ = self._holder.communicate(timeout=300)
        return int(out)


def main(files: Sequence[str]) -> None:
    """Holds the leases; gives each one up a while after somebody wants the file."""
    signal.signal(signal.SIGIO, lambda *_: None)  # the kernel's word that somebody waits: it ends the select
    held = [os.open(file, os.O_RDONLY) for file in files]
    for fd in held:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("ready", flush=True)
    waited = 0
    while not select.select([0], [], [], 0.01)[0]:
        for fd in [fd for fd in held if fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK]:
            time.sleep(DELAY_S)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            held.remove(fd)
            waited += 1
    print(waited)


if __name__ == "__main__":
    main(sys.argv[1:])
