"""The replica supervisor with real, small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from allranks.model.diagnosis import Failure
from allranks.supervise.logs import Terminal, _end_of_lines, open_log
from allranks.supervise.replicas import Event, ReplicaOptions, Request, Supervisor
from allranks.supervise.restarts import (
    RestartHistory,
    RestartOptions,
    decide_restart,
    find_common_error,
    find_program_error,
)


def script(tmp_path: Path, text: str) -> tuple[str, ...]:
    """A rank's command that runs `text`; `once(name)` is true only for its first caller."""
    head = (
        "import os, sys, time, signal\n"
        "R = int(os.environ['ALLRANKS_RANK'])\n"
        f"def once(name):\n"
        f"    try: os.close(os.open({str(tmp_path)!r} + '/' + name, os.O_CREAT | os.O_EXCL)); return True\n"
        f"    except FileExistsError: return False\n"
    )
    path = tmp_path / "rank.py"
    path.write_text(head + text)
    return (sys.executable, "-S", str(path))


def run(options: ReplicaOptions) -> tuple[int, list[Event]]:
    """Runs to the end and returns the code with everything that happened."""
    events: list[Event] = []
    code = Supervisor(options, on_event=events.append).run()
    return code, events


def kinds(events: list[Event], replica: int) -> list[str]:
    """What happened to one replica, in order."""
    return [event.kind for event in events if event.replica == replica]


def test_ranks_get_their_place_and_the_job_ends_with_zero(tmp_path: Path) -> None:
    """Two replicas of two ranks; each rank writes down what it was told."""
    command = script(
        tmp_path,
        f"open({str(tmp_path)!r} + f'/seen{{R}}', 'w').write(' '.join(os.environ[k] for k in"
        " ['RANK', 'WORLD_SIZE', 'REPLICA_GROUP_ID', 'ALLRANKS_REPLICA', 'ALLRANKS_WORLD_SIZE']))",
    )
    code, events = run(ReplicaOptions(command, replicas=2, ranks_per_replica=2, quiet=True))
    assert code == 0
    assert (tmp_path / "seen3").read_text() == "1 2 1 replica-1 4"
    assert kinds(events, 0) == ["started", "rank_exited", "rank_exited", "finished"]


def test_a_killed_replica_is_restarted_while_the_other_runs_on(tmp_path: Path) -> None:
    """Replica 1 kills itself with -9 once; replica 0 is never touched."""
    command = script(tmp_path, "if R == 1 and once('died'): os.kill(os.getpid(), 9)\n")
    code, events = run(ReplicaOptions(command, replicas=2, quiet=True))
    assert (tmp_path / "died").exists()
    assert code == 0
    assert kinds(events, 1) == ["started", "rank_exited", "restarting", "started", "rank_exited", "finished"]
    assert kinds(events, 0) == ["started", "rank_exited", "finished"]
    assert next(e.detail for e in events if e.replica == 1 and e.kind == "rank_exited") == "died of SIGKILL"


def test_the_other_ranks_of_a_failed_replica_are_stopped_first(tmp_path: Path) -> None:
    """Rank 0 would sleep for ever; rank 1 fails; both are replaced."""
    command = script(
        tmp_path,
        "if R == 0 and once('slept'): time.sleep(600)\n"
        f"while R == 1 and not os.path.exists({str(tmp_path)!r} + '/slept'): time.sleep(0.01)\n"
        "if R == 1 and once('failed'): sys.exit(3)\n",
    )
    code, events = run(ReplicaOptions(command, replicas=1, ranks_per_replica=2, quiet=True))
    assert code == 0
    endings = [e.detail for e in events if e.kind == "rank_exited"]
    assert "exited with code 3" in endings
    assert kinds(events, 0).count("started") == 2


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """The grace ends with SIGKILL."""
    command = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if R == 0 and once('stubborn'): time.sleep(600)\n"
        f"while R == 1 and not os.path.exists({str(tmp_path)!r} + '/stubborn'): time.sleep(0.01)\n"
        "if R == 1 and once('failed'): sys.exit(3)\n",
    )
    code, events = run(ReplicaOptions(command, replicas=1, ranks_per_replica=2, quiet=True))
    assert code == 0
    assert "died of SIGKILL" in [e.detail for e in events if e.kind == "rank_exited"]


def test_a_replica_that_fails_again_and_again_is_set_aside(tmp_path: Path) -> None:
    """The storm limit ends the restarts; the good replica decides the exit code."""
    command = script(tmp_path, "if R == 1: sys.exit(1)\n")
    restarts = RestartOptions(storm_failures=3, storm_window_s=60, max_delay_s=0.01)
    code, events = run(ReplicaOptions(command, replicas=2, restarts=restarts, quiet=True))
    assert code == 0
    assert kinds(events, 1)[-1] == "set_aside"
    assert kinds(events, 1).count("started") == 3


def test_a_job_in_which_no_replica_finishes_fails(tmp_path: Path) -> None:
    """Exit 1 when everybody was set aside."""
    command = script(tmp_path, "sys.exit(1)\n")
    code, _ = run(ReplicaOptions(command, replicas=1, restarts=RestartOptions(max_restarts=0), quiet=True))
    assert code == 1


def test_a_request_from_another_thread_restarts_a_hung_replica(tmp_path: Path) -> None:
    """This is what an eviction does to the process."""
    command = script(tmp_path, "if R == 1 and once('hung'): time.sleep(600)\n")
    events: list[Event] = []
    supervisor = Supervisor(ReplicaOptions(command, replicas=2, quiet=True), on_event=events.append)

    def evict() -> None:
        while not (tmp_path / "hung").exists():
            pass
        supervisor.request(Request("restart", 1, "evicted: stuck in data.py:3"))

    thread = threading.Thread(target=evict)
    thread.start()
    code = supervisor.run()
    thread.join()
    assert code == 0
    restarted = [e.detail for e in events if e.kind == "restarting"]
    assert restarted and restarted[0].startswith("evicted: stuck in data.py:3")


def test_a_signal_stops_every_rank_and_shows_in_the_exit_code(tmp_path: Path) -> None:
    """SIGTERM to the agent: no orphan, 128 + 15."""
    command = script(tmp_path, "once(f'up{R}'); time.sleep(600)\n")
    supervisor = Supervisor(ReplicaOptions(command, replicas=2, quiet=True))

    def stop() -> None:
        while not all((tmp_path / f"up{r}").exists() for r in range(2)):
            pass
        supervisor.note_signal(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    code = supervisor.run()
    thread.join()
    assert code == 128 + 15
    assert supervisor.pids() == {}


def test_output_is_prefixed_on_the_terminal_and_plain_in_the_file(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Each line names its rank; a line without an end is not lost."""
    command = script(tmp_path, "os.write(1, b'one\\ntwo')\n")
    code, _ = run(ReplicaOptions(command, replicas=1, log_folder=tmp_path / "logs"))
    assert code == 0
    assert capfdbinary.readouterr().out == b"[rank 0] one\n[rank 0] two\n"
    assert (tmp_path / "logs" / "rank0.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("blocking", [True, False])
def test_a_terminal_that_takes_nothing_holds_up_nobody_and_says_what_it_left_out(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the pipe while twenty megabytes are written; later the reader gets what fits, in order."""
    monkeypatch.setattr("allranks.supervise.logs.CLOSE_S", 60.0)  # 2 s may be short on a busy machine
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    terminal = Terminal(writing)
    terminal.start()
    for number in range(20):
        terminal.write(b"%02d " % number + b"x" * (1 << 20) + b"\n")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(reading, 1 << 20), b"")))
    reader.start()
    terminal.close()
    os.close(writing)
    reader.join(60)
    os.close(reading)
    lines = b"".join(got).splitlines()
    shown = [int(line[:2]) for line in lines if line.endswith(b"x")]
    left_out = sum(int(line.split()[1]) for line in lines if line.startswith(b"[allranks]"))
    assert shown == sorted(shown) and shown[0] == 0
    assert left_out > 0 and len(shown) + left_out == 20


def test_a_replica_that_trained_before_it_was_killed_comes_back_at_once() -> None:
    """However often it is killed; one that fails before it trains waits longer each time."""
    options = RestartOptions(storm_failures=99)
    history = RestartHistory()
    for number in range(5):
        history = history.after_failure(number * 40.0, 39.0, options, trained=True).after_restart()
        assert decide_restart(history, options)[0] == 0.0


def test_only_a_replica_that_was_killed_is_asked_whether_it_trained(tmp_path: Path) -> None:
    """An exception of the script comes again: it gets the back-off, however well the replica trained before."""
    ends = "import os, signal, sys; os.kill(os.getpid(), signal.SIGKILL) if KILLED else sys.exit(1)"
    for killed, delays in ((True, ["after 0 s"] * 3), (False, ["after 0 s", "after 0.5 s", "after 1 s"])):
        command = (sys.executable, "-c", ends.replace("KILLED", str(killed)))
        told: list[Event] = []
        supervisor = Supervisor(
            ReplicaOptions(command, 1, restarts=RestartOptions(max_restarts=3), log_folder=tmp_path),
            on_event=told.append,
            trained=lambda replica: True,
        )
        supervisor.run()
        assert [e.detail.split(", ")[-1] for e in told if e.kind == "restarting"] == delays


def test_back_off_grows_and_a_long_healthy_run_forgives() -> None:
    """Pure: delays double up to the limit; a healthy hour resets them."""
    options = RestartOptions(max_delay_s=4, storm_failures=99)
    history, delays, now = RestartHistory(), [], 0.0
    for _ in range(6):
        now += 100
        history = history.after_failure(now, 1.0, options)
        delays.append(decide_restart(history, options)[0])
        history = history.after_restart()
    assert delays == [0.0, 0.5, 1.0, 2.0, 4, 4]
    forgiven = history.after_failure(now + 5000, 4000.0, options)
    assert decide_restart(forgiven, options)[0] == 0.0


def test_a_replica_that_comes_back_after_the_end_is_stopped(tmp_path: Path) -> None:
    """It would train alone from the start; the job ends well without it."""
    command = script(
        tmp_path,
        "if R == 1 and once('died'): os.kill(os.getpid(), 9)\n"
        f"if R == 0:\n    while not os.path.exists({str(tmp_path)!r} + '/back'): time.sleep(0.01)\n"
        "if R == 1: once('back'); time.sleep(600)\n",
    )
    code, events = run(ReplicaOptions(command, replicas=2, finish_grace_s=0.1, quiet=True))
    assert (tmp_path / "back").exists()
    assert code == 0
    assert kinds(events, 1)[-1] == "stopped"


def test_children_of_a_killed_rank_go_with_it(tmp_path: Path) -> None:
    """A sleeping DataLoader worker would outlive its rank for ever; the second life finds it gone."""
    command = script(
        tmp_path,
        "import subprocess\n"
        f"note = {str(tmp_path)!r} + '/child'\n"
        "if once('forked'):\n"
        "    child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "    open(note, 'w').write(str(child.pid))\n"
        "    os.kill(os.getpid(), 9)\n",
    )
    code, events = run(ReplicaOptions(command, replicas=1, quiet=True))
    assert code == 0
    assert "died of SIGKILL" in [e.detail for e in events if e.kind == "rank_exited"]
    stat = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "the child of the killed rank still runs"
        time.sleep(0.02)


def failing(
    step: int = -1, where: str = "train.py:7", calls: int = 0, reason: str = "raised KeyError"
) -> Failure:
    """A failure of the program."""
    return Failure(0, reason, where, "'x'", step, calls)


def test_the_same_failure_three_times_is_an_error_of_the_program() -> None:
    """Before the first step, in the same step, or without marks after about as many calls; however long it took."""
    assert "3 times before the first step: rank 0 raised KeyError at train.py:7" in find_program_error(
        [failing()] * 3
    )
    assert "3 times in step 5" in find_program_error([failing(3), *[failing(5)] * 3])
    assert find_program_error([failing(calls=1000), failing(calls=1010), failing(calls=1005)])
    assert not find_program_error([failing()] * 2)
    assert not find_program_error([failing(), failing(where="train.py:8"), failing()])
    assert not find_program_error([failing(4), failing(5), failing(6)])
    assert not find_program_error([failing(calls=1000), failing(calls=2000), failing(calls=3000)])
    assert not find_program_error(
        [failing(reason="raised ReplicaEvicted")] * 3
    )  # the agent has not readmitted it yet


def test_a_failure_of_every_replica_is_an_error_of_the_program_sooner() -> None:
    """Three in all are enough when nobody is without; one sick replica says nothing of the others."""
    assert find_common_error({0: [failing()] * 2, 1: [failing()]}, 2)
    assert not find_common_error({0: [failing()] * 3, 1: []}, 2)
    assert not find_common_error({0: [failing(), failing()], 1: [failing(9)]}, 2)


def test_a_job_whose_program_always_fails_the_same_way_ends_after_three_times(tmp_path: Path) -> None:
    """However long its imports take: no back-off, no storm rule, one last word."""
    command = script(tmp_path, "sys.exit(3)")
    events: list[Event] = []
    supervisor = Supervisor(
        ReplicaOptions(command, replicas=2, quiet=True),
        on_event=events.append,
        failure=lambda replica, exits: failing(reason=f"exited with code {next(iter(exits.values()))}"),
    )
    assert supervisor.run() == 1
    failed = sum(event.kind == "rank_exited" and not event.expected for event in events)
    assert failed in (3, 4)  # the other replica may fail again before it is stopped


def test_a_supervisor_that_is_told_to_give_up_stops_all_and_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A script without a Manager, say. The log said that the agent got signal 0."""
    caplog.set_level("INFO")
    command = script(tmp_path, "time.sleep(600)")
    supervisor = Supervisor(ReplicaOptions(command, replicas=2, quiet=True))
    supervisor.on_event = lambda event: supervisor.give_up("no Manager") if event.replica == 1 else None
    assert supervisor.run() == 1
    assert supervisor.pids() == {}
    assert "replica 0: rank 0 died of SIGTERM" in caplog.messages
    assert "replica 0 stopped: the job ends" in caplog.messages and "signal 0" not in caplog.text


def test_lines_go_to_the_terminal_in_whole_pieces() -> None:
    """What a pipe takes at once ends with a line; a line that is longer goes alone."""
    short, long = b"x" * 99 + b"\n", b"y" * 9999 + b"\n"
    assert _end_of_lines(short * 5, 0) == 500
    assert _end_of_lines(short * 100, 0) == 4000
    assert _end_of_lines(short * 100, 4000) == 8000
    assert _end_of_lines(long + short, 0) == 10_000
    assert _end_of_lines(long + short, 3000) == 10_000
    assert _end_of_lines(long[:-1], 0) == 9999


def test_a_log_is_not_written_through_what_somebody_laid_in_its_place(tmp_path: Path) -> None:
    """In a folder that others can write to: a link would have us write into a file of ours, a pipe would make us wait."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "rank0.log").symlink_to(precious)
    os.mkfifo(tmp_path / "rank1.log")
    assert open_log(tmp_path, "rank0.log") is None and open_log(tmp_path, "rank1.log") is None
    for _ in range(2):
        with open_log(tmp_path, "rank2.log") or pytest.fail("no log") as file:
            file.write(b"line\n")
    assert (tmp_path / "rank2.log").read_bytes() == b"line\nline\n" and precious.read_text() == "as it was"


def test_the_reason_of_giving_up_is_not_lost_when_a_replica_fails_at_the_same_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread gives up while the loop asks how the program failed."""

    def fail(replica: int, exits: dict[int, int]) -> Failure:
        supervisor.give_up("the script did not make a Manager")
        return Failure(replica, "raised ValueError", "train.py:3")

    supervisor = Supervisor(ReplicaOptions(script(tmp_path, "sys.exit(3)"), replicas=2, quiet=True))
    supervisor.failure = fail
    assert supervisor.run() == 1
    assert "the script did not make a Manager" in caplog.text


#: Attaches to the second thread of a process as a debugger does, and lets go only when it ends.
TRACER = """
import ctypes, os, sys, time
pid = int(sys.argv[1])
thread = next(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
PTRACE_SEIZE = 0x4206
if ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, thread, 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
print("attached", flush=True)
time.sleep(1000)
"""


def test_a_rank_that_sigkill_does_not_end_does_not_keep_the_job_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one in a D state: a thread that a debugger holds keeps the process."""
    started: list[int] = []
    supervisor = Supervisor(
        ReplicaOptions(
            script(tmp_path, "import threading\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
                   f"open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(1000)"),
            replicas=1, quiet=True, stop_grace_s=0.2, kill_grace_s=1.0,
        ),
        on_event=lambda event: started.append(event.pid or 0) if event.kind == "started" else None,
    )  # fmt: skip
    tracers: list[subprocess.Popen[bytes]] = []

    def hold_and_stop() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        tracer = subprocess.Popen(
            [sys.executable, "-c", TRACER, str(started[0])], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        tracers.append(tracer)
        assert tracer.stdout is not None and tracer.stderr is not None
        if tracer.stdout.readline() != b"attached\n":
            caplog.records.clear()
        supervisor.note_signal(signal.SIGTERM)

    thread = threading.Thread(target=hold_and_stop)
    thread.start()
    try:
        code = supervisor.run()
        thread.join(60)
        if tracers[0].poll() is not None:
            assert tracers[0].stderr is not None
            pytest.skip(f"a process cannot be traced here: {tracers[0].stderr.read().decode()}")
        assert code == 128 + signal.SIGTERM and f"pid {started[0]} has not ended" in caplog.text
    finally:
        for tracer in tracers:
            tracer.kill()
            tracer.communicate()
