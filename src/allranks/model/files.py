"""Atomic file writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a new, empty file next to `path`, which replaces `path` at the end and is removed on an error.

    Does not follow links or reuse existing files. If several processes write, the last one wins.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
        yield draft
        draft.replace(path)
    except OSError as error:
        if error.filename in (None, str(draft)):  # a failed write names no file
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Writes a file atomically. Creates missing folders with mode 0700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path, mode) as draft:
        draft.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
