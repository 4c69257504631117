"""Which ranks share a folder: found by looking, not by asking the user."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from allranks.checkpoint.group import Group


def find_sharers(folder: Path, group: Group) -> tuple[int, ...]:
    """The ranks that see the same folder as this one (a local disk: those of this node). Collective.

    Every rank leaves a mark and looks for the others'. A rank that cannot write sees nobody, and fails later
    with the right error.
    """
    if group.alone:
        return (0,)
    token = uuid.uuid4().hex
    mine = folder / f".seen-{token}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()
    tokens = group.gather(token)
    seen = [rank for rank, other in enumerate(tokens) if (folder / f".seen-{other}").exists()]
    everybody = group.gather(seen)
    with contextlib.suppress(OSError):
        mine.unlink()
    views = [tuple(sorted({rank, *view})) for rank, view in enumerate(everybody)]
    return tuple(rank for rank in views[group.rank] if group.rank in views[rank])
