"""From a suspicion to an action: evidence, verdict, policy, story. Runs on a thread that the watch starts.

An examination takes seconds, during which the watch continues to notice deaths. Evidence is on disk before the actor is called.
On several nodes one agent leads an incident and the others send their part. A hang that continues stays one incident: its case
is open until the job makes progress or its processes change.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from allranks.incidents.deaths import DeathIncidents
from allranks.incidents.evidence import Observed
from allranks.incidents.folder import IncidentFolder
from allranks.incidents.pipeline import Examination, IncidentPipeline
from allranks.incidents.policy import HangFacts, PolicyState, back_off_left_s, decide_action
from allranks.incidents.stall import (
    Look,
    StallOutcome,
    describe_pause,
    find_activity,
    judge_stall,
    left_s,
    limits_of,
    next_look_s,
)
from allranks.model.cluster import Gathering, Motion
from allranks.model.diagnosis import Action, Finding, Moment
from allranks.model.formatting import duration
from allranks.report.story import headline
from allranks.watch.samples import ProcessId, RankSample, last_good, read_samples
from allranks.watch.silence import ProgressHistory, Suspicion

log = logging.getLogger("allranks.agent")

AGAIN_S = 30.0  # shortest time until a hang without an action is examined again
MAX_LOOKS = 32  # kept per case: ranks that call each other (RPC) are a stall for as long as the job lasts
LASTED_S = 10.0  # between two writes of the duration of a hang

UNKNOWN = StallOutcome("stalled", "")

Examine = Callable[[], None]


@dataclass
class HangCase:
    """A suspicion under examination, or a hang that was answered and continues."""

    opened: IncidentFolder
    processes: frozenset[ProcessId]  # of the suspects; other processes are a new case
    since_s: float = 0.0  # monotonic: the last progress before the stall
    lead: str = ""  # the agent that leads the incident, if it is another node's
    looks: list[Look] = field(default_factory=list)
    next_s: float = 0.0  # monotonic: no examination before this time
    next_quiet_s: float = 0.0  # no examination before the silence has lasted this long
    took_s: float = 0.0  # duration of the last examination
    outcome: StallOutcome = UNKNOWN  # of the looks so far
    answered: bool = False  # published, and the policy has decided
    lasted_s: float = 0.0  # as last written

    @property
    def stalled(self) -> str:
        """The stall in a sentence."""
        quiet_s = max((look.quiet_s for look in self.looks), default=0.0)
        what = describe_pause(self.looks)
        lasted = f" for {duration(quiet_s)}" if self.looks else ""
        return f"stalled{lasted}" + (f": {what}" if what else "")

    def prolong(self, quiet_s: float) -> None:
        """Writes how long the hang has lasted, every LASTED_S."""
        if not self.lead and quiet_s - self.lasted_s >= LASTED_S:
            self.lasted_s = quiet_s
            self.opened.update(durations_s={"lasted": quiet_s})


@dataclass
class HangInvestigator:
    """Examines at most one standstill and one replica left behind at a time. Not thread-safe."""

    pipeline: IncidentPipeline
    history: ProgressHistory
    deaths: DeathIncidents
    policy: PolicyState = field(default_factory=PolicyState)
    standstill: HangCase | None = None  # no rank makes progress
    behind: HangCase | None = None  # one replica makes no progress, the others do
    _ended: HangCase | None = None  # the last standstill that ended with progress of a rank

    def __post_init__(self) -> None:
        self.options = self.pipeline.options

    @property
    def motion(self) -> tuple[Motion, str]:
        """The state of the job, and its reason. From any thread."""
        case = self.standstill
        if case is None:
            return "moving", ""
        incident = case.opened.current
        if case.outcome.state == "hung":
            return "hung", headline(incident)
        return "stalled", case.outcome.reason or incident.reason

    def suspect(self, now_s: float, samples: list[RankSample]) -> tuple[Suspicion | None, Examine | None]:
        """A suspicion, and its examination if one is due. Quick."""
        suspicion = self.history.standstill(now_s, samples)
        self._forget_ended(suspicion, samples)
        if suspicion is not None:
            return suspicion, (lambda: self._examine(suspicion, samples)) if self._due(suspicion) else None
        return self._suspect_behind(now_s, samples) if self.options.mode == "replica" else (None, None)

    def close(self) -> None:
        """Reports open stalls when the job ends."""
        for case in (self.standstill, self.behind):
            if case is not None and case.outcome.state != "hung" and not case.lead:
                self._close(case, "the job ended", moves=False)

    # no rank makes progress

    def _forget_ended(self, suspicion: Suspicion | None, samples: list[RankSample]) -> None:
        case = self.standstill
        if case is None:
            return
        settled = case.answered or bool(case.lead)
        if suspicion is None and self.history.moves:
            self.standstill = None
            if not settled:
                self._close(case, "the ranks move again")
                self._ended = case
        elif settled and (case.processes != _processes(samples) or self._is_gone(case.lead)):
            self.standstill = None

    def _is_gone(self, lead: str) -> bool:
        return bool(lead) and (self.pipeline.peers is None or lead in self.pipeline.peers.gone)

    def _due(self, suspicion: Suspicion) -> bool:
        case = self.standstill
        if case is None:
            return True
        if case.answered:
            case.prolong(suspicion.quiet_s)
            if not self.options.policy.may_act(self.options.mode):
                return False
        due = suspicion.quiet_s >= case.next_quiet_s and time.monotonic() >= case.next_s
        return due and not case.lead

    def _examine(self, suspicion: Suspicion, samples: list[RankSample]) -> None:
        case = self.standstill
        if case is None:
            step = max((s.step for s in samples), default=-1)
            opened = self._open(suspicion, step, samples)
            case = self.standstill = HangCase(opened, _processes(samples), suspicion.since_s)
        gathering = self.pipeline.ask(case.opened, suspicion.reason)
        if gathering is not None and self.pipeline.follows(gathering):
            self._follow(case, gathering)
            return
        now = [] if self.options.whole_job else read_samples(self.options.folder)
        observed = Observed(unmoved=self.history.not_retrying(now) if now else (), looping=suspicion.by_step)
        found = self._inspect(case, suspicion, samples, samples, observed, gathering)
        state = case.outcome.state
        if state == "stalled" and not suspicion.by_step:
            self.history.extend_deadline()
        elif state == "ended":
            self.standstill, self._ended = None, case
        elif state == "hung" and self._answer(case, found, samples) and case.opened.current.acted:
            self.standstill = None
            self.history.extend_deadline(
                times=5
            )  # the action takes time: a whole limit until a new suspicion

    def _follow(self, case: HangCase, gathering: Gathering) -> None:
        """Another node noticed the stall first: it explains and acts, and this node has sent its part."""
        log.warning("%s of %s: this node sends its part", gathering.incident, gathering.lead)
        if not case.looks:
            case.opened.discard()
            case.lead = gathering.lead
        self.history.extend_deadline()

    # the others continue

    def _suspect_behind(
        self, now_s: float, samples: list[RankSample]
    ) -> tuple[Suspicion | None, Examine | None]:
        """A suspicion of replicas that stall while the others continue without them."""
        fresh = [s for s in samples if not self.pipeline.explained.covers(s)]
        stalled = [p for case in (self._ended, self.behind) if case is not None for p in case.processes]
        suspicion = self.history.left_behind(now_s, fresh, stalled)
        suspects = self._of_one_replica(suspicion, fresh)
        if self.behind is not None and self.behind.processes != _processes(suspects):
            self._close(self.behind, "it moves again or has ended")
            self.behind = None
        if suspicion is None or (self.behind is not None and time.monotonic() < self.behind.next_s):
            return suspicion, None
        return suspicion, lambda: self._examine_behind(suspicion, suspects, samples)

    def _examine_behind(
        self, suspicion: Suspicion, suspects: list[RankSample], samples: list[RankSample]
    ) -> None:
        case = self.behind
        if case is None:
            opened = self._reopen(suspicion, suspects) or self._open(suspicion, suspects[0].step, samples)
            case = self.behind = HangCase(opened, _processes(suspects))
        observed = Observed(behind=tuple(s.rank for s in suspects))
        found = self._inspect(case, suspicion, samples, suspects, observed)
        ended = case.outcome.state == "ended"
        if ended or (case.outcome.state == "hung" and self._answer(case, found, samples)):
            self.behind = None
            self.pipeline.explained.add(s.pid for s in suspects)

    def _reopen(self, suspicion: Suspicion, suspects: list[RankSample]) -> IncidentFolder | None:
        """The incident of the standstill before the others continued without these ranks."""
        case, self._ended = self._ended, None
        if case is None or not _processes(suspects) <= case.processes:
            return None
        if case.opened.current.opened < time.time() - suspicion.quiet_s:
            return None  # the suspects have made progress since
        case.opened.update(Moment("left behind", time.time(), suspicion.reason), closed=None)
        return case.opened

    def _of_one_replica(self, suspicion: Suspicion | None, samples: list[RankSample]) -> list[RankSample]:
        if suspicion is None:
            return []
        of = self.options.replica_of
        return [s for s in samples if s.rank in suspicion.quiet and of(s.rank) == of(suspicion.quiet[0])]

    # both

    def _open(self, suspicion: Suspicion, step: int, samples: list[RankSample]) -> IncidentFolder:
        now = time.time()
        since = now - suspicion.quiet_s
        opened = self.pipeline.open("stall", suspicion.reason, samples, step=step)
        overdue = f"silent for more than {suspicion.limit_s:.1f} s"
        opened.update(
            Moment("last good step", since, last_good(step, samples)),
            Moment("overdue", since + suspicion.limit_s, overdue),
            Moment("noticed", now, suspicion.reason),
            durations_s={"noticed": now - since},
        )
        return opened

    def _inspect(
        self,
        case: HangCase,
        suspicion: Suspicion,
        samples: list[RankSample],
        suspects: list[RankSample],
        observed: Observed,
        gathering: Gathering | None = None,
    ) -> Examination:
        """One more look: boxes of all ranks, stacks of the suspects and parts of other nodes, and their verdict."""
        begin, opened = time.monotonic(), case.opened
        if case.looks:  # at the first look the boxes have just been copied
            self.pipeline.keep_boxes(opened, samples)
        else:
            log.warning("%s: stalled: %s", opened.current.id, suspicion.reason)
        observed = replace(observed, reason=suspicion.reason, quiet_s=suspicion.quiet_s)
        number = len(case.looks)
        found = self.pipeline.examine(
            opened, samples, observed, stacks_of=suspects, look=number, gathering=gathering
        )
        if number < 2:
            alive = sum(s.alive for s in suspects)
            parts = f", parts of {len(gathering.agents)} other nodes" if gathering else ""
            text = f"{len(samples)} black boxes, stacks of {alive} ranks{parts}"
            durations = {"evidence": time.monotonic() - begin}
            opened.update(Moment("evidence", time.time(), text), durations_s=durations)
        case.took_s = time.monotonic() - begin
        self._judge(case, replace(suspicion, quiet_s=suspicion.quiet_s + case.took_s), found, suspects)
        loop = case.outcome.reason if case.outcome.livelock else ""  # no rank is guilty
        corrected = self.pipeline.settle(opened, looping=loop) if loop else None
        return found if corrected is None else replace(found, diagnosis=corrected)

    def _judge(
        self, case: HangCase, suspicion: Suspicion, found: Examination, suspects: list[RankSample]
    ) -> None:
        """The outcome of the case after one more look."""
        notice, alive = self.options.notice, [sample for sample in suspects if sample.alive]
        limits = limits_of(notice.floor_s, notice.cap_s, self.history.longest_s, self.history.trained)
        if wait_s := left_s(suspicion.quiet_s, limits, case.outcome.hung_at_s):
            time.sleep(wait_s)
            suspicion = replace(suspicion, quiet_s=suspicion.quiet_s + wait_s)
        after, moves = read_samples(self.options.folder), False
        if (ended := find_ended(suspects, after, found.ranks, self.options.whole_job)) is not None:
            case.outcome = StallOutcome("ended", f"rank {ended} ended while it was inspected")
        elif alive and all(map(self.pipeline.asked_to_end.covers, alive)):
            case.outcome = StallOutcome("ended", "the job was stopped")  # stacks at exit prove nothing
        else:
            del case.looks[:-MAX_LOOKS]
            case.looks.append(self._look(suspicion, found, suspects, {s.rank: s for s in after}))
            case.outcome, moves = judge_stall(case.looks, limits), True
        if case.outcome.state == "ended":
            self._close(case, case.outcome.reason, moves)
            return
        stalled = case.outcome.state == "stalled"
        self.pipeline.settle(case.opened, f"stalled: {describe_pause(case.looks)}" if stalled else "")
        further = stalled and len(case.looks) > 1
        at_s = case.outcome.hung_at_s
        case.next_quiet_s = next_look_s(suspicion.quiet_s, limits, case.took_s, at_s) if further else 0.0
        if stalled and (suspicion.by_step or case is self.behind):  # otherwise the deadline is extended
            case.next_s = time.monotonic() + self.options.notice.floor_s / 2
        known = {moment.text for moment in case.opened.current.timeline}
        if stalled and len(case.looks) > 1 and case.outcome.reason not in known:
            case.opened.update(Moment("sampled again", time.time(), case.outcome.reason))

    def _look(
        self,
        suspicion: Suspicion,
        found: Examination,
        suspects: list[RankSample],
        now: dict[int, RankSample],
    ) -> Look:
        progress = self.options.notice.progress
        pairs = [(s, now[s.rank]) for s in suspects if s.rank in now]
        by_step = suspicion.by_step
        moved = any(a.step != b.step if by_step else progress(a) != progress(b) for a, b in pairs)
        evidence = found.evidence
        observed = evidence.observed or Observed()
        return Look(
            time.monotonic(),
            suspicion.quiet_s,
            evidence.report,
            moved,
            calling=any(a.calls_completed != b.calls_completed and a.step_ns == b.step_ns for a, b in pairs),
            finding=found.verdict,
            activity=find_activity(evidence.captures),
            absent=(*observed.gone, *observed.left),
            behind=bool(observed.behind),
        )

    def _answer(self, case: HangCase, found: Examination, samples: list[RankSample]) -> bool:
        """Decides and acts; False when the action must wait for the back-off after the last one."""
        opened, reason = case.opened, case.outcome.reason
        verdict = found.verdict or Finding("", (), reason)
        left_s = back_off_left_s(time.monotonic(), self.policy, self.options.policy)
        if left_s > 0:
            log.warning("%s: %s; acting in %.0f s at the earliest", opened.current.id, reason, left_s)
            case.next_s = time.monotonic() + left_s
            return False
        facts = self._facts(verdict, case, samples)
        action = decide_action(time.monotonic(), facts, self.policy, self.options.policy)
        case.next_s = time.monotonic() + max(AGAIN_S, case.looks[-1].quiet_s)
        before = opened.current.action if case.answered else None
        if before is not None and (before.kind, before.ranks) == (action.kind, action.ranks):
            return True
        moments = (Moment("hung", time.time(), reason), Moment("verdict", time.time(), verdict.sentence))
        opened.update(*moments, kind="hang", verdict=found.verdict, ranks=found.ranks, action=action)
        log.error("%s: hung: %s", opened.current.id, reason)
        self.pipeline.publisher.log(opened)
        self.pipeline.publisher.publish(opened)  # before anything is killed
        self._act(opened, action, samples)
        self.pipeline.publisher.publish(opened)
        restarted = self.options.whole_job and opened.current.acted
        if not case.answered:
            patience = {} if opened.current.acted else {"patience_s": math.inf}
            self.pipeline.recoveries.add(opened, samples, action.ranks, new_only=restarted, **patience)
        if restarted and {s.rank for s in samples} & set(action.ranks):
            self.deaths.count_failure(opened)
        case.answered = True
        return True

    def _facts(self, verdict: Finding, case: HangCase, samples: list[RankSample]) -> HangFacts:
        members = tuple(sorted({self.options.replica_of(s.rank) for s in samples if s.alive}))
        found = (verdict.cause, verdict.ranks, verdict.confidence)
        options = self.options
        act_s = self.pipeline.recoveries.usual_s or self.history.started_in_s or HangFacts.act_s
        return HangFacts(
            options.mode,
            *found,
            options.ranks_per_replica,
            options.replicas,
            members,
            certain=case.outcome.certain,
            stalled_s=case.looks[-1].quiet_s,
            usual_s=options.notice.floor_s,
            act_s=act_s,
            leaving=has_left_training([s for s in samples if s.rank in verdict.ranks]),
        )

    def _act(self, opened: IncidentFolder, action: Action, samples: list[RankSample]) -> None:
        if self.pipeline.acts(action):
            of, whole = self.options.replica_of, self.options.whole_job
            ending = {of(rank) for rank in action.ranks}
            self.pipeline.explained.add(s.pid for s in samples if whole or of(s.rank) in ending)
            self.history.mark_resumed()
            self.policy = self.policy.after(time.monotonic(), action.replica, self.options.policy.window_s)
        self.pipeline.act(opened, action)

    def _close(self, case: HangCase, reason: str, moves: bool = True) -> None:
        """Closes the incident of a stall. It was no fault only if the ranks move again."""
        opened, now = case.opened, time.time()
        if opened.current.kind == "stall":
            self.pipeline.settle(opened, ended := f"{case.stalled}; {reason}", ended=moves)
            durations = {"lasted": now - opened.current.opened}
            opened.update(Moment("ended", now, ended), closed=now, durations_s=durations)
            log.warning("%s: %s", opened.current.id, ended)
            self.pipeline.publisher.publish(opened)


def find_ended(
    before: Sequence[RankSample], after: Sequence[RankSample], guilty: Sequence[int], whole_job: bool
) -> int | None:
    """A rank whose end settles the examination: any rank in whole-job mode, else a guilty one. None: all are alive."""
    alive = _processes(after)
    ended = [s.rank for s in before if s.alive and s.process not in alive]
    return next((rank for rank in ended if whole_job or rank in guilty), None)


def has_left_training(samples: Sequence[RankSample]) -> bool:
    """Whether these ranks have shut down their managers."""
    return bool(samples) and all(
        any(phase.name == "leaving" and not phase.end_ns for phase in sample.phases) for sample in samples
    )


def _processes(samples: Sequence[RankSample]) -> frozenset[ProcessId]:
    return frozenset(s.process for s in samples if s.alive)
