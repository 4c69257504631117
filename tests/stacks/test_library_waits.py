"""What live processes wait for inside libraries, pools and event loops, and in pipes of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.stacks.test_process_tree import look_at, running

from allranks.diagnosis.process_verdict import explain_processes
from allranks.diagnosis.processes import find_waits
from allranks.model.stacks import (
    Process,
    ProcessCapture,
    Snapshot,
    StackFrame,
    ThreadFacts,
    ThreadStack,
)
from allranks.stacktraces.asked import Surroundings
from allranks.stacktraces.patterns import load_patterns
from allranks.stacktraces.procfs import ProcessEntry
from allranks.stacktraces.roles import give_roles, load_roles
from allranks.stacktraces.views import ThreadView, is_busy, view_process
from allranks.stacktraces.waits import look_at_threads

SLOW = """
    import multiprocessing, os, subprocess, tempfile, time

    def save(done):
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            while True:
                os.fsync(file.fileno()), file.write(b"x"), file.flush(), time.sleep(0.05)

    def use_tool(done):
        subprocess.run(["sleep", "60"])
        done.set()

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        done = context.Event()
        context.Process(target=ROLE, args=(done,), daemon=True).start()
        time.sleep(0.5)
        print("ready")
        done.wait()
    """


@pytest.mark.parametrize(("role", "state"), [("save", "moving"), ("use_tool", "unclear")])
def test_who_writes_a_file_bit_by_bit_or_sleeps_in_a_command_is_not_stuck(
    role: str, state: str, tmp_path: Path
) -> None:
    """The disk is slow; the command ends within a minute."""
    with running(tmp_path, SLOW.replace("ROLE", role)) as job:
        found = explain_processes(look_at(job.pid))
    assert found.state == state, found
    assert role == "save" or re.search(r"sleep \(pid \d+\) sleeps for \d+ s more", found.sentence), found


def test_a_server_outside_the_tree_takes_no_name_from_it() -> None:
    """A server with a smaller pid that the driver is connected with: it is not the first process, nor left by a dead one."""
    driver = Process(7, ppid=1, title="python job.py")
    engine = Process(9, ppid=7, title="", alive=False, started_s=9.0)
    server = Process(4, ppid=1, title="python reward_server.py", started_s=1.0)
    entries = {
        one.pid: ProcessEntry(one.pid, one.ppid, "S", 0, "python", one.title)
        for one in (driver, engine, server)
    }
    named = {one.pid: one.role for one in give_roles([driver, engine, server], entries, load_roles())}
    assert (named[7], named[9]) == ("driver", "subprocess of driver") and named[4] != "driver", named


LIBRARY = "/venv/lib/python3.12/site-packages/"
WEB = StackFrame("RequestHandler.start", f"{LIBRARY}aiohttp/web_protocol.py", 600)
READS = StackFrame("WebSocketResponse.receive", f"{LIBRARY}aiohttp/web_ws.py", 500)


@pytest.mark.parametrize(
    ("inner", "line", "wait"),
    [
        ((), "await slot", ("event", "awaits slot", True)),
        (
            (StackFrame("_request", f"{LIBRARY}aiohttp/client.py", 700),),
            "await session.get()",
            ("answer", "waits for the answer to its request", True),
        ),
        (
            (StackFrame("read", f"{LIBRARY}aiohttp/streams.py", 600), READS),
            "await ws.receive()",
            ("event", "waits for the next message of its client", True),
        ),
        (
            (StackFrame("read", f"{LIBRARY}aiohttp/streams.py", 600), READS),
            "async for one in ws:\n        print(one)",
            ("event", "waits for the next message of its client", False),
        ),
    ],
)
def test_a_library_is_the_client_only_below_the_line_of_a_handler(
    inner: tuple[StackFrame, ...], line: str, wait: tuple[str, str, bool]
) -> None:
    """aiohttp has called the handler; what the handler calls says for what it waits."""
    frames = (*inner, StackFrame("generate", "/job/engine.py", 2), WEB)
    capture = ProcessCapture(0, None, 7, "a", "python engine.py")
    text = f"async def generate(slot, session, ws):\n    {line}\n"
    around = Surroundings(view_process(capture), (), {}, lambda file: text)
    (task,) = (one for one in look_at_threads(around, [(frames, None)]) if one.task)
    assert (task.wait.kind, task.wait.says, task.wait.strong) == wait


@pytest.mark.parametrize("line", ["lock.acquire()", "with store.lock(name):\n        pass"])
def test_a_lock_that_a_library_asks_for_again_and_again_is_waited_for(line: str) -> None:
    """A lock in Redis: that was "in code that waits for no other process"."""
    asks = StackFrame("Lock.acquire", f"{LIBRARY}redis/lock.py", 220)
    frames = (asks, StackFrame("handle", "/job/engine.py", 2))
    facts = (ThreadFacts(7, state="S", syscall="clock_nanosleep", args=(1, 1), wait_s=0.1),) * 2
    shots = tuple(
        Snapshot(n, float(n), (ThreadStack(7, "MainThread", frames),), facts[n : n + 1]) for n in (0, 1)
    )
    capture = ProcessCapture(0, None, 7, "a", "python engine.py", shots)
    text = f"def handle(lock, store):\n    {line}\n"
    around = Surroundings(view_process(capture), load_patterns(), {}, lambda file: text, seconds=5.0)
    (thread,) = look_at_threads(around)
    assert thread.wait.kind == "lock" and thread.wait.says.startswith("waits to acquire "), thread.wait


THREADS = """
    import socket, subprocess, sys, time
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.pool import ThreadPool

    def score(connection):
        connection.recv(1)

    def main():
        here, there = socket.socketpair()
        sleeps = [sys.executable, "-c", "import signal; signal.pause()"]
        child = subprocess.Popen(sleeps, pass_fds=[there.fileno()])
        pool = POOL
        print("ready")
        list(pool.map(score, [here]))

    main()
    """


@pytest.mark.parametrize("pool", ["ThreadPoolExecutor(2)", "ThreadPool(2)"])
def test_a_pool_of_threads_beside_a_process_is_not_called_a_pool_of_processes(
    tmp_path: Path, pool: str
) -> None:
    """The result comes from its thread, whatever processes it has started."""
    with running(tmp_path, THREADS.replace("POOL", pool)) as job:
        look = look_at(job.pid)
        main = next(t for p in look.processes for t in p.threads if p.pid == job.pid and t.main)
    assert main.wait.says == "waits for the result of a task that it started"
    thread = next(t for p in look.processes for t in p.threads if p.pid == job.pid and t.user and not t.main)
    assert thread.user is not None and thread.user.name == "score"
    units = find_waits(look).units
    edges = find_waits(look).edges
    (number,) = (n for n, one in enumerate(units) if one.thread is main)
    assert [units[n].thread.tid for n in edges[number]] == [thread.tid]


OWN_FIFO = """
    import os, sys

    def ingest(path):
        rows = open(os.open(path, os.O_RDWR), "r")
        print("ready")
        while line := rows.readline():
            print(line)

    os.mkfifo(sys.path[0] + "/rows")
    ingest(sys.path[0] + "/rows")
    """


def test_a_reader_that_has_its_fifo_open_for_writing_never_sees_the_end(tmp_path: Path) -> None:
    """That was "idle": no other process can write."""
    with running(tmp_path, OWN_FIFO) as job:
        found = explain_processes(look_at(job.pid))
    assert (found.state, [one.function for one in found.guilty]) == ("stuck", ["ingest"]), found
    assert "reads from a pipe that no other process has open for writing" in found.sentence


PREFORK = """
    import os, sys
    import uvicorn

    async def app(scope, receive, send):
        await receive()
        open(f"{sys.path[0]}/{os.getpid()}.up", "w").close()
        if len([one for one in os.listdir(sys.path[0]) if one.endswith(".up")]) == 2:
            print("ready", flush=True)
        await send({"type": "lifespan.startup.complete"})
        await receive()

    if __name__ == "__main__":
        uvicorn.run("job:app", port=0, workers=2, lifespan="on", log_level="warning")
    """


def test_an_idle_server_with_several_workers_is_no_hang(tmp_path: Path) -> None:
    """The library's parent process wakes up twice a second to see whether its workers live; they wait for its next question."""
    pytest.importorskip("uvicorn")
    with running(tmp_path, PREFORK) as job:
        look = look_at(job.pid)
    found = explain_processes(look)
    assert (found.state, found.guilty) == ("moving", ()), found
    assert sorted(p.name for p in look.processes if not p.system) == [
        "driver",
        "server worker 0",
        "server worker 1",
    ]


UVLOOP = """
    import asyncio, threading
    import uvloop

    async def enter(opened):
        print("ready")
        await opened.wait()

    def main():
        loop = uvloop.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(enter(asyncio.Event()), loop).result()

    main()
    """


@pytest.mark.skipif(sys.version_info < (3, 11), reason="coroutines of Python 3.10 are not read")
def test_tasks_of_a_loop_that_has_no_python_frame_are_read(tmp_path: Path) -> None:
    """uvloop's run_forever in a thread, as Ray's actors have it."""
    pytest.importorskip("uvloop")
    with running(tmp_path, UVLOOP) as job:
        found = explain_processes(look_at(job.pid))
    assert (found.state, [one.function for one in found.guilty]) == ("stuck", ["enter"]), found


SELF_PIPE = """
    import os, signal

    def supervise():
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes)
        print("ready")
        os.read(reads, 1)

    supervise()
    """


def test_a_pipe_into_which_a_signal_writes_is_not_without_a_writer(tmp_path: Path) -> None:
    """Its write end does not block; the interpreter writes there when a signal comes."""
    with running(tmp_path, SELF_PIPE) as job:
        look = look_at(job.pid)
    main = next(t for p in look.processes for t in p.threads if t.main)
    assert main.wait.kind == "pipe"
    (unit,) = (one for one in find_waits(look).units if one.thread.main)
    assert unit.thread.wait.says == "reads from a pipe"


LONG_POLL = """
    import asyncio, socket, subprocess, sys

    async def poll(reader, writer):
        print("ready")
        await asyncio.wait_for(asyncio.Queue().get(), LIMIT)

    async def serve():
        server = await asyncio.start_server(poll, "127.0.0.1", 0)
        ask = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
        subprocess.Popen([sys.executable, "-c", ask, str(server.sockets[0].getsockname()[1])])
        await asyncio.Event().wait()

    asyncio.run(serve())
    """


@pytest.mark.skipif(sys.version_info < (3, 11), reason="coroutines of Python 3.10 are not read")
@pytest.mark.parametrize("limit", ["30", "None"])
def test_a_task_that_waits_with_a_limit_is_no_hang(tmp_path: Path, limit: str) -> None:
    """A coordinator answers a long poll after 30 s at the latest; without a limit it may never."""
    with running(tmp_path, LONG_POLL.replace("LIMIT", limit)) as job:
        found = explain_processes(look_at(job.pid))
    guilty = [one.function for one in found.guilty]
    assert (found.state, guilty) == (("unclear", []) if limit == "30" else ("stuck", ["poll"])), found


@pytest.mark.parametrize(("ticks", "busy"), [(0, False), (40, True)])
def test_a_thread_that_was_once_about_to_run_is_not_busy(ticks: int, busy: bool) -> None:
    """On a full machine a thread that wakes up now and then is runnable for a while; it uses no CPU time."""
    facts = (ThreadFacts(7, state="R"), ThreadFacts(7, state="S", ticks=ticks))
    assert is_busy(ThreadView(7, "", True, (), None, facts), False, 5.0) is busy
