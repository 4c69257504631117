"""What one process is stuck on, by the table of patterns: decisions without a process."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    Snapshot,
    StackFrame,
    ThreadFacts,
    ThreadStack,
)
from allranks.stacktraces import classify
from allranks.stacktraces.procfs import parse_facts, read_facts
from allranks.stacktraces.text import grow_tree, render_text

CASES = Path(__file__).parent / "cases"
PROXY = "/usr/bin/python3 -S -s -m allranks.lighthouse.client.liveness_proxy --fd 8"


def test_the_training_thread_behind_a_serving_main_thread_is_the_rank() -> None:
    """Ray Train runs the user's loop in a thread of its own, whatever that does."""
    serving = ThreadStack(
        5, "MainThread", (StackFrame("main_loop", "/x/site-packages/ray/_private/worker.py", 1069),)
    )
    sleeping = ThreadStack(
        6,
        "TrainingThread(0)",
        (StackFrame("load_batch", "/home/user/t.py", 7), StackFrame("train", "/home/user/t.py", 9)),
    )
    facts = (
        ThreadFacts(5, state="S", syscall="epoll_wait"),
        ThreadFacts(6, state="S", syscall="clock_nanosleep"),
    )
    shots = tuple(Snapshot(number, None, (serving, sleeping), facts) for number in (1, 2))
    capture = Capture((ProcessCapture(1, None, 5, snapshots=shots),))
    state = classify(capture).ranks[1]
    assert (state.cause, state.thread) == ("sleep", "TrainingThread(0)")
    assert state.where.startswith("t.py:7")
    assert any("load_batch" in line for line in render_text(classify(capture), grow_tree(capture)))


def test_a_child_that_was_killed_is_named_by_the_rank_that_waits_for_its_queue() -> None:
    """The out-of-memory killer took the producer: the parent, which never waits for it, reads from its pipe forever."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays as the parent left it
    facts = parse_facts(json.dumps(read_facts(child))).threads
    os.waitpid(child, 0)
    assert facts[0].state == "Z"
    waits = ThreadStack(
        5,
        "MainThread",
        (StackFrame("get", "/x/multiprocessing/queues.py", 103), StackFrame("main", "/home/user/t.py", 9)),
    )
    shots = tuple(Snapshot(n, None, (waits,), (ThreadFacts(5, state="S", syscall="read"),)) for n in (1, 2))
    producer = ProcessCapture(0, 0, child, snapshots=(Snapshot(2, None, (), facts),))
    state = classify(Capture((ProcessCapture(0, None, 5, snapshots=shots), producer))).ranks[0]
    assert state.cause == "queue_wait"
    assert f"child 0 (pid {child}) was killed by SIGKILL" in state.evidence


@pytest.mark.parametrize(("title", "cause"), [("sh -c sync", "subprocess_wait"), (PROXY, "queue_wait")])
def test_our_own_helpers_are_not_commands_of_the_rank(title: str, cause: str) -> None:
    """A rank with a Manager has a process for its liveness: a read from a pipe was called a wait for a command."""
    reads = ThreadStack(5, "MainThread", (StackFrame("batch", "/home/user/t.py", 9),))
    facts = (ThreadFacts(5, state="S", syscall="read", wchan="anon_pipe_read", wait_s=-1.0),)
    shots = tuple(Snapshot(number, None, (reads,), facts) for number in (1, 2))
    beside = tuple(Snapshot(n, None, (), (ThreadFacts(6, state="S", syscall="epoll_wait"),)) for n in (1, 2))
    child = ProcessCapture(0, 0, 6, title=title, snapshots=beside)
    state = classify(Capture((ProcessCapture(0, None, 5, snapshots=shots), child))).ranks[0]
    assert state.cause == cause


@pytest.mark.parametrize("name", ["", "MainThread"])
def test_the_main_thread_is_known_where_no_thread_has_an_id(name: str) -> None:
    """py-spy tells none of Python 3.10 on ARM: what the kernel says of the process was not joined with its frames."""
    main = (StackFrame("load_batch", "/home/user/t.py", 7), StackFrame("<module>", "/home/user/t.py", 9))
    other = (StackFrame("run", "/home/user/log.py", 3), StackFrame("_bootstrap", "/x/threading.py", 973))
    stacks = (ThreadStack(None, "logger", other), ThreadStack(None, name, main))
    facts = (
        ThreadFacts(5, state="S", syscall="pselect6", args=(0,)),
        ThreadFacts(6, state="S", syscall="futex"),
    )
    shots = tuple(Snapshot(number, None, stacks, facts) for number in (1, 2))
    state = classify(Capture((ProcessCapture(0, None, 5, snapshots=shots),))).ranks[0]
    assert (state.cause, state.where) == ("sleep", "t.py:7 in load_batch")


def test_a_hook_that_hangs_in_a_thread_of_backward_is_the_ranks_trouble() -> None:
    """Gradients of a GPU come in a thread that C++ has started; the main thread waits for it in native code."""
    torch = "/x/site-packages/torch/"
    backward = (
        StackFrame("torch::autograd::ReadyQueue::pop", "libtorch_cpu.so", 0, native=True),
        StackFrame("_engine_run_backward", torch + "autograd/graph.py", 869),
        StackFrame("train", "/home/user/t.py", 83),
    )
    hook = (StackFrame("load_batch", "/home/user/t.py", 7), StackFrame("hook", "/home/user/t.py", 9))
    timer = (
        StackFrame("wait", "/usr/lib/python3.11/threading.py", 3),
        StackFrame("Thread._bootstrap", "threading.py", 9),
    )
    stacks = (
        ThreadStack(5, "MainThread", backward),
        ThreadStack(7, "timer", timer),
        ThreadStack(6, "", hook),
    )
    facts = (
        ThreadFacts(5, state="S", syscall="futex"),
        ThreadFacts(6, state="S", syscall="clock_nanosleep"),
        ThreadFacts(7, state="S", syscall="futex"),
    )
    shots = tuple(Snapshot(number, None, stacks, facts) for number in (1, 2))
    process = ProcessCapture(1, None, 5, snapshots=shots, native=stacks[:1])
    state = classify(Capture((process,))).ranks[1]
    assert (state.cause, state.where) == ("sleep", "t.py:7 in load_batch")
    assert "a hook of its backward" in state.evidence
    alone = tuple(replace(shot, stacks=stacks[:2]) for shot in shots)
    assert classify(Capture((replace(process, snapshots=alone),))).ranks[1].cause == "native_call"


def test_a_server_without_a_line_of_the_users_own_is_told_by_its_engine() -> None:
    """An idle vLLM worker waits for requests, its engine core for the worker; the place is the engine's line."""
    lib = "/usr/lib/python3.12/site-packages/"
    poll = StackFrame("poll", lib + "zmq/sugar/poll.py", 106)
    read = StackFrame("acquire_read", lib + "vllm/distributed/device_communicators/shm_broadcast.py", 698)
    loop = StackFrame("worker_busy_loop", lib + "vllm/v1/executor/multiproc_executor.py", 973)
    answer = StackFrame("get_response", lib + "vllm/v1/executor/multiproc_executor.py", 387)
    shot = lambda *frames: (Snapshot(1, None, (ThreadStack(1, "MainThread", frames, False, False),)),)  # noqa: E731
    worker = ProcessCapture(0, None, 1, title="VLLM::Worker_TP0", snapshots=shot(poll, read, loop))
    engine = ProcessCapture(1, None, 1, title="VLLM::EngineCore", snapshots=shot(poll, answer))
    report = classify(Capture((worker, engine)))
    assert report.ranks[0].cause == "request_wait"
    assert report.ranks[0].where == "shm_broadcast.py:698 in acquire_read"
    assert report.ranks[1].cause == "p2p_wait"


@pytest.mark.parametrize(
    ("function", "file", "cause"),
    [
        ("TrainingState._wait_for_group", "training.py", "rendezvous_wait"),
        ("TrainingState._wait_for_verdict", "training.py", "rendezvous_wait"),
        ("wait_while", "work.py", "collective_wait"),
        ("VoteMesh.cast", "vote_mesh.py", "collective_wait"),
    ],
)
def test_a_replica_that_waits_in_its_manager_is_no_culprit(function: str, file: str, cause: str) -> None:
    """Survivors wait for a group, a gradient or a vote; the one that sleeps in its data code is to blame."""
    wait = StackFrame("Condition.wait", "/usr/lib/python3.12/threading.py", 359)
    inside = StackFrame(function, f"/usr/lib/python3.12/site-packages/allranks/manager/{file}", 120)
    user = StackFrame("main", "train.py", 20)
    load = StackFrame("load_batch", "data.py", 31)
    shot = lambda *frames: (Snapshot(1, None, (ThreadStack(1, "MainThread", frames, False, False),)),)  # noqa: E731
    survivor = ProcessCapture(0, None, 1, snapshots=shot(wait, inside, user))
    sleeper = ProcessCapture(1, None, 2, snapshots=shot(load, user))
    report = classify(Capture((survivor, sleeper)))
    assert report.ranks[0].cause == cause
    assert report.culprits == (1,)


def test_a_rank_that_waits_on_a_queue_is_stuck_where_the_thread_that_fills_it_is() -> None:
    """torchdata's nodes map samples in threads: the line of the user's function was not named."""
    queue = (
        StackFrame("Condition.wait", "/usr/lib/python3.12/threading.py", 331),
        StackFrame("Queue.get", "/usr/lib/python3.12/queue.py", 180),
    )
    library = "/x/site-packages/torchdata/nodes/_apply_udf.py"
    user = StackFrame("train", "/home/u/t.py", 62)
    threads = {
        "MainThread": ((*queue, user), "futex"),
        "Thread-1 (idle)": ((*queue, StackFrame("_apply_udf", library, 39)), "futex"),
        "Thread-2 (my_worker)": ((*queue, StackFrame("my_worker", "/home/u/t.py", 30)), "futex"),
        "Thread-3 (apply)": (
            (StackFrame("read", "/home/u/t.py", 47), StackFrame("_apply_udf", library, 49)),
            "clock_nanosleep",
        ),
    }
    facts = tuple(
        ThreadFacts(tid, state="S", syscall=call) for tid, (_, call) in enumerate(threads.values(), 1)
    )
    stacks = tuple(
        ThreadStack(tid, name, frames) for tid, (name, (frames, _)) in enumerate(threads.items(), 1)
    )
    stuck, nobody = (
        classify(
            Capture(
                (ProcessCapture(0, None, 1, snapshots=(Snapshot(1, None, stacks[:count], facts[:count]),)),)
            )
        ).ranks[0]
        for count in (4, 3)
    )
    assert (stuck.cause, stuck.where, stuck.thread) == ("sleep", "t.py:47 in read", "Thread-3 (apply)")
    assert stuck.evidence.startswith(
        "the main thread waits in Condition.wait (threading.py:331) for thread Thread-3 (apply), which sleeps"
    )
    # threads that wait on queues themselves explain nothing
    assert (nobody.cause, nobody.where) == ("queue_wait", "t.py:62 in train")


def test_the_program_that_a_rank_waits_for_is_named_and_not_the_shell_around_it() -> None:
    """webdataset reads shards from a command; its arguments may hold secrets and are not shown."""

    def process(child: int | None, title: str, call: str, wchan: str, *frames: StackFrame) -> ProcessCapture:
        pid = 2 if child is None else 3 + child
        stacks = (ThreadStack(pid, "MainThread", frames),) if frames else ()
        facts = (ThreadFacts(pid, state="S", wchan=wchan, syscall=call),)
        shots = tuple(Snapshot(number, None, stacks, facts) for number in (1, 2))
        return ProcessCapture(0, child, pid, title=title, snapshots=shots)

    reads = ("read", "anon_pipe_read", StackFrame("Pipe.read", "/home/u/t.py", 4))
    rank = process(None, "python t.py", *reads)
    shell = process(0, "/bin/sh -c curl -H token:abc", "wait4", "do_wait")
    curl = process(1, "/usr/bin/curl -H token:abc", "clock_nanosleep", "hrtimer_nanosleep")
    report = classify(Capture((rank, shell, curl)))
    assert [child.where for child in report.ranks[0].children] == ["program sh", "program curl"]
    assert report.ranks[0].evidence.endswith("; child 1 (pid 4) sleeps at program curl")
    assert "abc" not in " ".join(render_text(report, []))


def test_an_idle_checkpoint_helper_is_no_checkpoint_io() -> None:
    """The verdict on a rank that sleeps told of its helper as if that was reading or writing."""
    inside = "/usr/lib/python3.12/site-packages/allranks/checkpoint/save/helper.py"
    shot = lambda call, *frames: (  # noqa: E731
        Snapshot(
            1, None, (ThreadStack(1, "MainThread", frames),), (ThreadFacts(1, state="S", syscall=call),)
        ),
    )
    waits = (
        StackFrame("recv_fds", "/usr/lib/python3.12/socket.py", 573),
        StackFrame("Helper.serve", inside, 52),
    )
    sleeper = ProcessCapture(
        0, None, 1, snapshots=shot("clock_nanosleep", StackFrame("load", "/home/u/t.py", 7))
    )
    report = classify(Capture((sleeper, ProcessCapture(0, 0, 2, snapshots=shot("recvmsg", *waits)))))
    assert report.ranks[0].cause == "sleep" and "child process" not in " ".join(render_text(report, []))
    assert "idle checkpoint helper" in " ".join(render_text(report, []))
    writes = (StackFrame("Helper.write", inside, 90), StackFrame("Helper.serve", inside, 53))
    busy = classify(Capture((sleeper, ProcessCapture(0, 0, 2, snapshots=shot("pwrite64", *writes)))))
    assert "reads or writes a checkpoint" in " ".join(render_text(busy, []))


def test_an_exit_that_a_thread_blocks_names_the_line_of_that_thread() -> None:
    """The main thread has no line of the user's any more; the thread that is not a daemon has."""
    exiting = (StackFrame("_shutdown", "/usr/lib/python3.11/threading.py", 1590),)
    uploader = (
        StackFrame("upload", "/home/user/t.py", 7),
        StackFrame("run", "/usr/lib/python3.11/threading.py", 982),
        StackFrame("_bootstrap", "/usr/lib/python3.11/threading.py", 1002),
    )
    stacks = (ThreadStack(5, "MainThread", exiting), ThreadStack(6, "uploader", uploader))
    facts = (ThreadFacts(5, state="S", syscall="futex"), ThreadFacts(6, state="S", syscall="clock_nanosleep"))
    shots = tuple(Snapshot(number, None, stacks, facts) for number in (1, 2))
    state = classify(Capture((ProcessCapture(0, None, 5, snapshots=shots),))).ranks[0]
    assert (state.cause, state.where, state.thread) == ("shutdown_join", "t.py:7 in upload", "uploader")
    assert state.evidence.endswith("; thread uploader sleeps in upload (t.py:7) (clock_nanosleep)")


def test_ranks_that_wait_for_remote_calls_are_not_taken_for_exiting() -> None:
    """rpc.shutdown waits for the workers that still run their calls: these are the cause."""
    api = "/x/site-packages/torch/distributed/rpc/api.py"
    frames = {
        0: (StackFrame("_wait_all_workers", api, 170), StackFrame("shutdown", api, 360)),
        1: (StackFrame("rpc_sync", api, 804), StackFrame("main", "/home/user/t.py", 12)),
        2: (StackFrame("work", "/home/user/t.py", 7), StackFrame("main", "/home/user/t.py", 9)),
    }
    calls = {0: "futex", 1: "futex", 2: "clock_nanosleep"}
    processes = tuple(
        ProcessCapture(
            rank,
            None,
            5 + rank,
            snapshots=tuple(
                Snapshot(
                    number,
                    None,
                    (ThreadStack(5 + rank, "MainThread", stack),),
                    (ThreadFacts(5 + rank, state="S", syscall=calls[rank]),),
                )
                for number in (1, 2)
            ),
        )
        for rank, stack in frames.items()
    )
    report = classify(Capture(processes))
    assert [report.ranks[rank].cause for rank in frames] == ["rendezvous_wait", "p2p_wait", "sleep"]
    assert report.culprits == (2,) and "exiting" not in report.ranks[0].evidence


@pytest.mark.parametrize("holder", [True, False])
def test_a_lock_is_called_a_deadlock_only_where_no_thread_could_release_it(holder: bool) -> None:
    """The thread that holds it may wait for a server: it is named, and nobody says that it waits for the other."""

    def thread(tid: int, name: str, *frames: tuple[str, str, int]) -> ThreadStack:
        return ThreadStack(tid, name, tuple(StackFrame(*frame) for frame in frames))

    lock = ("__enter__", "/usr/lib/python3.11/threading.py", 90)
    stacks = [thread(5, "MainThread", lock, ("step", "/home/user/t.py", 30))]
    facts = [ThreadFacts(5, state="S", syscall="futex")]
    if holder:
        stacks.append(
            thread(
                6,
                "uploader",
                ("read", "/usr/lib/python3.11/http/client.py", 5),
                ("put", "/home/user/t.py", 7),
            )
        )
        facts.append(ThreadFacts(6, state="S", syscall="recvfrom"))
    shots = tuple(Snapshot(number, None, tuple(stacks), tuple(facts)) for number in (1, 2))
    state = classify(Capture((ProcessCapture(0, None, 5, snapshots=shots),))).ranks[0]
    assert "the other holds" not in state.evidence
    assert ("held perhaps by uploader at t.py:7" in state.evidence) == holder, state.evidence
    assert ("no other thread can release" in state.evidence) != holder


SERVED = {  # what a remote call is stuck in: its innermost frames, system call, and the cause
    "sleep": ((), "clock_nanosleep", "sleep"),
    "lock": ((), "futex", "lock_deadlock"),
    "event": ((StackFrame("Event.wait", "/usr/lib/python3.11/threading.py", 629),), "futex", "queue_wait"),
}


@pytest.mark.parametrize("waits_for", ["answer", "future"])
@pytest.mark.parametrize("kind", SERVED)
def test_a_remote_call_that_does_not_return_is_what_its_rank_does(kind: str, waits_for: str) -> None:
    """The main thread of the callee waits in rpc.shutdown, the caller for its answer: in Python, or in a future's native wait."""
    api, run = (
        "/x/site-packages/torch/distributed/rpc/api.py",
        "/x/site-packages/torch/distributed/rpc/internal.py",
    )
    inner, syscall, cause = SERVED[kind]
    main = StackFrame("main", "/home/user/t.py", 12, source="for f in futures: f.wait()")
    caller = (StackFrame("rpc_sync", api, 804), main) if waits_for == "answer" else (main,)
    waits = (StackFrame("_wait_all_workers", api, 170), StackFrame("shutdown", api, 360))
    line = StackFrame("work", "/home/user/t.py", 7, source="lock.acquire()" if kind == "lock" else "")
    serves = (*inner, line, StackFrame("_run_function", run, 214))
    futex = ThreadFacts(5, state="S", syscall="futex", args=(1, 0x189))
    sleeps = ThreadFacts(7, "pt_thread_pool", state="S", syscall=syscall, args=(1, 0x189))
    network = ThreadFacts(8, "TP_UV_loop", state="S", syscall="epoll_pwait")
    threads = {
        0: ((ThreadStack(5, "MainThread", caller),), (futex, network)),
        1: ((ThreadStack(5, "MainThread", waits), ThreadStack(7, "pt_rpc", serves)), (futex, sleeps)),
    }
    processes = tuple(
        ProcessCapture(rank, None, 5, snapshots=tuple(Snapshot(n, None, *found) for n in (1, 2)))
        for rank, found in threads.items()
    )
    report = classify(Capture(processes))
    assert report.culprits == (1,)
    assert report.ranks[0].cause == "p2p_wait"
    assert (report.ranks[1].cause, report.ranks[1].where) == (cause, "t.py:7 in work")
    assert report.ranks[1].evidence.startswith("a call of another rank")


def _at_lock(rank: int, line: int) -> ProcessCapture:
    at = StackFrame("push", "/home/user/t.py", line, source="with lock:")
    stacks = (ThreadStack(5, "", (at, StackFrame("main", "/home/user/t.py", 20))),)
    facts = (ThreadFacts(5, state="S", syscall="futex", args=(1, 0x189)),)
    return ProcessCapture(rank, None, 5, snapshots=tuple(Snapshot(n, None, stacks, facts) for n in (1, 2)))


def test_ranks_that_do_the_same_are_one_part_of_the_sentence() -> None:
    """Remote calls that wait for each other's locks: the sentence said the same three times."""
    report = classify(Capture((_at_lock(0, 7), _at_lock(1, 7), _at_lock(2, 9))), quiet_s=30.0)
    assert report.culprits == (0, 1, 2)
    assert report.sentence == (
        "ranks 0,1: each waits for a lock in push (t.py:7); rank 2 waits for a lock in push (t.py:9)"
    )
    assert ":  at" not in report.ranks[0].evidence  # a thread without a name


def test_a_child_that_exits_with_items_in_its_queue_says_so() -> None:
    """`join()` before `get()`: the child's exit waits for its queue's thread, which writes to a full pipe."""
    lib = "/usr/lib/python3.11/multiprocessing/"
    exits = (
        StackFrame("Thread.join", "/usr/lib/python3.11/threading.py", 1119),
        StackFrame("Queue._finalize_join", lib + "queues.py", 199),
        StackFrame("_run_finalizers", lib + "util.py", 300),
        StackFrame("BaseProcess._bootstrap", lib + "process.py", 317),
    )
    facts = (ThreadFacts(6, state="S", syscall="futex"),)
    shots = tuple(Snapshot(n, None, (ThreadStack(6, "MainThread", exits),), facts) for n in (1, 2))
    state = classify(Capture((_at_lock(0, 7), ProcessCapture(0, 0, 6, snapshots=shots)))).ranks[0]
    (child,) = state.children
    assert child.cause == "pipe_write_blocked" and "its parent must get before it joins" in child.evidence


@pytest.mark.parametrize(("seconds", "hung"), [(5.0, None), (61.0, True)])
def test_a_wait_for_a_group_that_polls_is_no_progress(seconds: float, hung: bool | None) -> None:
    """A FileStore asks again and again: that was "finished what it waited for", and MOVING. Each rank had a file of its own."""
    init = "/x/site-packages/torch/distributed/distributed_c10d.py"
    frames = (StackFrame("init_process_group", init, 2721), StackFrame("main", "/home/user/t.py", 9))

    def rank(number: int) -> ProcessCapture:
        facts = [(ThreadFacts(5, state="S", syscall="clock_nanosleep", switches=s),) for s in (10, 60)]
        stacks = (ThreadStack(5, "MainThread", frames),)
        shots = tuple(Snapshot(n, n * seconds, stacks, fact) for n, fact in enumerate(facts))
        return ProcessCapture(number, None, 5, snapshots=shots)

    report = classify(Capture((rank(0), rank(1)), world_size=2))
    assert (report.hung, report.culprits) == (hung, ())
    assert "all 2 ranks are there and wait for each other to form a process group" in report.sentence
    assert ("look longer" in report.sentence) == (hung is None)


def test_a_child_that_serves_is_not_what_its_rank_waits_for() -> None:
    """The rank started a server and a DataLoader: the sentence named the idle server, and not the worker that is stuck."""

    def process(child: int | None, call: str, *frames: tuple[str, str]) -> ProcessCapture:
        pid = 2 if child is None else 3 + child
        stacks = (ThreadStack(pid, "MainThread", tuple(StackFrame(*frame, 7) for frame in frames)),)
        facts = (ThreadFacts(pid, state="S", syscall=call),)
        shots = tuple(Snapshot(number, None, stacks, facts) for number in (1, 2))
        return ProcessCapture(0, child, pid, snapshots=shots)

    loader = "/x/site-packages/torch/utils/data/dataloader.py"
    rank = process(None, "poll", ("_try_get_data", loader), ("main", "/home/u/t.py"))
    server = process(
        0, "accept4", ("socket.accept", "/usr/lib/python3.11/socket.py"), ("serve", "/home/u/t.py")
    )
    worker = process(
        1, "recvfrom", ("SocketIO.readinto", "/usr/lib/python3.11/socket.py"), ("get", "/home/u/t.py")
    )
    report = classify(Capture((rank, server, worker)), quiet_s=30.0)
    assert "(its child process 1 waits for the network at t.py:7 in get)" in report.sentence
    assert report.ranks[0].evidence.endswith("; child 1 (pid 4) waits for the network at t.py:7 in get")
    assert report.ranks[0].children[0].evidence == "a server that waits for a connection"


def test_a_storage_writer_that_waits_on_a_queue_is_no_file_io() -> None:
    """torch saves in a thread, which runs the user's writer: that said "is stuck in file I/O"."""
    writer = (
        StackFrame("Queue.get", "/usr/lib/python3.11/queue.py", 171),
        StackFrame("write_data", "/home/user/t.py", 12),
        StackFrame(
            "_save_state_dict", "/x/site-packages/torch/distributed/checkpoint/state_dict_saver.py", 500
        ),
    )
    facts = (ThreadFacts(5, state="S", syscall="futex"),)
    shots = tuple(Snapshot(n, None, (ThreadStack(5, "MainThread", writer),), facts) for n in (1, 2))
    state = classify(Capture((ProcessCapture(0, None, 5, snapshots=shots),))).ranks[0]
    assert (state.cause, state.where) == ("queue_wait", "t.py:12 in write_data")


def test_a_worker_that_was_forked_while_a_lock_was_held_says_so_in_what_its_rank_waits_for() -> None:
    """The user saw that a worker waits for a lock, and not that nobody is left in it to release that."""

    def process(child: int | None, call: str, *frames: StackFrame) -> ProcessCapture:
        pid = 2 if child is None else 3 + child
        stacks = (ThreadStack(pid, "MainThread", frames),)
        facts = (ThreadFacts(pid, state="S", syscall=call, args=(1, 0x189, 0, 0)),)
        shots = tuple(Snapshot(number, None, stacks, facts) for number in (1, 2))
        return ProcessCapture(0, child, pid, snapshots=shots)

    loader = StackFrame("_try_get_data", "/x/site-packages/torch/utils/data/dataloader.py", 7)
    rank = process(None, "poll", loader, StackFrame("main", "/home/u/t.py", 9))
    locked = StackFrame("add", "/home/u/t.py", 8, source="with self.lock:")
    worker = process(
        0, "futex", locked, StackFrame("_launch", "/usr/lib/python3.11/multiprocessing/popen_fork.py", 71)
    )
    evidence = classify(Capture((rank, worker)), quiet_s=30.0).ranks[0].evidence
    assert "; child 0 (pid 3) waits for a lock that was held when this process was forked" in evidence
    evidence = classify(Capture((rank, process(0, "futex", locked))), quiet_s=30.0).ranks[0].evidence
    assert (
        "no other thread can release (self-deadlock, or it was held at a fork): MainThread" in evidence
    )  # os.fork
