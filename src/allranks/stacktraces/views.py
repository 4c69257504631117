"""Joins what several looks say about one thread, so that a pattern can ask one thing: also whether it
moved, computed, or only asked again and again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from allranks.model.stacks import (
    INSTALLED,
    PACKAGES,
    ProcessCapture,
    StackFrame,
    ThreadFacts,
    ThreadStack,
    is_user_file,
)
from allranks.stacktraces import source


def short_name(name: str) -> str:
    """`outer.<locals>.Class.method` is `Class.method`."""
    return name.rsplit("<locals>.", 1)[-1] or name


def place(frame: StackFrame) -> str:
    """`data.py:31 in load_batch`."""
    file = frame.file.rsplit("/", 1)[-1] or "?"
    return f"{file}:{frame.line} in {short_name(frame.name)}"


def user_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """The innermost frame of the user's own code; None when there is none. Code that was made from a string (`<string>`) counts
    where nothing else does: libraries make such functions, too."""
    own = (frame for frame in frames if not frame.native and is_user_file(frame.file))
    first = next(own, None)
    if first is None or first.file != "<string>":
        return first
    return next((frame for frame in own if frame.file != "<string>"), first)


#: Packages whose lines say how, not what: in a server without a line of the user's own the engine's line is shown.
_PLUMBING = frozenset({"torch", "zmq", "uvloop", "numpy", "grpc", "urllib3", "requests", "httpx", "httpcore"})


def _is_framework(frame: StackFrame) -> bool:
    """Whether a library frame belongs to a framework rather than to its plumbing."""
    for part in INSTALLED:
        if part in frame.file:
            return frame.file.split(part, 1)[1].split("/")[0] not in _PLUMBING
    first = frame.file.split("/")[0]
    return "/" in frame.file and not frame.file.startswith("/") and first in PACKAGES - _PLUMBING


def where(frames: Sequence[StackFrame]) -> str:
    """The user's line that a stack stands on, else a framework's, else the innermost Python line, or ""."""
    python = [one for one in frames if not one.native]
    frame = user_frame(python) or next(iter((*filter(_is_framework, python), *python)), None)
    return place(frame) if frame is not None else ""


def cut_fork(frames: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
    """The frames of a forked child without those it inherited from its parent below the fork."""
    for index, frame in enumerate(frames):
        if frame.name.endswith("_bootstrap") and frame.file.endswith("multiprocessing/process.py"):
            return tuple(frames[: index + 1])
    return tuple(frames)


@dataclass(frozen=True)
class ThreadView:
    """One thread over all snapshots; the last snapshot is the present. Stacks are cut when first asked for:
    most of the threads of a thousand ranks never are."""

    tid: int | None
    name: str
    main: bool
    stacks: tuple[ThreadStack, ...]  # one for each snapshot that has them
    native: ThreadStack | None  # from the slower look
    facts: tuple[ThreadFacts, ...]  # one for each snapshot that has them

    @cached_property
    def paths(self) -> tuple[tuple[StackFrame, ...], ...]:
        """The Python stack of every snapshot, innermost first, cut at the fork."""
        return tuple(
            _ends(cut_fork([frame for frame in one.frames if not frame.native])) for one in self.stacks
        )

    @cached_property
    def python(self) -> tuple[StackFrame, ...]:
        """The Python stack of the present."""
        return self.paths[-1] if self.paths else tuple(frame for frame in self._mixed if not frame.native)

    @cached_property
    def _mixed(self) -> tuple[StackFrame, ...]:
        return cut_fork(self.native.frames) if self.native else ()

    @cached_property
    def leaf(self) -> tuple[StackFrame, ...]:
        """The native frames above the innermost Python frame."""
        return _leaf(self._mixed, self.python)

    @cached_property
    def natives(self) -> tuple[StackFrame, ...]:
        return tuple(frame for frame in self._mixed if frame.native)

    @cached_property
    def active(self) -> tuple[bool, ...]:
        """Whether it ran, in each sample that could tell."""
        return tuple(one.active for one in self.stacks if one.active is not None)

    @cached_property
    def gil(self) -> tuple[bool, ...]:
        """Whether it owned the GIL, in each sample that could tell."""
        return tuple(one.owns_gil for one in self.stacks if one.owns_gil is not None)

    @property
    def now(self) -> ThreadFacts | None:
        """The kernel's facts of the last snapshot."""
        return self.facts[-1] if self.facts else None

    @property
    def ticks_moved(self) -> int | None:
        """Clock ticks used between the first and the last snapshot; None with fewer than two."""
        return self.facts[-1].ticks - self.facts[0].ticks if len(self.facts) > 1 else None

    @property
    def busy(self) -> bool | None:
        """Whether the thread ran most of the time; None when nothing tells."""
        seen = [one.state == "R" or one.syscall == "running" for one in self.facts] or list(self.active)
        return None if not seen else sum(seen) * 2 > len(seen)

    @property
    def holds_gil(self) -> bool:
        """Whether it owned the interpreter lock in every snapshot that could tell."""
        return bool(self.gil) and all(self.gil)


@dataclass(frozen=True)
class Children:
    """Whether a process has child processes, and whether some of them run Python."""

    any: bool = False
    python: bool = False


NO_CHILDREN = Children()


@dataclass(frozen=True)
class ProcessView:
    """The threads of one process, the main one first, and what only the process as a whole can tell."""

    capture: ProcessCapture
    threads: tuple[ThreadView, ...]
    comms: frozenset[str]
    children: Children = NO_CHILDREN

    @property
    def main(self) -> ThreadView | None:
        """The main thread, or the first one known."""
        return self.threads[0] if self.threads else None

    @property
    def count(self) -> int:
        """Number of threads, as the kernel counts them where it could be asked."""
        last = self.capture.snapshots[-1] if self.capture.snapshots else None
        return max(len(last.facts), len(last.stacks)) if last else 0


def view_process(capture: ProcessCapture, children: Children = NO_CHILDREN) -> ProcessView:
    """All threads of a process, matched by thread id over the snapshots."""
    stacks: dict[tuple[int | None, str], list[ThreadStack]] = {}
    facts: dict[int, list[ThreadFacts]] = {}
    main_tid = _main_tid(capture)
    for snapshot in capture.snapshots:
        for stack in _with_main(snapshot.stacks, main_tid):
            stacks.setdefault(_key(stack), []).append(stack)
        for fact in snapshot.facts:
            facts.setdefault(fact.tid, []).append(fact)
    if main_tid is not None and not any(tid == main_tid for tid, _ in stacks):
        stacks = {(main_tid, ""): [], **stacks}
    native: dict[int | None, ThreadStack] = {one.tid: one for one in capture.native if one.tid is not None}
    views = [
        _view(key, found, facts.get(key[0], []) if key[0] is not None else [], native.get(key[0]), main_tid)
        for key, found in stacks.items()
    ]
    views.sort(key=lambda view: not view.main)
    comms = frozenset(fact.comm for found in facts.values() for fact in found)
    return ProcessView(capture, tuple(views), comms, children)


def _key(stack: ThreadStack) -> tuple[int | None, str]:
    """By kernel thread id where known, else by name: a thread may rename itself."""
    return (stack.tid, "") if stack.tid is not None else (None, stack.name)


def _main_tid(capture: ProcessCapture) -> int | None:
    """The main thread's id equals the process id; the first listed thread of /proc is it too."""
    for snapshot in capture.snapshots:
        for stack in snapshot.stacks:
            if stack.name == "MainThread" and stack.tid is not None:
                return stack.tid
    if capture.pid is not None:
        return capture.pid
    first = next((s.facts[0].tid for s in capture.snapshots if s.facts), None)
    if first is None and not any(s.stacks for s in capture.snapshots):  # gdb alone: the oldest thread
        first = min((one.tid for one in capture.native if one.tid is not None), default=None)
    return first


def _with_main(stacks: tuple[ThreadStack, ...], main_tid: int | None) -> tuple[ThreadStack, ...]:
    """py-spy by itself tells no thread ids of Python 3.10: the main thread is then known by where it began."""
    if main_tid is None or any(one.tid == main_tid for one in stacks):
        return stacks
    unknown = [one for one in stacks if one.tid is None and one.frames]
    named = [one for one in unknown if one.name == "MainThread"]
    begun = named or [one for one in unknown if one.frames[-1].name == "<module>"]
    return tuple(replace(one, tid=main_tid) if len(begun) == 1 and one is begun[0] else one for one in stacks)


def _view(
    key: tuple[int | None, str],
    stacks: list[ThreadStack],
    facts: list[ThreadFacts],
    native: ThreadStack | None,
    main_tid: int | None,
) -> ThreadView:
    tid = key[0]
    name = next((stack.name for stack in reversed(stacks) if stack.name), key[1])
    main = (tid == main_tid) if tid is not None and main_tid is not None else name == "MainThread"
    return ThreadView(tid, name or ("MainThread" if main else ""), main, tuple(stacks), native, tuple(facts))


def _ends(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Of a runaway recursion the two ends: patterns need no more."""
    return frames if len(frames) <= 400 else frames[:300] + frames[-100:]


def _leaf(frames: tuple[StackFrame, ...], python: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """The native frames that run on behalf of the innermost Python frame, if the native look saw that frame.

    A native look comes after the others: of a thread that has moved on it says nothing about this moment.
    """
    first = next((index for index, frame in enumerate(frames) if not frame.native), None)
    if first is None:
        return tuple(frames)
    if python and frames[first].name.rsplit(".", 1)[-1] != python[0].name.rsplit(".", 1)[-1]:
        return ()
    return tuple(frames[:first])


#: Reads a source file of the process; "" when it cannot be read.
ReadText = Callable[[str], str]
#: Behind the text of a line that sleeps in a loop: what that tests.
POLLS = "  # polls: "
#: Behind the text of a line in a loop that changes nothing: the first line of the loop.
LOOP = "  # in the loop of line "
POLL_SHARE, BURNS = 0.25, 0.8  # of a processor: one that polls uses less, one that computes more


def asks_again(thread: ThreadView, text: ReadText) -> StackFrame | None:
    """The line of a thread that was in one and the same loop of requests and sleeps whenever we looked."""
    if len(thread.paths) < 2 or not any(map(_sleeps, thread.paths)):
        return None
    loops = [
        {
            (f.file, f.name, start): f
            for f in path
            if is_user_file(f.file) and (start := source.retry_loop(text(f.file), f.line))
        }
        for path in thread.paths
    ]
    common = set(loops[0]).intersection(*loops[1:])
    if not common:
        return None
    best = next((found for found, path in zip(loops, thread.paths, strict=True) if _sleeps(path)), loops[-1])
    return next(frame for key, frame in best.items() if key in common)


def _sleeps(path: Sequence[StackFrame]) -> bool:
    """Whether the innermost line of a stack is a sleep of the user's code."""
    return bool(path) and "sleep(" in path[0].source


def line_of(frame: StackFrame) -> int:
    """The line of a frame; in a loop that changes nothing, the loop's first line: moving between its lines does not count as progress."""
    loop = frame.source.partition(LOOP)[2].partition(" ")[0]
    return int(loop) if loop.isdigit() else frame.line


def has_moved(thread: ThreadView, new: bool, seconds: float) -> bool:
    """Whether the thread did something while we looked. A wait that polls wakes up, which does not count."""
    cuts = [next((n for n, f in enumerate(path) if LOOP in f.source), 0) for path in thread.paths]
    pairs = zip(thread.paths, cuts, strict=True)  # what such a loop calls is not progress, either
    paths = {tuple((f.file, f.name, line_of(f)) for f in path[cut:]) for path, cut in pairs}
    users = {next(((f.file, line_of(f)) for f in path if user_frame([f])), None) for path in thread.paths}
    if new:
        return True  # it was started while we looked
    if _share(thread, seconds) > BURNS and len({tuple(one[:2] for one in path) for path in paths}) == 1:
        return False  # a loop of one function, which may have no end: that it is busy tells enough
    return len(users) > 1 or (len(paths) > 1 and (thread.ticks_moved or 0) > 2)


WAKES = 3  # context switches that a thread which only waits may make, by being looked at


def has_run(thread: ThreadView) -> bool:
    """Whether a thread ran between the looks."""
    facts = thread.facts
    return (thread.ticks_moved or 0) > 1 or (
        len(facts) > 1 and facts[-1].switches - facts[0].switches > WAKES
    )


def is_busy(thread: ThreadView, polls: bool, seconds: float) -> bool:
    """Whether the thread used the processor. One that polls every millisecond does so a little."""
    if polls and seconds:
        return _share(thread, seconds) > POLL_SHARE
    ticks = thread.ticks_moved
    runs = any(fact.state == "R" for fact in thread.facts) and (ticks is None or ticks > 1)
    return runs or (ticks or 0) > 5


def _share(thread: ThreadView, seconds: float) -> float:
    """Of the time of the look, what the thread ran."""
    return (thread.ticks_moved or 0) / 100 / seconds if seconds else 0.0
