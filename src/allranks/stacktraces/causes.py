"""Says what one process is stuck on, from the shapes of its threads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from allranks.model.stacks import WAITS, ProcessCapture, StackFrame, is_user_file
from allranks.stacktraces.patterns import PatternMatch, StackPattern, library, match_thread
from allranks.stacktraces.views import (
    NO_CHILDREN,
    POLLS,
    Children,
    ProcessView,
    ThreadView,
    place,
    short_name,
    user_frame,
    view_process,
    where,
)

_SHAPES = ("lock_wait", "thread_wait", "background")
_RPC_API, _RPC_CALL = "torch/distributed/rpc/api.py", "torch/distributed/rpc/internal.py"
#: Waits that are telling even in a thread without a line of the user's own.
_STRONG = WAITS | {"checkpoint_io", "dataloader_wait", "file_lock_wait"}


@dataclass(frozen=True)
class Cause:
    """What a process is doing, and what shows it."""

    cause: str
    where: str
    evidence: str
    operation: str = ""
    thread: str = ""
    stack: tuple[StackFrame, ...] = ()
    confidence: float = 0.0
    threads: int = 0


def find_cause(
    capture: ProcessCapture, patterns: Sequence[StackPattern], children: Children = NO_CHILDREN
) -> tuple[Cause, ProcessView]:
    """The cause of one process, and the view of its threads that led to it."""
    view = view_process(capture, children)
    main = view.main
    if main is None or not (main.python or main.facts or main.natives):
        reason = capture.notes[0] if capture.notes else "nothing could be collected of this process"
        return Cause("unknown", "", reason, threads=view.count), view
    return _Process(view, main, patterns).decide(), view


@dataclass(frozen=True)
class _Process:
    """The threads of one process, and the table that says what they do."""

    view: ProcessView
    main: ThreadView
    patterns: Sequence[StackPattern]

    @cached_property
    def others(self) -> list[tuple[ThreadView, PatternMatch]]:
        """The threads but the main one, where a pattern fits."""
        found = ((t, match_thread(self.patterns, t, self.view)) for t in self.view.threads if not t.main)
        return [(thread, match) for thread, match in found if match is not None]

    @property
    def locked(self) -> list[ThreadView]:
        """Threads but the main one that wait for a lock."""
        return [thread for thread, match in self.others if match.pattern.cause == "lock_wait"]

    def decide(self) -> Cause:
        first = match_thread(self.patterns, self.main, self.view)
        cause = first.pattern.cause if first is not None else "unknown"
        if first is not None and cause in ("stopped", "d_state"):
            return _cause(first, self.main, self.view)
        if (cycle := _mutex_cycle(self.view)) is not None:
            return cycle
        everywhere = [pattern for pattern in self.patterns if pattern.threads == "any"]
        for thread in self.view.threads:
            if (match := match_thread(everywhere, thread, self.view)) is not None:
                return _cause(match, thread, self.view)
        if first is None:
            return _unknown(self.main, self.view)
        if cause == "lock_wait":  # with whom, or for itself?
            return _lock_cause(self.view, [self.main, *self.locked], None)
        if cause == "thread_wait" or self._own_queue(first):
            return self._follow(first)
        if cause in ("request_wait", "event_loop_idle"):
            return self._behind_loop(first)
        if cause == "shutdown_join":
            return self._at_exit(first)
        if cause == "background":
            return _cause(first, self.main, self.view, "queue_wait")
        return self._behind_main(first) or _cause(first, self.main, self.view)

    def _own_queue(self, first: PatternMatch) -> bool:
        """Whether the main thread waits on a queue that threads of its own process fill."""
        near = self.main.python[:3]
        return first.pattern.cause == "queue_wait" and any(f.file.endswith("/queue.py") for f in near)

    def _at_exit(self, first: PatternMatch) -> Cause:
        """The interpreter waits for threads of the program: the line of the first that runs the user's code is what keeps it."""
        found = _cause(first, self.main, self.view)
        left = [t for t in self.view.threads if not t.main and user_frame(t.python) and _has_own_code(t)]
        if not left or user_frame(self.main.python):
            return found
        told = {t.tid: m for t, m in self.others if m.pattern.cause not in _SHAPES}
        thread = max(left, key=lambda t: t.tid in told)
        match = told.get(thread.tid)
        doing = f"is at {where(thread.python)}"
        if match is not None:  # most of them name the innermost line
            own = user_frame(thread.python[:1])
            doing = (
                _evidence_text(match, thread) if own else f"{doing}, which {_evidence_text(match, thread)}"
            )
        says = f"{found.evidence}; thread {thread.name} {doing}"
        return replace(
            found, where=where(thread.python), evidence=says, thread=thread.name, stack=thread.python
        )

    def _behind_main(self, first: PatternMatch) -> Cause | None:
        """What others of the rank's threads do for the main one: hooks of a backward, as the gradients of a GPU come in a thread
        that Python has not started; or for other ranks: their remote calls, while the main one waits for the end of all."""
        python = self.main.python
        others = [t for t in self.view.threads if not t.main and t.python]
        if python and python[0].name == "_engine_run_backward":
            what = "a hook of its backward"
            chosen = [t for t in others if not t.python[-1].name.endswith("_bootstrap")]
        elif first.pattern.cause == "p2p_wait" or any(frame.file.endswith(_RPC_API) for frame in python):
            what = "a call of another rank"
            chosen = [t for t in others if t.python[-1].file.endswith(_RPC_CALL)]
        else:
            return None
        table = [one for one in self.patterns if one.cause != "background"]
        found = ((t, match_thread(table, t, self.view)) for t in chosen)
        causes = [self._of_shape(match, thread) for thread, match in found if match is not None]
        if not causes:
            return None
        cause = max(causes, key=lambda one: (one.cause not in WAITS, one.cause != "sleep", one.confidence))
        return replace(cause, evidence=f"{what} {cause.evidence}")

    def _of_shape(self, match: PatternMatch, thread: ThreadView) -> Cause:
        """The cause of a thread whose own wait is all that is looked at."""
        if match.pattern.cause == "lock_wait":
            return replace(_lock_cause(self.view, [thread], None), thread=thread.name)
        shape = "queue_wait" if match.pattern.cause in _SHAPES else ""
        return replace(_cause(match, thread, self.view, shape), thread=thread.name)

    def _follow(self, first: PatternMatch) -> Cause:
        """The main thread waits for another thread, or for what that puts into a queue: that thread's trouble is the rank's."""
        main = self.main
        if first.pattern.cause == "thread_wait" and self.locked:
            return _lock_cause(self.view, self.locked, main)
        silent = (*_SHAPES, first.pattern.cause)
        others = [(t, m) for t, m in self.others if m.pattern.cause not in silent]
        told = [(t, m) for t, m in others if m.pattern.cause in _STRONG or _has_own_code(t)]
        if not told:
            cause = _cause(first, main, self.view, "queue_wait")
            alike = [t for t, m in self.others if m.pattern is first.pattern and user_frame(t.python)]
            too = ", ".join(f"thread {thread.name} at {where(thread.python)}" for thread in alike[:3])
            return replace(cause, evidence=f"{cause.evidence}; so does {too}") if too else cause
        thread, match = max(told, key=lambda pair: _weight(pair[1]))
        cause = _cause(match, thread, self.view)
        says = f"the main thread waits in {_top(main)} for thread {thread.name}, which {cause.evidence}"
        line = cause.where if user_frame(thread.python) else where(main.python)
        return replace(cause, where=line, evidence=says, thread=thread.name)

    def _behind_loop(self, first: PatternMatch) -> Cause:
        """A main thread that serves requests may leave the training to another thread (Ray Train, asyncio executors)."""
        matches = {thread.tid: match for thread, match in self.others}
        for thread in sorted((t for t in self.view.threads if not t.main), key=_trains, reverse=True):
            match = matches.get(thread.tid)
            strong = match is not None and match.pattern.cause in _STRONG
            if not user_frame(thread.python) or not (strong or _trains(thread)):
                continue
            cause = _unknown(thread, self.view)
            if match is not None:
                shape = "queue_wait" if match.pattern.cause in _SHAPES else ""
                cause = _cause(match, thread, self.view, shape)
            says = f"thread {thread.name} {cause.evidence}; the main thread only serves"
            return replace(cause, evidence=says, thread=thread.name)
        return _cause(first, self.main, self.view)


def _trains(thread: ThreadView) -> bool:
    """Ray Train's name of the thread that runs the user's loop."""
    return thread.name.startswith("TrainingThread")


def _has_own_code(thread: ThreadView) -> bool:
    """Whether the user's code is on the stack, or a task that the user handed to a thread."""
    return any(is_user_file(frame.file) for frame in thread.python) or (
        bool(thread.python) and thread.python[0].name.endswith("run")
    )


def _weight(match: PatternMatch) -> float:
    """A thread that sleeps may just be a monitor: any other trouble is more telling."""
    return match.pattern.confidence - (0.5 if match.pattern.cause == "sleep" else 0.0)


def _lock_cause(view: ProcessView, locked: list[ThreadView], joiner: ThreadView | None) -> Cause:
    """A lock that cannot come free. Owners are not recorded by the interpreter: threads and lines are."""
    lines = [f"{thread.name or 'a thread'} at {where(thread.python)}{_source(thread)}" for thread in locked]
    waiting = {thread.tid for thread in locked} | ({joiner.tid} if joiner is not None else set())
    others = [thread for thread in view.threads if thread.python and thread.tid not in waiting]
    if len(locked) > 1:
        says = f"{len(locked)} threads wait for locks: " + ", ".join(lines)
        says += "" if others else "; no thread that could release them runs (deadlock)"
    elif _forked(locked[0]):
        says = f"waits for a lock that was held when this process was forked; its owner does not exist here: {lines[0]}"
    elif not others:
        why = "self-deadlock" + (", or it was held at a fork" if view.capture.child is not None else "")
        says = f"waits for a lock that no other thread can release ({why}): {lines[0]}"
    else:
        says = f"waits for a lock that is not released: {lines[0]}"
    holders = [thread for thread in others if _has_own_code(thread)]
    if holders and not _forked(locked[0]):
        says += "; held perhaps by " + " or ".join(f"{t.name} at {where(t.python)}" for t in holders[:3])
    if joiner is not None:
        says += f"; the main thread joins them at {where(joiner.python)}"
    both = [*locked, *([joiner] if joiner is not None else [])]
    subject = next((t for t in both if any(is_user_file(frame.file) for frame in t.python)), locked[0])
    name, sure = subject.name if not subject.main else "", 0.95 if len(locked) > 1 else 0.85
    return Cause("lock_deadlock", where(subject.python), says, "lock", name, subject.python, sure, view.count)


def _mutex_cycle(view: ProcessView) -> Cause | None:
    """Native mutexes know their owners: threads that wait for each other in a circle are a proven deadlock."""
    facts = view.capture.snapshots[-1].facts if view.capture.snapshots else ()
    owners = {fact.tid: fact.mutex_owner for fact in facts if fact.mutex_owner is not None}
    for start in owners:
        path = [start]
        while (owner := owners.get(path[-1])) is not None and owner not in path:
            path.append(owner)
        if owner is None or owner != start:
            continue
        names = [_thread_name(view, tid) for tid in path]
        if len(path) == 1:
            says = f"waits for a native mutex that it holds itself (self-deadlock): {names[0]}"
        else:
            says = "native mutexes in a circle: " + ", ".join(
                f"{name} waits for {other}" for name, other in zip(names, [*names[1:], names[0]], strict=True)
            )
        subject = next((thread for thread in view.threads if thread.tid in path), view.main)
        python = subject.python if subject is not None else ()
        return Cause("lock_deadlock", where(python), says, "lock", names[0], python, 0.98, view.count)
    return None


def _thread_name(view: ProcessView, tid: int) -> str:
    named = (f"{t.name} at {where(t.python)}" for t in view.threads if t.tid == tid and t.python)
    return next(named, f"thread {tid}")


def _forked(thread: ThreadView) -> bool:
    files = ("popen_fork.py", "multiprocessing/process.py")
    return any(frame.file.endswith(files) for frame in thread.python)


def _source(thread: ThreadView) -> str:
    text = next((frame.source for frame in thread.python if is_user_file(frame.file) and frame.source), "")
    return f" `{text[:80]}`" if text else ""


def _cause(match: PatternMatch, thread: ThreadView, view: ProcessView, cause: str = "") -> Cause:
    return Cause(
        cause=cause or match.pattern.cause,
        where=where(thread.python),
        evidence=_evidence_text(match, thread) + _also_gil(match, thread),
        operation=match.operation,
        thread="" if thread.main else thread.name,
        stack=thread.python,
        confidence=match.pattern.confidence,
        threads=view.count,
    )


def _also_gil(match: PatternMatch, thread: ThreadView) -> str:
    """A wait that keeps the GIL also stops every other thread of the process."""
    held = thread.holds_gil and not thread.busy and match.pattern.cause not in ("gil_held_native", "stopped")
    return "; it keeps the GIL meanwhile" if held else ""


def _unknown(main: ThreadView, view: ProcessView) -> Cause:
    seen = f"in {_top(main)}" if main.python else "no Python frame"
    now = main.now
    kernel = f", state {now.state} {now.syscall} {now.wchan}".rstrip() if now else ""
    says = f"no pattern fits: {seen}{kernel}"
    return Cause("unknown", where(main.python), says, stack=main.python, threads=view.count)


def _top(thread: ThreadView) -> str:
    frame = thread.python[0] if thread.python else None
    return f"{short_name(frame.name)} ({place(frame).split(' in ')[0]})" if frame else "native code"


def _evidence_text(match: PatternMatch, thread: ThreadView) -> str:
    """The evidence line: the pattern's sentence with what was seen put in."""
    now = thread.now
    words = {
        "top": _top(thread),
        "where": where(thread.python),
        "operation": match.operation or _top(thread),
        "syscall": (now.syscall if now else "") or "no system call known",
        "wchan": now.wchan if now else "",
        "state": now.state if now else "?",
        "native": _native(thread),
        "source": next((frame.source for frame in thread.python if frame.source), "")[:80],
        "thread": thread.name or str(thread.tid),
        "ticks": str(thread.ticks_moved) if thread.ticks_moved is not None else "?",
        "fd": str(now.args[0]) if now and now.args else "?",
    }
    text = match.pattern.says
    test = thread.python[0].source.partition(POLLS)[2] if thread.python else ""
    if match.pattern.cause == "sleep" and test:
        text = "looks again and again in {top} whether `{test}` has changed"
    for word, value in words.items():
        text = text.replace("{" + word + "}", value)
    text = " ".join(text.split()).replace(" )", ")").replace("(, ", "(").replace("()", "").strip()
    return text.replace("{test}", test)


def _native(thread: ThreadView) -> str:
    """The native call that names the wait best: the innermost with a symbol outside the C library."""
    named = [frame for frame in thread.leaf if not frame.name.startswith("0x")]
    plain = ("libc.", "libc-", "libpthread", "libstdc++")
    telling = [frame for frame in named if not library(frame).startswith(plain)]
    frame = next(iter(telling or named), None)
    return f"{frame.name[:80]} in {library(frame).rsplit('/', 1)[-1]}" if frame is not None else ""
