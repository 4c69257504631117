"""Random lives of a job: whatever happens, the rules of the quorum hold."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given, settings

from allranks.lighthouse.decide import Form, decide
from allranks.lighthouse.options import Options
from allranks.lighthouse.state import QuorumState
from allranks.model.cluster import Member, Quorum

from .dumb import dumb_decision

NAMES = [f"r{i}" for i in range(6)]
names = st.sampled_from(NAMES)


class JobLife:
    """Replicas come, ask, die, fall silent, leave, restart, are evicted; time passes; quorums are formed."""

    def __init__(
        self, crowd: int, min_replicas: int, multiple_of: int, max_replicas: int, flap_limit: int, expect: int
    ) -> None:
        self.options = Options(
            min_replicas=min_replicas, multiple_of=multiple_of, max_replicas=max_replicas, join_timeout_s=10.0,
            presume_dead_s=30.0, finished_hold_s=100.0, flap_limit=flap_limit, expect_replicas=expect, flap_backoff_s=3.0,
        )  # fmt: skip
        self.state = QuorumState(self.options)
        self.now = 0.0
        self.lives = dict.fromkeys(NAMES, 0)
        self.formed: dict[tuple[int, int], Quorum] = {}
        self.reported: Quorum | None = None
        self.started = 0
        for name in NAMES[:crowd]:
            self.connect(name, False)

    def _session(self, name: str) -> str:
        return f"{name}.{self.lives[name]}"

    def connect(self, name: str, observer: bool) -> None:
        if name not in self.state.replicas:
            self.state.connect(self.now, name, self._session(name), observer=observer)

    def restart(self, name: str) -> None:
        if name in self.state.replicas:
            self.state.lose(self.now, name, "restarted", True)
        self.lives[name] += 1
        self.state.connect(self.now, name, self._session(name))

    def ask(self, name: str, step: int, shrink: bool, failed: int, patience: float = 0) -> None:
        if name in self.state.replicas and name not in self.state.evicted:
            member = Member(name, self._session(name), step=step, shrink_only=shrink, commit_failures=failed)
            self.state.ask(self.now, name, member, patience)

    def everybody_asks(self) -> None:
        for name, replica in self.state.replicas.items():
            if name not in self.state.evicted and not replica.observer:
                self.state.ask(self.now, name, Member(name, replica.session))

    def lose(self, name: str, certain: bool) -> None:
        if name in self.state.replicas:
            self.state.lose(self.now, name, "gone", certain)

    def leave(self, name: str) -> None:
        if name in self.state.replicas:
            self.state.leave(self.now, name, "bye")

    def withdraw(self, name: str) -> None:
        self.state.withdraw(name)

    def evict(self, name: str) -> None:
        self.state.evict(name, "bad")

    def let_in(self, name: str) -> None:
        self.state.let_in(name)

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.state.advance(self.now)

    def lighthouse_restarts(self) -> None:
        """The new one starts with nothing but the quorum that a member reports."""
        last, evicted = self.state.last, dict(self.state.evicted)
        if last is None:
            return
        self.state = QuorumState(self.options)
        self.state.evicted = evicted
        self.state.adopt(self.now, last)

    def lighthouse_forgets(self) -> None:
        """The new one knows nothing yet; anyone who is faster than the members may come first."""
        self.reported = self.state.last or self.reported
        self.started += 1  # a lighthouse takes its epoch from the clock
        self.state = QuorumState(self.options, epoch=self.started * 1000, settling_until=self.now + 2.0)

    def member_reports(self) -> None:
        """A member comes back to a lighthouse that has formed nothing, or something out of nothing."""
        if self.reported is not None and not self.state.taken_over:
            told = (self.reported.epoch, self.reported.number, self.reported.round)
            assert self.state.note_last_quorum(self.now, told, unknown=True)
            assert self.state.settling_until > self.now
            self.state.adopt(self.now, self.reported)
            assert not self.state.yielding and self.state.number >= self.reported.number
            self.reported = None

    def finish(self, name: str, step: int = -1) -> None:
        if name in self.state.replicas:
            self.state.leave(self.now, name, "through", step)
            self.state.finish(self.now, name)

    def all_finish(self) -> None:
        """The end of a training."""
        self.one_step()
        for name in sorted(self.state.continuing):
            self.finish(name)

    def form(self) -> None:
        decision, reason = decide(self.now, self.state, self.options)
        if not isinstance(decision, Form):
            return
        before = self.state.last
        everybody = before is None and 0 < self.options.expect_replicas <= len(self.state.asking)
        assert self.now >= self.state.settling_until or everybody, (
            "a new lighthouse did not wait for those who train already"
        )
        if self.state.over and self.now < self.state.finished_at + self.options.finished_hold_s:
            again = self.state.finishers <= self.state.asking.keys()
            many = 2 * len(self.state.asking) > self.state.largest
            assert again or many, "latecomers began a training that is over"
        quorum = self.state.next_quorum(decision.members, decision.spares, reason)
        self._check_new(quorum, before)
        self.state.form(quorum)

    def one_step(self) -> None:
        """What a healthy job does all day."""
        self.everybody_asks()
        self.form()

    def die_in_a_step(self, name: str, certain: bool) -> None:
        """A member is lost while the others train, and the survivors ask."""
        self.one_step()
        self.lose(name, certain)
        self.one_step()

    def some_ask(self, chosen: set[str]) -> None:
        for name in sorted(chosen):
            self.ask(name, 0, False, 0)

    def _check_new(self, quorum: Quorum, before: Quorum | None) -> None:
        key = (quorum.epoch, quorum.number)
        if key in self.formed:
            known = self.formed[key]
            same = [(m.replica, m.session) for m in known.members] == [
                (m.replica, m.session) for m in quorum.members
            ]
            assert same, "two quorums of one epoch and number disagree"
        self.formed[key] = quorum
        assert self.options.allows(len(quorum.members))
        assert quorum.reason
        for name in quorum.names:
            assert name in self.state.replicas, "a dead replica was made a member"
            assert name not in self.state.evicted, "an evicted replica was made a member"
            assert not self.state.replicas[name].observer
            assert self.state.replicas[name].cooling_until <= self.now
        if before is not None:
            assert quorum.number >= before.number
            assert quorum.round > before.round
            self._check_no_split(quorum, before)
            self._check_nobody_living_is_dropped_early(quorum)

    def _check_nobody_living_is_dropped_early(self, quorum: Quorum) -> None:
        """A living member is left out only when a fellow member has waited for it for the whole join timeout, or as long as it can."""
        inside = set(quorum.names) | set(quorum.spares)
        if all(member.shrink_only is False for member in quorum.members) and self.state.continuing - inside:
            asked = [self.state.replicas[name] for name in self.state.continuing & inside]
            assert asked
            first = min(each.asked_at + self.options.join_timeout_s for each in asked)
            assert self.now >= min(first, *(each.patient_until for each in asked))

    def _check_no_split(self, quorum: Quorum, before: Quorum) -> None:
        """Those of the last quorum that may still be training without this one are never the majority."""
        inside = {(m.replica, m.session) for m in quorum.members} | {
            (name, "spare") for name in quorum.spares
        }
        could = {
            m.replica
            for m in before.members
            if (m.replica, m.session) not in inside
            and m.replica not in quorum.spares
            and (m.replica in self.state.continuing or m.replica in self.state.silent)
        }
        stayed = {m.replica for m in before.members if m.replica in self.state.continuing} - could
        assert len(could) <= len(stayed), f"{could} of quorum {before.number} may train on without {stayed}"

    def decides_like_the_dumb_one(self) -> None:
        self.state.advance(self.now)
        decision, reason = decide(self.now, self.state, self.options)
        expected = dumb_decision(self.now, self.state, self.options)
        assert reason
        if isinstance(decision, Form):
            assert (decision.rule, tuple(m.replica for m in decision.members), decision.spares) == expected
        else:
            assert decision.rule == expected[0]

    def a_living_member_is_never_dropped_without_a_reason(self) -> None:
        """Members that are gone have left or were lost, or the lighthouse is new."""
        if self.state.last is None:
            return
        for member in self.state.last.members:
            here = member.replica in self.state.replicas
            assert here or member.replica in self.state.gone or member.replica in self.state.evicted

    def the_dead_are_forgotten(self) -> None:
        """Only members of the last quorum are remembered once they are gone, and silence has its limit."""
        members = set(self.state.last.names) if self.state.last else set()
        assert set(self.state.gone) <= members
        for name in self.state.silent:
            assert self.now - self.state.gone[name].at < self.options.presume_dead_s


def _event(kind: str, /, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(kind), st.fixed_dictionaries(values))


EVENTS = st.one_of(
    _event("connect", name=names, observer=st.sampled_from([False] * 5 + [True])),
    _event("restart", name=names),
    _event(
        "ask",
        name=names,
        step=st.integers(0, 3),
        shrink=st.sampled_from([False] * 6 + [True]),
        failed=st.integers(0, 1),
        patience=st.sampled_from([0, 0, 4, 30]),
    ),
    _event("everybody_asks"),
    _event("some_ask", chosen=st.sets(names, min_size=1)),
    _event("lose", name=names, certain=st.booleans()),
    _event("leave", name=names),
    _event("withdraw", name=names),
    _event("evict", name=names),
    _event("let_in", name=names),
    _event("time_passes", seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0, 31.0])),
    _event("lighthouse_restarts"),
    _event("lighthouse_forgets"),
    _event("member_reports"),
    _event("finish", name=names, step=st.integers(-1, 3)),
    _event("all_finish"),
    _event("form"),
    _event("one_step"),
    _event("die_in_a_step", name=names, certain=st.booleans()),
)


# An evicted replica that falls silent afterwards is not waited for (once found by chance).
EVICTED_THEN_SILENT: list[tuple[str, dict[str, Any]]] = [
    ("all_finish", {}),
    ("connect", {"name": "r0", "observer": False}),
    ("evict", {"name": "r0"}),
    ("connect", {"name": "r1", "observer": False}),
    ("die_in_a_step", {"name": "r0", "certain": False}),
]


# A lighthouse that knows nothing begins with number 1 again, in an epoch of its own (once found by chance).
NEW_LIGHTHOUSE: list[tuple[str, dict[str, Any]]] = [
    ("one_step", {}),
    ("lighthouse_forgets", {}),
    ("time_passes", {"seconds": 4.0}),
    ("connect", {"name": "r0", "observer": False}),
    ("all_finish", {}),
]


@settings(max_examples=400)
@example(
    crowd=2, min_replicas=1, multiple_of=1, max_replicas=0, flap_limit=0, expect=0,
    events=NEW_LIGHTHOUSE,
)  # fmt: skip
@example(
    crowd=2, min_replicas=2, multiple_of=1, max_replicas=0, flap_limit=0, expect=0, events=EVICTED_THEN_SILENT
)
@given(
    crowd=st.integers(0, 6),
    min_replicas=st.integers(1, 3),
    multiple_of=st.sampled_from([1, 1, 2]),
    max_replicas=st.sampled_from([0, 0, 4]),
    flap_limit=st.integers(0, 2),
    expect=st.sampled_from([0, 0, 3]),
    events=st.lists(EVENTS, max_size=40),
)
def test_whatever_happens_the_rules_hold(events: list[tuple[str, dict[str, Any]]], **options: int) -> None:
    """Decides like the dumb one, never splits, drops nobody without a reason, forgets the dead."""
    life = JobLife(**options)
    for name, values in events:
        getattr(life, name)(**values)
        life.decides_like_the_dumb_one()
        life.a_living_member_is_never_dropped_without_a_reason()
        life.the_dead_are_forgotten()
