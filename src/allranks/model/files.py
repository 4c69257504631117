"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Gives a new, empty file beside `path` to write to, which takes its name at the end; on an error it is removed.

    Never through a link or into a file that somebody else laid there. Several may write at the same moment: the last one stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Puts a file in place in one go. A folder that is missing is made, for this user only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path, mode) as draft:
        draft.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
