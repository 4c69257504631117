"""Who waits for whom between processes: the pure graph over frozen looks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.diagnosis.process_verdict import explain_processes
from allranks.model.stacks import JobLook, Process, ProcessLink, StackFrame, ThreadLook, WaitFor


def thread(tid: int, kind: str, line: int = 0, **facts: object) -> ThreadLook:
    """A thread at a line of job.py; `facts` of ThreadLook, and of WaitFor behind `wait_`."""
    wait = {name.removeprefix("wait_"): value for name, value in facts.items() if name.startswith("wait_")}
    rest = {name: value for name, value in facts.items() if not name.startswith("wait_")}
    user = StackFrame("work", "/job/job.py", line) if line else None
    frames = (user,) if user is not None else ()
    return ThreadLook(tid, f"t{tid}", WaitFor(kind, f"({kind})", **wait), frames, user=user, **rest)  # type: ignore[arg-type]


def process(pid: int, *threads: ThreadLook, links: tuple[ProcessLink, ...] = (), **facts: object) -> Process:
    first = replace(threads[0], main=True) if threads else None
    return Process(
        pid, node="a", role=f"role{pid}", threads=(first, *threads[1:]) if first else (), links=links, **facts
    )  # type: ignore[arg-type]


def tcp(fd: int, mine: int, other: int, side: str, **facts: object) -> ProcessLink:
    return ProcessLink(fd, "tcp", f"tcp h:{mine}>h:{other}", f"tcp h:{other}>h:{mine}", side, **facts)  # type: ignore[arg-type]


CLIENT, SERVER = tcp(3, 50, 80, "client", turn="awaits"), tcp(4, 80, 50, "server", turn="owes")
ASKS = thread(1, "socket", 5, wait_ends=("tcp h:50>h:80",))
IDLE = thread(9, "idle")


def answer(*processes: Process) -> tuple[str, set[tuple[int, int]]]:
    found = explain_processes(JobLook(processes, 5.0))
    return found.state, {(one.pid, one.line) for one in found.guilty}


def test_a_handler_that_does_not_move_is_guilty() -> None:
    """The client waits for a server whose handler waits for an event that no function sets."""
    handler = thread(2, "event", 41, handles=True, wait_lock="done")
    assert answer(process(1, ASKS, links=(CLIENT,)), process(2, IDLE, handler, links=(SERVER,))) == (
        "stuck",
        {(2, 41)},
    )


def test_the_holder_of_the_lock_is_followed() -> None:
    """A handler waits for a lock; the thread inside the lock's block sleeps for an hour."""
    handler = thread(2, "lock", 41, handles=True, wait_lock="self.judge")
    holder = thread(3, "sleep", 17, holds=("judge",), wait_left_s=3600.0)
    server = process(2, IDLE, handler, holder, links=(SERVER,))
    assert answer(process(1, ASKS, links=(CLIENT,)), server) == ("stuck", {(2, 17)})


def test_two_locks_in_different_order_are_a_circle() -> None:
    """Both threads are named, and only them."""
    one = thread(2, "lock", 13, holds=("cache",), wait_lock="scheduler")
    two = thread(3, "lock", 24, holds=("scheduler",), wait_lock="cache", handles=True)
    server = process(2, IDLE, one, two, links=(SERVER,))
    assert answer(process(1, ASKS, links=(CLIENT,)), server) == ("stuck", {(2, 13), (2, 24)})


def test_the_function_that_would_set_an_event_is_followed() -> None:
    """The handler waits for what the engine's thread sets; that one is in C code."""
    engine = replace(thread(3, "work", 70), frames=(StackFrame("engine_loop", "/job/job.py", 70),))
    handler = thread(2, "event", 41, handles=True, wait_lock="done", wait_setters=("engine_loop",))
    server = process(2, IDLE, handler, engine, links=(SERVER,))
    assert answer(process(1, ASKS, links=(CLIENT,)), server) == ("stuck", {(2, 70)})


def test_a_missing_member_of_a_group_is_guilty() -> None:
    """Of three members two are in the collective; the idle trainer of another group is not accused."""

    def gloo(mine: int, other: int, group: int) -> ProcessLink:
        return tcp(mine, mine, other, "client", owner=f"gloo {group}")

    waits = thread(1, "collective", 96)
    trainer0 = process(1, waits, links=(gloo(10, 20, 1), gloo(11, 30, 2), gloo(12, 40, 2)))
    trainer1 = process(2, IDLE, links=(gloo(20, 10, 1),))
    rollout0 = process(3, waits, links=(gloo(30, 11, 1), gloo(31, 41, 1)))
    rollout1 = process(4, thread(9, "idle", 204), links=(gloo(40, 12, 1), gloo(41, 31, 1)))
    assert answer(trainer0, trainer1, rollout0, rollout1) == ("stuck", {(4, 204)})


def test_data_that_moves_is_no_hang() -> None:
    """The same waits, but bytes went over the connection while we looked."""
    moved = replace(CLIENT, moved=True)
    handler = thread(2, "sleep", 41, handles=True, wait_left_s=0.4)
    state, guilty = answer(process(1, ASKS, links=(moved,)), process(2, IDLE, handler, links=(SERVER,)))
    assert (state, guilty) == ("moving", set())


def test_a_sleep_that_ends_soon_is_no_hang() -> None:
    """The rest of the sleep is known."""
    handler = thread(2, "sleep", 41, handles=True, wait_left_s=12.0)
    state, guilty = answer(process(1, ASKS, links=(CLIENT,)), process(2, IDLE, handler, links=(SERVER,)))
    assert (state, guilty) == ("moving", set())


def test_a_process_that_computes_is_unclear() -> None:
    """Busy on one line all the time: stuck or slow, and the answer says what decides it."""
    found = explain_processes(JobLook((process(1, thread(1, "work", 5, busy=True), ticks=400),), 5.0))
    assert found.state == "unclear" and "--for" in found.reason


def test_a_process_that_polls_is_not_said_to_use_the_processor() -> None:
    """It looks every millisecond: some ticks of the processor."""
    polls = process(1, thread(1, "poll", 5), ticks=40, read=True)
    found = explain_processes(JobLook((polls, process(2, thread(2, "poll", 6), ticks=40, read=True)), 9.0))
    assert found.state == "unclear" and "is at job.py:5 in work and (poll)" in found.sentence, found
    works = process(3, IDLE, ticks=90, read=True)
    found = explain_processes(JobLook((polls, works), 9.0))
    assert "role3 (pid 3) used 0.9 s of CPU time in 9 s" in found.sentence, found


def test_who_waits_for_a_process_that_computes_is_told() -> None:
    """Slow or without end: the answer names the busy line, since when, those behind it, and how to tell."""
    handler = thread(2, "work", 41, handles=True, busy=True)
    other = process(3, thread(1, "work", 7, busy=True), ticks=400)
    server = process(2, IDLE, handler, links=(SERVER,), ticks=400)
    found = explain_processes(JobLook((other, process(1, ASKS, links=(CLIENT,)), server), 5.0))
    assert (found.state, found.guilty) == ("unclear", ())
    assert found.sentence.startswith(
        "role2 (pid 2, thread t2) is at job.py:41 in work and (work) for the whole 5 s"
    )
    assert "role1 (socket) and waits for role2 (pid 2)" in found.sentence
    assert "--for 60" in found.reason and "job.py:41" in found.reason


def test_idle_servers_are_no_hang() -> None:
    assert answer(process(1, IDLE), process(2, IDLE)) == ("moving", set())


def test_a_killed_process_comes_first() -> None:
    """A child that was killed and never waited for is the cause of the queue that stays full."""
    dead = process(2, alive=False, ended="killed by SIGKILL", ppid=1)
    state, guilty = answer(process(1, thread(1, "queue", 27)), dead)
    assert state == "stuck" and (2, 0) in guilty


def test_a_stopped_process_is_guilty() -> None:
    stopped = process(2, thread(2, "stopped"), links=(SERVER,))
    assert answer(process(1, ASKS, links=(CLIENT,)), stopped) == ("stuck", {(2, 0)})


def test_two_nodes_are_joined_by_their_addresses() -> None:
    """The client of node a waits for the server of node b, which has the same pid."""
    handler = thread(2, "event", 41, handles=True, wait_lock="done")
    server = replace(process(1, IDLE, handler, links=(SERVER,)), node="b")
    found = explain_processes(JobLook((process(1, ASKS, links=(CLIENT,)), server), 5.0))
    assert [(one.node, one.pid, one.line) for one in found.guilty] == [("b", 1, 41)]


@pytest.mark.parametrize("kind", ["child", "thread"])
def test_waiting_for_the_end_of_an_idle_server_is_no_hang(kind: str) -> None:
    """A launcher that waits for its server is how servers run."""
    launcher = process(1, thread(1, kind, 3, wait_pids=(2,)))
    assert answer(launcher, process(2, IDLE, ppid=1)) == ("moving", set())


def test_the_words_name_roles_and_lines() -> None:
    handler = thread(2, "event", 41, handles=True, wait_lock="done")
    server = replace(process(2, IDLE, handler, links=(SERVER,)), role="reward", number=1)
    found = explain_processes(JobLook((process(1, ASKS, links=(CLIENT,)), server), 5.0))
    assert "reward 1 (pid 2, thread t2) is at job.py:41 in work and (event)" in found.sentence
    assert [(link.role, link.pids) for link in found.chain] == [("role1", (1,))]


def test_waiters_behind_another_thread_of_the_guilty_process_are_listed() -> None:
    """Trainer → handler → lock → holder, the last two in one process: the trainer is in the chain."""
    handler = thread(2, "lock", 41, handles=True, wait_lock="judge")
    holder = thread(3, "sleep", 17, holds=("judge",), wait_left_s=3600.0)
    server = process(2, IDLE, handler, holder, links=(SERVER,))
    found = explain_processes(JobLook((process(1, ASKS, links=(CLIENT,)), server), 5.0))
    assert [link.pids for link in found.chain] == [(1,)]


def test_of_ranks_that_wait_for_each_other_the_minority_is_blamed() -> None:
    """Two ranks are in an all_reduce, one waits for a key that they would set."""

    def links(mine: int, *others: int) -> tuple[ProcessLink, ...]:
        gloo = [tcp(o, 10 * mine + o, 10 * o + mine, "client", owner="gloo 1") for o in others]
        return (*gloo, tcp(90 + mine, 90 + mine, 80, "client"))

    store = process(4, IDLE, links=tuple(tcp(9, 80, 90 + n, "server") for n in (1, 2, 3)), system=True)
    waits, asks = (
        thread(1, "collective", 15, wait_operation="all_reduce"),
        thread(1, "store", 14, wait_ends=("tcp h:92>h:80",)),
    )
    ranks = (
        process(1, waits, links=links(1, 2, 3)),
        process(2, asks, links=links(2, 1, 3)),
        process(3, waits, links=links(3, 1, 2)),
    )
    assert answer(*ranks, store) == ("stuck", {(2, 14)})


def test_who_was_killed_comes_before_those_that_ended_after_it() -> None:
    """The trainer looks for a file that the exporter will not write any more; alone such a loop is not a hang."""
    polls = process(1, thread(1, "poll", 17))
    failed = process(2, alive=False, ended="exit code 1")
    killed = process(3, alive=False, ended="killed by SIGKILL")
    assert answer(polls) == ("unclear", set())
    assert answer(polls, failed) == ("stuck", {(1, 17), (2, 0)})
    assert answer(polls, failed, killed) == ("stuck", {(3, 0)})
    moving = process(4, thread(1, "work", 8, moved=True))
    assert answer(polls, failed, moving)[0] == "moving"


def test_a_server_without_requests_is_not_waited_for_by_who_takes_work_from_it() -> None:
    """An engine waits for the next request of a router that has none; one that waits for an answer needs it."""
    router = process(2, IDLE, links=(SERVER,))
    takes = replace(ASKS, wait=replace(ASKS.wait, strong=False))
    assert answer(process(1, takes, links=(CLIENT,)), router)[0] == "moving"
    assert answer(process(1, ASKS, links=(CLIENT,)), router)[0] == "stuck"


def test_an_idle_process_is_not_missed_by_one_that_forms_a_group() -> None:
    """A restarted actor waits for members that will not come again; the idle one beside it has no part in that."""
    joins = process(1, thread(1, "rendezvous", 36), ppid=9)
    waits = process(2, thread(1, "event", 5), ppid=9)
    assert answer(joins, process(3, IDLE, ppid=9)) == ("stuck", {(1, 36)})
    assert answer(joins, waits, process(3, IDLE, ppid=9)) == ("stuck", {(2, 5)})


JOINS = thread(1, "rendezvous", 36, wait_ends=("tcp h:51>h:80",), wait_members=2)
TRAINER = process(1, JOINS, links=(tcp(3, 51, 80, "client"), tcp(4, 80, 51, "server")), ppid=9)


def test_the_member_that_a_group_lacks_is_missed_even_if_it_is_idle() -> None:
    """A group of two, one at its store: who knows the store's address, or would join next, is the other one."""
    knows = process(2, thread(9, "idle", 22), ppid=9, title="python job.py rollout 80")
    would = process(3, thread(9, "idle", 24, later=("init_process_group",)), ppid=9)
    reward = process(4, IDLE, ppid=9, title="python job.py reward 8080")
    assert answer(TRAINER, knows, reward) == ("stuck", {(2, 22)})
    assert answer(TRAINER, would, reward) == ("stuck", {(3, 24)})
    assert answer(TRAINER, reward) == ("stuck", {(1, 36)})
    three = replace(JOINS.wait, ends=("tcp h:53>h:80",), members=3)
    come = replace(process(5, replace(JOINS, wait=three), links=(tcp(3, 53, 80, "client"),)), role="engine")
    trainer = replace(TRAINER, threads=(replace(TRAINER.threads[0], wait=replace(JOINS.wait, members=3)),))
    idle = replace(process(6, thread(9, "idle", 28)), role="engine")  # of the role of one that has come
    assert answer(trainer, come, idle, reward) == ("stuck", {(6, 28)})


def test_a_rank_of_the_same_world_is_missed_even_if_it_is_idle() -> None:
    trainer = replace(TRAINER, rank=0, world=2)
    late = process(2, thread(9, "idle", 22), ppid=9, rank=1, world=2)
    assert answer(trainer, late, process(4, IDLE, ppid=9)) == ("stuck", {(2, 22)})


def test_nobody_is_missed_by_a_group_whose_members_are_all_at_its_store() -> None:
    """The restarted one waits for ever; an idle process that knows the address, too, has no part in it."""
    ours, theirs = tcp(5, 61, 62, "client", owner="gloo 1"), tcp(5, 62, 61, "client", owner="gloo 1")
    trainer = replace(TRAINER, links=(*TRAINER.links, ours))
    other = process(2, thread(1, "collective", 5), links=(tcp(3, 52, 80, "client"), theirs), ppid=9)
    idle = process(3, thread(9, "idle", 22), ppid=9, title="python job.py rollout 80")
    assert answer(trainer, other, idle) == ("stuck", {(1, 36)})


def test_of_more_candidates_than_missing_members_none_is_accused() -> None:
    idle = [process(n, thread(9, "idle", 22), ppid=9, title="python job.py rollout 80") for n in (2, 3)]
    assert answer(TRAINER, *idle) == ("stuck", {(1, 36)})


def test_a_process_that_was_started_again_is_named_not_the_one_that_died() -> None:
    """It forms the group anew; the others still use the old one, and never come."""
    links = tuple(tcp(n, 90 + n, 80, "client") for n in (1, 2))
    trainer = process(1, thread(1, "store", 94, wait_ends=("tcp h:91>h:80",)), links=links[:1])
    again = process(2, thread(1, "rendezvous", 196, wait_ends=("tcp h:92>h:80",)), links=links[1:])
    store = process(4, IDLE, links=tuple(tcp(9, 80, 90 + n, "server") for n in (1, 2)), system=True)
    died = process(3, alive=False, ended="killed, or crashed")
    restarted = replace(died, role=again.role)
    assert answer(trainer, again, store, restarted) == ("stuck", {(2, 196)})
    assert (3, 0) in answer(trainer, again, store, died)[1]


def shared(number: int) -> ProcessLink:
    return ProcessLink(-1, "shared", f"s{number}", f"s{number}", owner="semaphore")


def pipe(fd: int, number: int, side: str) -> ProcessLink:
    other = "write" if side == "read" else "read"
    return ProcessLink(fd, "pipe", f"pipe {number} {side}", f"pipe {number} {other}", side)


def test_who_joins_its_processes_does_not_release_what_they_wait_for() -> None:
    """A condition and a barrier between two processes; the driver has both mapped, and joins them."""
    both = (shared(1), shared(2))
    driver = process(1, thread(1, "child", 3, wait_pids=(2, 3)), links=both)
    generator = process(2, thread(1, "event", 12, wait_ends=("s1",)), links=both, ppid=1)
    learner = process(3, thread(1, "event", 19, wait_ends=("s2",)), links=both, ppid=1)
    assert answer(driver, generator, learner) == ("stuck", {(2, 12), (3, 19)})


def test_an_idle_child_does_not_end_a_circle_of_the_others() -> None:
    """The resource tracker of multiprocessing is a child, too."""
    driver = process(1, thread(1, "child", 3, wait_pids=(2, 3)), links=(shared(1),))
    worker = process(2, thread(1, "event", 12, wait_ends=("s1",)), links=(shared(1),), ppid=1)
    tracker = process(3, IDLE, ppid=1, system=True)
    assert answer(driver, worker, tracker) == ("stuck", {(1, 3), (2, 12)})


def test_an_idle_child_stands_for_those_that_it_started() -> None:
    """A driver joins a process that a fork server has started, and this process waits for the driver."""
    links = tcp(3, 50, 80, "client"), tcp(4, 80, 50, "server")
    driver = process(1, thread(1, "child", 3, wait_pids=(2,)), links=links[:1])
    server = process(2, IDLE, ppid=1, system=True)
    worker = process(3, thread(1, "socket", 12, wait_ends=("tcp h:80>h:50",)), links=links[1:], ppid=2)
    assert answer(driver, server, worker) == ("stuck", {(1, 3), (3, 12)})


def test_who_made_a_pair_of_sockets_is_not_its_other_end() -> None:
    """The driver has kept both ends of a pair, and joins those that use them."""
    a, b = ProcessLink(3, "unix", "u1", "u2"), ProcessLink(4, "unix", "u2", "u1")
    driver = process(1, thread(1, "child", 3, wait_pids=(9,)), links=(a, b))
    actor = process(2, thread(1, "socket", 12, wait_ends=("u1",), holds=("lock",)), links=(a, shared(1)))
    learner = process(3, thread(1, "lock", 19, wait_ends=("s1",), wait_lock="lock"), links=(b, shared(1)))
    tracker = process(9, IDLE, ppid=1, system=True)
    assert answer(driver, actor, learner, tracker) == ("stuck", {(2, 12), (3, 19)})


@pytest.mark.parametrize(("ppid", "state"), [(1, "moving"), (77, "stuck")])
def test_the_output_of_an_ended_process_that_another_one_keeps_open(ppid: int, state: str) -> None:
    """A script has started a server that has its output, and has ended. Reading from a server that runs is no hang."""
    driver = process(1, thread(1, "child", 3, wait_ends=("pipe 5 read",)), links=(pipe(3, 5, "read"),))
    script = Process(2, node="a", role="script", ppid=1, alive=False)
    server = process(3, IDLE, links=(pipe(1, 5, "write"),), ppid=ppid)
    found = explain_processes(JobLook((driver, script, server), 5.0))
    assert found.state == state
    if state == "stuck":
        assert found.sentence.startswith(
            "role1 (pid 1) is at job.py:3 in work and waits for role3 (pid 3) to close the output"
        ), found
        assert "ended: script (pid 2)" in found.reason


@pytest.mark.parametrize(
    ("left_s", "strong", "state"), [(44, False, "unclear"), (44, True, "stuck"), (9, True, "unclear")]
)
def test_a_wait_with_a_time_limit_is_no_hang_before_it_is_over(
    left_s: float, strong: bool, state: str
) -> None:
    """A scheduler holds requests for work for a minute. Who asks for work needs nobody; who waits for an answer does."""
    asks = thread(1, "socket", 5, wait_ends=("tcp h:50>h:80",), wait_strong=strong)
    handler = thread(2, "queue", 41, handles=True, wait_lock="jobs", wait_left_s=left_s)
    found = explain_processes(
        JobLook((process(1, asks, links=(CLIENT,)), process(2, IDLE, handler, links=(SERVER,))), 5.0)
    )
    assert found.state == state, found
    assert (f"run the command again in {left_s} s" in found.reason) == (state == "unclear")


def test_who_polls_comes_behind_a_circle_and_is_mentioned() -> None:
    """The trainer asks a server for its health; the server's threads wait for each other. The driver joins the trainer."""
    driver = process(1, thread(1, "child", 3, wait_pids=(2,)))
    trainer = process(2, thread(1, "poll", 5), ppid=1)
    one = thread(1, "lock", 61, wait_lock="b", holds=("a",))
    server = process(3, one, thread(2, "lock", 67, wait_lock="a", holds=("b",)), ppid=1)
    assert answer(driver, trainer, server) == ("stuck", {(3, 61), (3, 67)})
    assert (
        "role2 (pid 2) is at job.py:5 in work and (poll)"
        in explain_processes(JobLook((driver, trainer, server), 5.0)).reason
    )


def test_a_line_that_several_roles_are_at_is_named_with_its_caller() -> None:
    """All roles wait in the same small function."""

    def asks(line: int) -> ThreadLook:
        call = StackFrame("ask", "/job/job.py", 9)
        frames = (call, StackFrame("work", "/job/job.py", line))
        return replace(thread(1, "work"), frames=frames, user=call)

    found = explain_processes(JobLook((process(1, asks(20)), process(2, asks(30))), 5.0))
    assert "job.py:9 in ask, called at job.py:20" in found.sentence
    alone = explain_processes(JobLook((process(1, asks(20)),), 5.0))
    assert "called at" not in alone.sentence


def test_several_waiters_need_and_one_needs() -> None:
    handler = thread(2, "event", 41, handles=True, wait_lock="done")
    second = tcp(3, 51, 80, "client", turn="awaits")
    asks = replace(
        thread(1, "socket", 5, wait_ends=("tcp h:51>h:80",)),
        wait=WaitFor("socket", "waits for data", ends=("tcp h:51>h:80",)),
    )
    first = replace(asks, wait=WaitFor("socket", "waits for data", ends=("tcp h:50>h:80",)))
    server = process(2, IDLE, handler, links=(SERVER, tcp(5, 80, 51, "server", turn="owes")))
    clients = [
        replace(process(n, t, links=(link,)), role="client", number=n)
        for n, t, link in ((3, first, CLIENT), (4, asks, second))
    ]
    found = explain_processes(JobLook((server, *clients), 5.0))
    assert found.sentence.endswith("client 3,4 wait for role2 (pid 2): data"), found.sentence


def test_who_waits_for_an_event_is_named_and_not_an_idle_setter() -> None:
    """The task that would fulfil the future waits for data; nothing shows whose data is missing."""
    setter = thread(2, "idle", 21, task=True)
    handler = thread(3, "event", 37, handles=True, wait_lock="future", wait_setters=("work",))
    router = process(2, IDLE, setter, handler, links=(SERVER,))
    assert answer(process(1, ASKS, links=(CLIENT,)), router) == ("stuck", {(2, 37)})


def test_a_future_that_the_engine_beside_it_may_still_fulfil_is_no_hang() -> None:
    """The handler waits for a future; another thread of its process generates, in steps of a few milliseconds."""
    handler = thread(-1, "event", 41, task=True, handles=True, wait_lock="future")
    steps, waits = thread(3, "sleep", 17, wait_left_s=0.01), thread(4, "event", 50, wait_lock="done")
    client = process(1, ASKS, links=(CLIENT,))
    assert answer(client, process(2, steps, handler, waits, links=(SERVER,)))[0] == "moving"
    state, guilty = answer(client, process(2, IDLE, handler, waits, links=(SERVER,)))
    assert state == "stuck" and (2, 41) in guilty


def test_a_process_that_has_not_connected_yet_is_waited_for() -> None:
    """The server waits for the engine's first message; the engine loads its weights from elsewhere."""
    server = process(1, thread(1, "answer", 5, wait_operation="zmq"))
    loads = process(2, thread(2, "socket", 30, wait_ends=("tcp h:60>h:90",)), ppid=1, read=True)
    assert answer(server, replace(loads, links=(tcp(3, 60, 90, "client", moved=True),)))[0] == "moving"
    assert answer(server, replace(loads, links=(tcp(3, 60, 90, "client"),))) == ("stuck", {(2, 30)})


def test_of_a_circle_the_one_that_may_wait_for_any_of_its_peers_is_named() -> None:
    """A scheduler with a client and a worker, which wait for nobody but it; a pair is a circle of both."""
    zmq = {"wait_operation": "zmq"}
    ends = [tcp(3, *pair, "client", owner="zmq 4") for pair in ((1, 2), (2, 1), (1, 3), (3, 1))]
    client = process(2, thread(2, "answer", 20, **zmq), links=(ends[1],))
    worker = process(3, thread(3, "answer", 30, **zmq), links=(ends[3],))
    scheduler = process(1, thread(1, "answer", 10, **zmq), links=(ends[0], ends[2]))
    assert answer(scheduler, client, worker) == ("stuck", {(1, 10)})
    assert answer(scheduler, client) == ("stuck", {(1, 10), (2, 20)})


@pytest.mark.parametrize(("left_s", "state"), [(20.0, "moving"), (100.0, "unclear"), (3600.0, "stuck")])
def test_a_sleep_whose_end_is_known_is_waited_for(left_s: float, state: str) -> None:
    """A server that sleeps in a handler, and a client that waits for its answer."""
    server = process(
        2, IDLE, thread(2, "sleep", 41, handles=True, wait_left_s=left_s), links=(SERVER,), read=True
    )
    found = explain_processes(JobLook((process(1, ASKS, links=(CLIENT,)), server), 5.0))
    assert found.state == state and "role2 (pid 2, thread t2) is at job.py" in found.sentence, found
    assert ("run the command again in 100 s" in found.reason) == (state == "unclear")


@pytest.mark.parametrize(
    ("works", "said"),
    [
        (thread(3, "idle"), ("stuck", {(1, 5), (2, 41)})),
        (thread(3, "work", 70, busy=True), ("unclear", set())),
        (thread(3, "lock", 70), ("stuck", {(3, 70)})),
    ],
)
def test_what_another_process_does_may_end_a_wait_for_a_future(
    works: ThreadLook, said: tuple[str, set[tuple[int, int]]]
) -> None:
    """A client, the handler of a router, and a worker whose answers a task of the router reads: none of its threads is about
    to fulfil the future."""
    handler = thread(-1, "event", 41, handles=True, task=True, wait_lock="future", wait_setters=("collect",))
    router = process(2, IDLE, handler, links=(SERVER, tcp(5, 60, 90, "client")))
    worker = process(3, works, links=(tcp(3, 90, 60, "server"),))
    assert answer(process(1, ASKS, links=(CLIENT,)), router, worker) == said


def test_an_answer_from_outside_the_job_is_waited_for() -> None:
    """A reward function that asks a service of somebody else; the trainer waits for it. A multi-hour silence is a hang."""
    asks = thread(2, "socket", 41, handles=True, wait_ends=("tcp h:60>far:443",))
    for quiet_s, state in ((40.0, "unclear"), (7200.0, "stuck")):
        link = ProcessLink(
            5, "tcp", "tcp h:60>far:443", "tcp far:443>h:60", "client", "awaits", quiet_s=quiet_s
        )
        jobs = process(1, ASKS, links=(CLIENT,)), process(2, IDLE, asks, links=(SERVER, link), read=True)
        found = explain_processes(JobLook(jobs, 5.0))
        assert found.state == state and "role2 (pid 2, thread t2) is at job.py" in found.sentence, found
        assert ("no process of this job is at far:443, and data moved 40 s ago" in found.reason) == (
            state == "unclear"
        )


def test_a_call_of_a_library_that_waits_for_its_engine_is_no_hang() -> None:
    """`generate` waits in a queue inside a library, whose own thread reads from the engine's process: that one computes."""
    calls, reads = thread(1, "queue", 8), thread(2, "answer", 0, wait_operation="zmq", wait_strong=False)
    trainer = process(1, calls, reads, links=(tcp(3, 60, 90, "server", owner="zmq 5"),))
    engine = process(2, thread(3, "work", 30, busy=True), ppid=1, links=(tcp(3, 90, 60, "client"),))
    assert answer(trainer, engine)[0] == "unclear"
    idle = process(2, thread(3, "idle"), ppid=1, links=(tcp(3, 90, 60, "client"),))
    assert answer(trainer, idle) == ("stuck", {(1, 8)})


def test_a_server_that_waits_to_be_told_to_stop_is_no_hang() -> None:
    """The driver joins a process whose main thread waits for an event, and that listens; without a port it is a hang."""
    joins = process(1, thread(1, "child", 5, wait_pids=(2,)))
    port = ProcessLink(3, "listen", "tcp n listen 80", "")
    main = thread(2, "event", 41, wait_lock="stop")
    assert answer(joins, process(2, main, links=(port,), read=True))[0] == "moving"
    assert answer(joins, process(2, main)) == ("stuck", {(2, 41)})
    asked = process(2, main, links=(port, SERVER))
    assert answer(process(3, ASKS, links=(CLIENT,)), joins, asked) == ("stuck", {(2, 41)})


def test_the_process_that_has_not_come_to_the_barrier_is_guilty() -> None:
    """Three are at the barrier. The fourth waits for a condition that one of them would notify: not all four are to blame."""
    barrier, turn = "shared 1 1", "shared 1 2"
    links = tuple(ProcessLink(-1, "shared", end, end, owner="semaphore") for end in (barrier, turn))
    at_barrier = thread(1, "event", 14, wait_ends=(barrier,), wait_operation="barrier")
    late = thread(1, "event", 13, wait_ends=(turn,))
    found = explain_processes(
        JobLook(tuple(process(n, late if n == 3 else at_barrier, links=links) for n in (1, 2, 3, 4)), 5.0)
    )
    assert (found.state, [(one.pid, one.line) for one in found.guilty]) == ("stuck", [(3, 13)]), found
    assert "role1 (pid 1), role2 (pid 2), role4 (pid 4) wait for it" in found.sentence, found.sentence


@pytest.mark.parametrize("writer", ["", "other process", "other thread"])
def test_a_reader_that_alone_keeps_the_pipe_open_is_guilty(writer: str) -> None:
    """It was forked with the write end, so the end of the data never comes. Where another process has it, too, that one is guilty
    with it; another thread of its own may still write."""
    reads = thread(1, "pipe", 10, wait_ends=("pipe 7 read",), wait_strong=False)
    beside = (thread(2, "work", 20, moved=True),) if writer == "other thread" else ()
    reader = process(2, reads, *beside, links=(pipe(3, 7, "read"), pipe(4, 7, "write")), ppid=1)
    joins = thread(1, "child", 5, wait_pids=(2,))
    driver = process(1, joins, links=(pipe(5, 7, "write"),) if writer == "other process" else ())
    found = explain_processes(JobLook((driver, reader), 5.0))
    guilty = [(one.pid, one.line) for one in found.guilty]
    both = {"other process": [(1, 5), (2, 10)], "other thread": []}
    assert guilty == both.get(writer, [(2, 10)]), found


def test_a_process_that_polls_beside_a_killed_one_is_not_guilty() -> None:
    """The driver polls for what the killed worker would have made."""
    driver = process(1, thread(1, "poll", 21))
    killed = Process(2, 1, node="a", role="worker", alive=False, ended="killed by SIGKILL")
    found = explain_processes(JobLook((driver, killed), 5.0))
    assert (found.state, [one.pid for one in found.guilty]) == ("stuck", [2]), found
    assert "role1 (pid 1) is at job.py:21" in found.sentence


def test_a_job_whose_processes_have_ended_is_said_to_have_ended() -> None:
    """That was "no stack of this job could be read"."""
    ended = Process(2, 1, node="a", role="driver", alive=False, ended="exit code 2")
    found = explain_processes(JobLook((ended,), 5.0))
    assert (found.state, found.sentence) == ("unclear", "driver (pid 2) has ended: exit code 2"), found


@pytest.mark.parametrize("asks", [True, False])
def test_a_broker_that_is_not_python_is_not_guilty_of_what_its_clients_do_not_put_there(asks: bool) -> None:
    """Redis is idle: the learner waits for a result, the worker for work under another name. Idle clients are no hang."""

    def client(pid: int, port: int, strong: bool) -> Process:
        wait = thread(1, "socket", pid, wait_ends=(f"tcp h:{port}>h:80",), wait_strong=strong)
        return process(pid, wait, links=(tcp(3, port, 80, "client", turn="awaits"),))

    listens = ProcessLink(5, "listen", "tcp h listen 80", "")
    links = (listens, tcp(6, 80, 50, "server"), tcp(7, 80, 51, "server"))
    redis = process(2, replace(IDLE, frames=()), links=links, read=False)
    found = answer(client(10, 50, asks), client(11, 51, False), redis)
    assert found == (("stuck", {(10, 10), (11, 11)}) if asks else ("moving", set()))


def test_a_call_that_waits_for_one_that_finds_no_room_is_guilty_alone() -> None:
    """A full engine: the driver has sent the call that would end the others, and waits for their answers, as a trainer does."""
    call = thread(2, "event", 13, handles=True, task=True, wait_lock="done", wait_setters=("release",))
    other = tcp(5, 80, 51, "server", turn="owes")
    engine = process(2, IDLE, call, links=(SERVER, other))
    asks = thread(1, "socket", 7, wait_ends=("tcp h:51>h:80",))
    trainer = process(3, asks, links=(tcp(3, 51, 80, "client", turn="awaits"),))
    driver = process(1, replace(ASKS, sent=("release",)), links=(CLIENT,))
    assert answer(driver, engine, trainer) == ("stuck", {(2, 13)})
    assert answer(process(1, ASKS, links=(CLIENT,)), engine, trainer)[1] == {(1, 5), (2, 13), (3, 7)}


def test_of_several_processes_at_the_other_end_of_a_pipe_none_is_said_to_be_the_one() -> None:
    """The core made the pipes of its workers before it forked them: the second one has the first one's, too."""
    core = process(
        1, thread(1, "pipe", 5, wait_ends=("pipe 2 read",)), links=(pipe(3, 1, "write"), pipe(4, 2, "read"))
    )
    first = process(2, thread(2, "pipe", 6, wait_ends=("pipe 1 read",)), links=(pipe(5, 1, "read"),))
    stuck = thread(3, "event", 7, wait_lock="done")
    second = process(3, stuck, links=(pipe(3, 1, "write"), pipe(6, 2, "write")))
    found = explain_processes(JobLook((core, first, second), 5.0))
    assert [(one.pid, one.line) for one in found.guilty] == [(3, 7)], found
    assert "role2 (pipe) and waits for role3 (pid 3) or role1 (pid 1)" in found.sentence, found
