"""Who can talk to whom, how often quorums are formed, and whose claims are believed: the pure core, and real processes."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Collection

import pytest

from allranks.errors import LighthouseRefused
from allranks.lighthouse.client.client import Client
from allranks.lighthouse.decide import Form, Wait, decide
from allranks.lighthouse.options import Options
from allranks.lighthouse.reach import Reach, largest_set
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.state import QuorumState
from allranks.model.cluster import DIALECT, Member, Quorum, find_fault

from .processes import Victim
from .waiting import eventually


def ask(
    state: QuorumState,
    now: float,
    name: str,
    unreached: Collection[str] = (),
    unserved: Collection[str] = (),
    **values: object,
) -> None:
    replica = state.replicas[name]
    state.ask(now, name, Member(name, replica.session, **values))  # type: ignore[arg-type]
    state.note_failures(now, name, unreached, unserved)


def crowd(*names: str, now: float = 0.0) -> QuorumState:
    state = QuorumState(Options())
    for name in names:
        state.connect(now, name, f"{name}.1", probes=True)
    return state


def form(state: QuorumState, now: float) -> Quorum:
    decision, reason = decide(now, state, state.options)
    assert isinstance(decision, Form), reason
    quorum = state.next_quorum(decision.members, decision.spares, reason)
    state.form(quorum, now)
    return quorum


def test_members_that_fail_again_and_again_get_no_more_than_a_few_quorums() -> None:
    """The loop of members that ask at once for another: 31,213 quorums in 82 s once, now fewer than one in 4 s."""
    state, now, times = crowd("a", "b"), 0.0, []
    while now < 82.0:
        for name in ("a", "b"):
            ask(state, now, name, commit_failures=1)
        decision, reason = decide(now, state, state.options)
        if isinstance(decision, Form):
            state.form(state.next_quorum(decision.members, decision.spares, reason), now)
            times.append(now)
        else:
            assert decision.rule == "pace" and decision.until is not None and decision.until > now
        now += 0.002
    assert len(times) <= 30 and state.number == len(times)


def test_no_course_of_events_forms_more_than_twenty_quorums_in_a_second() -> None:
    """Also when members change all the time, and steps grow: by the pace, no matter who asks."""
    state, now, times = crowd("a"), 0.0, []
    for turn in range(20_000):
        if "b" in state.replicas:
            state.lose(now, "b", "killed", certain=True)
            state.let_in("b")
        else:
            state.connect(now, "b", f"b.{turn}")
        state.advance(now)
        for name in state.replicas:
            ask(state, now, name, step=turn, commit_failures=1)
        decision, reason = decide(now, state, state.options)
        if isinstance(decision, Form):
            state.form(state.next_quorum(decision.members, decision.spares, reason), now)
            times.append(now)
        now += 0.001
    assert times
    assert all(later - earlier > 1.0 for earlier, later in zip(times, times[20:], strict=False))


def test_a_member_that_dies_a_few_times_costs_no_pause() -> None:
    """What happens in a job on a bad day is not slowed down."""
    state, now = crowd("a", "b"), 0.0
    for life in range(8):
        for name in ("a", "b"):
            ask(state, now, name, step=life)
        assert form(state, now).names == ("a", "b")
        state.lose(now, "b", "killed", certain=True)
        state.let_in("b")
        state.connect(now, "b", f"b.{life + 2}")
        now += 0.3


def test_asking_in_a_quorum_that_stands_has_no_limit() -> None:
    """torchft's clients ask at every step: the number stays, and so no group is made."""
    state = crowd("a", "b")
    for turn in range(1000):
        for name in ("a", "b"):
            ask(state, turn / 1000, name, step=turn)
        assert form(state, turn / 1000).number == 1


def brute_force(names: str, apart: dict[str, set[str]]) -> int:
    for size in range(len(names), 0, -1):
        for chosen in itertools.combinations(names, size):
            if not any(other in apart.get(one, ()) for one, other in itertools.combinations(chosen, 2)):
                return size
    return 0


def test_the_largest_set_is_the_largest() -> None:
    """Compared with all subsets, over random graphs."""
    choose = random.Random(5)
    for _ in range(300):
        names = "abcdefgh"[: choose.randint(1, 8)]
        apart: dict[str, set[str]] = {}
        for one, other in itertools.combinations(names, 2):
            if choose.random() < 0.35:
                apart.setdefault(one, set()).add(other)
                apart.setdefault(other, set()).add(one)
        found = largest_set(names, apart, lambda chosen: 0)
        assert len(found) == brute_force(names, apart)
        assert not any(other in apart.get(one, ()) for one, other in itertools.combinations(found, 2))


def test_members_that_lost_each_other_continue_before_anybody_new_comes_in() -> None:
    """What cut them may have cut others too, and they have waited already: the newcomers join one that trains again."""
    state = crowd("a", "c")
    for name in ("a", "c"):
        ask(state, 0.0, name)
    form(state, 0.0)
    for name in ("b", "d"):
        state.connect(5.0, name, f"{name}.1")
        ask(state, 5.0, name)
    ask(state, 8.0, "a", ["c.1"], step=9, commit_failures=1)
    ask(state, 8.0, "c", step=9, commit_failures=1)
    assert form(state, 8.0).names == ("a",)
    ask(state, 8.5, "a", step=10)
    assert form(state, 8.5).names == ("a", "b", "d")


def test_nobody_waits_long_for_a_member_that_cannot_be_reached_and_does_not_ask() -> None:
    """c hangs in an attempt to connect, and its heartbeats arrive: the others had waited for the join timeout of 30 s."""
    state = crowd("a", "b", "c")
    for name in "abc":
        ask(state, 0.0, name)
    form(state, 0.0)
    ask(state, 8.0, "a", ["c.1"], commit_failures=1)
    ask(state, 8.0, "b", commit_failures=1)
    decision, _ = decide(8.5, state, state.options)
    assert isinstance(decision, Wait) and decision.missing == ("c",)
    assert decision.until is not None and decision.until <= 9.0
    quorum = form(state, 9.0)
    assert quorum.names == ("a", "b") and quorum.reason.startswith("c cannot be reached: 2 replicas joined")


def test_a_member_that_others_reach_is_waited_for() -> None:
    """Of two that have not asked, a cannot reach one; the other one may join."""
    state = crowd("a", "b", "c")
    for name in "abc":
        ask(state, 0.0, name)
    form(state, 0.0)
    ask(state, 8.0, "a", ["c.1"], commit_failures=1)
    decision, _ = decide(12.0, state, state.options)
    assert isinstance(decision, Wait) and decision.missing == ("b", "c")


def test_newcomers_come_in_at_once_where_too_few_members_are_left_without_them() -> None:
    state = QuorumState(Options(min_replicas=2))
    for name in "ac":
        state.connect(0.0, name, f"{name}.1")
        ask(state, 0.0, name)
    form(state, 0.0)
    state.connect(5.0, "b", "b.1")
    ask(state, 5.0, "b")
    ask(state, 8.0, "a", ["c.1"], step=9, commit_failures=1)
    ask(state, 8.0, "c", step=9, commit_failures=1)
    assert form(state, 8.0).names == ("a", "b")


def test_of_equal_sets_the_newest_state_counts_then_the_older_members() -> None:
    """Two that cannot talk: the one with more steps trains; with equal steps the one that trained already."""
    state = crowd("a", "b")
    ask(state, 0.0, "a", step=3, unreached=("b.1",))
    ask(state, 0.0, "b", step=7)
    assert form(state, 0.0).names == ("b",)
    state = crowd("b")
    ask(state, 0.0, "b")
    assert form(state, 0.0).names == ("b",)
    state.connect(1.0, "a", "a.1")
    ask(state, 1.0, "a")
    ask(state, 1.0, "b", unreached=("a.1",))
    assert form(state, 1.0).names == ("b",)


def test_one_that_reports_everybody_is_left_out_itself() -> None:
    """A replica whose network is broken, or that lies, costs the others nothing."""
    state = crowd("a", "b", "c", "d")
    for name in ("a", "b", "c"):
        ask(state, 0.0, name)
    ask(state, 0.0, "d", step=9, unreached=("a.1", "b.1", "c.1"))
    quorum = form(state, 0.0)
    assert quorum.names == ("a", "b", "c")
    assert "left out: d (cannot connect to a, b, c; next try in 2 s)" in quorum.reason


def test_a_pair_is_tried_again_after_a_pause_that_doubles() -> None:
    """2, 4, 8 … 60 s; both sides of one failure count once."""
    reach, now, pauses = Reach(), 0.0, []
    for _ in range(8):
        reach.report(now, "a", ["b"])
        reach.report(now, "b", ["a"])
        until = reach.next_change(now)
        assert until is not None and reach.are_apart(now, "a", "b") and not reach.are_apart(until, "a", "b")
        pauses.append(until - now)
        now = until
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    reach.report(now + 100.0, "a", ["b"])
    assert reach.next_change(now + 100.0) == now + 102.0, "it had worked for long"
    reach.forget("a")
    assert reach.next_change(now) is None


def test_a_newcomer_joins_when_all_members_and_it_have_reached_each_other() -> None:
    """Until then it waits, and the members that ask for another reason form their quorum without it."""
    state = crowd("a", "b")
    for name in ("a", "b"):
        ask(state, 0.0, name, address=f"{name}:1")
    assert form(state, 0.0).names == ("a", "b")
    state.connect(1.0, "c", "c.1", probes=True)
    ask(state, 1.0, "c", address="c:1")
    for one, other in (("a", "c"), ("b", "c"), ("c", "a")):
        state.reach.prove(f"{one}.1", f"{other}.1")
    for name in ("a", "b"):
        ask(state, 2.0, name, address=f"{name}:1")
    quorum = form(state, 2.0)
    assert quorum.names == ("a", "b") and "c (not proved reachable yet" in quorum.reason
    state.reach.prove("c.1", "b.1")
    for name in ("a", "b"):
        ask(state, 3.0, name, address=f"{name}:1")
    assert form(state, 3.0).names == ("a", "b", "c")


def test_a_newcomer_that_is_needed_is_not_waited_for_to_be_proved() -> None:
    """Nobody trains: there is nothing to stop."""
    state = QuorumState(Options(min_replicas=2))
    for name in ("a", "b"):
        state.connect(0.0, name, f"{name}.1", probes=True)
        ask(state, 0.0, name, address=f"{name}:1")
    form(state, 0.0)
    state.lose(1.0, "b", "killed", certain=True)
    ask(state, 1.0, "a", address="a:1", commit_failures=1)
    assert isinstance(decide(1.0, state, state.options)[0], Wait)
    state.connect(2.0, "c", "c.1", probes=True)
    ask(state, 2.0, "c", address="c:1")
    assert form(state, 2.0).names == ("a", "c")


def test_a_claim_that_nobody_can_serve_loses_its_place() -> None:
    """One accuser suffices if it is older; one that came later cannot throw the holder of the state out."""
    state = crowd("a")
    state.connect(1.0, "liar", "liar.1")
    ask(state, 2.0, "a", step=5, unserved=("liar.1",))
    ask(state, 2.0, "liar", step=1_000_000)
    assert form(state, 2.0).names == ("a",)
    ask(state, 100.0, "a", step=6)
    assert form(state, 100.0).names == ("a",), "it was let in again"
    state = crowd("a")
    state.connect(1.0, "liar", "liar.1")
    ask(state, 2.0, "a", step=5)
    ask(state, 2.0, "liar", step=0, unserved=("a.1",), unreached=("a.1",))
    assert form(state, 2.0).names == ("a",)


GOOD = json.dumps({"ranks": [{"term": 1, "step": 5, "address": "10.0.0.1:80", "torn": False}], "fixed": True})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD, ""),
        (GOOD.replace("10.0.0.1:80", "").replace("}]", ', "novelty": -1}]'), ""),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "no list of 1 to"),
        ('{"ranks": "many"}', "no list of 1 to"),
        ('{"ranks": [7]}', "not an object"),
        (GOOD.replace('"step": 5', '"step": "5"'), "'step' is not a number"),
        (GOOD.replace('"step": 5', '"step": 1e400'), "'step' is not a number"),
        (GOOD.replace('"step": 5', f'"step": {1 << 60}'), "'step' is not a number"),
        (GOOD.replace('"step": 5', '"step": 5, "arrived": [-1, -1], "lineage": [[0, 0], [1, 5]]'), ""),
        (GOOD.replace('"step": 5', '"step": 5, "lineage": [[1, "5"]]'), "'lineage' is not a list"),
        (GOOD.replace('"step": 5', '"step": 5, "arrived": 7'), "'arrived' is not"),
        (GOOD.replace("false", "0"), "'torn' is not a flag"),
        (GOOD.replace("10.0.0.1:80", "nowhere"), "'address' is not HOST:PORT"),
        (GOOD.replace('"step": 5', '"step": 5, "new": {}'), "'new' is not a number"),
    ],
)  # fmt: skip
def test_a_claim_is_checked_before_members_see_it(text: str, why: str) -> None:
    """Malformed ones are refused with what is wrong; fields of newer versions pass."""
    found = find_fault(text)
    assert (why in found) if why else not found, found


def test_a_malformed_claim_is_refused_with_the_name_of_its_sender(
    embedded: Callable[..., Lighthouse], connect: Callable[..., Client]
) -> None:
    """The others form their quorum; the page tells who sent it."""
    address = embedded().address
    a, b = connect(address, "a"), connect(address, "b", node="node-9")
    with pytest.raises(
        LighthouseRefused, match=r"the claim of b \(node-9\) is malformed: it is not valid JSON"
    ):
        b.join(Member("b", data="{", dialect=DIALECT), 30)
    b.close()
    assert a.join(Member("a", data=GOOD, dialect=DIALECT), 30).names == ("a",)
    assert any("the claim of b" in event["text"] for event in a.status()["history"])


def test_a_newcomer_is_probed_by_members_that_train(
    embedded: Callable[..., Lighthouse], connect: Callable[..., Client]
) -> None:
    """Nobody listens at its address: no member is called for it, and the page says why it waits."""
    address = embedded().address
    a = connect(address, "a")
    called = threading.Event()
    a.subscribe(lambda notice: called.set() if type(notice).__name__ == "QuorumWanted" else None)
    assert a.join(Member("a"), 30).names == ("a",)
    b = connect(address, "b")
    ticket = b.request_quorum(Member("b", address="127.0.0.1:9"))
    eventually(lambda: {r["replica"]: r["state"] for r in a.status()["replicas"]}["b"] == "unreachable")
    assert not called.is_set() and not ticket.done()
    assert "b (cannot connect to a" in a.status()["waiting"]


def test_real_processes_that_ask_in_a_loop_are_slowed_down(
    run_lighthouse: Callable[..., object], victims: Callable[..., list[Victim]]
) -> None:
    """Two replicas that give up each group at once: 10 quorums come fast, the next only after pauses."""
    lighthouse = run_lighthouse()
    pair = victims(lighthouse.address, "a", "b")  # type: ignore[attr-defined]
    began, numbers = time.monotonic(), []
    for _ in range(12):
        for victim in pair:
            victim.say("join 0 1")
        (number,) = {victim.quorum()["quorum"] for victim in pair}
        numbers.append(number)
    assert numbers == sorted(set(numbers))
    assert time.monotonic() - began > 2.5, "more than 10 quorums in 2.5 s"
