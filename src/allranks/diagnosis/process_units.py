"""What the graph between processes is made of: threads and tasks with their processes, and what each waits for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from allranks.diagnosis.waits import Graph
from allranks.model.stacks import JobLook, Process, ProcessLink, ThreadLook

#: Waits that end by themselves sooner than this are no hang.
SOON_S = 30.0
#: Waits for the end of a process or thread: that others run is normal.
LIFE = frozenset({"child", "thread", "stdin"})
#: A thread whose process has nobody to serve: it needs a request to go on.
_SOFT = frozenset({"idle"})


@dataclass(frozen=True)
class Unit:
    """A thread or task with its process."""

    process: Process
    thread: ThreadLook

    @property
    def active(self) -> bool:
        """Whether it does or needs something, other than its next work."""
        return self.thread.wait.kind not in _SOFT and self.thread.wait.strong

    @property
    def still(self) -> bool:
        """Whether nothing shows that it moved."""
        return not self.thread.moved and not self.thread.busy


@dataclass(frozen=True)
class Waits:
    """The units of a job, and for each the units that it waits for."""

    look: JobLook
    units: tuple[Unit, ...]
    edges: dict[int, tuple[int, ...]]
    moved: frozenset[int]  # units whose wait is answered now and then: bytes moved on their link
    outside: dict[
        int, ProcessLink
    ]  # of units that wait on a link whose other end is in no process of the job
    #: units that wait for a call, which was sent, but finds no room beside theirs
    full: frozenset[int] = frozenset()

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.edges, ())


def is_same_lock(held: str, lock: str) -> bool:
    def last(text: str) -> str:
        return text.rsplit(".", 1)[-1].split("(")[0]

    return bool(lock) and last(held) == last(lock)


def is_task(thread: ThreadLook) -> bool:
    """Whether it runs a task of a pool."""
    places = (("run", "concurrent/futures/thread.py"), ("worker", "multiprocessing/pool.py"))
    return thread.task or any(
        f.name.endswith(name) and f.file.endswith(file) for f in thread.frames for name, file in places
    )


def is_in(thread: ThreadLook, functions: Sequence[str], like: ThreadLook) -> bool:
    file = like.user.file if like.user is not None else ""
    return any(f.file == file and f.name.rsplit(".", 1)[-1] in functions for f in thread.frames)
