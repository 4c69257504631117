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
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from allranks.errors import ConfigurationError
from allranks.model.stacks import StackFrame, ThreadFacts
from allranks.stacks.user_code import is_user_file
from allranks.stacks.views import ProcessView, ThreadView


@dataclass(frozen=True)
class Condition:
    """What must hold. None or an empty tuple: not asked."""

    state: str = ""  # letters; the thread was in one of them in every snapshot
    syscall: tuple[str, ...] = ()
    first_arg: tuple[int, ...] = ()  # of the system call
    second_arg: tuple[int, ...] = ()
    wchan: tuple[str, ...] = ()  # words in wchan or in the kernel stack
    top: tuple[str, ...] = ()  # frame patterns for the innermost Python frame
    frame: tuple[str, ...] = ()  # frame patterns for any Python frame
    also: tuple[str, ...] = ()  # a second `frame`
    without: tuple[str, ...] = ()  # no Python frame matches
    leaf: tuple[str, ...] = ()  # regular expressions for native frames above the innermost Python frame
    native: tuple[str, ...] = ()  # regular expressions for any native frame of the thread
    source: str = ""  # regular expression for the text of the innermost Python line; native frames outrank it
    name: str = ""  # regular expression for the thread's name
    comm: tuple[str, ...] = ()  # some thread of the process bears such a kernel name (prefix)
    title: str = ""  # regular expression for the process title
    gil: bool | None = None
    busy: bool | None = None
    user_top: bool | None = None  # the innermost Python frame is the user's own code
    leaf_known: bool | None = None  # a native look was taken of this thread
    children: bool | None = None  # the process has child processes
    python_children: bool | None = None  # some of them run Python
    kernels: str = ""  # regular expression for a device kernel seen by cuda-gdb
    idle: bool | None = None  # the opposite of busy, but None counts as idle
    main: bool | None = None  # it is the main thread
    gil_known: bool | None = None  # a look could tell who owns the GIL
    foreign_leaf: bool | None = None  # the native frames lead out of the interpreter and the C library
    facts_known: bool | None = None  # /proc was read for this thread
    python_known: bool | None = None  # some look saw its Python frames
    torch_threads: bool | None = None  # the process has threads of gloo or NCCL
    starves: bool | None = None  # another Python thread waits for the GIL in every snapshot


@dataclass(frozen=True)
class Pattern:
    """One line of the table: cause, conditions, and the sentence that says what was seen."""

    cause: str
    says: str
    when: Condition
    any_of: tuple[Condition, ...] = ()  # further ways to the same conclusion
    threads: str = "main"  # "any": asked of every thread before the main one is looked at
    confidence: float = 0.9


@dataclass(frozen=True)
class Match:
    """A pattern that holds. `operation` is the function of the frame that matched."""

    pattern: Pattern
    operation: str


@lru_cache(maxsize=1)
def load_patterns() -> tuple[Pattern, ...]:
    """The patterns that ship with the package."""
    text = resources.files("allranks.stacks").joinpath("patterns.yaml").read_text(encoding="utf-8")
    return parse_patterns(text)


def parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Patterns from YAML; says which entry is wrong."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load(text, Loader=loader)
    if not isinstance(rows, list):
        raise ConfigurationError("a pattern file is a list of patterns")
    return tuple(_pattern(row, index) for index, row in enumerate(rows))


def _pattern(row: object, index: int) -> Pattern:
    if not isinstance(row, dict) or "cause" not in row:
        raise ConfigurationError(f"pattern {index} has no cause")
    known = {"cause", "says", "when", "any_of", "threads", "confidence"}
    if unknown := set(row) - known:
        raise ConfigurationError(f"pattern {index} ({row['cause']}) has unknown keys {sorted(unknown)}")
    any_of = row.get("any_of") or []
    when = row.get("when") or {}
    return Pattern(
        cause=str(row["cause"]),
        says=str(row.get("says") or row["cause"]),
        when=_condition(when, index),
        any_of=tuple(_condition(item, index) for item in any_of),
        threads=str(row.get("threads") or "main"),
        confidence=float(row.get("confidence") or 0.9),
    )


_LISTS = {field.name for field in fields(Condition) if field.type.startswith("tuple")}
_NAMES = {field.name for field in fields(Condition)}


def _condition(row: object, index: int) -> Condition:
    if not isinstance(row, dict) or set(row) - _NAMES:
        raise ConfigurationError(f"pattern {index}: unknown condition in {row!r}")
    values: dict[str, Any] = {
        key: tuple(value if isinstance(value, list) else [value]) if key in _LISTS else value
        for key, value in row.items()
    }
    return Condition(**values)


def match_thread(patterns: Sequence[Pattern], view: ThreadView, process: ProcessView) -> Match | None:
    """The first pattern that holds for a thread."""
    for pattern in patterns:
        first = _holds(pattern.when, view, process)
        if first is None:
            continue
        if not pattern.any_of:
            return Match(pattern, first)
        for condition in pattern.any_of:
            second = _holds(condition, view, process)
            if second is not None:
                return Match(pattern, first or second)
    return None


def _holds(c: Condition, view: ThreadView, process: ProcessView) -> str | None:
    """None when the condition fails; else the function name of the frame that matched, or ""."""
    if not _kernel_holds(c, view) or not _flags_hold(c, view, process):
        return None
    top = view.python[0] if view.python else None
    if c.top and (top is None or not any(frame_matches(one, top) for one in c.top)):
        return None
    if c.source and (top is None or not _source_matches(c.source, top, view)):
        return None
    if c.without and any(frame_matches(one, frame) for one in c.without for frame in view.python):
        return None
    if c.also and not any(frame_matches(one, frame) for one in c.also for frame in view.python):
        return None
    if c.leaf and not _natives_match(c.leaf, view.leaf):
        return None
    if c.native and not _natives_match(c.native, view.natives):
        return None
    if not c.frame:
        return _last_word(top.name) if c.top and top is not None else ""
    outer = [frame for frame in view.python if any(frame_matches(one, frame) for one in c.frame)]
    return _last_word(outer[-1].name) if outer else None


def _source_matches(expression: str, top: StackFrame, view: ThreadView) -> bool:
    """A line of source is a hint: it counts only while no native frame says what the line is really doing."""
    told = any(not library(frame).startswith(("libc.", "libc-", "libpthread")) for frame in view.leaf)
    return not told and bool(top.source) and re.search(expression, top.source) is not None


def _kernel_holds(c: Condition, view: ThreadView) -> bool:
    now = view.now
    if c.state and (not view.facts or not all(fact.state and fact.state in c.state for fact in view.facts)):
        return False
    if not (c.syscall or c.wchan or c.first_arg or c.second_arg):
        return True
    if now is None:
        return False
    if c.syscall and not any(fact.syscall in c.syscall for fact in view.facts):
        return False
    if c.first_arg and not any(fact.args[:1] and fact.args[0] in c.first_arg for fact in view.facts):
        return False
    if c.second_arg and not any(fact.args[1:2] and fact.args[1] in c.second_arg for fact in view.facts):
        return False
    seen = (now.wchan, *now.kernel_stack)
    return not c.wchan or any(word in name for word in c.wchan for name in seen)


@lru_cache(maxsize=2000)
def _asked(c: Condition) -> tuple[tuple[str, bool], ...]:
    """The yes-or-no questions of a condition."""
    return tuple((name, getattr(c, name)) for name in _FLAGS if getattr(c, name) is not None)


def _top_is_user(view: ThreadView) -> bool:
    return bool(view.python) and is_user_file(view.python[0].file)


_FLAGS: dict[str, Callable[[ThreadView, ProcessView], bool | None]] = {
    "gil": lambda view, process: view.holds_gil,
    "busy": lambda view, process: view.busy,
    "idle": lambda view, process: not view.busy,
    "main": lambda view, process: view.main,
    "user_top": lambda view, process: _top_is_user(view),
    "leaf_known": lambda view, process: bool(view.leaf),
    "facts_known": lambda view, process: bool(view.facts),
    "python_known": lambda view, process: bool(view.python),
    "gil_known": lambda view, process: bool(view.gil),
    "children": lambda view, process: process.children.any,
    "python_children": lambda view, process: process.children.python,
    "torch_threads": lambda view, process: _has_torch_threads(process),
    "foreign_leaf": lambda view, process: _foreign(view.leaf),
    "starves": lambda view, process: _starves(view, process),
}


def _flags_hold(c: Condition, view: ThreadView, process: ProcessView) -> bool:
    if any(_FLAGS[name](view, process) != wanted for name, wanted in _asked(c)):
        return False
    if c.comm and not any(comm.startswith(word) for comm in process.comms for word in c.comm):
        return False
    if c.title and not re.search(c.title, process.capture.title):
        return False
    if c.kernels and not any(re.search(c.kernels, kernel) for kernel in process.capture.kernels):
        return False
    return not c.name or bool(re.search(c.name, view.name))


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


def _foreign(frames: Sequence[StackFrame]) -> bool:
    """Whether native frames belong to some library that is neither the interpreter nor the C library."""
    return any(
        not _INTERPRETER.search(library(frame))
        and library(frame).split(".")[0] not in sys.stdlib_module_names
        for frame in frames
        if library(frame)
    )


def library(frame: StackFrame) -> str:
    """The file name of the library of a native frame, or of its source where a tool gave only that."""
    path = frame.source or frame.file
    return path if "lib-dynload" in path else path.rsplit("/", 1)[-1]


def _has_torch_threads(process: ProcessView) -> bool:
    return any(comm.startswith(("gloo", "pt_gloo", "pt_nccl", "nccl")) for comm in process.comms)


def _starves(holder: ThreadView, process: ProcessView) -> bool:
    """Whether every other thread of the user's own code was found in the GIL's timed wait at every look."""
    others = [
        view
        for view in process.threads
        if view.tid != holder.tid
        and len(view.facts) > 1
        and view.python
        and is_user_file(view.python[0].file)
    ]
    return bool(others) and all(_stands_in_line(view) for view in others)


def _stands_in_line(view: ThreadView) -> bool:
    """Seen in the GIL's wait, and otherwise only ready to run (on a busy machine even the wait waits for a CPU)."""
    waits = [_waits_for_gil(fact) for fact in view.facts]
    return any(waits) and all(
        wait or fact.syscall == "running" for wait, fact in zip(waits, view.facts, strict=True)
    )


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
