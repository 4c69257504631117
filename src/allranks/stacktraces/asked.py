"""What a rule of `waits.py` is asked about: one thread with its surroundings, and the table of frames. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from typing import TypeVar

from allranks.model.stacks import ProcessLink, StackFrame, ThreadFacts
from allranks.model.yaml_tree import read_yaml
from allranks.stacktraces import source
from allranks.stacktraces.patterns import StackPattern, frame_matches
from allranks.stacktraces.views import ProcessView, ReadText, ThreadView, user_frame

T = TypeVar("T")


@lru_cache(maxsize=1)
def _table() -> dict[str, tuple[str, ...]]:
    """Frames by what they wait for (`waits.yaml`)."""
    text = resources.files("allranks.stacktraces").joinpath("waits.yaml").read_text(encoding="utf-8")
    rows = read_yaml(text)
    assert isinstance(rows, dict)
    return {name: tuple(patterns) for name, patterns in rows.items()}


def is_in_row(frame: StackFrame, row: str) -> bool:
    """Whether a frame is in a row of the table."""
    return any(frame_matches(one, frame) for one in _table()[row])


def any_in_row(frames: Sequence[StackFrame], row: str) -> bool:
    return any(is_in_row(frame, row) for frame in frames)


def any_matches(frames: Sequence[StackFrame], pattern: str) -> bool:
    return any(frame_matches(pattern, frame) for frame in frames)


@dataclass(frozen=True)
class ThreadExtra:
    """What /proc and py-spy say of one thread beyond its stack and `ThreadFacts`."""

    fds: tuple[int, ...] = ()  # descriptors that its system call waits on
    shared: str = ""  # the end of a semaphore that processes share
    holders: tuple[int, ...] = ()  # processes that hold the file lock it waits for
    polled: tuple[int, ...] = ()  # it sleeps: processes that hold a lock on a file that it has open
    connects: str = ""  # the address that it connects to: "unix /path", "tcp port"
    signals: tuple[str, ...] = ()  # that it waits for
    pending: tuple[str, ...] = ()  # other signals that were sent to its process and blocked
    opens: str = ""  # the path that it opens
    selves: tuple[str, ...] = ()  # address of `self` for each frame
    members: int = 0  # of the process group that it forms


@dataclass(frozen=True)
class Surroundings:
    """What the threads of one process share."""

    view: ProcessView
    patterns: Sequence[StackPattern]
    links: Mapping[int, ProcessLink]
    text: ReadText
    children: tuple[int, ...] = ()
    first: frozenset[int] = frozenset()  # threads that were there at the first look
    extras: Mapping[int, ThreadExtra] = field(default_factory=dict)
    lockers: tuple[int, ...] = ()  # other processes that hold locks on files
    counted: frozenset[int] = frozenset()  # threads in a loop around which a number has changed
    seconds: float = 0.0  # from the first look to the last


#: Frames of a suspended task, innermost first, and how long it waits at most.
Task = tuple[tuple[StackFrame, ...], float | None]


@dataclass(frozen=True)
class Asked:
    """What a rule looks at: one thread, and the cause that the patterns name."""

    thread: ThreadView
    extra: ThreadExtra
    around: Surroundings
    cause: str = ""
    operation: str = ""

    @cached_property
    def frames(self) -> tuple[StackFrame, ...]:
        return self.thread.python

    @property
    def now(self) -> ThreadFacts:
        return self.thread.now or ThreadFacts(0)

    @cached_property
    def user(self) -> StackFrame | None:
        return user_frame(self.frames)

    @cached_property
    def called(self) -> tuple[StackFrame, ...]:
        """The frames of libraries that its line called; those below its line have called it."""
        return self.frames if self.user is None else self.frames[: self.frames.index(self.user)]

    def ask(self, question: Callable[[str, int], T], otherwise: T) -> T:
        """What the source around the user's line says."""
        user = self.user
        return otherwise if user is None else question(self.around.text(user.file), user.line)

    @cached_property
    def waited(self) -> tuple[str, str]:
        """The object that its line waits on, and by which method."""
        return self.ask(source.waited_object, ("", ""))

    @cached_property
    def lock(self) -> str:
        return self.ask(source.asked_lock, "")

    @property
    def futex(self) -> str:
        """The address of the lock that its system call waits for."""
        return f"{self.now.args[0]:x}" if self.now.syscall == "futex" and self.now.args else ""

    @property
    def ends(self) -> tuple[str, ...]:
        """Its own ends of the links that its system call waits on."""
        links = self.around.links
        return tuple(links[fd].end for fd in self.extra.fds if fd in links)

    @property
    def consumes(self) -> bool:
        """Whether it takes its work from a queue, again and again: without work it is idle."""
        return self.user is None or (not self.thread.main and self.ask(source.in_loop, False))
