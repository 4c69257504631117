"""Whether a thread did something while we looked: moved, computed, or only asked again and again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allranks.model.stacks import StackFrame, is_user_file
from allranks.stacktraces import source
from allranks.stacktraces.views import ThreadView, user_frame

#: Reads a source file of the process; "" when it cannot be read.
ReadText = Callable[[str], str]
POLLS, BURNS = 0.25, 0.8  # of a processor: one that polls uses less, one that computes more


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


def has_moved(thread: ThreadView, new: bool, seconds: float) -> bool:
    """Whether the thread did something while we looked. A wait that polls wakes up, which does not count."""
    paths = {tuple((f.file, f.name, f.line) for f in path if f is not None) for path in thread.paths}
    users = {next(((f.file, f.line) for f in path if user_frame([f])), None) for path in thread.paths}
    if new:
        return True  # it was started while we looked
    if _share(thread, seconds) > BURNS and len({tuple(one[:2] for one in path) for path in paths}) == 1:
        return False  # a loop of one function, which may have no end: that it is busy tells enough
    return len(users) > 1 or (len(paths) > 1 and (thread.ticks_moved or 0) > 2)


def is_busy(thread: ThreadView, polls: bool, seconds: float) -> bool:
    """Whether the thread used the processor. One that polls every millisecond does so a little."""
    if polls and seconds:
        return _share(thread, seconds) > POLLS
    return any(fact.state == "R" for fact in thread.facts) or (thread.ticks_moved or 0) > 5


def _share(thread: ThreadView, seconds: float) -> float:
    """Of the time of the look, what the thread ran."""
    return (thread.ticks_moved or 0) / 100 / seconds if seconds else 0.0
