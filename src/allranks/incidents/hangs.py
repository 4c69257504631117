"""From a suspicion to an action: evidence, verdict, policy, story. Runs on the thread that the watch gives it.

It takes seconds, and the watch goes on meanwhile: a death is noticed while something else is examined. Evidence is on
disk before anything is asked of the actor. On several nodes one agent leads an incident and the others send their part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from allranks.incidents.deaths import DeathIncidents
from allranks.incidents.evidence import Gatherer
from allranks.incidents.examine import Examination
from allranks.incidents.folder import IncidentFolder, open_incident
from allranks.incidents.judge import Observed
from allranks.incidents.options import WatchOptions
from allranks.incidents.policy import Case, PolicyState, back_off_left_s, decide_action
from allranks.incidents.publish import IncidentPublisher
from allranks.incidents.recoveries import Recoveries
from allranks.incidents.stuck_or_slow import Look, judge
from allranks.model.cluster import Gathering
from allranks.model.diagnosis import Finding
from allranks.model.incident import Action, Incident, Moment
from allranks.watch.history import History
from allranks.watch.samples import RankSample, read_samples
from allranks.watch.silence import Suspicion

log = logging.getLogger("allranks.agent")


class Actor(Protocol):
    """Who carries out what the policy decided."""

    def act(self, action: Action, incident: Incident) -> str:
        """Does it, and says in a sentence what was done."""
        ...


@dataclass
class _Inquiry:
    """A suspicion that is being looked into."""

    opened: IncidentFolder
    pids: frozenset[int]  # of the suspects: a new process is a new case
    looks: list[Look] = field(default_factory=list)
    next_s: float = 0.0  # monotonic: not before
    hung: bool = False  # settled: it is one


@dataclass
class HangInvestigator:
    """At most one standstill and one replica left behind at a time. Not for two threads at once."""

    options: WatchOptions
    history: History
    gatherer: Gatherer
    teller: IncidentPublisher
    deaths: DeathIncidents
    recoveries: Recoveries
    actor: Actor | None = None
    _policy: PolicyState = field(default_factory=PolicyState)
    _standstill: _Inquiry | None = None  # nobody moves
    _behind: _Inquiry | None = None  # one rank does not move, the others do

    def suspect(
        self, now_s: float, samples: list[RankSample]
    ) -> tuple[Suspicion | None, Callable[[], None] | None]:
        """What looks wrong, and the examination that it asks for now; quick."""
        suspicion = self.history.standstill(now_s, samples)
        if suspicion is not None:
            case = self._standstill
            due = case is None or time.monotonic() >= case.next_s
            return suspicion, (lambda: self._examine(suspicion, samples)) if due else None
        if self._standstill is not None and self.history.moves:
            self._close_as_slow("the job went on by itself")
        return self._suspect_behind(now_s, samples) if self.options.mode == "replica" else (None, None)

    def close(self) -> None:
        """The job is over: what was not settled is told as that."""
        for case in (self._standstill, self._behind):
            if case is not None and not case.hung:
                self._close(case.opened, "the job ended before it was clear whether it hung")

    def gather(
        self, opened: IncidentFolder, samples: list[RankSample], suspects: list[RankSample] | None = None,
        gathering: Gathering | None = None, observed: Observed | None = None,
    ) -> Examination:  # fmt: skip
        """Boxes of all ranks; stacks of the suspects, which are all ranks unless said otherwise; others' parts."""
        begin = time.monotonic()
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        pids = {s.rank: s.pid for s in (samples if suspects is None else suspects) if s.alive}
        found = self.gatherer.examine(opened, pids, samples, gathering, observed)
        durations = {**opened.current.durations_s, "evidence": time.monotonic() - begin}
        parts = f", parts of {len(gathering.agents)} other nodes" if gathering else ""
        opened.update(
            Moment("evidence", time.time(), f"{len(samples)} black boxes, stacks of {len(pids)} ranks{parts}"),
            missing=(*missing, *found.missing), durations_s=durations, **found.facts(),
        )  # fmt: skip
        return found

    # nobody moves

    def _examine(self, suspicion: Suspicion, samples: list[RankSample]) -> None:
        case = self._standstill
        if case is None:
            opened = self._open(suspicion, max((s.step for s in samples), default=-1))
            case = self._standstill = _Inquiry(opened, frozenset(s.pid for s in samples))
        gathering = self.gatherer.ask(case.opened, suspicion.reason)
        if gathering is not None and self.gatherer.follows(gathering):
            self._follow(case, gathering)
            return
        if not case.looks:
            log.warning("%s: %s", case.opened.current.id, suspicion.reason)
        unmoved = (
            () if self.options.whole_job else self.history.not_retrying(read_samples(self.options.folder))
        )
        observed = Observed(reason=suspicion.reason, quiet_s=suspicion.quiet_s, unmoved=unmoved)
        found = self.gather(case.opened, samples, gathering=gathering, observed=observed)
        hung, reason = self._judge(case, suspicion, found, samples)
        if hung is None:
            self.history.excuse()
        elif hung is False:
            self._close_as_slow(reason)
        elif self._answer(case, found, reason, samples):
            self._standstill = None
            # The same standstill is not reported twice: a new suspicion needs a whole further limit.
            self.history.excuse(times=4)

    def _follow(self, case: _Inquiry, gathering: Gathering) -> None:
        """Another node noticed the same before us: it explains and acts, and has our part."""
        log.warning("%s of %s: this node sends its part", gathering.incident, gathering.lead)
        if not case.looks:
            case.opened.discard()
            self._standstill = None
        self.history.excuse()

    # the others go on

    def _suspect_behind(
        self, now_s: float, samples: list[RankSample]
    ) -> tuple[Suspicion | None, Callable[[], None] | None]:
        """Replicas that the others have given up stand still beside a job that moves."""
        fresh = [s for s in samples if not self.deaths.explained.covers(s)]
        suspicion = self.history.left_behind(now_s, fresh)
        suspects = self._of_one_replica(suspicion, fresh)
        if self._behind is not None and self._behind.pids != frozenset(s.pid for s in suspects):
            self._close(self._behind.opened, "it moves again or is gone")
            self._behind = None
        if suspicion is None or (self._behind is not None and time.monotonic() < self._behind.next_s):
            return suspicion, None
        return suspicion, lambda: self._examine_behind(suspicion, suspects, samples)

    def _examine_behind(
        self, suspicion: Suspicion, suspects: list[RankSample], samples: list[RankSample]
    ) -> None:
        case = self._behind
        if case is None:
            pids = frozenset(s.pid for s in suspects)
            case = self._behind = _Inquiry(self._open(suspicion, suspects[0].step), pids)
            log.warning("%s: %s", case.opened.current.id, suspicion.reason)
        behind = Observed(
            reason=suspicion.reason, quiet_s=suspicion.quiet_s, behind=tuple(s.rank for s in suspects)
        )
        found = self.gather(case.opened, samples, suspects, observed=behind)
        hung, reason = self._judge(case, suspicion, found, suspects)
        if hung is None:
            case.next_s = time.monotonic() + self.options.notice.floor_s / 2
        elif hung is False or self._answer(case, found, reason, samples):
            self._behind = None
            self.deaths.explained.add(case.pids)
            if not hung:
                self._close(case.opened, reason)

    def _of_one_replica(self, suspicion: Suspicion | None, samples: list[RankSample]) -> list[RankSample]:
        if suspicion is None:
            return []
        size = self.options.ranks_per_replica
        first = suspicion.quiet[0] // size
        return [s for s in samples if s.rank in suspicion.quiet and s.rank // size == first]

    # both

    def _open(self, suspicion: Suspicion, step: int) -> IncidentFolder:
        now = time.time()
        since = now - suspicion.quiet_s
        opened = open_incident(
            self.options.incidents, kind="hang", job=self.options.job, reason=suspicion.reason,
            node=self.options.node, step=step,
        )  # fmt: skip
        overdue = f"silent for more than {suspicion.limit_s:.1f} s"
        opened.update(
            Moment("last good step", since, f"step {step}"),
            Moment("overdue", since + suspicion.limit_s, overdue),
            Moment("noticed", now, suspicion.reason),
            durations_s={"noticed": suspicion.quiet_s},
        )
        return opened

    def _judge(
        self, case: _Inquiry, suspicion: Suspicion, found: Examination, suspects: list[RankSample]
    ) -> tuple[bool | None, str]:
        after = read_samples(self.options.folder)
        ended = find_ended(suspects, after, found.ranks, self.options.whole_job)
        if ended is not None:
            return False, f"rank {ended} ended while it was looked at: its own incident tells"
        now, progress = {s.rank: s for s in after}, self.options.notice.progress
        pairs = [(s, now[s.rank]) for s in suspects if s.rank in now]
        moved = any(progress(a) != progress(b) for a, b in pairs)
        calling = any(a.calls_completed != b.calls_completed and a.step_ns == b.step_ns for a, b in pairs)
        case.looks.append(Look(time.monotonic(), suspicion.quiet_s, found.stacks, moved, calling))
        hung, reason = judge(case.looks, self.options.notice.cap_s)
        case.hung = hung is True
        log.debug("%s: look %d: %s", case.opened.current.id, len(case.looks), reason)
        return hung, reason

    def _answer(self, case: _Inquiry, found: Examination, reason: str, samples: list[RankSample]) -> bool:
        """Decides and acts; False when the action must wait for the back-off after the one before."""
        opened, verdict = case.opened, found.verdict or Finding("", (), reason)
        left_s = back_off_left_s(time.monotonic(), self._policy, self.options.policy)
        if left_s > 0:
            log.warning("%s: %s; acting in %.0f s at the earliest", opened.current.id, reason, left_s)
            case.next_s = time.monotonic() + left_s
            return False
        opened.update(Moment("verdict", time.time(), verdict.sentence))
        self.teller.say(opened)
        facts = Case(
            self.options.mode, verdict.cause, verdict.ranks, verdict.confidence, self.options.ranks_per_replica,
            self.options.replicas,
            members=tuple(sorted({s.rank // self.options.ranks_per_replica for s in samples if s.alive})),
        )  # fmt: skip
        action, why = decide_action(time.monotonic(), facts, self._policy, self.options.policy)
        opened.update(action=action)
        self.teller.publish(opened)  # the story so far is safe before anything is killed
        self._act(opened, action, why, samples)
        self.teller.publish(opened)
        done = opened.current.action
        restarted = self.options.whole_job and done is not None and done.done
        self.recoveries.add(opened, samples, set(action.ranks), reborn=restarted)
        if restarted and {s.rank for s in samples} & set(action.ranks):
            self.deaths.count_failure(opened)
        return True

    def _act(self, opened: IncidentFolder, action: Action, why: str, samples: list[RankSample]) -> None:
        if action.kind not in ("evict", "restart_rank", "restart_job", "command") or self.actor is None:
            opened.update(Moment("action", time.time(), f"none ({action.kind.replace('_', ' ')}): {why}"))
            log.warning("%s: no action: %s", opened.current.id, why)
            return
        size = self.options.ranks_per_replica
        going = {rank // size for rank in action.ranks}  # those who end with the guilty ones are no deaths
        self.deaths.explained.add(s.pid for s in samples if self.options.whole_job or s.rank // size in going)
        self.history.cure()
        self._policy = self._policy.after(time.monotonic(), action.replica, self.options.policy.window_s)
        try:
            result, done = self.actor.act(action, opened.current), True
        except Exception as error:  # the story goes on, and says so
            log.exception("%s: %s failed", opened.current.id, action.kind)
            result, done = f"failed: {error!r}", False
        carried = replace(action, done=done, result=result)
        opened.update(
            Moment("action", time.time(), f"{action.kind.replace('_', ' ')}: {result}"), action=carried
        )
        log.warning("%s: %s: %s", opened.current.id, action.kind.replace("_", " "), result)

    def _close_as_slow(self, reason: str) -> None:
        case, self._standstill = self._standstill, None
        if case is not None:
            self._close(case.opened, reason)

    def _close(self, opened: IncidentFolder, reason: str) -> None:
        opened.update(Moment("back to speed", time.time(), reason), kind="slow", closed=time.time())
        self.teller.write_page(opened)


def find_ended(
    before: Sequence[RankSample], after: Sequence[RankSample], guilty: Sequence[int], whole_job: bool
) -> int | None:
    """A rank whose end settles what was being examined: any of a whole job, else one of those named. None: all live."""
    alive = {s.rank: s.pid for s in after if s.alive}
    ended = [s.rank for s in before if s.alive and alive.get(s.rank) != s.pid]
    return next((rank for rank in ended if whole_job or rank in guilty), None)
