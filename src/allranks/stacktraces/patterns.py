"""Patterns are data (`patterns.yaml`): each names a cause and what must be true of a thread. Pure but for loading.

A frame pattern is `function@file`; either part may be missing. The function matches by its last words
(`Queue.get` matches `Queue.get` and a plain `get`), the file by its end. Lists mean "one of these"; all
conditions of a pattern must hold; the first pattern that holds wins, so specific ones stand first.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from allranks.errors import ConfigurationError
from allranks.model.stacks import StackFrame, ThreadFacts, is_user_file
from allranks.stacktraces.views import ProcessView, ThreadView

#: (value of the condition, thread, process) -> whether it holds.
Test = Callable[[Any, ThreadView, ProcessView], bool]


@dataclass(frozen=True)
class Condition:
    """What must hold: tests of `_TESTS` with their values. `frame`: patterns for any Python frame, which names the match."""

    asked: tuple[tuple[Test, Any], ...] = ()
    frame: tuple[str, ...] = ()
    top: bool = False  # the innermost Python frame names the match


@dataclass(frozen=True)
class StackPattern:
    """One line of the table: cause, conditions, and the sentence that says what was seen."""

    cause: str
    says: str
    when: Condition
    any_of: tuple[Condition, ...] = ()  # further ways to the same conclusion
    threads: str = "main"  # "any": asked of every thread before the main one is looked at
    confidence: float = 0.9


@dataclass(frozen=True)
class PatternMatch:
    """A pattern that holds. `operation` is the function of the frame that matched."""

    pattern: StackPattern
    operation: str


@lru_cache(maxsize=1)
def load_patterns() -> tuple[StackPattern, ...]:
    """The patterns that ship with the package."""
    text = resources.files("allranks.stacktraces").joinpath("patterns.yaml").read_text(encoding="utf-8")
    return parse_patterns(text)


def parse_patterns(text: str) -> tuple[StackPattern, ...]:
    """Patterns from YAML; says which entry is wrong."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load(text, Loader=loader)
    if not isinstance(rows, list):
        raise ConfigurationError("a pattern file is a list of patterns")
    return tuple(_pattern(row, index) for index, row in enumerate(rows))


def _pattern(row: object, index: int) -> StackPattern:
    if not isinstance(row, dict) or "cause" not in row:
        raise ConfigurationError(f"pattern {index} has no cause")
    known = {"cause", "says", "when", "any_of", "threads", "confidence"}
    if unknown := set(row) - known:
        raise ConfigurationError(f"pattern {index} ({row['cause']}) has unknown keys {sorted(unknown)}")
    return StackPattern(
        cause=str(row["cause"]),
        says=str(row.get("says") or row["cause"]),
        when=_condition(row.get("when") or {}, index),
        any_of=tuple(_condition(item, index) for item in row.get("any_of") or []),
        threads=str(row.get("threads") or "main"),
        confidence=float(row.get("confidence") or 0.9),
    )


#: Conditions whose value is a list, or one of it.
_LISTS = frozenset(
    {"syscall", "first_arg", "second_arg", "wchan", "top", "frame"}
    | {"also", "without", "leaf", "native", "comm"}
)


def _condition(row: object, index: int) -> Condition:
    if not isinstance(row, dict) or set(row) - _TESTS.keys() - {"frame"}:
        raise ConfigurationError(f"pattern {index}: unknown condition in {row!r}")
    values = {
        key: tuple(value if isinstance(value, list) else [value]) if key in _LISTS else value
        for key, value in row.items()
    }
    asked = ((test, values.get(name)) for name, test in _TESTS.items())
    given = tuple((test, value) for test, value in asked if value not in (None, "", ()))
    return Condition(given, values.get("frame", ()), bool(values.get("top")))


def match_thread(
    patterns: Sequence[StackPattern], view: ThreadView, process: ProcessView
) -> PatternMatch | None:
    """The first pattern that holds for a thread."""
    for pattern in patterns:
        first = _holds(pattern.when, view, process)
        if first is None:
            continue
        if not pattern.any_of:
            return PatternMatch(pattern, first)
        for condition in pattern.any_of:
            if (second := _holds(condition, view, process)) is not None:
                return PatternMatch(pattern, first or second)
    return None


def _holds(c: Condition, view: ThreadView, process: ProcessView) -> str | None:
    """None when the condition fails; else the function name of the frame that matched, or ""."""
    if not all(test(value, view, process) for test, value in c.asked):
        return None
    if c.frame:
        outer = [frame for frame in view.python if any(frame_matches(one, frame) for one in c.frame)]
        return _last_word(outer[-1].name) if outer else None
    return _last_word(view.python[0].name) if c.top else ""


def _source_matches(expression: str, view: ThreadView, process: ProcessView) -> bool:
    """A line of source is a hint: it counts only while no native frame says what the line is really doing."""
    source = view.python[0].source if view.python else ""
    told = any(not library(frame).startswith(("libc.", "libc-", "libpthread")) for frame in view.leaf)
    return not told and bool(source) and re.search(expression, source) is not None


def _state_holds(letters: str, view: ThreadView, process: ProcessView) -> bool:
    return bool(view.facts) and all(fact.state and fact.state in letters for fact in view.facts)


def _kernel_matches(words: Sequence[str], view: ThreadView, process: ProcessView) -> bool:
    seen = () if view.now is None else (view.now.wchan, *view.now.kernel_stack)
    return any(word in name for word in words for name in seen)


def _argument(index: int) -> Test:
    """Whether the system call had one of these values as its argument `index` in some snapshot."""
    return lambda values, view, process: any(
        len(fact.args) > index and fact.args[index] in values for fact in view.facts
    )


def _any_frame(patterns: Sequence[str], frames: Sequence[StackFrame]) -> bool:
    return any(frame_matches(one, frame) for one in patterns for frame in frames)


def _flag(answer: Callable[[ThreadView, ProcessView], bool | None]) -> Test:
    """A yes-or-no question; an answer that is not known is neither."""
    return lambda wanted, view, process: answer(view, process) == wanted


#: Every condition and how it is tested, the cheap ones first; `frame` is tested last, since it also gives a name.
_TESTS: dict[str, Test] = {
    # letters; the thread was in one of these states in every snapshot
    "state": _state_holds,
    "syscall": lambda names, view, process: any(fact.syscall in names for fact in view.facts),
    "first_arg": _argument(0),
    "second_arg": _argument(1),
    # words in wchan or in the kernel stack
    "wchan": _kernel_matches,
    "gil": _flag(lambda view, process: view.holds_gil),
    "busy": _flag(lambda view, process: view.busy),
    # the opposite of busy, but where nothing tells it counts as idle
    "idle": _flag(lambda view, process: not view.busy),
    # no CPU time between the looks, or one tick, the price of being looked at
    "unmoved": _flag(lambda view, process: (view.ticks_moved or 0) <= 1),
    "main": _flag(lambda view, process: view.main),
    # the innermost Python frame is the user's own code
    "user_top": _flag(lambda view, process: bool(view.python) and is_user_file(view.python[0].file)),
    # a native sample was taken of this thread; /proc was read for it; some sample has its Python frames, or who owns the GIL
    "leaf_known": _flag(lambda view, process: bool(view.leaf)),
    "facts_known": _flag(lambda view, process: bool(view.facts)),
    "python_known": _flag(lambda view, process: bool(view.python)),
    "gil_known": _flag(lambda view, process: bool(view.gil)),
    # the process has child processes; some of them run Python
    "children": _flag(lambda view, process: process.children.any),
    "python_children": _flag(lambda view, process: process.children.python),
    # the process has threads of gloo or NCCL
    "torch_threads": _flag(lambda view, process: _has_torch_threads(process)),
    # the native frames lead out of the interpreter and the C library
    "foreign_leaf": _flag(lambda view, process: any(map(_is_foreign, view.leaf))),
    "starves": _flag(lambda view, process: _starves(view, process)),
    "contends": _flag(lambda view, process: _contends(view, process)),
    # some thread of the process bears a kernel name that begins so
    "comm": lambda words, view, process: any(comm.startswith(words) for comm in process.comms),
    # regular expressions: for the process title, a device kernel seen by cuda-gdb, the thread's name
    "title": lambda expression, view, process: bool(re.search(expression, process.capture.title)),
    "kernels": lambda wanted, view, process: any(re.search(wanted, one) for one in process.capture.kernels),
    "name": lambda expression, view, process: bool(re.search(expression, view.name)),
    # frame patterns: for the innermost Python frame; for none of them; for any, beside `frame`
    "top": lambda patterns, view, process: _any_frame(patterns, view.python[:1]),
    "source": _source_matches,
    "without": lambda patterns, view, process: not _any_frame(patterns, view.python),
    "also": lambda patterns, view, process: _any_frame(patterns, view.python),
    # regular expressions: for native frames above the innermost Python frame; for any native frame of the thread
    "leaf": lambda expressions, view, process: _natives_match(expressions, view.leaf),
    "native": lambda expressions, view, process: _natives_match(expressions, view.natives),
}


@lru_cache(maxsize=400_000)
def frame_matches(pattern: str, frame: StackFrame) -> bool:
    """Whether `function@file` describes a frame. A file that ends in "/" is a folder; without a file the
    frame must be the user's own code."""
    function, at, file = pattern.partition("@")
    if not (_file_matches(file, frame.file) if at else is_user_file(frame.file)):
        return False
    if function == "*":
        return True
    if "*" in function:
        return fnmatch.fnmatchcase(_last_word(frame.name).lower(), function)
    if "." in frame.name and "." in function:
        return frame.name == function or frame.name.endswith("." + function)
    return _last_word(frame.name) == _last_word(function)


def _file_matches(pattern: str, file: str) -> bool:
    if pattern == "*":
        return True
    if pattern.endswith("/"):
        return f"/{pattern}" in f"/{file}"
    return file == pattern or file.endswith(f"/{pattern}")


_INTERPRETER = re.compile(
    r"^(lib(python|c|m|dl|rt|util|pthread|gcc_s|stdc\+\+)[.\d-]|python[\d.]*$|ld-|linux-vdso|\[vdso)"
    r"|(^|/)(Python|Objects|Modules|Include|nptl|sysdeps|Parser)/|lib-dynload"
)


def _is_foreign(frame: StackFrame) -> bool:
    """Whether a native frame belongs to some library that is neither the interpreter nor the C library."""
    name = library(frame)
    known = _INTERPRETER.search(name) or name.split(".")[0] in sys.stdlib_module_names
    return bool(name) and not known


def library(frame: StackFrame) -> str:
    """The file name of the library of a native frame, or of its source where a tool gave only that."""
    path = frame.source or frame.file
    return path if "lib-dynload" in path else path.rsplit("/", 1)[-1]


def _has_torch_threads(process: ProcessView) -> bool:
    return any(comm.startswith(("gloo", "pt_gloo", "pt_nccl", "nccl", "TP_")) for comm in process.comms)


def _starves(holder: ThreadView, process: ProcessView) -> bool:
    """Whether every other thread of the user's own code was found in the GIL's timed wait at every look."""
    others = [view for view in _seen_in_user_code(process) if view.tid != holder.tid]
    return bool(others) and all(_stands_in_line(view) for view in others)


def _contends(thread: ThreadView, process: ProcessView) -> bool:
    """Whether this thread and at least two others run Python code and stand in line for the GIL."""
    waiting = {view.tid for view in _seen_in_user_code(process) if _stands_in_line(view)}
    return thread.tid in waiting and len(waiting) > 2


def _seen_in_user_code(process: ProcessView) -> list[ThreadView]:
    """Threads that were looked at more than once and whose innermost frame is the user's: no call that waits."""
    threads = (view for view in process.threads if len(view.facts) > 1 and view.python)
    return [view for view in threads if is_user_file(view.python[0].file)]


def _stands_in_line(view: ThreadView) -> bool:
    """Seen in the GIL's wait, and otherwise only ready to run (on a busy machine even the wait waits for a CPU)."""
    ready = all(_waits_for_gil(fact) or fact.syscall == "running" for fact in view.facts)
    return ready and any(map(_waits_for_gil, view.facts))


def _waits_for_gil(fact: ThreadFacts) -> bool:
    """A futex wait with a time limit: how a thread stands in line for the GIL."""
    return fact.syscall == "futex" and fact.args[1:2] == (0x89,) and fact.args[3:4] != (0,)


def _last_word(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _natives_match(expressions: Sequence[str], frames: Sequence[StackFrame]) -> bool:
    return any(
        _compiled(one).search(frame.name) or _compiled(one).search(library(frame))
        for one in expressions
        for frame in frames
    )


@lru_cache(maxsize=1000)
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)
