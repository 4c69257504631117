"""Stalled, hung or ended: decisions over looks at a silent job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from allranks.incidents.folder import open_incident
from allranks.incidents.hangs import HangCase
from allranks.incidents.pipeline import WatchOptions
from allranks.incidents.stall import (
    POLL_S,
    Activity,
    Look,
    StallLimits,
    ThreadWait,
    describe_pause,
    find_activity,
    judge_stall,
    left_s,
    limits_of,
    next_look_s,
)
from allranks.model.diagnosis import Finding
from allranks.model.stacks import (
    Capture,
    ChildState,
    ProcessCapture,
    RankState,
    Snapshot,
    StackFrame,
    StacksReport,
    ThreadFacts,
    ThreadStack,
    is_user_file,
)

LIMITS = StallLimits(hung_s=90.5, cap_s=300.0)
YEAR = 3e7
LATE = Finding("stuck_before_collective", (1,), "rank 1 never entered all_reduce #8", confidence=0.95)
INSIDE, OUTSIDE = ThreadWait(-1.0, inside=True), ThreadWait(-1.0, inside=False)
PIPED = ThreadWait(-1.0, inside=False, piped=True)


def waits(wait_s: float, *, inside: bool = False) -> Activity:
    return Activity(5, (ThreadWait(wait_s, inside),))


def looks(
    cause: str,
    activity: Activity | None = None,
    *,
    quiet_s: float = 15.0,
    functions: tuple[str, ...] = ("load", "load", "load"),
    file: str = "train.py",
    finding: Finding | None = LATE,
    other: str = "collective_wait",
) -> list[Look]:
    """Three looks at a job whose rank 1 is in `cause` while rank 0 waits; line numbers differ each time."""
    found = []
    for number, function in enumerate(functions):
        stack = (StackFrame(function, file, 10 + number), StackFrame("main", "train.py", 50))
        guilty = RankState(1, cause, "train.py:10 in load", "", stack=stack)
        report = StacksReport(True, (1,), "", {0: RankState(0, other, "", ""), 1: guilty})
        at = quiet_s - 5.0 * (len(functions) - 1 - number)
        seen = {} if activity is None else {1: activity}
        found.append(Look(at, at, report, False, finding=finding, activity=seen))
    return found


# Pauses that end by themselves: a stall for as long as anybody of the kind has been seen to take.
PAUSES = {
    "a retry that sleeps": looks("sleep", waits(30.0), quiet_s=90),
    "garbage collection": looks("native_call", Activity(900, (ThreadWait(None, False, False),)), quiet_s=90),
    "an evaluation": looks("busy_python", functions=("layer1", "layer2", "layer3"), quiet_s=250),
    "compilation": looks("native_call", file="/x/torch/_inductor/codecache.py", quiet_s=290),
    "a checkpoint": looks("checkpoint_io", waits(-1.0), quiet_s=90),
    "a command": looks("subprocess_wait", Activity(5, (INSIDE,), (ThreadWait(40.0, False),)), quiet_s=90),
    "a command that waits for another machine": looks(
        "subprocess_wait", Activity(5, (INSIDE,), (OUTSIDE,)), quiet_s=90
    ),
    "an event loop with connections": looks("event_loop_idle", Activity(5, (OUTSIDE,)), quiet_s=90),
    "a download without a timeout": looks("network_io", waits(-1.0), quiet_s=90),
    "a stopped process": looks("stopped", waits(YEAR), quiet_s=90),
    "a lock whose holder sleeps": looks(
        "lock_deadlock", Activity(5, (INSIDE, ThreadWait(20.0, False))), quiet_s=90
    ),
    "a lock of another process": looks("lock_deadlock", Activity(5, (OUTSIDE,)), quiet_s=90),
    "a lock, and a thread that works": looks(
        "lock_deadlock", Activity(5, (INSIDE, replace(INSIDE, still=False))), quiet_s=90
    ),
    "all ranks on their own": looks("sleep", waits(YEAR), other="sleep", finding=None, quiet_s=90),
    "a network that is away": looks(
        "collective_wait", finding=replace(LATE, cause="none_finished"), quiet_s=90
    ),
    "ranks whose hosts have two names": looks(
        "store_wait",
        other="store_wait",
        finding=replace(LATE, cause="setup_mismatch", confidence=0.6),
        quiet_s=90,
    ),
    "work on the device": looks("cuda_wait", waits(-1.0), quiet_s=90),
    "a key of a store": looks("store_wait", waits(2.0), quiet_s=90),
    "nothing could be read": [Look(n, 80.0 + 5 * n, None, False, finding=LATE) for n in range(3)],
}


@pytest.mark.parametrize("syscall", ["pause", "rt_sigsuspend", "rt_sigtimedwait"])
def test_a_wait_for_a_signal_is_a_stall(syscall: str) -> None:
    """Its own timer sends one, or the scheduler: nothing tells when."""
    facts = ThreadFacts(1, state="S", syscall=syscall, wait_s=-1.0)
    activity = find_activity([Capture((ProcessCapture(1, snapshots=(Snapshot(0, facts=(facts,)),)),))])[1]
    found = judge_stall(looks("queue_wait", activity), LIMITS)
    assert (found.state, found.reason) == ("stalled", "rank 1 waits for an event at train.py:10 in load")


@pytest.mark.parametrize(
    ("thread", "file", "state"),
    [
        ("tokio-rt-worker", "epoll 2", "stalled"),
        ("worker.io", "socket:[7]", "stalled"),
        ("tokio-rt-worker", "", "hung"),
        ("gloo_tcp_loop", "epoll 3", "hung"),
        ("pt_tcpstore_uv", "epoll 5", "hung"),
        ("NCCL Service 0", "socket:[7]", "hung"),
    ],
)
def test_an_event_loop_may_be_woken_by_a_native_thread_that_uses_the_network(
    thread: str, file: str, state: str
) -> None:
    """A download by a library in Rust: its thread has no Python. The threads of torch's libraries serve collectives only."""
    main = ThreadFacts(1, "python", "S", syscall="epoll_wait", wait_s=-1.0, file="epoll 1")
    other = ThreadFacts(2, thread, "S", syscall="epoll_wait", wait_s=-1.0, file=file)
    stacks = (ThreadStack(1, "", (StackFrame("select", "selectors.py", 468),)),)
    shots = (Snapshot(0, stacks=stacks, facts=(main, other)),)
    activity = find_activity([Capture((ProcessCapture(1, snapshots=shots),))])[1]
    assert judge_stall(looks("event_loop_idle", activity), LIMITS).state == state


@pytest.mark.parametrize(("confidence", "state"), [(0.4, "stalled"), (0.9, "hung")])
def test_a_guess_that_the_named_rank_waits_for_others_does_not_make_a_hang_certain(
    confidence: float, state: str
) -> None:
    """A library in Rust waits in native code, in a process that has process groups."""
    seen = []
    for look in looks("collective_wait"):
        assert look.report is not None
        ranks = {**look.report.ranks, 1: replace(look.report.ranks[1], confidence=confidence)}
        seen.append(replace(look, report=replace(look.report, ranks=ranks)))
    assert judge_stall(seen, LIMITS).state == state


@pytest.mark.parametrize("kind", PAUSES)
def test_a_pause_of_a_known_kind_is_a_stall(kind: str) -> None:
    found = judge_stall(PAUSES[kind], LIMITS)
    assert (found.state, found.certain) == ("stalled", False)


@pytest.mark.parametrize("kind", PAUSES)
def test_no_pause_lasts_for_longer_than_the_cap(kind: str) -> None:
    """And most of them not for longer than several times what a stall is."""
    last = replace(PAUSES[kind][-1], quiet_s=301.0)
    assert judge_stall([*PAUSES[kind], last], LIMITS).state == "hung"
    works = kind in ("an evaluation", "compilation")
    last = replace(PAUSES[kind][-1], quiet_s=91.0)
    assert judge_stall([*PAUSES[kind], last], LIMITS).state == ("stalled" if works else "hung")


# Hangs that follow from what was seen, with a word of the reason.
HANGS = {
    "a sleep for a year": (looks("sleep", waits(YEAR)), "sleeps, and nothing in it moves for another"),
    "a sleep for a year while the other's wait on the device looks like work": (
        looks("sleep", waits(YEAR), other="native_call"),
        "sleeps, and nothing in it moves for another",
    ),
    "C code that sleeps and keeps the GIL": (
        looks("gil_held_native", waits(YEAR)),
        "holds the GIL in C code, and nothing in it moves for another",
    ),
    "a lock that it holds itself": (looks("lock_deadlock", Activity(5, (INSIDE,))), "without limit"),
    "two threads and two locks": (looks("lock_deadlock", Activity(5, (INSIDE, INSIDE))), "without limit"),
    "a queue that nobody fills": (looks("queue_wait", Activity(5, (INSIDE,))), "without limit"),
    "a command that sleeps for a year": (
        looks("subprocess_wait", Activity(5, (INSIDE,), (ThreadWait(YEAR, False),))),
        "waits for a command, and nothing in it moves for another",
    ),
    "a command that waits for input": (
        looks("subprocess_wait", Activity(5, (INSIDE,), (PIPED,))),
        "without limit",
    ),
    "an event loop that nothing can wake": (
        looks("event_loop_idle", Activity(5, (INSIDE,))),
        "without limit",
    ),
    "a DataLoader whose worker sleeps for a year": (
        looks("dataloader_wait", Activity(5, (ThreadWait(5.0, False),), (ThreadWait(YEAR, False), INSIDE))),
        "waits for its DataLoader, and nothing in it moves for another",
    ),
    "a receive with torch's timeout, which no frame shows": (
        looks("native_call", waits(1780.0), finding=replace(LATE, cause="p2p_mismatch")),
        "is inside native code, and nothing in it moves for another",
    ),
    "a mismatch": (looks("sleep", finding=replace(LATE, cause="size_mismatch")), "do not match"),
    "a mismatch of two ranks": (
        looks("collective_wait", finding=replace(LATE, cause="type_mismatch", confidence=0.5)),
        "do not match",
    ),
    "ranks that wait for each other": (looks("collective_wait"), "waits for another"),
    "calls in another order": (
        looks("collective_wait", finding=replace(LATE, cause="order_inversion")),
        "do not match",
    ),
    "ranks that cannot meet": (
        looks(
            "store_wait", other="store_wait", finding=replace(LATE, cause="setup_mismatch", confidence=0.8)
        ),
        "cannot meet",
    ),
    "a process that has ended": ([replace(one, absent=(1,)) for one in looks("unknown")], "has ended"),
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_that_follows_from_what_was_seen_is_certain_at_the_second_look(kind: str) -> None:
    seen, reason = HANGS[kind]
    assert judge_stall(seen[:1], LIMITS).state == "stalled"
    found = judge_stall(seen[:2], LIMITS)
    assert (found.state, found.certain) == ("hung", True) and reason in found.reason


def test_ranks_that_make_no_calls_but_all_wake_are_not_hung() -> None:
    """Remote calls are not recorded: a healthy job of them has no progress that could be seen. One that sleeps makes it a hang."""
    awake = Activity(5, (ThreadWait(-1.0, False, still=False),))
    seen = looks("sleep", other="p2p_wait", quiet_s=400)
    both = [replace(one, activity={0: awake, 1: awake}) for one in seen]
    assert judge_stall(both, LIMITS).state == "stalled"
    one_sleeps = [replace(one, activity={0: Activity(5, (OUTSIDE,)), 1: awake}) for one in seen]
    assert judge_stall(one_sleeps, LIMITS).state == "hung"
    waits_for_it = [replace(one, activity={0: awake, 1: awake}) for one in looks("sleep", quiet_s=400)]
    assert judge_stall(waits_for_it, LIMITS).state == "hung"
    absent = [replace(one, finding=replace(LATE, kind="never_called", confidence=0.5)) for one in both]
    assert judge_stall(absent, LIMITS).state == "hung"


def in_a_loop(quiet_s: float, functions: tuple[str, ...], *, apart: bool = False) -> list[Look]:
    """Both ranks run and wait for nobody."""
    awake = Activity(5, (ThreadWait(-1.0, False, still=False),))
    found = []
    for one in looks("sleep", other="sleep", quiet_s=quiet_s, functions=functions, finding=None):
        assert one.report is not None
        first = replace(
            one.report.ranks[1], rank=0, where="serve.py:3 in run" if apart else "train.py:9 in load"
        )
        if apart:
            first = replace(first, stack=(StackFrame("run", "serve.py", 3),))
        report = replace(one.report, ranks={0: first, 1: one.report.ranks[1]})
        found.append(replace(one, report=report, activity={0: awake, 1: awake}))
    return found


def test_ranks_that_all_run_the_same_loop_are_hung_at_the_cap() -> None:
    """Each polls for what never comes. One that has made steps is hung in any loop; one that has not may serve others."""
    same, trained = in_a_loop(310, ("load",) * 4), replace(LIMITS, trained=True)
    found = judge_stall(same, LIMITS)
    assert (found.state, found.certain, found.livelock) == ("hung", False, True)
    assert (
        found.reason
        == "no rank has come to a first step or call for 5 min 10 s; all ranks run the same loop at train.py:9 in load"
    )
    assert "no rank has made a step or a call for" in judge_stall(same, trained).reason
    assert judge_stall(in_a_loop(290, ("load",) * 4), trained).state == "stalled"
    apart = in_a_loop(310, ("load",) * 4, apart=True)
    assert judge_stall(apart, LIMITS).state == "stalled"
    assert "rank 0 at serve.py:3 in run; rank 1 at train.py:10 in load" in judge_stall(apart, trained).reason
    assert judge_stall(in_a_loop(310, ("load", "a", "b", "c")), LIMITS).state == "stalled"


def remote_calls(woken: dict[int, tuple[int, ...]], quiet_s: tuple[float, ...] = (60, 80, 107)) -> list[Look]:
    """Looks at three ranks in RPC, of which rank 1 runs a call of another. `woken`: context switches of each rank, by look."""
    file, found = "/x/torch/distributed/rpc/api.py", []
    for number, at in enumerate(quiet_s):
        serving = (StackFrame("work", "train.py", 7), StackFrame("_run_function", file, 3))
        waiting = (StackFrame("shutdown", file, 9),)
        states = {
            rank: RankState(rank, "rendezvous_wait", "train.py:50", "", stack=waiting) for rank in (0, 2)
        }
        states[1] = RankState(1, "sleep", "train.py:7 in work", "", stack=serving)
        activity = {rank: Activity(5, (INSIDE,), switches=counts[number]) for rank, counts in woken.items()}
        found.append(Look(at, at, StacksReport(True, (1,), "", states), False, activity=activity))
    return found


def test_ranks_that_call_each_other_are_not_hung() -> None:
    """A call that ends wakes its caller and the rank that ran it; what no look has seen ended is as old as the looks."""
    calling = remote_calls({0: (1, 2, 3), 1: (1, 2, 3), 2: (1, 1, 1)})
    assert judge_stall(calling, LIMITS).reason == "the ranks call each other (RPC)"
    long = remote_calls({0: (1, 2, 2), 1: (1, 2, 2), 2: (1, 1, 1)}, (60, 80, 150))
    assert judge_stall(long, LIMITS).state == "stalled"


@pytest.mark.parametrize("others", [(1, 1, 1), (1, 2, 3)])
def test_a_call_of_another_rank_that_does_not_return_is_hung(others: tuple[int, ...]) -> None:
    """Also beside others that return, and where our own debugger has woken the rank once."""
    looks = remote_calls({0: others, 1: (1, 1, 1), 2: others}, (60, 80, 151))
    found = judge_stall(looks, LIMITS)
    assert (found.state, found.certain) == ("hung", False)
    assert "rank 1 sleeps at train.py:7 in work" in found.reason
    steps = StallLimits(hung_s=90.0, cap_s=300.0, trained=True)  # the silence began with the last step
    assert (
        judge_stall(remote_calls({0: others, 1: (1, 1, 1), 2: others}, (10, 13, 91)), steps).state == "hung"
    )
    debugged = remote_calls({0: (1, 1, 1, 1), 1: (1, 1, 3, 3), 2: (1, 1, 1, 1)}, (60, 80, 107, 171))
    assert judge_stall(debugged, LIMITS).state == "hung"


@pytest.mark.parametrize("late_s", [0.0, POLL_S])
@pytest.mark.parametrize(("took_s", "takes_s"), [(0.3, 0.3), (1.3, 1.0), (1.3, 1.5), (4.0, 3.0), (4.0, 4.5)])
def test_a_hang_by_time_is_called_one_within_90_s_and_a_pause_of_88_s_is_not(
    late_s: float, took_s: float, takes_s: float
) -> None:
    """At defaults, in a job whose steps take 0.5 s: the look ends before the limit, and is judged when that is reached."""
    limits = limits_of(10.0, 300.0, 0.5)
    assert limits.hung_s > 88.0 + 0.5 and WatchOptions.poll_s == POLL_S
    ends_s = next_look_s(80.0, limits, took_s) + late_s + takes_s
    assert limits.hung_s <= ends_s + left_s(ends_s, limits) <= 90.0
    assert left_s(90.0, limits) == left_s(60.0, limits) == 0.0
    assert left_s(148.0, limits, hung_at_s=149.5) == pytest.approx(1.501)


def test_the_last_rank_whose_thread_sleeps_for_an_hour_is_hung() -> None:
    """The others have left; a thread that is not a daemon keeps the program from its end. While others work, nobody waits."""
    seen = looks(
        "shutdown_join", Activity(5, (INSIDE, ThreadWait(3600.0, False))), other="sleep", finding=None
    )
    assert judge_stall(seen, LIMITS).state == "stalled"
    last = [
        replace(one, absent=(0,), report=replace(one.report, ranks={1: one.report.ranks[1]}))
        for one in seen
        if one.report is not None
    ]
    assert judge_stall(last, LIMITS).certain


def test_a_rank_that_used_cpu_time_between_two_looks_may_move() -> None:
    seen = looks("lock_deadlock", Activity(5, (INSIDE,)))
    seen[-1] = replace(seen[-1], activity={1: Activity(50, (INSIDE,))})
    assert judge_stall(seen, LIMITS).state == "stalled"


def test_progress_ends_a_stall_and_completed_calls_prolong_it() -> None:
    seen = looks("sleep", waits(YEAR))
    assert judge_stall([*seen, replace(seen[-1], moved=True)], LIMITS).state == "ended"
    assert judge_stall([*seen, replace(seen[-1], calling=True)], LIMITS).state == "stalled"
    assert judge_stall([*seen, replace(seen[-1], calling=True, quiet_s=301)], LIMITS).state == "hung"


def test_a_command_that_works_has_time_until_the_cap() -> None:
    """tar packs a checkpoint."""
    tar = ChildState(0, 7, "busy_python", "", "")
    state = RankState(1, "subprocess_wait", "", "", children=(tar,))
    seen = [
        replace(one, report=StacksReport(True, (1,), "", {1: state})) for one in looks("sleep", quiet_s=250)
    ]
    assert judge_stall(seen, LIMITS).state == "stalled"


def test_a_rank_that_only_serves_compiled_code_does_not_compile() -> None:
    """FSDP2's hooks, and code that was compiled before, have frames of torch/_dynamo, too."""
    for file in ("/x/torch/_dynamo/eval_frame.py", "/x/torch/_functorch/_aot_autograd/runtime_wrappers.py"):
        assert judge_stall(looks("native_call", file=file, quiet_s=95), LIMITS).state == "hung"


def test_a_pause_says_that_a_rank_compiles_and_not_which_command_it_waits_for() -> None:
    """Inductor waits for a C++ compiler in a file that it has written itself, which is not the user's."""
    file = "/tmp/torchinductor_me/lj/cljph.py"
    assert not is_user_file(file)
    compiling = looks("subprocess_wait", file="/x/torch/_inductor/codecache.py")
    assert describe_pause(compiling) == "rank 1 compiles at train.py:10 in load"


def test_a_rank_without_a_python_frame_is_not_said_to_run_python() -> None:
    """The interpreter starts or ends."""
    found = looks("busy_python")
    bare = RankState(1, "busy_python", "", "native code")
    found = [replace(look, report=replace(look.report, ranks={1: bare})) for look in found if look.report]
    assert describe_pause(found) == "rank 1 has no Python frames: it starts, exits or could not be read"


def test_a_stall_that_was_never_sampled_has_no_duration(tmp_path: Path) -> None:
    """A rank ended before the first sample: "stalled for 0 ms" is not true."""
    opened = open_incident(tmp_path, kind="stall", job="j", reason="silent")
    case = HangCase(opened, frozenset())
    assert case.stalled == "stalled"
    case.looks.extend(looks("sleep", quiet_s=15))
    assert case.stalled == "stalled for 15 s: rank 1 sleeps at train.py:10 in load"


def test_the_longest_pause_of_a_job_moves_its_limit() -> None:
    assert limits_of(10.0, 300.0, 0.0) == StallLimits(88.5, 300.0, 0.0)
    assert limits_of(10.0, 300.0, 3.0).hung_s == 91.5  # a step of 3 s with a pause of 88 s in it
    assert limits_of(10.0, 300.0, 50.0).hung_s == 150.0
    assert limits_of(10.0, 300.0, 200.0).hung_s == 300.0


def test_looks_become_rarer_and_do_not_miss_a_limit() -> None:
    """Each one asks all nodes for their stacks."""
    seen = [12.0]
    while seen[-1] < 300:
        ends_s = next_look_s(seen[-1], LIMITS)
        seen.append(ends_s + left_s(ends_s, LIMITS))
    assert 90.501 in seen and 300.001 in seen and len(seen) == 13
    assert left_s(4.0, limits_of(0.5, 300.0, 0.0)) == 0.0  # of a short limit the wait is short, too
    assert next_look_s(80.0, LIMITS, took_s=2.0) == pytest.approx(87.6)


def test_activity_is_of_threads_that_may_wake_another() -> None:
    """Those of Python, a timer's, too, and the first thread of a child; not a progress bar's, a pool's, nor native ones."""

    def stack(tid: int, file: str, name: str = "f") -> ThreadStack:
        return ThreadStack(tid, "", (StackFrame(name, file, 1),))

    def facts(switches: int) -> tuple[ThreadFacts, ...]:
        futex = {"state": "S", "syscall": "futex", "wait_s": -1.0}
        return (
            ThreadFacts(1, ticks=3, args=(0, 0x189), **futex),  # type: ignore[arg-type]
            ThreadFacts(2, ticks=4, args=(0, 0x109), switches=switches, **futex),  # type: ignore[arg-type]
            ThreadFacts(3, ticks=90),
            ThreadFacts(4, ticks=90),
            ThreadFacts(5, ticks=90),
        )

    library = "/usr/lib/python3.11/threading.py"
    stacks = (
        stack(1, "train.py"),
        stack(2, library),
        stack(4, "/x/site-packages/tqdm/_monitor.py"),
        stack(5, "pool.py", "Pool._handle_workers"),
    )
    shots = tuple(Snapshot(n, stacks=stacks, facts=facts(n)) for n in range(2))
    sleeps = ThreadFacts(9, state="S", syscall="clock_nanosleep", wait_s=40.0)
    child = ProcessCapture(1, child=0, snapshots=(Snapshot(0, facts=(sleeps,)),))
    proxy = replace(child, child=1, title="python -S -m allranks.lighthouse.client.liveness_proxy")
    found = find_activity([Capture((ProcessCapture(1, snapshots=shots), child, proxy))])
    threads = (INSIDE, replace(OUTSIDE, still=False))
    assert found == {1: Activity(7, threads, (ThreadWait(40.0, False),), switches=1)}
