"""What goes into a load and what comes out of it. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from allranks.model.diagnosis import FileNote
from allranks.model.trace import RankTrace
from allranks.model.trace import Raw as Raw


@dataclass(frozen=True)
class LoadOptions:
    """How to load. Limits protect against hostile or runaway files, not against large jobs."""

    attempt: int | None = None  # None: the newest
    prefix: str | None = None  # file name up to the rank's digits; None: found out
    ranks: frozenset[int] | None = None  # only these ranks; None: all
    max_file_bytes: int = 128 << 20  # of one dump, after decompression
    max_box_bytes: int = 1 << 30  # of one black box
    max_files: int = 1_000_000
    read_limit_s: float = 60.0  # one file, or one step of looking for files, may take so long
    allow_nothing: bool = False  # return notes alone instead of raising InputError when nothing was readable
    number_unknown: bool = False  # give files whose rank is not known a free number instead of skipping them
    newest_calls: int = 0  # of black boxes with more calls in all read only so many, as many of each; 0: all
    progress: Callable[[int, int], None] | None = None  # called with (files done, files in all)


@dataclass(frozen=True)
class LoadResult:
    """Everything that was readable, and a note on every file, readable or not.

    At most one trace per rank, in rank order. `other` are paths of our stack bundles and captures, which
    `stacks` reads. `attempts` are the numbers found; `attempt` the one that was chosen.
    """

    traces: list[RankTrace] = field(default_factory=list)
    files: list[FileNote] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    attempts: tuple[int, ...] = ()
    attempt: int | None = None


class Unreadable(Exception):
    """A file that gives nothing. The message becomes its note; `skip` tells foreign from damaged."""

    def __init__(self, note: str, *, kind: str = "unknown", skip: bool = False) -> None:
        super().__init__(note)
        self.kind = kind
        self.skip = skip
