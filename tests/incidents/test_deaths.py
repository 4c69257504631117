"""Deaths in whole-job mode, where torchrun owns the processes: noticed at once, one incident each, the first is named."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from allranks.blackbox import header
from allranks.blackbox.header import process_state, read_header
from allranks.blackbox.layout import wakeup_address
from allranks.incidents import pipeline
from allranks.incidents.folder import read_incidents
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import WatchOptions
from allranks.launch.node_agent import NodeAgent
from allranks.model.cluster import MemberLost
from allranks.supervise.replicas import ReplicaOptions, Supervisor
from allranks.watch.exits import Death, Ending, ExitWatcher, MemoryKills, find_deaths, find_first
from allranks.watch.samples import read_samples
from allranks.watch.silence import NoticeOptions
from boxes import write_box

GONE = 2**22  # no process has such a number


def found(folder: Path, endings: dict[int, Ending]) -> dict[int, str]:
    """Rank -> how it died."""
    return {death.rank: death.reason for death in find_deaths(read_samples(folder), endings, since_ns=1)}


def test_a_death_is_told_from_an_end_that_was_asked_for(tmp_path: Path) -> None:
    """A signal, a code and an exception are deaths; SIGTERM, code 0 and a life that goes on are not."""
    write_box(tmp_path, 0, 5)
    codes = {1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: 0, 4: 3}
    for rank in codes:
        write_box(tmp_path, rank, 5, pid=GONE + rank)
    write_box(tmp_path, 5, 5, closed=b"exception: ValueError (train.py:44): bad batch", closed_ns=10**9)
    write_box(tmp_path, 6, 5, closed=b"exception: KeyboardInterrupt: ", closed_ns=10**9)
    write_box(tmp_path, 7, 5, pid=GONE + 7)
    write_box(tmp_path, 8, 5, closed=b"exit code 3 (sys.exit at train.py:8)", closed_ns=10**9)
    write_box(tmp_path, 9, 5, closed=b"exit code 143 (sys.exit at train.py:8)", closed_ns=10**9)
    endings = {GONE + rank: Ending(GONE + rank, code, 1.0) for rank, code in codes.items()}
    assert found(tmp_path, endings) == {
        1: "died of SIGKILL", 4: "exited with code 3", 5: "raised ValueError", 7: "exited without shutting down",
        8: "exited with code 3 (sys.exit)",
    }  # fmt: skip


def test_who_only_echoes_another_end_is_not_the_first() -> None:
    """A broken connection is reported earlier than the death that broke it was seen, and is still not the cause."""
    echo = Death(0, 10, 1.0, "raised RuntimeError", "", "Connection closed by peer", echo=True)
    cause = Death(2, 12, 1.2, "died of SIGKILL")
    later = Death(1, 11, 1.5, "raised ValueError")
    assert find_first([echo, later, cause]) == cause
    assert find_first([echo]) == echo
    assert find_first([]) is None


def test_a_pidfd_or_a_wakeup_ends_the_wait_and_tells_how_a_child_ended() -> None:
    """No polling: with an hour to wait both come back at once, and the code is left for the parent's own wait."""
    lines = ExitWatcher()
    lines.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lines.hold([child.pid])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            rank.sendto(b"!", wakeup_address(os.getpid()))
        lines.wait(3600)
        assert not lines.endings
        child.kill()
        lines.wait(3600)
        assert lines.endings[child.pid].words == "died of SIGKILL"
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
        lines.close()


def test_how_a_rank_ended_is_known_also_when_its_box_was_read_first() -> None:
    """A segmentation fault between two turns of the watch was "exited without shutting down"."""
    lines = ExitWatcher()
    lines.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lines.hold([child.pid])
        child.send_signal(signal.SIGSEGV)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        lines.note_dead([child.pid, os.getpid()])
        assert {pid: end.words for pid, end in lines.endings.items()} == {child.pid: "died of SIGSEGV"}
    finally:
        child.kill()
        child.communicate()
        lines.close()


_LEADER_FIRST = """
import ctypes, os, platform, signal, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(1), os.kill(os.getpid(), signal.SIGSEGV))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread alone
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of the system call")
def test_how_a_rank_ended_is_known_also_when_its_first_thread_ends_before_the_others() -> None:
    """Its box says dead then, and nothing tells how: a segmentation fault was "exited without shutting down"."""
    lines = ExitWatcher()
    lines.start()
    child = subprocess.Popen([sys.executable, "-c", _LEADER_FIRST], stdin=subprocess.PIPE)
    try:
        lines.hold([child.pid])
        while process_state(child.pid) != "Z":
            time.sleep(0.01)
        assert lines.note_dead([child.pid]) == {child.pid}
        assert not lines.endings
        assert child.stdin is not None
        child.stdin.write(b"!")
        child.stdin.flush()
        lines.wait(3600)
        assert {pid: end.words for pid, end in lines.endings.items()} == {child.pid: "died of SIGSEGV"}
    finally:
        child.kill()
        child.communicate()
        lines.close()


@pytest.mark.parametrize("held", [True, False])
def test_how_a_rank_ended_is_known_also_when_the_launcher_has_waited_for_it_first(held: bool) -> None:
    """torchrun polls its ranks ten times a second. On a busy node it was there before the watch: "exited without shutting down"."""
    lines = ExitWatcher()
    lines.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        if held:
            lines.hold([child.pid])
        lines.peek([child.pid])
        child.send_signal(signal.SIGSEGV)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        lines.peek([child.pid])
        assert child.wait() == -signal.SIGSEGV
        assert not lines.note_dead([child.pid])
        assert {pid: end.words for pid, end in lines.endings.items()} == {child.pid: "died of SIGSEGV"}
    finally:
        child.kill()
        child.communicate()
        lines.close()


_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
door.sendto(b"!", "\\0" + sys.argv[1])
"""


@pytest.mark.needs_root
def test_another_user_cannot_end_the_wait() -> None:
    """Abstract sockets have no owner: whoever sends without pause would keep the agent reading boxes without pause."""
    lines = ExitWatcher()
    lines.start()
    try:
        stranger = [sys.executable, "-c", _AS_NOBODY, wakeup_address(os.getpid())[1:]]
        assert subprocess.run(stranger, check=False).returncode == 0
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as child:
            lines.hold([child.pid])
            lines.wait(3600)
            assert lines.endings[child.pid].words == "exited with code 0"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            rank.sendto(b"!", wakeup_address(os.getpid()))
        lines.wait(3600)  # it is heard again
    finally:
        lines.close()


def watch(tmp_path: Path, **options: object) -> Watch:
    """A watch that was made before the boxes."""
    (tmp_path / "boxes").mkdir()
    return Watch(
        WatchOptions(tmp_path / "boxes", tmp_path / "incidents", "job", collect_stacks=False, **options)
    )  # type: ignore[arg-type]


def test_a_death_in_whole_job_mode_opens_one_incident_for_all_that_follows(tmp_path: Path) -> None:
    """Rank 1 is gone and rank 0 raised because of it; the next round of processes starts afresh."""
    dog = watch(tmp_path)
    now = time.time_ns()
    write_box(
        tmp_path / "boxes",
        0,
        7,
        start_ns=now,
        closed=b"exception: RuntimeError: gloo: Connection closed",
        closed_ns=now,
    )
    write_box(tmp_path / "boxes", 1, 7, start_ns=now, pid=GONE)
    dog.look()
    dog.look()
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["verdict"]["cause"], story["verdict"]["ranks"]) == (
        "death",
        "rank_died",
        [1],
    )
    assert (tmp_path / "incidents" / story["id"] / "story.html").exists()
    assert list((tmp_path / "incidents" / story["id"] / "boxes").glob("*.box"))
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, 0, calls=2, start_ns=time.time_ns())
    dog.look()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["closed"] is not None


def test_broken_connections_are_reported_although_the_job_was_started_again_meanwhile(tmp_path: Path) -> None:
    """Warm processes take over within the second in which a better cause may still show."""
    dog = watch(tmp_path)
    dog.deaths.echo_patience_s = lambda: 60.0
    broken = b"exception: RuntimeError: gloo: Connection closed"
    for rank in (0, 1):
        now = time.time_ns()
        box = write_box(
            tmp_path / "boxes", rank, 7, start_ns=now, closed=broken, closed_ns=now, pid=GONE + rank
        )
        box.rename(box.with_name(f"{rank}.earlier.box"))
    dog.look()
    assert read_incidents(tmp_path / "incidents") == []
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, 0, calls=2, start_ns=time.time_ns())
    dog.look()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    kept = [read_header(box).pid for box in (tmp_path / "incidents" / story["id"] / "boxes").glob("*.box")]
    assert (story["kind"], sorted(kept)) == ("death", [GONE, GONE + 1])


@pytest.mark.parametrize("restarted", [1, 2])
def test_a_rank_that_aborted_is_reported_although_the_one_that_complained_first_was_asked_to_end(
    tmp_path: Path, restarted: int
) -> None:
    """Rank 0 lost its connection, rank 1 aborted, the launcher ends rank 0 and starts both again: all within a second.

    The evidence is of the attempt that failed, also when only some have been started again.
    """
    dog = watch(tmp_path)
    dog.deaths.echo_patience_s = lambda: 60.0
    now = time.time_ns()
    broken = {"closed": b"exception: RuntimeError: gloo: Connection closed", "closed_ns": now}
    for rank, closed in ((0, broken), (1, {})):
        box = write_box(tmp_path / "boxes", rank, 7, start_ns=now, pid=GONE + rank, **closed)
        box.rename(box.with_name(f"{rank}.earlier.box"))
    dog._exits.endings[GONE + 1] = Ending(GONE + 1, -signal.SIGABRT, time.time())
    dog.look()
    dog.pipeline.explained.add([GONE])
    dog.deaths.echo_patience_s = lambda: 0.0
    for rank in range(restarted):
        write_box(tmp_path / "boxes", rank, 0, calls=2, start_ns=time.time_ns())
    dog.look()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    kept = [read_header(box).pid for box in (tmp_path / "incidents" / story["id"] / "boxes").glob("*.box")]
    assert (story["verdict"]["sentence"], sorted(kept)) == ("rank 1 died of SIGABRT", [GONE, GONE + 1])


def test_a_killed_rank_that_is_still_being_taken_down_is_waited_for_when_another_lost_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of its GPU takes seconds; rank 0 raises at once. Nobody may be told that no rank had died."""
    dog = watch(tmp_path)
    dog.deaths.echo_patience_s = lambda: 0.0
    now = time.time_ns()
    broken = {"closed": b"exception: DistBackendError: NCCL error: Connection closed", "closed_ns": now}
    killed = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    write_box(tmp_path / "boxes", 0, 7, start_ns=now, **broken)  # type: ignore[arg-type]
    write_box(tmp_path / "boxes", 1, 7, start_ns=now, pid=killed.pid)
    monkeypatch.setattr(
        "allranks.incidents.deaths.process_state", lambda pid: "X" if pid == killed.pid else "S"
    )
    dog.look()
    assert read_incidents(tmp_path / "incidents") == []
    killed.kill()
    killed.wait()
    dog._exits.endings[killed.pid] = Ending(killed.pid, -signal.SIGKILL, time.time())
    dog.look()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["verdict"]["sentence"] == "rank 1 died of SIGKILL"


def test_connections_that_break_because_another_node_was_stopped_are_no_incident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C in one of two launchers: its agent says good-bye before its ranks end, and the log of the other says so."""
    dog = watch(tmp_path)
    dog.deaths.echo_patience_s = lambda: 0.0
    agent = NodeAgent(dog)
    broken = b"exception: RuntimeError: gloo: Connection closed by peer"
    dog.deaths.note_stopped("agent-b")
    write_box(tmp_path / "boxes", 0, 7, start_ns=time.time_ns(), closed=broken, closed_ns=time.time_ns())
    dog.look()
    dog.look()
    agent.close()
    assert read_incidents(tmp_path / "incidents") == []
    assert caplog.text.count("agent-b was stopped or has ended") == 1


def test_ranks_that_another_agent_of_this_host_asked_to_end_are_no_incident(tmp_path: Path) -> None:
    """Two launchers of one job share its folder; torchrun kills ranks that do not end in time. Later ranks are others."""
    ours = watch(tmp_path)
    write_box(tmp_path / "boxes", 2, 7, start_ns=time.time_ns(), pid=GONE)
    pipeline.Explained().tell([GONE], tmp_path / "boxes")
    ours.look()
    assert read_incidents(tmp_path / "incidents") == []
    write_box(tmp_path / "boxes", 3, 7, start_ns=time.time_ns(), pid=GONE)
    ours.look()
    ours.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["verdict"]["ranks"] == [3]


def test_deaths_are_reported_after_the_clock_went_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first round started while the clock was an hour ahead; the death of the second is of the same kind."""
    dog = watch(tmp_path)
    for ahead_s, dead in ((3600, 1), (0, 0)):
        start_ns = time.time_ns() + ahead_s * 10**9
        for rank in (0, 1):
            pid = GONE + rank if rank == dead else os.getpid()
            write_box(tmp_path / "boxes", rank, 7, start_ns=start_ns, pid=pid)
        dog.look()
        dog.look()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["verdict"]["ranks"] == [1]
    assert caplog.text.count("again rank 0 exited without shutting down") == 1


def test_boxes_of_an_earlier_run_are_no_deaths(tmp_path: Path) -> None:
    """A folder may hold the ranks of yesterday."""
    dog = watch(tmp_path)
    write_box(tmp_path / "boxes", 0, 7, pid=GONE)
    dog.look()
    assert read_incidents(tmp_path / "incidents") == []


class Living(Supervisor):
    """A supervisor whose replica 1 is this process."""

    running = True

    def __init__(self) -> None:
        super().__init__(ReplicaOptions((), 2))

    def pids(self) -> dict[int, int]:
        return {1: os.getpid()}

    def is_running(self, replica: int) -> bool:
        return self.running


@pytest.mark.parametrize(
    ("running", "step", "calls"), [(True, 7, 5), (True, 0, 0), (False, 7, 5), (True, -1, 0)]
)
def test_a_lost_replica_whose_process_runs_is_a_partition(
    tmp_path: Path, running: bool, step: int, calls: int
) -> None:
    """The lighthouse lost it, its agent sees it run: the network, also in its first step. One that is being stopped is
    none, and a process that has begun no step and made no call is the next life of the one that was lost."""
    dog, supervisor = watch(tmp_path, mode="replica", replicas=2), Living()
    supervisor.running = running
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, step, calls=calls)
    agent = NodeAgent(dog, None, supervisor)
    notice = MemberLost("replica-1", "connection was cut and did not come back")
    agent._look_after(notice, agent._pids(notice), 5.0)
    stories = read_incidents(tmp_path / "incidents")
    assert [(s["kind"], s["ranks"], s["verdict"]["cause"]) for s in stories] == (
        [("partition", [1], "none_finished")] if running and step >= 0 else []
    )


def test_a_death_is_told_while_a_standstill_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks stand still and their stacks take for ever to read: one is killed, and its incident does not wait."""
    dog = watch(tmp_path, poll_s=0.05, notice=NoticeOptions(floor_s=0.1, warm_up_s=0.1))
    examining, told = threading.Event(), threading.Event()

    def judge(*args: object) -> tuple[None, None]:
        examining.set()
        told.wait(60)
        return None, None

    monkeypatch.setattr(pipeline, "judge_folder", judge)
    dog.join(None, lambda incident: told.set() if incident.kind == "death" else None)
    ranks = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        for rank, process in enumerate(ranks):
            write_box(tmp_path / "boxes", rank, 7, pid=process.pid, start_ns=time.time_ns())
        dog.start()
        assert examining.wait(60)
        ranks[1].kill()
        assert told.wait(30)
    finally:
        dog.close()
        for process in ranks:
            process.kill()
            process.communicate()
    death, standstill = sorted(read_incidents(tmp_path / "incidents"), key=lambda story: story["kind"])
    assert (death["kind"], death["verdict"]["ranks"]) == ("death", [1])
    assert standstill["kind"] == "slow"
    assert "rank 1 ended while it was inspected" in standstill["timeline"][-1]["text"]


def test_the_watch_goes_on_while_the_lighthouse_does_not_answer_about_a_death(tmp_path: Path) -> None:
    """Rank 1 dies and the question who leads its incident hangs: a rank that starts meanwhile is seen."""
    dog = watch(tmp_path, poll_s=0.05)
    asked, answer = threading.Event(), threading.Event()

    def ask(*args: object, **kwargs: object) -> None:
        asked.set()
        answer.wait(60)

    dog.pipeline.ask = ask  # type: ignore[method-assign]
    ranks = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        for rank, process in enumerate(ranks):
            write_box(tmp_path / "boxes", rank, 7, pid=process.pid, start_ns=time.time_ns())
        dog.start()
        deadline = time.monotonic() + 30
        while dog.ranks != (0, 1):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks[1].kill()
        assert asked.wait(30)
        write_box(tmp_path / "boxes", 2, 7)
        while dog.ranks != (0, 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        answer.set()
        dog.close()
        for process in ranks:
            process.kill()
            process.communicate()
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["ranks"]) == ("death", [1])


def test_a_kill_of_the_kernel_for_lack_of_memory_is_said(tmp_path: Path) -> None:
    """The kernel's counter has moved since the last death; a later kill without that is only a kill."""
    dog = watch(tmp_path)
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 9\noom_kill 3\n")
    dog.deaths.memory_kills = MemoryKills(counter)
    counter.write_text("pgfault 9\noom_kill 4\n")
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, 7, pid=GONE + rank)
        opened = dog.deaths.note_death(Death(rank, GONE + rank, time.time(), "died of SIGKILL"))
        assert opened is not None
    dog.close()
    starved, killed = read_incidents(tmp_path / "incidents")
    assert starved["reason"] == "rank 0 died of SIGKILL: the kernel ended it for lack of memory"
    assert killed["reason"] == "rank 1 died of SIGKILL"
    assert [moment["name"] for moment in killed["timeline"]][-3:] == ["died", "noticed", "evidence"]


def test_a_process_with_the_pid_of_an_earlier_one_dies_a_death_of_its_own(tmp_path: Path) -> None:
    """The end of the first was asked for; the second, of the same number, is killed. Identity is pid and start."""
    dog = watch(tmp_path)
    write_box(tmp_path / "boxes", 0, 7, pid=GONE, start_ns=time.time_ns())
    write_box(tmp_path / "boxes", 1, 7, start_ns=time.time_ns())
    dog.pipeline.explained.add([GONE])
    dog.look()
    assert read_incidents(tmp_path / "incidents") == []
    write_box(tmp_path / "boxes", 0, 9, pid=GONE, start_ns=time.time_ns())
    dog.look()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["verdict"]["ranks"] == [0]
    old = {GONE: Ending(GONE, 0, time.time() - 60)}  # how the first ended says nothing of the second
    assert found(tmp_path / "boxes", old) == {0: "exited without shutting down"}
    dog.close()


def test_a_death_after_the_clock_was_set_back_is_noticed(tmp_path: Path) -> None:
    """The first attempt ran while the clock was an hour ahead; the next one seems to have started before it."""
    dog = watch(tmp_path)
    ahead = time.time_ns() + 3600 * 10**9
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, 7, start_ns=ahead, pid=GONE + rank)
    dog.look()
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, 7, start_ns=time.time_ns())
    dog.look()
    write_box(tmp_path / "boxes", 1, 9, start_ns=time.time_ns(), pid=GONE + 7)
    dog.look()
    dog.close()
    first, second = read_incidents(tmp_path / "incidents")
    assert (first["ranks"], second["ranks"]) == ([0], [1])


@pytest.mark.parametrize(
    ("state", "flags", "told"),
    [("D", 0x40040C, "X"), ("S", 0x400400, "S"), ("Z", 0x40040C, "Z"), ("T", 0x400000, "T")],
)
def test_a_process_that_the_kernel_takes_down_does_not_run_any_more(
    monkeypatch: pytest.MonkeyPatch, state: str, flags: int, told: str
) -> None:
    """Killed with a GPU's memory it is no zombie for half a second, and was called cut off from the network."""
    fields = [state, "1", "1", "1", "0", "-1", str(flags), *["0"] * 40]
    monkeypatch.setattr(header, "process_stat", lambda pid: fields)
    assert header.process_state(4711) == told


def test_a_rank_that_gave_up_after_another_had_gone_is_not_the_first(tmp_path: Path) -> None:
    """Its program caught the error and called sys.exit(1): that says as little of the cause as the error itself."""
    closed = b"exit code 1 (sys.exit at train.py:9): after RuntimeError: Connection closed by peer [::1]:4711"
    write_box(tmp_path, 0, 5, exit_message=closed, closed=closed[:63], closed_ns=10**9)
    write_box(tmp_path, 1, 5, closed=b"exit code 2 (sys.exit at train.py:7): no data", closed_ns=2 * 10**9)
    deaths = find_deaths(read_samples(tmp_path), {}, since_ns=1)
    assert [death.echo for death in deaths] == [True, False]
    first = find_first(deaths)
    assert first is not None
    assert first.sentence == "rank 1 exited with code 2 (sys.exit) at train.py:7: no data"
