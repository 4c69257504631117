"""What each thread of a process waits for: from its Python frames, its system call, and the source around its line. Pure.

The table of patterns says what a thread does; here it is turned into what it waits *for*, so that the wait can be followed
into another thread or process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources

from allranks.model.stacks import ProcessLink, StackFrame, ThreadLook, ThreadStack, WaitFor, is_user_file
from allranks.model.yaml_tree import read_yaml
from allranks.stacktraces import source
from allranks.stacktraces.patterns import StackPattern, frame_matches, match_thread
from allranks.stacktraces.views import (
    ProcessView,
    ReadText,
    ThreadView,
    asks_again,
    has_moved,
    is_busy,
    user_frame,
)

SHORT_S = 30.0  # a sleep that ends sooner is not a hang by itself


@lru_cache(maxsize=1)
def _table() -> dict[str, tuple[str, ...]]:
    """Frames by what they wait for (`waits.yaml`)."""
    text = resources.files("allranks.stacktraces").joinpath("waits.yaml").read_text(encoding="utf-8")
    rows = read_yaml(text)
    assert isinstance(rows, dict)
    return {name: tuple(patterns) for name, patterns in rows.items()}


@dataclass(frozen=True)
class ThreadExtra:
    """What /proc and py-spy say of one thread beyond the stack."""

    fds: tuple[int, ...] = ()  # descriptors that its system call waits on
    left_s: float | None = None  # until its system call ends by itself
    futex: str = ""  # address, or the shared file that it lies in
    shared: str = ""  # the end of a semaphore that processes share
    owner: int | None = None  # the thread that holds the native mutex
    child: int | None = None  # the process that it waits for in wait4; 0 any
    holders: tuple[int, ...] = ()  # processes that hold the file lock it waits for
    polled: tuple[int, ...] = ()  # it sleeps: processes that hold a lock on a file that it has open
    connects: str = ""  # the address that it connects to: "unix /path", "tcp port"
    opens: str = ""  # the path that it opens
    selves: tuple[str, ...] = ()  # address of `self` for each frame
    members: int = 0  # of the process group that it forms
    switches: int = 0


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
    seconds: float = 0.0  # from the first look to the last


def look_at_threads(around: Surroundings, tasks: Sequence[Task] = ()) -> tuple[ThreadLook, ...]:
    """Every thread that has Python frames, or is the main one; then the suspended tasks."""
    threads = [
        look_at_thread(thread, around)
        for thread in around.view.threads
        if thread.tid is not None and (thread.python or thread.main)
    ]
    return (*threads, *(_look_at_task(-1 - n, task, around) for n, task in enumerate(tasks)))


#: Frames of a suspended task, innermost first, and how long it sleeps.
Task = tuple[tuple[StackFrame, ...], float | None]


def _look_at_task(tid: int, task: Task, around: Surroundings) -> ThreadLook:
    """A suspended task with what it awaits."""
    frames, delay = task
    stack = ThreadStack(tid, "task", frames, False, False)
    view = ThreadView(tid, "task", False, (stack,), None, ())
    user = user_frame(frames)
    awaits = any(link.side == "client" and link.turn == "awaits" for link in around.links.values())
    if any(f.file.endswith("ray/util/queue.py") for f in frames[:4]):
        full = any(f.name.endswith("put") for f in frames[:2])
        says = "waits for room in the queue" if full else "waits for an item of the queue"
        wait = WaitFor("queue", says, setters=("clients",))
    elif user is None or any(_is(frame, _table()["task_idle"]) for frame in frames[:2]):
        wait = WaitFor("idle", "waits for its next work")
    elif delay is not None:
        wait = WaitFor("sleep", f"sleeps {delay:g} s", left_s=delay)
    elif any(_is(frame, _table()["http"]) for frame in frames[:12]):
        wait = WaitFor("answer", "waits for the answer to its request")
    elif any(_is(frame, _table()["stream"]) for frame in frames[:3]):
        wait = (
            WaitFor("answer", "waits for data on a connection")
            if awaits
            else WaitFor("idle", "waits for its next request")
        )
    else:
        wait = _by_thread(
            _Asked(
                view,
                ThreadExtra(),
                around,
                "thread_wait",
                "",
                source.waited_object(around.text(user.file), user.line),
            )
        ) or WaitFor("work")
    holds = tuple(name for frame in frames for name in _held(frame, around.text))
    return ThreadLook(tid, frames[-1].name, wait, frames, task=True, holds=holds, handles=True, user=user)


def look_at_thread(thread: ThreadView, around: Surroundings) -> ThreadLook:
    """One thread with what it waits for."""
    extra = around.extras.get(thread.tid or 0, ThreadExtra())
    frames = thread.python
    wait = _find_wait(thread, extra, around)
    if not thread.main and user_frame(frames) is None:
        wait = replace(wait, strong=False)  # a library's own thread
    elif wait.kind in _TAKES and _takes_work(frames, around):
        wait = replace(wait, strong=False)
    holds = tuple(name for frame in frames[:40] for name in _held(frame, around.text))
    serving = next((i for i, frame in enumerate(frames) if _is(frame, _table()["serves"])), None)
    if (again := asks_again(thread, around.text)) is not None:
        wait = WaitFor("poll", "asks again and again, and gets the same answer", operation="retry")
    new = thread.tid is not None and thread.tid not in around.first
    return ThreadLook(
        tid=thread.tid or 0,
        name=thread.name,
        wait=wait,
        frames=frames,
        main=thread.main,
        moved=again is None and has_moved(thread, new, around.seconds),
        busy=is_busy(thread, wait.kind == "poll", around.seconds),
        holds=tuple(dict.fromkeys(holds)),
        handles=serving is not None and user_frame(frames[:serving]) is not None,
        thread_key=_thread_key(frames, extra),
        user=again or user_frame(frames),
    )


#: Waits at the head of a loop that are for the next work.
_TAKES = frozenset({"answer", "socket", "pipe", "queue"})


def _takes_work(frames: Sequence[StackFrame], around: Surroundings) -> bool:
    user = user_frame(frames)
    return user is not None and source.takes_work(around.text(user.file), user.line)


def _is(frame: StackFrame, patterns: Sequence[str]) -> bool:
    return any(frame_matches(one, frame) for one in patterns)


def _held(frame: StackFrame, text: ReadText) -> tuple[str, ...]:
    return source.held_locks(text(frame.file), frame.line) if is_user_file(frame.file) else ()


def _thread_key(frames: Sequence[StackFrame], extra: ThreadExtra) -> str:
    for frame, address in zip(frames, extra.selves, strict=False):
        if frame.name.endswith("_bootstrap_inner") and address:
            return address
    return ""


def _self_of(frames: Sequence[StackFrame], extra: ThreadExtra, patterns: Sequence[str]) -> str:
    """The address of `self` of the outermost frame that matches."""
    found = [a for f, a in zip(frames, extra.selves, strict=False) if _is(f, patterns) and a]
    return found[-1] if found else ""


def _find_wait(thread: ThreadView, extra: ThreadExtra, around: Surroundings) -> WaitFor:
    now, frames = thread.now, thread.python
    if now is not None and now.state in ("T", "t"):
        return WaitFor("stopped", "is stopped by a signal or held by a debugger")
    if _is_idle(thread, around):
        return WaitFor("idle", "waits for its next work")
    thread = _above_server(thread)
    match = match_thread(around.patterns, thread, around.view)
    cause, operation = (match.pattern.cause, match.operation) if match is not None else ("unknown", "")
    user = user_frame(frames)
    name, method = source.waited_object(around.text(user.file), user.line) if user is not None else ("", "")
    for rule in (_by_torch, _by_ray, _by_child, _by_shared, _by_lock, _by_thread, _by_links, _by_rest):
        wait = rule(_Asked(thread, extra, around, cause, operation, (name, method)))
        if wait is not None:
            return wait
    return WaitFor("work", "is in code that waits for nobody")


def _above_server(thread: ThreadView) -> ThreadView:
    """The thread without the frames of the server that called the user's code: it does what that code does."""
    frames = thread.python
    serves = next((i for i, frame in enumerate(frames) if _is(frame, _table()["serves"])), None)
    if serves is None or user_frame(frames[:serves]) is None:
        return thread
    below = frames[serves:]
    stacks = tuple(
        replace(one, frames=tuple(f for f in one.frames if f not in below)) for one in thread.stacks
    )
    return replace(thread, stacks=stacks)


@dataclass(frozen=True)
class _Asked:
    """What a rule looks at: one thread, the cause that the patterns name, and the object that its line waits on."""

    thread: ThreadView
    extra: ThreadExtra
    around: Surroundings
    cause: str = ""
    operation: str = ""
    waited: tuple[str, str] = ("", "")


def _is_idle(thread: ThreadView, around: Surroundings) -> bool:
    """Whether a thread only waits for its next request, task or event."""
    frames, call = thread.python, thread.now.syscall if thread.now is not None else ""
    if not frames:
        return (
            not thread.main
            or not call
            or call.startswith(("epoll", "accept", "poll", "ppoll", "select", "pselect"))
        )
    if call in ("write", "writev", "sendto", "sendmsg", "connect"):
        return False
    top = next((i for i, frame in enumerate(frames) if _is(frame, _table()["serves"])), None)
    if top is not None and user_frame(frames[:top]) is None and not thread.busy:
        return not (
            thread.main
            and any(frame_matches("handle_one_request@http/server.py", f) for f in frames[: top + 1])
        )
    if _is(frames[0], _table()["idle"]) or any(_is(frame, _table()["idle"]) for frame in frames[:4]):
        return not thread.busy
    return call in ("accept", "accept4")


def _by_torch(a: _Asked) -> WaitFor | None:
    kinds = {
        "collective_wait": "collective",
        "p2p_wait": "collective",
        "rendezvous_wait": "rendezvous",
        "store_wait": "store",
        "cuda_wait": "device",
        "cuda_kernel": "device",
        "dataloader_wait": "queue",
    }
    if a.cause == "dataloader_wait":
        return WaitFor(
            "child",
            "waits for a batch of its data loader's workers",
            pids=a.around.children,
            operation=a.operation,
        )
    if a.cause not in kinds:
        return None
    if (
        a.cause == "store_wait"
        and not a.extra.fds
        and a.thread.now is not None
        and "poll" in a.thread.now.syscall
    ):
        return WaitFor("work", "is inside native code")  # it waits on no connection at all
    if a.cause == "store_wait" and a.extra.fds:
        ends = _ends(a.extra, a.around)
        return WaitFor("store", "waits for a key of the store", ends=ends, operation=a.operation)
    says = {
        "collective": f"waits in {a.operation or 'a collective'}",
        "rendezvous": f"waits for its process group{f' of {a.extra.members}' if a.extra.members else ''} to form",
        "device": "waits for the device",
    }
    kind = kinds[a.cause]
    found = WaitFor(kind, says.get(kind, "waits for a key of the store"), operation=a.operation)
    if kind != "rendezvous":
        return found
    return replace(found, ends=_ends(a.extra, a.around), members=a.extra.members)


def _by_ray(a: _Asked) -> WaitFor | None:
    if any(_is(frame, _table()["ray"]) for frame in a.thread.python[:8]) and not any(
        frame_matches("main_loop@ray/_private/worker.py", f) for f in a.thread.python[:1]
    ):
        return WaitFor("ray", "waits for a task of Ray", operation=a.waited[1])
    return None


def _by_child(a: _Asked) -> WaitFor | None:
    if a.extra.child is not None:
        return WaitFor(
            "child",
            "waits for a process that it started",
            pids=(a.extra.child,) if a.extra.child > 0 else a.around.children,
        )
    if (
        a.cause in ("subprocess_wait", "child_process_wait")
        and a.around.children
        and not any(_is(f, _table()["shared"]) for f in a.thread.python)
    ):
        return WaitFor(
            "child",
            "waits for a process that it started",
            ends=_ends(a.extra, a.around),
            pids=a.around.children,
        )
    polled = a.extra.polled if a.cause == "native_call" else ()
    if any(_is(frame, _table()["polls_lock"]) for frame in a.thread.python[:3]):
        polled = a.extra.polled or a.around.lockers
    if a.extra.holders or polled:
        return WaitFor("file_lock", "waits for a lock on a file", pids=a.extra.holders or polled)
    return None


def _by_shared(a: _Asked) -> WaitFor | None:
    """Queues and locks of multiprocessing: a pipe, or a semaphore in shared memory."""
    if not any(_is(frame, _table()["shared"]) for frame in a.thread.python[:4]) and not a.extra.shared:
        return None
    user = user_frame(a.thread.python)
    text = a.around.text(user.file) if user is not None else ""
    asked = source.asked_lock(text, user.line) if user is not None else ""
    soft = _is_consumer(a.thread, a.around)
    if pipe := _ends(a.extra, a.around):
        return WaitFor("pipe", "waits for an item of a queue between processes", ends=pipe, strong=not soft)
    if any(frame_matches("get@multiprocessing/queues.py", frame) for frame in a.thread.python[:3]):
        return WaitFor(
            "queue",
            "waits for its turn at a queue between processes",
            ends=(a.extra.shared,) if a.extra.shared else (),
            lock="_rlock",
            strong=False,
        )
    is_put = any(frame_matches("put@multiprocessing/queues.py", frame) for frame in a.thread.python[:3])
    says = (
        "puts into a full queue between processes"
        if is_put
        else f"waits for {asked} between processes"
        if asked
        else "waits for other processes"
    )
    return WaitFor(
        "queue" if is_put else "lock" if asked else "event",
        says,
        lock=asked,
        ends=(a.extra.shared,) if a.extra.shared else (),
    )


def _by_lock(a: _Asked) -> WaitFor | None:
    if a.extra.owner is not None:
        return WaitFor("lock", "waits for a native mutex", key=a.extra.futex, tids=(a.extra.owner,))
    user = user_frame(a.thread.python)
    if a.cause not in ("lock_wait", "lock_deadlock") or user is None:
        return None
    lock = source.asked_lock(a.around.text(user.file), user.line)
    return WaitFor(
        "lock", f"waits for the lock {lock}" if lock else "waits for a lock", key=a.extra.futex, lock=lock
    )


def _by_thread(a: _Asked) -> WaitFor | None:
    """Other threads of the process: join, events, conditions, futures, queues."""
    near = a.thread.python[:5]
    ends = ("join@threading.py", "_wait_for_tstate_lock@threading.py")
    if any(_is(f, (*ends, "_shutdown@threading.py")) for f in near):
        return WaitFor("thread", "waits for a thread to end", key=_self_of(near, a.extra, ends))
    if any(_is(f, _table()["future"]) for f in near):
        return WaitFor("event", "waits for the result of a task that it started", key="future")
    kind = _kind_of_object(a, near)
    if not kind:
        return None
    user = user_frame(a.thread.python)
    text = a.around.text(user.file) if user is not None else ""
    if a.waited[1] == "acquire" or any(
        _is(f, ("acquire@threading.py", "acquire@asyncio/locks.py")) for f in near
    ):
        lock = source.asked_lock(text, user.line) if user is not None else ""
        says = f"waits for {lock}" if lock else "waits for a lock"
        return WaitFor("lock", says, key=a.extra.futex, lock=lock)
    return _wait_for_object(a, kind, text)


def _kind_of_object(a: _Asked, near: Sequence[StackFrame]) -> str:
    """Queue, event, or "" for something else."""
    if any(_is(f, _table()["queue"]) for f in near) or (a.cause == "queue_wait" and a.extra.futex):
        return "queue"
    return "event" if any(_is(f, _table()["event"]) for f in near) or a.cause == "thread_wait" else ""


def _wait_for_object(a: _Asked, kind: str, text: str) -> WaitFor:
    """A queue, event or condition, with the functions of its file that would end the wait."""
    name, method = a.waited
    setters = source.find_setters(text, name, method)
    full = method == "put"
    says = "waits for an event" if kind == "event" else "waits for an item of a queue"
    says = "puts into a full queue" if full else says
    key = _self_of(a.thread.python[:5], a.extra, (*_table()["queue"], *_table()["event"])) or a.extra.futex
    return WaitFor(
        kind,
        f"{says} ({name})" if name else says,
        key=key,
        lock=name,
        setters=setters,
        lost=next((one for one in setters if source.is_started(text, one)), ""),
        strong=not (kind == "queue" and not full and _is_consumer(a.thread, a.around)),
        left_s=a.extra.left_s,
        operation=method,
    )


def _is_consumer(thread: ThreadView, around: Surroundings) -> bool:
    """Whether it takes its work from a queue, again and again: without work it is idle."""
    user = user_frame(thread.python)
    if user is None:
        return True
    return not thread.main and source.in_loop(around.text(user.file), user.line)


def _ends(extra: ThreadExtra, around: Surroundings) -> tuple[str, ...]:
    return tuple(around.links[fd].end for fd in extra.fds if fd in around.links)


def _by_links(a: _Asked) -> WaitFor | None:
    links = [a.around.links[fd] for fd in a.extra.fds if fd in a.around.links]
    if a.extra.opens:
        return WaitFor(
            "open",
            f"opens {a.extra.opens.rsplit('/', 1)[-1]} and waits for the other side",
            path=a.extra.opens,
        )
    if a.extra.connects:
        return WaitFor("connect", f"connects to {a.extra.connects.split(' ', 1)[1]}", path=a.extra.connects)
    client = any(_is(frame, _table()["http"]) for frame in a.thread.python)
    what = "the answer to its request" if client else "data"
    if links and all(one.kind == "listen" for one in links):
        return WaitFor("idle", "waits for a connection")
    if any(one.kind == "pipe" for one in links):
        return WaitFor("pipe", "waits for a pipe", ends=tuple(one.end for one in links if one.kind == "pipe"))
    if links:
        near = [one for one in links if one.kind != "listen"]
        return WaitFor("socket", f"waits for {what} on a connection", ends=tuple(one.end for one in near))
    if (
        client
        or a.cause == "request_wait"
        or any("/zmq/" in frame.file or frame.file.startswith("zmq/") for frame in a.thread.python[:6])
    ):
        return WaitFor("answer", f"waits for {what}", operation="zmq" if not client else "")
    return None


def _by_rest(a: _Asked) -> WaitFor | None:
    user = user_frame(a.thread.python)
    if a.cause == "sleep":
        polls = user is not None and source.is_poll(a.around.text(user.file), user.line)
        if polls and (a.extra.left_s is None or a.extra.left_s <= SHORT_S):
            memory = user is not None and source.polls_memory(a.around.text(user.file), user.line)
            text = "looks again and again for something that does not come"
            return WaitFor("poll", text, left_s=a.extra.left_s, operation="memory" if memory else "")
        return WaitFor("sleep", "sleeps", left_s=a.extra.left_s)
    if a.cause == "stdin_wait":
        return WaitFor("stdin", "waits for input")
    if a.cause in ("request_wait", "event_loop_idle", "background"):
        return WaitFor("idle", "waits for its next work")
    says = {
        "native_call": "is inside native code",
        "busy_python": "runs Python code",
        "checkpoint_io": "reads or writes a file",
        "pipe_write_blocked": "writes to a full pipe",
        "gil_held_native": "holds the interpreter lock in native code",
        "d_state": "is in an uninterruptible system call",
        "gil_contention": "waits for the interpreter lock",
    }
    return WaitFor("work", says.get(a.cause, "is in code that waits for nobody"))
