"""What each thread of a process waits for: from its Python frames, its system call, and the source around its line. Pure.

The table of patterns says what a thread does; here it is turned into what it waits *for*, so that the wait can be followed
into another thread or process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from allranks.model.stacks import (
    StackFrame,
    ThreadLook,
    ThreadStack,
    WaitFor,
    is_user_file,
)
from allranks.stacktraces import source
from allranks.stacktraces.asked import (
    Asked,
    Surroundings,
    Task,
    ThreadExtra,
    any_in_row,
    any_matches,
    is_in_row,
)
from allranks.stacktraces.patterns import match_thread
from allranks.stacktraces.views import (
    LOOP,
    ReadText,
    ThreadView,
    asks_again,
    has_moved,
    has_run,
    is_busy,
    user_frame,
)

_SENDS = ("write", "writev", "sendto", "sendmsg")
LONG_S = 3600.0
SHORT_S = 30.0  # a sleep that ends sooner is not a hang by itself


def look_at_threads(around: Surroundings, tasks: Sequence[Task] = ()) -> tuple[ThreadLook, ...]:
    """Every thread that has Python frames, or is the main one; then the suspended tasks."""
    threads = [
        look_at_thread(thread, around)
        for thread in around.view.threads
        if thread.tid is not None and (thread.python or thread.main)
    ]
    return (*threads, *(_look_at_task(-1 - n, task, around) for n, task in enumerate(tasks)))


def _look_at_task(tid: int, task: Task, around: Surroundings) -> ThreadLook:
    """A suspended task with what it awaits."""
    frames, limit = task
    stack = ThreadStack(tid, "task", frames, False, False)
    asked = Asked(ThreadView(tid, "task", False, (stack,), None, ()), ThreadExtra(), around, "thread_wait")
    awaits = any(link.side == "client" and link.turn == "awaits" for link in around.links.values())
    zmq = any(link.owner.startswith("zmq") for link in around.links.values())
    if any(f.file.endswith("ray/util/queue.py") for f in frames[:4]):
        full = any(f.name.endswith("put") for f in frames[:2])
        says = "waits for room in the queue" if full else "waits for an item of the queue"
        wait = WaitFor("queue", says, setters=("clients",))
    elif around.children and _awaits_child(asked):
        wait = WaitFor("child", "waits for a process that it started", pids=around.children)
    elif asked.user is None or any_in_row(frames[:2], "task_idle"):
        wait = WaitFor("idle", "waits for its next work")
    elif limit is not None and any_matches(frames[:1], "sleep@asyncio/tasks.py"):
        wait = WaitFor("sleep", f"sleeps {limit:g} s")
    elif any_in_row(asked.called, "requests"):
        takes = asked.ask(source.takes_work, False)
        wait = WaitFor("event", _NEXT_MESSAGE, setters=("clients",), strong=not takes)
    elif any_in_row(asked.called, "http"):
        wait = WaitFor("answer", "waits for the answer to its request")
    elif any_matches(frames[:4], "drain@asyncio/streams.py"):
        wait = WaitFor("answer", "sends on a full connection")
    elif any_in_row(frames[:3], "stream") and awaits:
        wait = WaitFor("answer", "waits for data on a connection")
    elif any_in_row(frames[:3], "stream"):
        wait = WaitFor("idle", "waits for its next request")
    elif zmq and re.search(r"\.recv\w*\(", _line(asked)):
        takes = asked.ask(source.takes_work, False)
        wait = WaitFor("answer", "waits for data", operation="zmq", strong=not takes)
    else:
        wait = _by_thread(asked) or WaitFor("work")
    wait = replace(wait, left_s=limit)
    holds, handles = _held(frames, around.text), not _is_program(frames, around)
    return ThreadLook(
        tid, frames[-1].name, wait, frames, task=True, holds=holds, handles=handles, user=asked.user
    )


def _is_program(frames: Sequence[StackFrame], around: Surroundings) -> bool:
    """Whether a task is what the program runs, as `asyncio.run(main())` does, and not one that handles a request."""
    own = [f.name.rsplit(".", 1)[-1] for f in frames if is_user_file(f.file)]
    starts = (frame.source for one in around.view.threads if (frame := user_frame(one.python)) is not None)
    return any(re.search(rf"\b{re.escape(own[-1])}\(", line) for line in starts) if own else False


def _awaits_child(a: Asked) -> bool:
    """Whether a task awaits the end or the output of a process: asyncio calls that `stdout` or `stderr` of the process."""
    reads = any_in_row(a.frames[:3], "stream") and re.search(r"\.std(out|err)\b", _line(a))
    return bool(reads) or any_in_row(a.frames[:4], "async_child")


def _line(a: Asked) -> str:
    """The text of the user's line."""
    return a.ask(lambda text, number: "".join(text.splitlines()[number - 1 : number]), "")


def look_at_thread(thread: ThreadView, around: Surroundings) -> ThreadLook:
    """One thread with what it waits for."""
    asked = Asked(thread, around.extras.get(thread.tid or 0, ThreadExtra()), around)
    frames, user = asked.frames, asked.user
    serving = next((i for i, frame in enumerate(frames) if is_in_row(frame, "serves")), None)
    handles = serving is not None and user_frame(frames[:serving]) is not None
    wait = _find_wait(asked, serving, handles)
    if not thread.main and user is None:
        wait = replace(wait, strong=False)  # a library's own thread
    elif wait.kind in _TAKES and asked.ask(source.takes_work, False):
        wait = replace(wait, strong=False)
    if (again := asks_again(thread, around.text)) is not None:
        wait = WaitFor("poll", "repeats its request and gets the same answer", operation="retry")
    new = thread.tid is not None and thread.tid not in around.first
    # a slow disk, not a stuck one
    works = (wait.says == _WORK["checkpoint_io"] and has_run(thread)) or thread.tid in around.counted
    return ThreadLook(
        tid=thread.tid or 0,
        name=thread.name,
        wait=wait,
        frames=frames,
        main=thread.main,
        moved=works or (again is None and has_moved(thread, new, around.seconds)),
        busy=is_busy(thread, wait.kind == "poll", around.seconds),
        holds=_held(frames[:40], around.text),
        handles=handles,
        thread_key=_self_of(asked, len(frames), "thread"),
        user=again or user,
    )


_NEXT_MESSAGE = "waits for the next message of its client"
#: Waits at the head of a loop that are for the next work.
_TAKES = frozenset({"answer", "socket", "pipe", "queue"})


def _held(frames: Sequence[StackFrame], text: ReadText) -> tuple[str, ...]:
    """The locks that frames of the user's code stand inside of."""
    own = [frame for frame in frames if is_user_file(frame.file)]
    return tuple(dict.fromkeys(n for f in own for n in source.held_locks(text(f.file), f.line)))


def _self_of(a: Asked, near: int, *rows: str) -> str:
    """The address of `self` of the outermost of the innermost frames that is in these rows of the table."""
    pairs = zip(a.frames[:near], a.extra.selves, strict=False)
    return next((s for f, s in reversed(list(pairs)) if s and any(is_in_row(f, row) for row in rows)), "")


def _find_wait(a: Asked, serving: int | None, handles: bool) -> WaitFor:
    if a.now.state in ("T", "t"):
        return WaitFor("stopped", "is stopped by a signal or held by a debugger")
    if a.thread.main and a.now.syscall in ("rt_sigtimedwait", "rt_sigsuspend", "pause"):
        return _for_signal(a)
    if _is_idle(a, serving, handles):
        return WaitFor("idle", "waits for its next work")
    if handles:  # it does what the user's code does, not the server that called that
        served = a.frames[serving:]
        cut = (replace(s, frames=tuple(f for f in s.frames if f not in served)) for s in a.thread.stacks)
        a = replace(a, thread=replace(a.thread, stacks=tuple(cut)))
    match = match_thread(a.around.patterns, a.thread, a.around.view)
    cause, operation = (match.pattern.cause, match.operation) if match is not None else ("unknown", "")
    a = replace(a, cause=cause, operation=operation)
    rules = (
        *(_by_torch, _by_ray, _by_child, _by_shared, _by_lock, _by_thread, _by_links),
        *(_by_library_lock, _by_sleep),
    )
    found = next((wait for rule in rules if (wait := rule(a)) is not None), None)
    if found is None and a.user is not None and LOOP in a.user.source:
        return WaitFor("work", "is in a loop that changes nothing", operation="loop")
    return found or WaitFor("work", _WORK.get(cause, "is in code that waits for no other process"))


#: Signals that end or reload a server, and those that the kernel sends.
_STOPS = frozenset({"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGALRM", "SIGWINCH", "SIGCONT"})


def _for_signal(a: Asked) -> WaitFor:
    """A wait for a signal: to be stopped, as servers do, or for another one, which a process has to send."""
    names, pending = a.extra.signals, a.extra.pending
    if not names or _STOPS & {*names} or a.ask(source.takes_work, False):
        return WaitFor("signal", "waits for a signal", strong=False)
    says = f"waits for {' or '.join(names[:3])}"
    says = f"{says}, while {' and '.join(pending)} is pending" if pending else says
    return WaitFor("signal", says, left_s=a.now.left_s, operation="pending" if pending else "")


def _is_idle(a: Asked, serving: int | None, handles: bool) -> bool:
    """Whether a thread only waits for its next request, task or event."""
    frames, call = a.frames, a.now.syscall
    if not frames:
        waits = call.startswith(("epoll", "accept", "poll", "ppoll", "select", "pselect"))
        return not a.thread.main or not call or waits
    if call in (*_SENDS, "connect"):
        return False
    if serving is not None and not handles and not a.thread.busy:
        return not (a.thread.main and any_matches(frames[: serving + 1], "handle_one_request@http/server.py"))
    if any_in_row(frames[:4], "idle"):
        return not a.thread.busy
    return call in ("accept", "accept4")


def _by_torch(a: Asked) -> WaitFor | None:
    match a.cause:
        case "dataloader_wait":
            says = "waits for a batch of its data loader's workers"
            return WaitFor("child", says, pids=a.around.children, operation=a.operation)
        case "collective_wait" | "p2p_wait":
            return WaitFor("collective", f"waits in {a.operation or 'a collective'}", operation=a.operation)
        case "cuda_wait" | "cuda_kernel":
            return WaitFor("device", "waits for the device", operation=a.operation)
        case "rendezvous_wait":
            members = a.extra.members
            says = f"waits for its process group{f' of {members}' if members else ''} to form"
            return WaitFor("rendezvous", says, ends=a.ends, members=members, operation=a.operation)
        case "store_wait" if not a.extra.fds and "poll" in a.now.syscall:
            return WaitFor("work", "is inside native code")  # it waits on no connection at all
        case "store_wait":
            return WaitFor("store", "waits for a key of the store", ends=a.ends, operation=a.operation)
    return None


def _by_ray(a: Asked) -> WaitFor | None:
    if any_in_row(a.frames[:8], "ray") and not any_matches(a.frames[:1], "main_loop@ray/_private/worker.py"):
        return WaitFor("ray", "waits for a task of Ray", operation=a.waited[1])
    return None


def _by_child(a: Asked) -> WaitFor | None:
    says, children = "waits for a process that it started", a.around.children
    place = {"wait4": 0, "waitid": 1}.get(a.now.syscall, 6)  # the argument that names a process
    if len(a.now.args) > place:
        child = a.now.args[place]
        return WaitFor("child", says, pids=(child,) if 0 < child < 1 << 22 else children)
    commands = a.cause in ("subprocess_wait", "child_process_wait")
    pool = any_in_row(a.frames[:6], "future")
    if commands and children and not any_in_row(a.frames, "shared") and not (pool and _is_of_threads(a)):
        reads = a.ends and not any_matches(a.frames[:3], "wait@multiprocessing/connection.py")
        says = "reads the output of a process that it started" if reads else says
        says = "waits for a result of its process pool" if pool else says
        return WaitFor("child", says, ends=a.ends, pids=() if a.ends else children)
    polled = a.extra.polled if a.cause == "native_call" else ()
    if any_in_row(a.frames[:3], "polls_lock"):
        polled = a.extra.polled or a.around.lockers
    if a.extra.holders or polled:
        return WaitFor("file_lock", "waits for a lock on a file", pids=a.extra.holders or polled)
    if a.cause == "file_lock_wait":
        says = (
            "waits for a lock on a file that no process of this machine holds: perhaps a file that was left"
        )
        return WaitFor("file_lock", says)
    return None


def _is_of_threads(a: Asked) -> bool:
    """Whether the pool whose result it waits for runs in threads of this process."""
    others = [frame for one in a.around.view.threads if one is not a.thread for frame in one.python]
    if any_matches(a.frames[:6], "*@multiprocessing/pool.py"):
        return any_matches(others, "worker@multiprocessing/pool.py")
    return not any_matches(others, "run@concurrent/futures/process.py")


def _by_shared(a: Asked) -> WaitFor | None:
    """Queues and locks of multiprocessing: a pipe, or a semaphore in shared memory."""
    near, ends = a.frames[:3], (a.extra.shared,) if a.extra.shared else ()
    if not any_in_row(a.frames[:4], "shared") and not ends:
        return None
    if a.ends:
        says = "waits for an item of a queue between processes"
        return WaitFor("pipe", says, ends=a.ends, strong=not a.consumes)
    if any_matches(near, "get@multiprocessing/queues.py"):
        says = "waits for its turn at a queue between processes"
        return WaitFor("queue", says, ends=ends, lock="_rlock", strong=False)
    if any_matches(near, "put@multiprocessing/queues.py"):
        return WaitFor("queue", "puts into a full queue between processes", lock=a.lock, ends=ends)
    if a.lock:
        return WaitFor("lock", f"waits to acquire {a.lock}, which processes share", lock=a.lock, ends=ends)
    made = (word for word in _SHARED if any(f.name.startswith(f"{word}.") for f in a.frames[:6]))
    name = f" ({a.waited[0]})" if a.waited[0] else ""
    word = next(made, "")
    says = f"waits for {_SHARED[word]}{name} between processes"
    return WaitFor("event", says, ends=ends, operation=word.lower())


#: The outermost object that a thread waits on, of those that are made of each other.
_SHARED = {"Barrier": "a barrier", "Event": "an event", "Condition": "a condition", "": "something"}


def _by_lock(a: Asked) -> WaitFor | None:
    if a.now.mutex_owner is not None:
        return WaitFor("lock", "waits for a native mutex", key=a.futex, tids=(a.now.mutex_owner,))
    if a.cause not in ("lock_wait", "lock_deadlock") or a.user is None:
        return None
    says = f"waits to acquire {a.lock}" if a.lock else "waits for a lock"
    return WaitFor("lock", says, key=a.futex, lock=a.lock)


def _by_thread(a: Asked) -> WaitFor | None:
    """Other threads of the process: join, events, conditions, futures, queues."""
    near = a.frames[:5]
    if any_in_row(near, "rpc"):
        return None
    if any_in_row(near, "requests"):
        return WaitFor("event", _NEXT_MESSAGE, setters=("clients",))
    if any_in_row(near, "join"):
        return WaitFor("thread", "waits for a thread to end", key=_self_of(a, 5, "join"))
    if any_in_row(near, "future"):
        return WaitFor("event", "waits for the result of a task that it started", key="future")
    if any_in_row(near, "queue") or (a.cause == "queue_wait" and a.futex):
        kind = "queue"
    elif any_in_row(near, "event") or a.cause == "thread_wait":
        kind = "event"
    else:
        return None
    if a.waited[1] == "acquire" or any_in_row(near, "acquire"):
        says = f"waits to acquire {a.lock}" if a.lock else "waits for a lock"
        return WaitFor("lock", says, key=a.futex, lock=a.lock)
    return _wait_for_object(a, kind)


def _wait_for_object(a: Asked, kind: str) -> WaitFor:
    """A queue, event or condition, with the functions of its file that would end the wait."""
    name, method = a.waited
    text = a.around.text(a.user.file) if a.user is not None else ""
    setters = source.find_setters(text, name, method)
    full = method == "put"
    says = "waits for an event" if kind == "event" and method != "get" else "waits for an item of a queue"
    says = "puts into a full queue" if full else says
    return WaitFor(
        kind,
        f"awaits {name}" if method == "await" else f"{says} ({name})" if name else says,
        key=_self_of(a, 5, "queue", "event") or a.futex,
        lock=name,
        setters=setters,
        lost=next((one for one in setters if source.is_started(text, one)), ""),
        strong=full or not _takes(a, kind, method),
        left_s=_left_s(a),
        operation=method,
    )


def _takes(a: Asked, kind: str, method: str) -> bool:
    """Whether what it waits for is its next work."""
    if kind == "queue":
        return a.consumes
    return _supervises(a) or (method == "get" and a.ask(source.takes_work, False))


def _left_s(a: Asked) -> float | None:
    """Until its wait ends by itself; None also where that is only one try of many."""
    return None if _renews(a) or a.ask(source.tries_again, False) else a.now.left_s


def _renews(a: Asked) -> bool:
    """Whether its wait has ended meanwhile, and begun anew."""
    last, first = a.now.left_s, a.thread.facts[0].left_s if a.thread.facts else None
    if last is None or first is None:
        return False
    return first < a.around.seconds or last > first - a.around.seconds / 2


def _supervises(a: Asked) -> bool:
    """Whether a library wakes up now and then to see whether its processes live."""
    inside = any(not frame.file.endswith("threading.py") for frame in a.called)
    return inside and bool(a.around.children) and _renews(a)


def _by_links(a: Asked) -> WaitFor | None:
    links = [a.around.links[fd] for fd in a.extra.fds if fd in a.around.links]
    if path := a.extra.opens:
        says = f"opens {path.rsplit('/', 1)[-1]} and waits for the other side"
        return WaitFor("open", says, path=path)
    if address := a.extra.connects:
        return WaitFor("connect", f"connects to {address.split(' ', 1)[1]}", path=address)
    client = any_in_row(a.called, "http")
    what = "the answer to its request" if client else "data"
    if links and all(one.kind == "listen" for one in links):
        return WaitFor("idle", "waits for a connection")
    if pipes := tuple(one.end for one in links if one.kind == "pipe"):
        reads = any(one.side == "read" for one in links)
        return WaitFor("pipe", "reads from a pipe" if reads else "writes to a full pipe", ends=pipes)
    if links:
        ends = tuple(one.end for one in links if one.kind != "listen")
        says = f"waits for {what}" if client else f"waits for {what} on a connection"
        says = "sends on a full connection" if a.now.syscall in _SENDS else says
        return WaitFor("socket", says, ends=ends)
    if client or a.cause == "request_wait" or any_in_row(a.frames[:6], "zmq"):
        return WaitFor("answer", f"waits for {what}", operation="" if client else "zmq")
    return None


def _by_library_lock(a: Asked) -> WaitFor | None:
    """A lock that lies elsewhere, in a database: the library asks for it again and again."""
    named = bool(a.called) and source.names_lock(a.lock, a.waited[1])
    return WaitFor("lock", f"waits to acquire {a.lock}", lock=a.lock) if named else None


def _by_sleep(a: Asked) -> WaitFor | None:
    left_s = a.now.left_s
    whole_s = a.now.wait_s or 0.0
    if not a.frames and a.now.syscall.endswith("nanosleep") and a.around.seconds < whole_s < LONG_S:
        return WaitFor(
            "sleep", "sleeps", left_s=whole_s
        )  # a command, which has not run since we looked first
    if a.cause == "sleep":
        if a.ask(source.only_sleeps, False):
            return WaitFor("idle", "sleeps until the program is ended")
        if a.ask(source.is_poll, False) and (left_s is None or left_s <= SHORT_S):
            memory = a.ask(source.polls_memory, False)
            says = "polls for a change that does not come"
            return WaitFor("poll", says, left_s=left_s, operation="memory" if memory else "")
        return WaitFor("sleep", "sleeps", left_s=left_s)
    if a.cause == "stdin_wait":
        return WaitFor("stdin", "waits for input")
    if a.cause in ("request_wait", "event_loop_idle", "background"):
        return WaitFor("idle", "waits for its next work")
    return None


#: Causes that are waits for no other process.
_WORK = {
    "native_call": "is inside native code",
    "busy_python": "runs Python code",
    "checkpoint_io": "reads or writes a file",
    "pipe_write_blocked": "writes to a full pipe",
    "gil_held_native": "holds the interpreter lock in native code",
    "d_state": "is in an uninterruptible system call",
    "gil_contention": "waits for the interpreter lock",
}
