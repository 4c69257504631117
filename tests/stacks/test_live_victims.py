"""Real programs that are really stuck, looked at live."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.errors import InputError
from allranks.model.stacks import RankState
from allranks.stacktraces import (
    CollectOptions,
    Selection,
    classify,
    collect,
    find_targets,
    read_bundle,
    targets_of,
    write_bundle,
)
from allranks.stacktraces.debuggers import ask_faulthandler, find_pyspy
from allranks.stacktraces.procfs import catches

from . import victims as v

QUICK = CollectOptions(interval_s=0.2)
FIRST_PASS = CollectOptions(interval_s=0.2, native="never")

thread_ids = pytest.mark.skipif(
    sys.version_info < (3, 11) and platform.machine() == "aarch64",
    reason="py-spy tells no thread ids of Python 3.10 on ARM",
)
pytestmark = pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")


def look(pid: int, options: CollectOptions = QUICK) -> RankState:
    """The state of one process as rank 0."""
    return classify(collect(targets_of({0: pid}), options)).ranks[0]


@pytest.mark.parametrize(
    ("code", "cause", "where"),
    [
        pytest.param(v.ABBA, "lock_deadlock", "in pay", marks=thread_ids),
        (v.SELF_DEADLOCK, "lock_deadlock", "in twice"),
        (v.GIL_HELD, "gil_held_native", "in driver_call"),
        (v.NATIVE, "native_call", "in driver_call"),
        (v.SLEEP, "sleep", "in load_batch"),
        (v.SUBPROCESS, "subprocess_wait", "in convert"),
        (v.FIFO, "checkpoint_io", "in save_checkpoint"),
        (v.STDIN, "stdin_wait", "in ask"),
        (v.BUSY, "busy_python", "in spin"),
        (v.NETWORK, "network_io", "in fetch"),
        (v.QUEUE, "queue_wait", "in take"),
    ],
    ids=[
        "abba",
        "self_deadlock",
        "gil",
        "native",
        "sleep",
        "subprocess",
        "fifo",
        "stdin",
        "busy",
        "network",
        "queue",
    ],
)
def test_the_cause_and_the_line_of_a_stuck_program_are_told(
    code: str, cause: str, where: str, tmp_path: Path
) -> None:
    """Each program is stuck before it is looked at; cause and user line are those of the program."""
    with v.victim(code, tmp_path) as victim:
        if cause != "busy_python":
            v.settled(victim.pid)
        state = look(victim.pid)
        assert (state.cause, state.evidence != "") == (cause, True), state
        assert state.where.endswith(where)
        assert victim.process.poll() is None


@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)), reason="its coroutines are not known"
)
def test_an_event_loop_that_waits_is_at_the_line_of_the_programs_coroutine(tmp_path: Path) -> None:
    """The stack of the thread ends in the loop, at `asyncio.run`; another task, which only sleeps, is not the program."""
    with v.victim(v.COROUTINE, tmp_path) as victim:
        v.settled(victim.pid)
        state = look(victim.pid)
    assert (state.cause, state.where.partition(" ")[2]) == ("event_loop_idle", "in next_batch"), state
    assert [frame.name for frame in state.stack if "victim" in frame.file] == [
        *("next_batch", "train", "<module>")
    ]


def test_who_holds_the_lock_on_a_file_is_told(tmp_path: Path) -> None:
    """Another rank of the job, or a process that is none of it. The kernel lists the second that waits behind the first."""
    path = str(tmp_path / "cache.lock")
    with (
        v.victim(v.FILE_LOCK, tmp_path, path, "holds") as holder,
        v.victim(v.FILE_LOCK, tmp_path, path, "waits") as waiter,
        v.victim(v.FILE_LOCK, tmp_path, path, "waits") as second,
    ):
        v.settled(waiter.pid)
        v.settled(second.pid)
        job = {0: holder.pid, 1: waiter.pid, 2: second.pid}
        ranks = classify(collect(targets_of(job), QUICK)).ranks
        alone = look(waiter.pid)
    for rank in (1, 2):
        assert (ranks[rank].cause, ranks[rank].held_by) == ("file_lock_wait", 0)
        assert ranks[rank].evidence.endswith(", held by rank 0"), ranks[rank]
    assert alone.evidence.endswith(f", held by process {holder.pid}, which is not of this job")


def test_a_task_that_waits_for_its_own_pool_is_told(tmp_path: Path) -> None:
    """The only thread of the pool waits for a task which it would have to run: the main thread shows just half of that."""
    with v.victim(v.POOL_OF_ONE, tmp_path) as victim:
        v.settled(victim.pid)
        state = look(victim.pid)
    assert (state.cause, state.where.partition(" ")[2]) == ("queue_wait", "in load")
    assert "; so does thread ThreadPoolExecutor-0_0 at " in state.evidence
    assert state.evidence.endswith(" in batch"), state


def test_a_task_that_a_pool_has_lost_with_its_worker_is_told(tmp_path: Path) -> None:
    """The pool has replaced the worker that was killed; its new one waits for a task, and the result never comes."""
    with v.victim(v.POOL, tmp_path) as victim:
        v.settled(victim.pid)
        v.wait_until(lambda: "every worker of its pool waits for a task" in look(victim.pid).evidence)
        state = look(victim.pid)
    assert (state.cause, state.where.partition(" ")[2]) == ("child_process_wait", "in augment_all")


@thread_ids
def test_threads_that_fight_for_the_gil_are_told(tmp_path: Path) -> None:
    """No thread keeps it for long, and the main one gets a seventh of the time: a look may also find it running."""
    with v.victim(v.GIL_CONTENTION, tmp_path) as victim:
        for _ in range(20):
            state = look(victim.pid, FIRST_PASS)
            if state.cause == "gil_contention":
                break
        assert state.cause == "gil_contention", state
        assert "GIL" in state.evidence


MUTEXES = """
libc = ctypes.CDLL(None)
first, second, met = (ctypes.c_char * 64)(), (ctypes.c_char * 64)(), threading.Barrier(2)
def pay(mine, other):
    libc.pthread_mutex_lock(mine)
    met.wait()
    libc.pthread_mutex_lock(other)
worker = threading.Thread(target=pay, args=(second, first), name="worker", daemon=True)
worker.start()
ready()
pay(first, second)
"""


@thread_ids
def test_a_circle_of_native_mutexes_is_proven_by_their_owners(tmp_path: Path) -> None:
    """The kernel names the mutex, the mutex names its owner: both threads of the circle are named."""
    with v.victim(MUTEXES, tmp_path) as victim:
        v.settled(victim.pid)
        for _ in range(20):
            state = look(victim.pid, FIRST_PASS)
            if state.cause == "lock_deadlock":
                break
        assert state.cause == "lock_deadlock"
        assert "native mutexes in a circle" in state.evidence
        assert "MainThread at" in state.evidence and "worker at" in state.evidence


def test_a_stopped_process_is_told_and_stays_stopped(tmp_path: Path) -> None:
    """SIGSTOP: seen in the kernel's state; nobody continues it, and the look does not hang."""
    with v.victim(v.SLEEP, tmp_path) as victim:
        os.kill(victim.pid, signal.SIGSTOP)
        v.wait_until(lambda: v.state_of(victim.pid) == "T")
        state = look(victim.pid, CollectOptions(interval_s=0.1, native="all"))
        assert state.cause == "stopped"
        assert "kill -CONT" in state.evidence
        assert v.state_of(victim.pid) == "T"


def test_a_process_in_uninterruptible_sleep_costs_no_hang(tmp_path: Path) -> None:
    """The parent of a vfork is in state D: /proc and the nonblocking look still work."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "v.c", tmp_path / "v.so"
    source.write_text(
        "#include <unistd.h>\nint hold(void){ if (vfork() == 0) { sleep(1000); _exit(0); } return 0; }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    code = f"def spawn():\n    ctypes.CDLL({str(library)!r}).hold()\nready()\nspawn()\n"
    with v.victim(code, tmp_path) as victim:
        v.wait_until(lambda: v.state_of(victim.pid) == "D")
        state = look(victim.pid, CollectOptions(interval_s=0.1, native="all"))
        assert state.cause == "d_state"
        assert state.where.endswith("in spawn")


def test_a_zombie_and_a_vanished_process_are_findings(tmp_path: Path) -> None:
    """A rank that is dead is reported as dead; a pid that does not exist is an error with a hint."""
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    v.wait_until(lambda: v.state_of(dead.pid) == "Z")
    state = look(dead.pid)
    assert state.cause == "unknown"
    assert "dead" in state.evidence or "gone" in state.evidence
    dead.wait()
    with pytest.raises(InputError, match="does not exist on"):
        find_targets(Selection(pids=(dead.pid,)))


def test_a_process_that_is_no_python_is_told_from_the_kernel() -> None:
    """A broken or foreign interpreter costs a finding, not a failure."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            state = look(process.pid)
            assert state.cause in ("native_call", "sleep")
        finally:
            process.kill()


def test_the_first_pass_stops_nobody_and_signals_nobody(tmp_path: Path) -> None:
    """While the process is looked at its tracer is never set and its state is never traced."""
    seen: set[str] = set()
    done = threading.Event()
    with v.victim(v.SLEEP, tmp_path) as victim:
        v.settled(victim.pid)

        def sample() -> None:
            while not done.is_set():
                status = Path(f"/proc/{victim.pid}/status").read_text()
                seen.update(line for line in status.splitlines() if line.startswith(("TracerPid", "State")))

        watcher = threading.Thread(target=sample, name="sampler")
        watcher.start()
        try:
            assert look(victim.pid, FIRST_PASS).cause == "sleep"
        finally:
            done.set()
            watcher.join()
        assert seen == {"TracerPid:\t0", "State:\tS (sleeping)"}


def test_only_nonblocking_looks_are_made_unless_more_is_asked_for(tmp_path: Path) -> None:
    """The commands of the first passes carry --nonblocking, and none carries --native."""
    log, fake = tmp_path / "calls", tmp_path / "py-spy"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "{find_pyspy()}" "$@"\n')
    fake.chmod(0o755)
    with v.victim(v.SLEEP, tmp_path) as victim:
        collect(targets_of({0: victim.pid}), CollectOptions(interval_s=0.0, native="never", pyspy=str(fake)))
    calls = log.read_text().splitlines()
    assert len(calls) == 2
    assert all("--nonblocking" in call and "--native" not in call for call in calls)


def test_a_tool_that_hangs_is_ended_and_its_target_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit belongs to the tool: the process itself is untouched, and the rest of the look continues."""
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\nexec sleep 1000\n")
    fake.chmod(0o755)
    with v.victim(v.SLEEP, tmp_path) as victim:
        v.settled(victim.pid)
        options = CollectOptions(interval_s=0.0, native="never", pyspy=str(fake), pyspy_limit_s=0.3)
        state = look(victim.pid, options)
        assert victim.process.poll() is None
    assert state.cause == "sleep"
    assert any("did not finish" in note for note in state.notes)


def test_a_process_without_a_handler_is_never_signalled(tmp_path: Path) -> None:
    """SIGUSR1 would kill it: the look says so instead."""
    with v.victim(v.SLEEP, tmp_path) as victim:
        stacks, problem = ask_faulthandler(victim.pid, signal.SIGUSR1)
        assert stacks == ()
        assert "no handler" in problem
        assert victim.process.poll() is None


def test_a_faulthandler_that_is_installed_is_asked_and_read_back(tmp_path: Path) -> None:
    """The dump that the process writes to its log file is read as stacks."""
    code = "import faulthandler\nfaulthandler.register(signal.SIGUSR1, all_threads=True)\n" + v.SLEEP
    with v.victim(code, tmp_path) as victim:
        v.settled(victim.pid)
        assert catches(victim.pid, signal.SIGUSR1)
        stacks, problem = ask_faulthandler(victim.pid, signal.SIGUSR1)
        assert problem == ""
        assert stacks[-1].frames[0].name == "load_batch"
        assert victim.process.poll() is None


def test_ranks_are_found_by_environment_and_children_are_attached(tmp_path: Path) -> None:
    """Two processes with RANK are two ranks; a child of one is its child, though it inherits RANK."""
    job = f"job-{os.getpid()}"
    code = "child = os.fork()\nif child == 0:\n    time.sleep(1000)\n" + v.SLEEP
    with (
        v.victim(code, tmp_path, RANK="3", WORLD_SIZE="8", TORCHELASTIC_RUN_ID=job) as first,
        v.victim(v.SLEEP, tmp_path, RANK="1", WORLD_SIZE="8", TORCHELASTIC_RUN_ID=job) as second,
    ):
        targets = find_targets(Selection(job=job))
        assert [(t.rank, t.child) for t in targets] == [(1, None), (3, None), (3, 0)]
        assert (targets[0].pid, targets[1].pid) == (second.pid, first.pid)
        assert targets[0].world_size == 8


def test_titles_of_an_sglang_like_server_are_ranks_and_its_router_is_not(tmp_path: Path) -> None:
    """Processes are found by their title alone; coordinates become rank numbers."""
    names = ["sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::router"]
    servers = [
        subprocess.Popen(
            ["bash", "-c", f"exec -a {name} {shlex.quote(sys.executable)} -c 'import time; time.sleep(1000)'"]
        )
        for name in names
    ]
    try:
        for name, server in zip(names, servers, strict=True):
            v.wait_until(
                lambda s=server, n=name: Path(f"/proc/{s.pid}/cmdline").read_bytes().startswith(n.encode())
            )
        targets = [t for t in find_targets(Selection(name="sglang::scheduler")) if t.child is None]
        mine = {target.pid: target for target in targets}
        assert mine[servers[0].pid].parallel == (("tp", 0),)
        assert mine[servers[1].pid].rank == 1
        everyone = {target.pid for target in find_targets(Selection())}
        assert {servers[0].pid, servers[1].pid} <= everyone
        assert servers[2].pid not in everyone
    finally:
        for server in servers:
            server.kill()
            server.wait()


def test_the_bundle_and_the_texts_of_a_live_look_can_be_read_again(tmp_path: Path) -> None:
    """One bundle for machines; the texts for people tell the line, too."""
    out = tmp_path / "out"
    with v.victim(v.SLEEP, tmp_path) as victim:
        v.settled(victim.pid)
        capture = collect(targets_of({5: victim.pid}), CollectOptions(interval_s=0.1, raw_folder=out))
        write_bundle(capture, out)
    assert (
        (out / f"pyspy_{os.uname().nodename}_{victim.pid}.txt")
        .read_text()
        .startswith(f"Process {victim.pid}:")
    )
    report = read_bundle(out)
    assert report.ranks[5].cause == "sleep"
    (out / "bundle.json").unlink()
    (again,) = read_bundle(out).ranks.values()
    assert again.where == report.ranks[5].where and again.where


@pytest.mark.needs_root
def test_a_refusal_says_what_to_change(tmp_path: Path) -> None:
    """Without the right to ptrace the note names the obstacle and the fixes, not py-spy's own riddle."""
    with v.victim(v.SLEEP, tmp_path) as victim:
        v.settled(victim.pid)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                from allranks.stacktraces.debuggers import explain_pyspy, may_ptrace

                text = f"{may_ptrace(victim.pid)} " + explain_pyspy("Error: Permission Denied", victim.pid)
                text += explain_pyspy("Error: Failed to get process executable name", victim.pid)
                os.write(write_end, text.encode())
            finally:
                os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        told = os.read(read_end, 1 << 16).decode()
        os.close(read_end)
    assert told.startswith("False ")
    assert "uid 0, we are uid 65534" in told
    assert "--cap-add=SYS_PTRACE" in told


def test_a_gdb_backtrace_stands_in_where_py_spy_fails(tmp_path: Path) -> None:
    """With --gdb a process that py-spy cannot read still shows its native frames."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Error: broken interpreter' >&2\nexit 1\n")
    fake.chmod(0o755)
    with v.victim(v.SLEEP, tmp_path) as victim:
        v.settled(victim.pid)
        options = CollectOptions(rounds=1, interval_s=0.0, gdb=True, pyspy=str(fake))
        process = collect(targets_of({0: victim.pid}), options).processes[0]
        assert any("sleep" in frame.name for stack in process.native for frame in stack.frames)
        assert any("broken interpreter" in note for note in process.notes)
        assert victim.process.poll() is None


def test_every_node_of_a_slurm_job_is_asked_and_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """srun runs the look beside the job's steps; what the nodes wrote is read as one job."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    srun = bin_folder / "srun"
    srun.write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexport SLURM_NNODES=1\nexec "$@"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    job = f"job-{os.getpid()}"
    monkeypatch.chdir(tmp_path)
    with v.victim(v.SLEEP, tmp_path, RANK="0", SLURM_JOB_ID=job) as victim:
        v.settled(victim.pid)
        monkeypatch.setenv("SLURM_JOB_ID", "another")
        code = main(
            [
                "stacks",
                "--all-nodes",
                "--job",
                job,
                "-o",
                str(tmp_path / "all"),
                "--interval",
                "0.1",
                "--json",
            ]
        )
        answer = json.loads(capsys.readouterr().out)
    assert (answer["hung"], code) == (None, 1)  # one sleeping rank alone: unclear, and that is not healthy
    assert (tmp_path / "all" / os.uname().nodename / "bundle.json").exists()
    assert victim.pid in [state["pid"] for state in answer["ranks"].values()]


@pytest.mark.needs_root
def test_a_rank_in_another_pid_namespace_is_found_from_the_host(tmp_path: Path) -> None:
    """As in a container: the process has another number inside; environment, facts and stacks still work."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    script, mark = tmp_path / "inside.py", tmp_path / "ready"
    script.write_text(v.PREAMBLE + v.SLEEP)
    job = f"box-{os.getpid()}"
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, str(script), str(mark)],
        env={**os.environ, "RANK": "2", "TORCHELASTIC_RUN_ID": job}, start_new_session=True,
    )  # fmt: skip
    try:
        v.wait_until(mark.exists, outer)
        targets = [target for target in find_targets(Selection(job=job)) if target.child is None]
        assert [target.rank for target in targets] == [2]
        assert targets[0].pid != outer.pid
        v.settled(targets[0].pid)
        report = classify(collect(targets, QUICK))
        assert report.ranks[2].cause == "sleep"
        assert report.ranks[2].where.endswith("in load_batch")
    finally:
        os.killpg(outer.pid, signal.SIGKILL)
        outer.wait()
