"""Deaths in whole-job mode, where torchrun owns the processes: noticed at once, one incident each, the first is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from allranks.blackbox.header import read_header
from allranks.incidents import pipeline
from allranks.incidents.evidence import Evidence, read_observed
from allranks.incidents.folder import IncidentFolder, keep_newest, read_incidents
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import WatchOptions
from allranks.launch.node_agent import NodeAgent
from allranks.model.cluster import MemberLost
from allranks.supervise.replicas import ReplicaOptions, Supervisor
from allranks.watch import exits
from allranks.watch.exits import Death, Ending, find_deaths
from allranks.watch.samples import RankSample, read_samples
from allranks.watch.silence import NoticeOptions
from boxes import write_box

GONE = 2**22  # no process has such a number


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
    dog.deaths.patience_s = lambda: 60.0
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
    dog.deaths.patience_s = lambda: 60.0
    now = time.time_ns()
    broken = {"closed": b"exception: RuntimeError: gloo: Connection closed", "closed_ns": now}
    for rank, closed in ((0, broken), (1, {})):
        box = write_box(tmp_path / "boxes", rank, 7, start_ns=now, pid=GONE + rank, **closed)
        box.rename(box.with_name(f"{rank}.earlier.box"))
    dog.exits.endings[GONE + 1] = Ending(GONE + 1, -signal.SIGABRT, time.time())
    dog.look()
    dog.pipeline.explained.add([GONE])
    dog.deaths.patience_s = lambda: 0.0
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
    dog.deaths.patience_s = lambda: 0.0
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
    dog.exits.endings[killed.pid] = Ending(killed.pid, -signal.SIGKILL, time.time())
    dog.look()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["verdict"]["sentence"] == "rank 1 died of SIGKILL"


def test_connections_that_break_because_another_node_was_stopped_are_no_incident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C in one of two launchers: its agent says good-bye before its ranks end, and the log of the other says so."""
    dog = watch(tmp_path)
    dog.deaths.patience_s = lambda: 0.0
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
    pipeline.Explained().share([GONE], tmp_path / "boxes")
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
    agent._check_lost(notice, agent._pids(notice), 5.0)
    stories = read_incidents(tmp_path / "incidents")
    assert [(s["kind"], s["ranks"], s["verdict"]["cause"]) for s in stories] == (
        [("partition", [1], "none_finished")] if running and step >= 0 else []
    )


def test_a_death_is_told_while_a_standstill_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks hang and their stacks take for ever to read: one is killed, and its incident does not wait."""
    dog = watch(tmp_path, poll_s=0.05, notice=NoticeOptions(floor_s=0.1, warm_up_s=0.1))
    examining, told = threading.Event(), threading.Event()

    def read(folder: Path) -> Evidence:
        examining.set()
        told.wait(60)
        return Evidence(observed=read_observed(folder))

    monkeypatch.setattr(pipeline, "read_incident", read)
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
    assert standstill["kind"] == "stall"
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


def test_a_kill_of_the_kernel_for_lack_of_memory_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's counter has moved since the last death; a later kill without that is only a kill."""
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 9\noom_kill 3\n")
    monkeypatch.setattr(exits, "VMSTAT", counter)
    dog = watch(tmp_path)
    counter.write_text("pgfault 9\noom_kill 4\n")
    for rank in (0, 1):
        write_box(tmp_path / "boxes", rank, 7, pid=GONE + rank)
        opened = dog.deaths.note_death(Death(rank, GONE + rank, time.time(), "died of SIGKILL"))
        assert opened is not None
    dog.close()
    starved, killed = read_incidents(tmp_path / "incidents")
    assert starved["reason"] == "rank 0 died of SIGKILL: the kernel killed it for lack of memory"
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
    (death,) = find_deaths(read_samples(tmp_path / "boxes"), old, since_ns=1)
    assert (death.rank, death.reason) == (0, "exited without shutting down")
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


def test_deaths_of_one_moment_do_not_wait_for_each_others_evidence(tmp_path: Path) -> None:
    """The disk takes the evidence of the first death slowly: the second one is known meanwhile."""
    dog = watch(tmp_path, mode="replica", replicas=2)
    for rank in range(2):
        write_box(tmp_path / "boxes", rank, 7, pid=GONE + rank, start_ns=time.time_ns())
    begun, go, ordinary = threading.Event(), threading.Event(), dog.pipeline.keep_boxes

    def slow(opened: IncidentFolder, samples: Sequence[RankSample]) -> None:
        if opened.current.ranks == (0,):
            begun.set()
            go.wait(60)
        ordinary(opened, samples)

    dog.pipeline.keep_boxes = slow  # type: ignore[method-assign]
    first = threading.Thread(
        target=dog.deaths.note_death, args=(Death(0, GONE, time.time(), "died of SIGKILL"),)
    )
    first.start()
    assert begun.wait(30)
    second = threading.Thread(
        target=dog.deaths.note_death, args=(Death(1, GONE + 1, time.time(), "died of SIGKILL"),)
    )
    second.start()
    second.join(30)
    waited = second.is_alive()
    go.set()
    for thread in (first, second):
        thread.join(60)
    dog.close()
    assert not waited and len(read_incidents(tmp_path / "incidents")) == 2


def test_what_the_agent_remembers_does_not_grow_with_the_deaths_of_weeks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, threads and incidents of long ago are forgotten; here the limit of hundreds is one of ten."""
    monkeypatch.setattr(keep_newest, "__defaults__", (10,))
    dog = watch(tmp_path, mode="replica", replicas=2)
    for number in range(15):
        dog.deaths.note_death(Death(0, GONE + number, time.time(), "died of SIGKILL"), [])
    assert len(dog.deaths._known) == 10
    for thread in dog.pipeline._threads:
        dog.pipeline._closing.set()
        thread.join(60)
    dog.pipeline.start(lambda: None, "one more")
    assert len(dog.pipeline._threads) == 1
    dog.close()


def test_a_death_that_only_the_end_of_the_watch_sees_has_its_signal(tmp_path: Path) -> None:
    """torchrun had already waited for the rank, and the job ended before the next look: "exited without shutting down"."""
    dog = watch(tmp_path, mode="whole_job", poll_s=3600.0)
    looked = threading.Event()
    dog.on_samples = lambda samples, ranks: looked.set()
    dog.start()
    assert looked.wait(60)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        dog.exits.know(rank)
        write_box(tmp_path / "boxes", 1, 7, start_ns=time.time_ns(), pid=rank.pid)
        rank.kill()
    dog.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["verdict"]["sentence"].startswith("rank 1 died of SIGKILL")
