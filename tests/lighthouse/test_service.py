"""The service without sockets: what a door of any protocol can rely on."""

from __future__ import annotations

import asyncio

import pytest

from allranks.lighthouse.agents import MAX_STORIES, MAX_STORIES_CHARS
from allranks.lighthouse.messages import Beat, Hello, Refused, Welcome
from allranks.lighthouse.page import take_snapshot
from allranks.lighthouse.quorum_coordinator import _TOGETHER_S
from allranks.lighthouse.service import PROXY_BACK_S
from allranks.lighthouse.status import PersistedState
from allranks.model.cluster import (
    Member,
    MemberLost,
    Notice,
    PublishedIncident,
    Quorum,
    QuorumFormed,
    QuorumWanted,
)

from .without_sockets import Desk, FakePeer, on_loop, timers_until, until


@on_loop
async def test_nobody_forms_a_quorum_while_a_recall_is_on_its_way() -> None:
    """A restarted lighthouse first learns who trains already, then lets newcomers in by the rules."""
    desk = Desk()
    last = Quorum(7, 2, (Member("a", "a.1"), Member("b", "b.1")), "why", round=30)
    _, a_peer = desk.enter("a", epoch=2, number=7, round=30)
    assert a_peer.of(Welcome)[0].recall
    x, x_peer = desk.enter("x")
    desk.service.join(x, Member("x"))
    await desk.settle()
    assert not x_peer.of(Quorum)
    desk.service.recalled(last)
    await desk.settle()
    assert not x_peer.of(Quorum)  # a and b are training; they are called
    assert a_peer.of(QuorumWanted)
    status = take_snapshot(desk.service)
    assert (status.number, status.epoch) == (7, 3)
    assert {row.replica: row.state for row in status.replicas} == {
        "a": "member",
        "b": "expected",
        "x": "asking",
    }


@on_loop
@pytest.mark.parametrize("given_up", [True, False])
async def test_members_are_told_when_another_gives_their_group_up(given_up: bool) -> None:
    """Only then: a member that asks again because somebody waits to join is no reason to stop in a step."""
    desk = Desk()
    (a, a_peer), (b, b_peer) = desk.enter("a"), desk.enter("b")
    for session in (a, b):
        desk.service.join(session, Member(session.replica))
    await desk.settle()
    assert b_peer.of(Quorum)
    desk.service.join(a, Member("a", commit_failures=int(given_up)))
    await desk.settle()
    await timers_until(_TOGETHER_S)
    told = [notice for notice in b_peer.of(QuorumWanted) if notice.broken]
    assert [(notice.number, "a left" in notice.reason) for notice in told] == [(1, True)] * given_up
    assert not a_peer.of(QuorumWanted)


@on_loop
@pytest.mark.parametrize("asked", [True, False])
async def test_members_are_called_again_for_a_newcomer_that_died_and_came_back(asked: bool) -> None:
    """Same name, same quorum, another life; whether or not the members had come already for the first one."""
    desk = Desk()
    a, a_peer = desk.enter("a")
    desk.service.join(a, Member("a"))
    await desk.settle()
    for life in (1, 2):
        x, x_peer = desk.enter("x", session=f"x.{life}")
        desk.service.join(x, Member("x"))
        await desk.settle()
        assert len(a_peer.of(QuorumWanted)) == life
        assert [member.session for member in a_peer.of(QuorumWanted)[-1].waiting] == [f"x.{life}"]
        desk.service.disconnected(x, x_peer, clean=True)
        desk.service.accuse("x", "killed")
        await desk.settle()
        if asked:
            desk.service.join(a, Member("a"))
            await desk.settle()
    assert a_peer.of(Quorum)[-1].names == ("a",)


@on_loop
async def test_what_an_older_client_recalls_does_not_replace_what_is_known() -> None:
    """Numbers never go back."""
    desk = Desk()
    a, peer = desk.enter("a")
    desk.service.join(a, Member("a"))
    await desk.settle()
    (formed,) = peer.of(Quorum)
    desk.service.recalled(Quorum(0, 0, (Member("z", "z.1"),), "old"))
    assert desk.service.state.last == formed


@on_loop
async def test_a_quorum_formed_out_of_nothing_gives_way_to_one_that_trains_already() -> None:
    """A newcomer was faster than those who came back from the earlier lighthouse: it is asked to join them."""
    desk = Desk()
    x, x_peer = desk.enter("x")
    for _ in range(40):  # its rounds run far ahead of theirs
        desk.service.join(x, Member("x"))
        await desk.settle()
    assert x_peer.of(Quorum)[-1].names == ("x",)
    a, a_peer = desk.enter("a", epoch=1, number=1, round=3)
    assert a_peer.of(Welcome)[0].recall
    desk.service.recalled(Quorum(1, 1, (Member("a", "a.1"), Member("b", "b.1")), "why", round=3))
    await desk.settle()
    assert "earlier lighthouse" in x_peer.of(QuorumWanted)[0].reason
    b, b_peer = desk.enter("b", epoch=1, number=1, round=3)
    assert not b_peer.of(Welcome)[0].recall  # one word is enough
    for session, step in ((x, 40), (a, 1000), (b, 1000)):
        desk.service.join(session, Member(session.replica, step=step))
    await desk.settle()
    (last,) = a_peer.of(Quorum)
    assert last == x_peer.of(Quorum)[-1] == b_peer.of(Quorum)[0]
    assert (last.names, last.number, last.epoch) == (("a", "b", "x"), 2, 2)
    assert last.max_step == 1000


@on_loop
async def test_a_new_lighthouse_waits_for_those_who_train_already() -> None:
    """Within the grace nobody new forms a quorum of its own; it says why, and does so after it."""
    desk = Desk(start_grace_s=0.2)
    desk.service.start()
    x, x_peer = desk.enter("x")
    desk.service.join(x, Member("x"))
    await desk.settle()
    assert not x_peer.of(Quorum)
    assert "members of an earlier quorum come first" in take_snapshot(desk.service).waiting
    while not x_peer.of(Quorum):
        await asyncio.sleep(0.01)
    desk.service.close()


@on_loop
async def test_a_new_lighthouse_waits_no_longer_when_everybody_expected_asks() -> None:
    """Not so when one of them tells of an earlier quorum: those who train already come first."""
    desk = Desk(start_grace_s=60.0, expect_replicas=2)
    desk.service.start()
    (x, x_peer), (y, _) = desk.enter("x"), desk.enter("y")
    desk.service.join(x, Member("x"))
    await desk.settle()
    assert not x_peer.of(Quorum)
    desk.service.join(y, Member("y"))
    await desk.settle()
    assert x_peer.of(Quorum)[0].names == ("x", "y")
    desk.service.close()

    desk = Desk(start_grace_s=60.0, expect_replicas=2)
    desk.service.start()
    for session, peer in (desk.enter("x"), desk.enter("y", epoch=1, number=1, round=3)):
        desk.service.join(session, Member(session.replica))
        await desk.settle()
        assert not peer.of(Quorum)
    desk.service.close()


@on_loop
async def test_a_training_that_is_over_is_not_begun_anew_by_a_latecomer() -> None:
    """By its own good-bye or an agent's word, also if that comes first; let in by hand it may begin."""
    desk = Desk()
    crowd = [desk.enter(name) for name in ("a", "b", "c")]
    for session, _ in crowd:
        desk.service.join(session, Member(session.replica))
    await desk.settle()
    (a, _), (b, _), (c, _) = crowd
    desk.service.leave(a, "through", finished=True)
    assert desk.service.finish("b")  # the agent is faster than the good-bye
    desk.service.leave(b, "through")
    desk.service.accuse("c", "killed")
    c, c_peer = desk.enter("c", session="c.2")
    desk.service.join(c, Member("c"))
    await desk.settle()
    status = take_snapshot(desk.service)
    assert not c_peer.of(Quorum)
    assert "the training has finished (a, b in quorum 1): c joined too late" in status.waiting
    assert {row.replica: row.state for row in status.replicas} == {
        "a": "finished",
        "b": "finished",
        "c": "asking",
    }
    assert set(status.lost) == {"c"}
    assert desk.service.let_in("c")
    await desk.settle()
    assert c_peer.of(Quorum)[0].names == ("c",)


@on_loop
async def test_the_end_of_a_training_outlives_its_lighthouse() -> None:
    """The next leader knows from what was kept that nobody is to be waited for, and turns latecomers away."""
    saved: list[PersistedState] = []

    async def keep(kept: PersistedState) -> None:
        saved.append(kept)

    first, second = Desk(), Desk()
    first.service.lead(PersistedState(epoch=1), keep)
    crowd = [first.enter(name) for name in ("a", "b", "c")]
    for session, _ in crowd:
        first.service.join(session, Member(session.replica))
    await first.settle()
    for session, _ in crowd[:2]:
        first.service.leave(session, "through", finished=True)
    await first.settle()
    assert saved[-1].finished == ("a", "b")
    second.service.lead(saved[-1], keep)
    assert take_snapshot(second.service).lost == {}
    second.service.accuse("c", "did not come back")
    late, late_peer = second.enter("c", session="c.2")
    second.service.join(late, Member("c"))
    await second.settle()
    assert not late_peer.of(Quorum)
    assert "the training has finished" in take_snapshot(second.service).waiting


@on_loop
async def test_many_deaths_in_one_moment_are_told_together() -> None:
    """Every survivor hears of every death, each once."""
    desk = Desk(grace_s=0.0)
    crowd = [desk.enter(f"r{i:02d}") for i in range(30)]
    for session, _ in crowd:
        desk.service.join(session, Member(session.replica))
    await desk.settle()
    for session, peer in crowd[:20]:
        desk.service.disconnected(session, peer, clean=True)
    await until(lambda: all(len(peer.of(MemberLost)) >= 20 for _, peer in crowd[20:]))
    for _, peer in crowd[20:]:
        lost = [notice.replica for notice in peer.of(MemberLost)]
        assert sorted(lost) == [f"r{i:02d}" for i in range(20)]


@on_loop
async def test_a_returning_session_gets_what_it_did_not_acknowledge() -> None:
    """On the new connection, with the same ids."""
    desk = Desk(reset_grace_s=5.0)
    (a, a_peer), (b, _) = desk.enter("a"), desk.enter("b")
    for session in (a, b):
        desk.service.join(session, Member(session.replica))
    await desk.settle()
    desk.service.disconnected(a, a_peer, clean=False)
    desk.service.leave(b, "bye")
    await desk.settle()
    assert len(a.pending) == 1
    _, again = desk.enter("a")
    assert [type(each).__name__ for each in again.got] == ["Welcome", "MemberLeft"]
    a.pending.pop(next(iter(a.pending)))
    _, third = desk.enter("a")
    assert [type(each).__name__ for each in third.got] == ["Welcome"]
    assert again.closed  # one connection per session


@on_loop
async def test_who_has_older_steps_waits_for_a_member_whose_proxy_was_killed() -> None:
    """Its rank lives and has the newest state: nobody begins another training from an older one before it is back."""
    desk = Desk(min_replicas=1, grace_s=0.0)
    (a, a_peer), (b, b_peer) = desk.enter("a", proxy=True), desk.enter("b", proxy=True)
    for session in (a, b):
        desk.service.join(session, Member(session.replica, step=5))
    await desk.settle()
    desk.service.disconnected(a, a_peer, clean=True)
    await until(lambda: bool(b_peer.of(MemberLost)))
    desk.service.join(b, Member("b", step=5))
    await desk.settle()
    assert b_peer.of(Quorum)[-1].names == ("b",)  # one of two continues at once
    desk.service.disconnected(b, b_peer, clean=True)
    await until(lambda: "b" not in desk.service.state.replicas)
    again, a_peer = desk.enter("a", proxy=True)
    desk.service.join(again, Member("a", step=5))
    await desk.settle()
    assert not a_peer.of(Quorum) and "waiting for b" in take_snapshot(desk.service).waiting
    back, b_peer = desk.enter("b", proxy=True)
    desk.service.join(back, Member("b", step=9))
    await desk.settle()
    assert (a_peer.of(Quorum)[-1].names, a_peer.of(Quorum)[-1].max_step) == (("a", "b"), 9)


@on_loop
async def test_who_has_older_steps_goes_on_when_a_member_does_not_come_back_after_its_proxy() -> None:
    """Both were killed together: that is presumed after PROXY_BACK_S, not after presume_dead_s."""
    desk = Desk(min_replicas=1, grace_s=0.0)
    a, a_peer = desk.enter("a", proxy=True)
    desk.service.join(a, Member("a", step=5))
    await desk.settle()
    desk.service.disconnected(a, a_peer, clean=True)
    await until(lambda: "a" not in desk.service.state.replicas)
    b, b_peer = desk.enter("b")
    desk.service.join(b, Member("b", step=2))
    await desk.settle()
    state = desk.service.state
    assert (
        state.silent == {"a"} and state.next_change(desk.service.now()) <= desk.service.now() + PROXY_BACK_S
    )
    state.advance(desk.service.now() + PROXY_BACK_S)
    desk.service.coordinator.soon()
    await desk.settle()
    assert b_peer.of(Quorum)[-1].names == ("b",)


@on_loop
async def test_the_end_of_a_back_off_is_noticed_without_another_event() -> None:
    """The next process of a silent member waits for its lease. A quorum of the others, formed meanwhile, left no timer for that."""
    desk = Desk(heartbeat_timeout_s=0.1, presume_dead_s=0.2, join_timeout_s=0.1, start_grace_s=0.0)
    crowd = {name: desk.enter(name) for name in ("a", "b")}
    for name, (session, _) in crowd.items():
        desk.service.join(session, Member(name))
    await desk.settle()
    desk.service._lose("b", "nothing heard", certain=False)
    b, _ = desk.enter("b", session="b.2")
    desk.service.join(b, Member("b"))
    desk.service.join(crowd["a"][0], Member("a", step=1))
    await until(lambda: crowd["a"][1].of(Quorum)[-1].names == ("a",))
    await until(lambda: bool(crowd["a"][1].of(QuorumWanted)))
    assert not desk.service.state.cooling and "b" in desk.service.state.asking


@on_loop
async def test_spares_are_told_and_used_when_a_member_dies() -> None:
    """They keep asking; no member is disturbed while nothing can change."""
    desk = Desk(max_replicas=2, grace_s=0.0)
    crowd = [desk.enter(name) for name in ("a", "b", "c")]
    for session, _ in crowd:
        desk.service.join(session, Member(session.replica))
    await desk.settle()
    spare = crowd[2][1]
    assert spare.of(QuorumFormed)[0].members == ("a", "b")
    assert not spare.of(Quorum)
    assert not crowd[0][1].of(QuorumWanted)
    desk.service.disconnected(*crowd[1], clean=True)
    await until(lambda: bool(crowd[0][1].of(MemberLost)))
    desk.service.join(crowd[0][0], Member("a", step=1))
    await desk.settle()
    assert spare.of(Quorum)[0].names == ("a", "c")


@on_loop
async def test_number_and_state_survive_a_keeper_that_fails_at_first() -> None:
    """Nothing is announced before it is kept; a failed attempt is made again."""
    desk = Desk(quorum_tick_s=0.01)
    kept: list[int] = []

    async def keep(to_keep: PersistedState) -> None:
        if len(kept) < 2:
            kept.append(-1)
            raise OSError("etcd is away")
        kept.append(to_keep.number)

    desk.service.lead(PersistedState(epoch=4, number=11), keep)
    a, peer = desk.enter("a")
    desk.service.join(a, Member("a"))
    await desk.settle()
    assert not peer.of(Quorum)
    while not peer.of(Quorum):
        await asyncio.sleep(0.01)
    assert kept == [-1, -1, 12]
    assert (peer.of(Quorum)[0].number, peer.of(Quorum)[0].epoch) == (12, 4)


@on_loop
async def test_a_member_lost_while_its_quorum_is_being_kept_makes_it_void() -> None:
    """The number is used up; the survivors get another."""
    desk = Desk(grace_s=0.0)
    gate = asyncio.Event()

    async def keep(to_keep: PersistedState) -> None:
        await gate.wait()

    desk.service.lead(PersistedState(epoch=1), keep)
    (a, a_peer), (b, b_peer) = desk.enter("a"), desk.enter("b")
    for session in (a, b):
        desk.service.join(session, Member(session.replica))
    await desk.settle()
    desk.service.disconnected(b, b_peer, clean=True)
    await until(lambda: "b" not in desk.service.state.replicas)
    gate.set()
    await until(lambda: bool(a_peer.of(Quorum)))
    (quorum,) = a_peer.of(Quorum)
    assert quorum.names == ("a",)
    assert quorum.number == 2


@on_loop
async def test_a_lighthouse_that_does_not_lead_sends_everybody_to_the_leader() -> None:
    """Those who are there already too."""
    desk = Desk()
    _, peer = desk.enter("a")
    desk.service.follow("other:1")
    assert peer.of(Refused)[0] == Refused("moved", "this lighthouse no longer leads", "other:1")
    assert peer.closed
    refused = desk.service.hello(FakePeer(), Hello(replica="b", session="b.1"))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.leader) == ("moved", "other:1")


@on_loop
async def test_listeners_hear_every_event_and_a_broken_one_harms_nobody() -> None:
    """As the page does."""
    desk = Desk()
    heard: list[str] = []

    def broken(_: object) -> None:
        raise RuntimeError("page closed")

    desk.service.event_log.subscribe(broken)
    stop = desk.service.event_log.subscribe(lambda event: heard.append(event.kind))
    desk.enter("a")
    desk.service.evict("a", "bad")
    stop()
    desk.service.let_in("a")
    assert heard == ["connected", "evicted"]


@pytest.mark.parametrize("kind", [MemberLost, QuorumWanted])
def test_notices_are_plain_data(kind: type[Notice]) -> None:
    """Equal when their fields are; usable as keys."""
    one = kind(**{"replica": "a", "reason": "r"} if kind is MemberLost else {"reason": "r"})
    assert one == kind(**{name: getattr(one, name) for name in one.__dataclass_fields__})
    assert hash(one)


@on_loop
async def test_a_replica_that_was_let_in_stays_so_when_another_lighthouse_takes_over() -> None:
    """The last quorum still names it as evicted; what was kept in etcd since then knows better."""
    quorum = Quorum(5, 1, (Member("a", "a.1"), Member("b", "b.1")), evicted=("c", "d"))
    desk = Desk()

    async def keep(to_keep: PersistedState) -> None:
        """Safe at once."""

    desk.service.lead(PersistedState(2, 5, quorum, evicted={"d": "bad GPU"}), keep)
    assert desk.service.state.evicted == {"d": "bad GPU"}


@on_loop
async def test_pages_of_incidents_take_a_bounded_part_of_the_memory() -> None:
    """The newest stay, however long they are."""
    agents = Desk().service.agents
    for number in range(5):
        agents.report_incident(
            PublishedIncident(f"i{number}", "hang", story="x" * (MAX_STORIES_CHARS // 2 - 10))
        )
    assert list(agents.stories) == ["i3", "i4"]
    for number in range(2 * MAX_STORIES):
        agents.report_incident(PublishedIncident(f"j{number}", "hang", story="short"))
    assert len(agents.stories) == MAX_STORIES


@on_loop
async def test_steps_that_are_lost_with_their_replicas_are_told() -> None:
    """The last one that held the state is gone: the next quorum begins before it, and says so once."""
    desk = Desk(start_grace_s=0.0)
    a, a_peer = desk.enter("a")
    desk.service.join(a, Member("a"))
    await until(lambda: bool(a_peer.of(Quorum)))
    desk.service.beat(a, Beat(step=50))
    desk.service.leave(a, "terminated")
    desk.service.disconnected(a, a_peer, clean=True)
    for number in (1, 2):
        desk.service.accuse("b", "killed")
        b, b_peer = desk.enter("b", session=f"b.{number}")
        desk.service.join(b, Member("b", f"b.{number}"))
        await until(lambda peer=b_peer: bool(peer.of(Quorum)))  # type: ignore[misc]
    told = [event.text for event in take_snapshot(desk.service).history if event.kind == "went_back"]
    assert told == ["training starts over from step 0: all replicas that had reached step 50 are gone"]


@on_loop
async def test_a_member_that_has_come_further_than_it_asked_with_has_lost_nothing() -> None:
    """It continues to compute while the others are waited for."""
    desk = Desk(min_replicas=2, start_grace_s=0.0)
    a, a_peer = desk.enter("a")
    desk.service.join(a, Member("a", step=50))
    desk.service.beat(a, Beat(step=53))
    b, _ = desk.enter("b")
    desk.service.join(b, Member("b"))
    await until(lambda: bool(a_peer.of(Quorum)))
    assert not [event for event in take_snapshot(desk.service).history if event.kind == "went_back"]
