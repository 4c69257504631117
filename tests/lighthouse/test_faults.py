"""Real faults on real processes. Each test asserts that the fault happened and what must hold after it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.launch.node_agent import NodeAgent
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.server import Lighthouse
from allranks.supervise.replicas import Event

from .processes import LighthouseProcess, Proxy, Victim
from .waiting import eventually

RunLighthouse = Callable[..., LighthouseProcess]
Victims = Callable[..., list[Victim]]


def form(victims: list[Victim], step: int = 0) -> dict[str, object]:
    """All ask; they must agree on one quorum, which is returned."""
    for victim in victims:
        victim.say(f"join {step}")
    quorums = [victim.quorum() for victim in victims]
    assert all(quorum == quorums[0] for quorum in quorums)
    assert quorums[0]["members"] == sorted(victim.replica for victim in victims)
    assert quorums[0]["reason"]
    return quorums[0]


def come_in(newcomer: Victim, members: list[Victim]) -> dict[str, object]:
    """The newcomer asks, the members are called to their next quorum."""
    newcomer.say("join 1")
    members[0].notice("QuorumWanted")
    for victim in members:
        victim.say("join 1")
    quorums = [victim.quorum() for victim in [newcomer, *members]]
    assert all(quorum == quorums[0] for quorum in quorums)
    return quorums[0]


def meet_again(returned: Victim, member: Victim) -> dict[str, object]:
    """Both ask; the member once more whenever it is called, until the other, lost meanwhile or not, is with it."""
    returned.say("join 1")
    member.say("join 1")
    while returned.replica not in (quorum := member.quorum())["members"]:
        member.notice("QuorumWanted")
        member.say("join 1")
    assert returned.quorum() == quorum
    return quorum


def gone(pid: int) -> bool:
    """Whether a process is dead (or a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("beacon", [False, True], ids=["thread", "beacon"])
def test_a_killed_replica_is_told_to_all_survivors_at_once(
    run_lighthouse: RunLighthouse, victims: Victims, beacon: bool
) -> None:
    """kill -9: the closed line is the notice; no heartbeat timeout (here: a minute) is waited for."""
    lighthouse = run_lighthouse("--min-replicas", "2", "--heartbeat-timeout-ms", "60000")
    a, b, c = victims(lighthouse.address, "a", "b", "c", beacon=beacon)
    first = form([a, b, c])
    c.kill()
    for survivor in (a, b):
        notice = survivor.notice("MemberLost", replica="c")
        assert notice["certain"] and notice["number"] == first["quorum"]
    assert c.process.wait(40) == -signal.SIGKILL  # the kernel closes its files shortly before
    second = form([a, b], step=1)
    assert second["quorum"] == first["quorum"] + 1
    assert second["epoch"] == first["epoch"]
    assert "without c" in second["reason"]
    lighthouse.wait_log(second["reason"])


def test_a_death_is_seen_although_a_forked_child_lives_on(
    run_lighthouse: RunLighthouse, victims: Victims
) -> None:
    """A DataLoader worker must not hold the dead rank's connection open."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "60000")
    a, b = victims(lighthouse.address, "a", "b")
    form([a, b])
    b.say("fork")
    child = b.told.wait(lambda line: "child" in line)["child"]
    try:
        b.kill()
        assert a.notice("MemberLost", replica="b")["certain"]
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_frozen_replica_is_lost_by_silence_and_comes_back(
    run_lighthouse: RunLighthouse, victims: Victims
) -> None:
    """SIGSTOP: the connection stays open, only heartbeats can tell; thawed, it learns that it was given up."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    a, b, c = victims(lighthouse.address, "a", "b", "c")
    first = form([a, b, c])
    c.kill(signal.SIGSTOP)
    notice = a.notice("MemberLost", replica="c")
    assert not notice["certain"] and "nothing heard" in notice["reason"]
    second = form([a, b], step=1)
    c.kill(signal.SIGCONT)
    assert c.notice("MemberLost", replica="c")["number"] == first["quorum"]
    third = come_in(c, [a, b])
    assert third["members"] == ["a", "b", "c"]
    assert first["quorum"] < second["quorum"] < third["quorum"]
    assert first["epoch"] == third["epoch"]


def test_a_rank_whose_gil_is_held_is_not_lost_when_it_has_a_beacon(
    run_lighthouse: RunLighthouse, victims: Victims
) -> None:
    """C code that keeps the GIL for more than two heartbeat timeouts stops every thread of the rank, not its beacon."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    a, b = victims(lighthouse.address, "a", "b", beacon=True)
    first = form([a, b])
    b.say("hold_gil 5")
    assert b.told.wait(lambda line: line.get("holding") is True)
    assert b.told.wait(lambda line: line.get("holding") is False)
    assert "lost" not in lighthouse.log()
    assert form([a, b], step=1)["quorum"] == first["quorum"]


def test_the_same_rank_without_a_beacon_is_lost(run_lighthouse: RunLighthouse, victims: Victims) -> None:
    """The fault of the test above does fire: it is the beacon that saves the rank."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    a, b = victims(lighthouse.address, "a", "b")
    form([a, b])
    b.say("hold_gil 6")
    assert a.notice("MemberLost", replica="b")["certain"] is False


def _listener() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)
    return listener, listener.getsockname()[1]


@pytest.mark.parametrize("beacon", [False, True], ids=["thread", "beacon"])
def test_held_sockets_are_shut_when_a_fellow_member_dies(
    run_lighthouse: RunLighthouse, victims: Victims, beacon: bool
) -> None:
    """The far end of a held socket sees the end of the stream; that is how a blocked collective is woken."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "60000")
    a, b = victims(lighthouse.address, "a", "b", beacon=beacon)
    number = form([a, b])["quorum"]
    listener, port = _listener()
    with listener:
        a.say(f"hold {port} {number}")
        held, _ = listener.accept()
        a.say(f"hold {port} {number + 7}")
        other, _ = listener.accept()
        with held, other:
            a.told.wait(lambda line: "held" in line)
            a.told.wait(lambda line: "held" in line)
            if beacon:
                a.say("hold_gil 2")
                a.told.wait(lambda line: line.get("holding") is True)
            b.kill()
            held.settimeout(30)
            assert held.recv(1) == b""
            if beacon:  # it was shut while nobody in the rank could move
                assert not any(line.get("holding") is False for line in a.told.lines)
            a.notice("MemberLost", replica="b")
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)  # sockets of another quorum are left alone


def test_a_beacon_ends_with_its_rank_and_shuts_what_it_held(
    run_lighthouse: RunLighthouse, victims: Victims
) -> None:
    """A dead rank's peers see the reset at once, although the beacon had duplicates of its sockets."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "60000")
    (a,) = victims(lighthouse.address, "a", beacon=True)
    children = [int(pid) for pid in Path(f"/proc/{a.pid}/task/{a.pid}/children").read_text().split()]
    for task in Path(f"/proc/{a.pid}/task").iterdir():
        children += [int(pid) for pid in (task / "children").read_text().split()]
    assert children
    listener, port = _listener()
    with listener:
        a.say(f"hold {port} 1")
        held, _ = listener.accept()
        with held:
            a.told.wait(lambda line: "held" in line)
            a.kill()
            held.settimeout(30)
            assert held.recv(1) == b""
    lighthouse.wait_log("a lost: process")
    deadline_reads = 400
    while deadline_reads and not all(gone(pid) for pid in children):
        deadline_reads -= 1
        signal.sigtimedwait([], 0.02)
    assert all(gone(pid) for pid in children)


def test_a_reset_connection_is_not_a_death(
    embedded: Callable[..., Lighthouse], victims: Victims, proxy: Callable[[str], Proxy]
) -> None:
    """A network blip: the session comes back on another connection and nobody is notified."""
    lighthouse = embedded(heartbeat_timeout_s=30.0, reset_grace_s=20.0)
    between = proxy(lighthouse.address)
    (a,) = victims(lighthouse.address, "a")
    (b,) = victims(between.address, "b", beacon=True)
    first = form([a, b])
    assert between.reset() == 1
    b.notice("ConnectionLost")
    history = eventually(lambda: [e for e in lighthouse.status().history if e.kind == "returned"])
    assert history[0].replica == "b"
    assert between.accepted == 2
    assert form([a, b], step=1)["quorum"] == first["quorum"]
    assert not any(event.kind == "lost" for event in lighthouse.status().history)


def test_a_cut_line_is_lost_by_silence_and_heals(
    run_lighthouse: RunLighthouse, victims: Victims, proxy: Callable[[str], Proxy]
) -> None:
    """Nothing passes in either direction, not even a close; afterwards there is one quorum again."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    between = proxy(lighthouse.address)
    (a,) = victims(lighthouse.address, "a")
    (b,) = victims(between.address, "b")
    first = form([a, b])
    between.drop.update(up=True, down=True)
    assert a.notice("MemberLost", replica="b")["certain"] is False
    assert between.dropped_bytes > 0
    second = form([a], step=1)
    between.drop.update(up=False, down=False)
    between.reset()
    b.notice("MemberLost", replica="b")
    third = come_in(b, [a])
    assert first["quorum"] < second["quorum"] < third["quorum"]
    assert first["epoch"] == third["epoch"]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_cut_in_one_direction_heals(
    run_lighthouse: RunLighthouse, victims: Victims, proxy: Callable[[str], Proxy], way: str
) -> None:
    """Asymmetric partition: whichever side hears nothing gives the connection up; the job ends in one quorum."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    between = proxy(lighthouse.address)
    (a,) = victims(lighthouse.address, "a")
    (b,) = victims(between.address, "b")
    first = form([a, b])
    between.drop[way] = True
    if way == "up":
        assert a.notice("MemberLost", replica="b")["certain"] is False
    else:
        assert "silent" in b.notice("ConnectionLost")["reason"]
    assert between.dropped_bytes > 0
    between.drop[way] = False
    between.reset()
    lighthouse.wait_log("b is back")
    last = meet_again(b, a)
    assert last["members"] == ["a", "b"]
    lost = way == "up" or "b lost" in lighthouse.log()  # then it came in anew
    assert (last["quorum"] > first["quorum"]) is lost
    assert last["epoch"] == first["epoch"]


def test_a_line_that_its_client_gives_up_is_not_a_death(
    run_lighthouse: RunLighthouse, victims: Victims, proxy: Callable[[str], Proxy]
) -> None:
    """No answer arrives, so the client connects anew, again and again. It may train on: its name is not free yet."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "1000")
    between = proxy(lighthouse.address)
    (a,) = victims(lighthouse.address, "a")
    (b,) = victims(between.address, "b")
    form([a, b])
    between.drop["down"] = True
    assert "silent" in b.notice("ConnectionLost")["reason"]
    assert a.notice("MemberLost", replica="b")["certain"] is False


def test_a_slow_line_is_not_a_death(
    run_lighthouse: RunLighthouse, victims: Victims, proxy: Callable[[str], Proxy]
) -> None:
    """A third of a second each way, below the heartbeat timeout: everything works, only later."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "3000")
    between = proxy(lighthouse.address)
    between.delay_s = 0.3
    a, b = victims(between.address, "a", "b")
    first = form([a, b])
    assert form([a, b], step=1)["quorum"] == first["quorum"]
    assert " lost" not in lighthouse.log()


def test_a_lighthouse_killed_in_the_middle_of_a_quorum_loses_nobody(
    run_lighthouse: RunLighthouse, victims: Victims
) -> None:
    """Two of three have asked when it dies; the new one is asked again by itself and the number is the next one."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "5000")
    a, b, c = victims(lighthouse.address, "a", "b", "c")
    before = form([a, b, c])
    for _ in range(2):  # the number is well above what a fresh lighthouse would give
        c.say("leave")
        a.notice("MemberLeft", replica="c")
        form([a, b], step=1)
        c.close()
        (c,) = victims(lighthouse.address, "c")
        before = come_in(c, [a, b])
    a.say("join 2")
    b.say("join 2")
    lighthouse.wait_log("no quorum yet")
    lighthouse.kill()
    for victim in (a, b, c):
        victim.notice("ConnectionLost")
    again = run_lighthouse("--heartbeat-timeout-ms", "5000", port=lighthouse.port)
    again.wait_log("took over quorum")
    c.say("join 2")
    quorums = [victim.quorum() for victim in (a, b, c)]
    assert quorums[0] == quorums[1] == quorums[2]
    assert quorums[0]["members"] == ["a", "b", "c"]
    assert quorums[0]["quorum"] >= before["quorum"]
    assert quorums[0]["epoch"] > before["epoch"]
    assert " lost" not in again.log()
    a.kill()
    b.notice("MemberLost", replica="a")
    assert form([b, c], step=3)["quorum"] > before["quorum"]


def test_a_frozen_lighthouse_believes_nobody_dead_when_it_wakes(
    run_lighthouse: RunLighthouse, victims: Victims
) -> None:
    """While it stood still it could not hear: that silence counts for nothing."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    a, b = victims(lighthouse.address, "a", "b")
    first = form([a, b])
    lighthouse.kill(signal.SIGSTOP)
    assert "silent" in a.notice("ConnectionLost")["reason"]  # it was frozen for longer than the timeout
    lighthouse.kill(signal.SIGCONT)
    lighthouse.wait_log("is back")
    assert form([a, b], step=1)["quorum"] == first["quorum"]
    assert "nothing heard" not in lighthouse.log()


def test_a_restarted_replica_is_readmitted_when_the_lighthouse_answers_again(
    run_lighthouse: RunLighthouse,
) -> None:
    """The agent asks for it while the lighthouse is away. Otherwise the replica would be refused for ever."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    with Client(ClientOptions((lighthouse.address,), replica="agent", role="observer")) as client:
        agent = NodeAgent(None, client)
        client.evict("replica-2", "stuck")
        agent._evicted.add(2)
        lighthouse.kill(signal.SIGSTOP)
        eventually(lambda: not client.connected)
        agent._on_event(Event("started", 2))
        lighthouse.kill(signal.SIGCONT)
        eventually(lambda: client.connected and client.status()["evicted"] == {})
        agent.close()


def test_a_replica_that_is_evicted_again_is_not_readmitted_late(run_lighthouse: RunLighthouse) -> None:
    """Its restart is not reported while the lighthouse is away; then it is set aside."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2000")
    with Client(ClientOptions((lighthouse.address,), replica="agent", role="observer")) as client:
        agent = NodeAgent(None, client)
        client.evict("replica-2", "stuck")
        agent._evicted.add(2)
        lighthouse.kill(signal.SIGSTOP)
        eventually(lambda: not client.connected)
        agent._on_event(Event("started", 2))
        agent._evicted.add(2)
        lighthouse.kill(signal.SIGCONT)
        eventually(lambda: "allranks-readmit" not in {thread.name for thread in threading.enumerate()})
        eventually(lambda: client.connected)
        assert "replica-2" in client.status()["evicted"]
        agent.close()


def test_sigterm_drains_and_exits_zero(run_lighthouse: RunLighthouse, victims: Victims) -> None:
    """Clients hear that it closes, and the exit code is 0."""
    lighthouse = run_lighthouse()
    (a,) = victims(lighthouse.address, "a")
    lighthouse.kill(signal.SIGTERM)
    assert "closing" in a.notice("ConnectionLost")["reason"]
    assert lighthouse.process.wait(20) == 0
