"""Copies incident folders to an object store, beside the loop. Runs in the agent, on a thread of its own.

What fails is logged: the folder on disk stays the original.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

log = logging.getLogger("allranks.agent")

MAX_FILE_BYTES = 256 << 20
CLOSE_S = 30.0


class Blobs(Protocol):
    """Where the bytes go (checkpoint/stores/object_store.py); `put` raises OSError."""

    def put(self, key: str, pieces: Iterable[memoryview], length: int) -> None: ...


@dataclass
class Keeper:
    """`keep` may be called again for the same folder: only what has changed is copied."""

    blobs: Blobs
    _wanted: queue.SimpleQueue[Path | None] = field(default_factory=queue.SimpleQueue)
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)  # file -> (size, mtime)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="allranks-keeper", daemon=True)
        self._thread.start()

    def keep(self, folder: Path) -> None:
        """Soon; returns at once."""
        self._wanted.put(folder)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Copies what was asked for, within the time."""
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("not all incidents reached the object store within %g s", timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (folder := self._wanted.get()) is not None:
            begin = time.monotonic()
            try:
                copied = self._copy(folder)
            except Exception as error:  # of any store; the original is on disk
                log.warning("%s could not be copied to the object store: %s", folder.name, error)
                continue
            if copied:
                took = time.monotonic() - begin
                log.info("%s: %d files copied to the object store in %.1f s", folder.name, copied, took)

    def _copy(self, folder: Path) -> int:
        copied = 0
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
            stat = path.stat()
            version = (stat.st_size, stat.st_mtime_ns)
            if self._copied.get(path) == version or stat.st_size > MAX_FILE_BYTES:
                continue
            data = path.read_bytes()
            self.blobs.put(
                f"{folder.name}/{path.relative_to(folder).as_posix()}", [memoryview(data)], len(data)
            )
            self._copied[path] = version
            copied += 1
        return copied
