"""What the graph between processes is made of: threads and tasks with their processes, and what each waits for. Pure."""

from __future__ import annotations

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

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.edges, ())
