"""What live processes wait for, and whom it leads to: pipes that outlive their process, streams, objects between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stacks.test_process_tree import look_at, running

from allranks.cli import main
from allranks.diagnosis.process_verdict import explain_processes
from allranks.model.stacks import (
    Process,
    StackFrame,
    ThreadLook,
    WaitFor,
)
from allranks.stacktraces.procfs import ProcessEntry
from allranks.stacktraces.roles import give_roles, load_roles


def _forked(pid: int, title: str, *names: str) -> Process:
    """A process whose main thread is in these functions, outermost first, below multiprocessing's `run`."""
    run = StackFrame("BaseProcess.run", "/lib/multiprocessing/process.py", 1)
    frames = tuple(StackFrame(name, "/job/job.py", 7) for name in reversed(names))
    main = ThreadLook(1, "MainThread", WaitFor("work"), (*frames, run), main=True)
    return Process(pid, ppid=0, node="a", title=title, threads=(main,))


def test_a_process_of_the_fork_server_is_not_the_fork_server() -> None:
    """It has the server's title, and a function of its own; a comprehension gives no name."""
    title = "python -c from multiprocessing.forkserver import main; main(5, 6)"
    (actor,) = give_roles([_forked(4, title, "actor", "send")], {}, load_roles())
    assert (actor.role, actor.system) == ("actor", False)
    frames = (StackFrame("<listcomp>", "/job/job.py", 9), StackFrame("<module>", "/job/job.py", 9))
    main = ThreadLook(1, "MainThread", WaitFor("work"), frames, main=True)
    plain = [Process(pid, ppid=pid - 3, node="a", title="python job.py", threads=(main,)) for pid in (3, 6)]
    entries = {one.pid: ProcessEntry(one.pid, one.ppid, "S", 0, "python", one.title) for one in plain}
    assert give_roles(plain, entries, load_roles())[0].role == "driver"


def test_a_process_of_torch_multiprocessing_is_named_after_its_function() -> None:
    """Not after torch's own function below it."""
    forked = _forked(4, "python -c from multiprocessing.spawn import", "_wrap", "learner")
    (main,) = forked.threads
    learner, wrap, run = main.frames
    wrap = replace(wrap, file="/lib/python3.12/site-packages/torch/multiprocessing/spawn.py")
    forked = replace(forked, threads=(replace(main, frames=(learner, wrap, run)),))
    (one,) = give_roles([forked], {}, load_roles())
    assert one.role == "learner"


DETACHED = """
    import subprocess, sys

    START = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid)"
    SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]

    def launch():
        starter = subprocess.Popen([sys.executable, "-c", START, *SLEEPS], stdout=subprocess.PIPE)
        print(starter.stdout.readline().decode(), end="")
        print("ready")
        starter.communicate()

    launch()
    """


SERVES = """
    import socket, subprocess, sys

    START = (
        "import subprocess, sys; d = subprocess.DEVNULL;"
        "print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=d, stderr=d, stdin=0).pid)"
    )
    SERVER = "import signal, socket; connection = socket.socket(fileno=0); connection.send(connection.recv(1)); signal.pause()"

    def launch():
        here, there = socket.socketpair()
        words = [sys.executable, "-c", START, sys.executable, "-c", SERVER]
        print(subprocess.run(words, stdin=there, stdout=subprocess.PIPE, text=True).stdout, end="")
        there.close()
        here.send(b"x")
        here.recv(1)
        print("ready")
        here.recv(1)

    launch()
    """


@pytest.mark.parametrize("text", [DETACHED, SERVES])
def test_a_process_that_left_the_tree_is_found_by_its_output_or_its_connection(
    tmp_path: Path, text: str
) -> None:
    """What the driver started has ended; a server in a session of its own keeps the pipe open that the driver reads to the
    end, or does not answer."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(text))
    job = subprocess.Popen([sys.executable, "-u", str(script)], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    server = int(job.stdout.readline())
    try:
        assert job.stdout.readline() == "ready\n"
        look = look_at(job.pid)
        found = explain_processes(look)
        assert server in {one.pid for one in look.processes}
        if text is DETACHED:
            assert found.state == "stuck" and found.guilty[0].pid == job.pid, found
            assert f"(pid {server}) to close the output of an ended process" in found.sentence
        else:
            assert (found.state, [one.pid for one in found.guilty]) == ("stuck", [server]), found
    finally:
        os.kill(server, 9)
        job.kill()
        job.communicate()


STREAM = """
    import queue, subprocess, sys
    from concurrent import futures
    import grpc

    def parameters():
        def sync(requests, context):
            for request in requests:
                yield request
        method = grpc.stream_stream_rpc_method_handler(sync)
        handler = grpc.method_handlers_generic_handler("P", {"Sync": method})
        server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        subprocess.Popen([sys.executable, "-u", __file__, str(port)])
        server.wait_for_termination()

    def learner(port):
        todo = queue.Queue()
        todo.put(b"x")
        answers = grpc.insecure_channel(f"127.0.0.1:{port}").stream_stream("/P/Sync")(iter(todo.get, None))
        next(answers)
        print("ready")
        next(answers)

    learner(sys.argv[1]) if len(sys.argv) > 1 else parameters()
    """


def test_both_ends_of_a_stream_wait_for_each_other(tmp_path: Path) -> None:
    """A handler waits for the next message, its client for the next answer; the server's main thread is idle."""
    pytest.importorskip("grpc")
    with running(tmp_path, STREAM) as job:
        found = explain_processes(look_at(job.pid))
    assert {(one.role, one.function) for one in found.guilty} == {
        ("parameters", "sync"),
        ("learner", "learner"),
    }, found


SHARED = """
    import multiprocessing, threading, time

    def generator(condition, barrier, done):
        barrier.wait()

    def learner(condition, barrier, done):
        with condition:
            condition.wait()

    def judge(condition, barrier, done):
        done.wait()

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        things = context.Condition(), context.Barrier(2), context.Event()
        processes = [context.Process(target=role, args=things) for role in (generator, learner, judge)]
        [one.start() for one in processes]
        time.sleep(0.5)
        print("ready")
        [one.join() for one in processes]
    """


def test_what_processes_wait_for_is_named(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("this interpreter's code has no qualified names")
    with running(tmp_path, SHARED) as job:
        look = look_at(job.pid)
    says = {p.role: t.wait.says for p in look.processes for t in p.threads if t.main}
    assert says["generator"] == "waits for a barrier (barrier) between processes"
    assert says["learner"] == "waits for a condition (condition) between processes"
    assert says["judge"] == "waits for an event (done) between processes"


KEEPS_ALIVE = """
    import multiprocessing, time

    def worker(queue):
        for job in iter(queue.get, None):
            print(job)

    if __name__ == "__main__":
        queue = multiprocessing.get_context("fork").Queue()
        multiprocessing.get_context("fork").Process(target=worker, args=(queue,), daemon=True).start()
        time.sleep(0.5)
        print("ready")
        while True:
            time.sleep(1200)
    """


@pytest.mark.parametrize("words", [[], ["--tree"]])
def test_a_driver_that_keeps_idle_workers_alive_is_not_stuck(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without --tree: the driver is not a rank."""
    with running(tmp_path, KEEPS_ALIVE) as job:
        code = main(["stacks", "--pid", str(job.pid), "--for", "2.5", "--json", *words])
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["state"], answer.get("hung", False)) == (0, "moving", False), answer


ZMQ = """
    import asyncio, os, sys, tempfile, threading
    import zmq, zmq.asyncio

    def reward(address):
        end = zmq.Context().socket(zmq.REP)
        end.bind(address)
        end.recv()
        print("ready")
        threading.Event().wait()

    async def orchestrator(address):
        end = zmq.asyncio.Context().socket(zmq.REQ)
        end.connect(address)
        await end.send(b"sample")
        await end.recv()

    if len(sys.argv) > 1:
        reward(sys.argv[1])
    else:
        address = "ipc://" + os.path.join(os.path.dirname(__file__), "socket")
        import subprocess
        subprocess.Popen([sys.executable, "-u", __file__, address])
        asyncio.run(orchestrator(address))
    """


def test_a_task_that_awaits_a_message_of_zmq_is_followed(tmp_path: Path) -> None:
    """The orchestrator's task → ZMQ → the process that does not answer."""
    pytest.importorskip("zmq")
    if sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)):
        pytest.skip("the layout of this interpreter's coroutines is not known")
    with running(tmp_path, ZMQ) as job:
        found = explain_processes(look_at(job.pid))
    assert [(one.role, one.function) for one in found.guilty] == [("reward", "reward")], found
    assert [link.role for link in found.chain] == ["driver"], found.chain


FULL = """
    import asyncio, multiprocessing, socket, time

    def rollout(connection):
        time.sleep(0.5)
        print("ready")
        connection.sendall(bytes(10_000_000))

    async def router(connection):
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(bytes(10_000_000))
        await writer.drain()

    if __name__ == "__main__":
        here, there = socket.socketpair()
        process = multiprocessing.get_context("fork").Process(target=rollout, args=(there,))
        process.start()
        there.close()
        asyncio.run(router(here))
    """

LOST = """
    import asyncio

    async def worker(todo):
        while True:
            if await todo.get() == 2:
                raise ValueError
            todo.task_done()

    async def orchestrator():
        todo = asyncio.Queue()
        workers = [asyncio.create_task(worker(todo)) for _ in range(2)]
        [todo.put_nowait(n) for n in range(3)]
        print("ready")
        await todo.join()

    asyncio.run(orchestrator())
    """


@pytest.mark.parametrize(("text", "names"), [(FULL, {"rollout", "router"}), (LOST, {"orchestrator"})])
def test_tasks_that_fill_a_connection_or_lose_work_are_named(
    tmp_path: Path, text: str, names: set[str]
) -> None:
    """Two sides that only send; an orchestrator one of whose workers has ended with its item, the other one being idle."""
    if sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)):
        pytest.skip("the layout of this interpreter's coroutines is not known")
    with running(tmp_path, text) as job:
        found = explain_processes(look_at(job.pid))
    assert (found.state, {one.function for one in found.guilty}) == ("stuck", names), found


CALLBACK = """
    import multiprocessing, time

    def keep(value):
        seen = 1 / value

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(2) as pool:
            results = [pool.apply_async(int, (n,), callback=keep) for n in (2, 1, 0, 3)]
            time.sleep(1)
            print("ready")
            [one.get() for one in results]
    """


def test_an_error_in_a_callback_of_a_pool_is_a_hang(tmp_path: Path) -> None:
    """It ends the thread that takes the results; another thread of the pool then spins, which is no progress."""
    with running(tmp_path, CALLBACK) as job:
        found = explain_processes(look_at(job.pid))
    assert (found.state, [one.pid for one in found.guilty]) == ("stuck", [job.pid]), found
    assert "waits for a result of its process pool" in found.sentence, found.sentence
    assert found.sentence.endswith("the thread that takes its results has ended"), found.sentence


LISTENER = """
    import multiprocessing, os, time
    from multiprocessing.connection import Client, Listener

    def replay(address):
        with Listener(address, "AF_UNIX", authkey=b"k") as listener:
            while True:
                with listener.accept() as connection:
                    while True:
                        connection.send(connection.recv())

    def evaluator(address):
        with Client(address, "AF_UNIX", authkey=b"k") as connection:
            connection.send(1)
            connection.recv()
            time.sleep(1)
            print("ready")
            while not os.path.exists("/never/there"):
                time.sleep(0.1)

    if __name__ == "__main__":
        address = __file__ + ".socket"
        for role in (replay, evaluator):
            multiprocessing.get_context("fork").Process(target=role, args=(address,)).start()
            time.sleep(0.5)
        Client(address, "AF_UNIX", authkey=b"k")
    """


def test_a_connection_that_a_unix_server_has_not_accepted_is_followed(tmp_path: Path) -> None:
    """The server serves one client at a time, and that one looks for a file that does not come."""
    with running(tmp_path, LISTENER) as job:
        found = explain_processes(look_at(job.pid))
    assert [(one.role, one.function) for one in found.guilty] == [("evaluator", "evaluator")], found


BROKER = """
    import multiprocessing, socket, threading

    def serve(line, items, changed):
        while command := line.recv(4):
            with changed:
                if command == b"push":
                    items.append(1)
                    changed.notify_all()
                while not items:
                    changed.wait()

    def broker(server):
        items, changed = [], threading.Condition()
        while True:
            line, _ = server.accept()
            threading.Thread(target=serve, args=(line, items, changed)).start()

    def take(port):
        line = socket.create_connection(("127.0.0.1", port))
        line.sendall(b"take")
        line.recv(4)

    def rollout(port):
        take(port)

    def trainer(port):
        print("ready")
        take(port)

    if __name__ == "__main__":
        server = socket.create_server(("127.0.0.1", 0))
        start = multiprocessing.get_context("fork").Process
        start(target=broker, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        server.close()
        start(target=rollout, args=(port,), daemon=True).start()
        trainer(port)
    """


def test_clients_that_wait_for_each_other_through_a_broker_are_named(tmp_path: Path) -> None:
    """Both take what only another request could bring: the broker, which waits for that, does not wait for itself."""
    with running(tmp_path, BROKER) as job:
        found = explain_processes(look_at(job.pid))
    assert found.state == "stuck" and {"broker", "rollout"} < {one.role for one in found.guilty}, found
    assert job.pid in {one.pid for one in found.guilty}, found
    assert "only this process can" not in found.sentence, found.sentence


IDLE_JOB = """
    import multiprocessing, threading, time

    def rollout(ready, out):
        while True:
            ready.wait()
            ready.clear()
            out.put(1)

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Manager() as manager:
            ready, out = manager.Event(), manager.Queue()
            multiprocessing.get_context("fork").Process(target=rollout, args=(ready, out), daemon=True).start()
            time.sleep(1)
            print("ready")
            while True:
                out.get()
    """


def test_processes_that_take_their_work_from_each_other_are_not_called_idle(tmp_path: Path) -> None:
    """Who should set the event has ended; nothing from outside reaches any of them."""
    with running(tmp_path, IDLE_JOB) as job:
        look = look_at(job.pid)
    found = explain_processes(look)
    assert {one.role for one in look.processes} == {"driver", "rollout", "manager of shared objects"}
    assert found.state == "unclear" and "wait for work from each other" in found.sentence, found
    assert "rollout (pid" in found.sentence, found.sentence


FORKED = """
    import multiprocessing, time

    def generate(queue):
        while True:
            pass

    def judge(queue):
        time.sleep(3600)

    def watch(queue):
        while True:
            time.sleep(20)

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        for role in (generate, judge, watch):
            context.Process(target=role, args=(queue,), daemon=True).start()
        print("ready")
        queue.get()
    """


def test_who_may_get_an_item_from_a_process_that_computes_is_not_stuck(tmp_path: Path) -> None:
    """All that were forked can write into the queue: one computes, one sleeps for an hour, one only stays alive."""
    with running(tmp_path, FORKED) as job:
        look = look_at(job.pid)
        found = explain_processes(look)
    kinds = {one.role: one.threads[0].wait.kind for one in look.processes}
    assert (kinds["judge"], kinds["watch"]) == ("sleep", "idle"), kinds
    assert found.state == "unclear" and "generate (pid" in found.sentence, found
    assert "in a loop that changes nothing" in found.sentence, found
