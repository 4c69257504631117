"""The loop of the agent: notice → evidence → verdict → action → story. One thread per node, named allranks-watch.

It never touches a rank by itself: actions go to the `Actor` that the launcher gives it. Evidence is on disk
before anything is asked of the actor. Deaths wake it at once; on several nodes one watch leads an incident and the
others send it their part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from allranks.agent.company import Company
from allranks.agent.examine import Examination, verdict_on
from allranks.agent.gatherer import Gatherer
from allranks.agent.incidents import IncidentFolder, open_incident
from allranks.agent.judge import Look, judge
from allranks.agent.lifelines import Lifelines
from allranks.agent.notice import (
    NoticeState,
    Suspicion,
    cure,
    excuse,
    left_behind,
    notice,
    observe,
)
from allranks.agent.obituaries import Obituaries
from allranks.agent.policy import Case, PolicyState, back_off_left_s, decide_action
from allranks.agent.recoveries import Recoveries
from allranks.agent.sample import RankSample, read_samples
from allranks.agent.telling import Teller
from allranks.agent.watch_options import WatchOptions
from allranks.model.cluster import Gathering
from allranks.model.incident import Action, Incident, Moment
from allranks.report.story import headline

log = logging.getLogger("allranks.agent")

CLOSE_S, CLOSE_POLL_S = 5.0, 0.05  # after an incident recovery is looked for more often, for a while


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
class Watch:
    """Watches one node's ranks. `start()` and `close()` own the thread; `look()` is one turn of it."""

    options: WatchOptions
    actor: Actor | None = None
    _state: NoticeState = field(default_factory=NoticeState)
    _policy: PolicyState = field(default_factory=PolicyState)
    _standstill: _Inquiry | None = None  # nobody moves
    _behind: _Inquiry | None = None  # one rank does not move, the others do
    _gatherer: Gatherer = field(init=False)
    _teller: Teller = field(init=False)
    deaths: Obituaries = field(init=False)
    _recoveries: Recoveries = field(default_factory=Recoveries)
    _lines: Lifelines = field(default_factory=Lifelines)
    _stop: bool = False
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._gatherer = Gatherer(self.options)
        self._teller = Teller(self.options.webhooks)
        self.deaths = Obituaries(self.options, self._gatherer, self._teller, self._recoveries)

    def start(self) -> None:
        """Starts the thread."""
        if self.actor is not None:
            self.deaths.act = self.actor.act
        self._lines.start()
        self._thread = threading.Thread(target=self._run, name="allranks-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and writes the last state of open incidents."""
        self._stop = True
        self._lines.wake()
        if self._thread is not None:
            self._thread.join(timeout=30.0)
            self._thread = None
            self.deaths.look(read_samples(self.options.folder), self._lines.endings, patience_s=0.0)
        self.deaths.close()
        self._lines.close()
        for case in (self._standstill, self._behind):
            if case is not None and not case.hung:
                self._close(case.opened, "the job ended before it was clear whether it hung")
        for opened in self._recoveries.open():
            self._teller.write_page(opened)

    def collect_now(self, reason: str) -> Incident:
        """Evidence on demand, without a suspicion."""
        opened = open_incident(
            self.options.incidents,
            kind="request",
            job=self.options.job,
            reason=reason,
            node=self.options.node,
        )
        samples = read_samples(self.options.folder)
        self._gather(opened, samples)
        opened.update(closed=time.time())
        self._teller.publish(opened)
        return opened.current

    def join(self, company: Company | None, on_incident: Callable[[Incident], None]) -> None:
        """Before `start`: the other nodes' agents, and who is told of incidents."""
        self._gatherer.company = company
        self._teller.on_incident = on_incident

    def copy_to(self, keep: Callable[[Path], None]) -> None:
        """Before `start`: `keep` copies incident folders elsewhere as they grow."""
        self._teller.keep = keep

    def collect_part(self, folder: Path, stacks: bool) -> list[str]:
        """Our part of an incident that another node leads; returns what is missing."""
        return self._gatherer.collect_part(folder, stacks)

    def look(self, now_s: float | None = None) -> Suspicion | None:
        """One turn: read, decide, and if there is a suspicion, examine it."""
        now = time.monotonic() if now_s is None else now_s
        samples = read_samples(self.options.folder)
        self._lines.hold(s.pid for s in samples if s.alive and not s.closed)
        self._state = observe(now, self._state, samples, self.options.notice)
        self.deaths.look(samples, self._lines.endings)
        for opened in self._recoveries.look(samples):
            self._teller.publish(opened)
        suspicion, _ = notice(now, time.time_ns(), self._state, samples, self.options.notice)
        if suspicion is not None:
            self._examine(suspicion, samples)
            return suspicion
        if self._standstill is not None and self._state.excused == 0:
            self._close_as_slow("the job went on by itself")
        return self._look_behind(now, samples) if self.options.mode == "replica" else None

    # the thread

    def _run(self) -> None:
        while not self._stop:
            try:
                self.look()
            except Exception:
                log.exception("the watch failed once and goes on")
            self._lines.wait(CLOSE_POLL_S if self._recoveries.recent(CLOSE_S) else self.options.poll_s)

    # from suspicion to action

    def _examine(self, suspicion: Suspicion, samples: list[RankSample]) -> None:
        case = self._standstill
        if case is None:
            opened = self._open(suspicion, max((s.step for s in samples), default=-1))
            case = self._standstill = _Inquiry(opened, frozenset(s.pid for s in samples))
        if time.monotonic() < case.next_s:
            return
        gathering = self._gatherer.ask(case.opened, suspicion.reason)
        if gathering is not None and self._gatherer.follows(gathering):
            self._follow(case, gathering)
            return
        if not case.looks:
            log.warning("%s: %s", case.opened.current.id, suspicion.reason)
        found = self._gather(case.opened, samples, gathering=gathering)
        hung, reason = self._judge(case, suspicion, found, samples)
        if hung is None:
            self._state = excuse(self._state, time.monotonic(), self.options.notice)
        elif hung is False:
            self._close_as_slow(reason)
        elif self._answer(case, found, reason, samples):
            self._standstill = None
            # The same standstill is not reported twice: a new suspicion needs a whole further limit.
            for _ in range(4):
                self._state = excuse(self._state, time.monotonic(), self.options.notice)

    def _follow(self, case: _Inquiry, gathering: Gathering) -> None:
        """Another node noticed the same before us: it explains and acts, and has our part."""
        log.warning("%s of %s: this node sends its part", gathering.incident, gathering.lead)
        if not case.looks:
            case.opened.discard()
            self._standstill = None
        self._state = excuse(self._state, time.monotonic(), self.options.notice)

    def _look_behind(self, now: float, samples: list[RankSample]) -> Suspicion | None:
        """Replicas that the others have given up stand still beside a job that moves."""
        fresh = [s for s in samples if s.pid not in self.deaths.answered]
        suspicion, _ = left_behind(now, time.time_ns(), self._state, fresh, self.options.notice)
        suspects = self._of_one_replica(suspicion, fresh)
        pids = frozenset(s.pid for s in suspects)
        if self._behind is not None and self._behind.pids != pids:
            self._close(self._behind.opened, "it moves again or is gone")
            self._behind = None
        if suspicion is None:
            return None
        if self._behind is None:
            self._behind = _Inquiry(self._open(suspicion, suspects[0].step), pids)
            log.warning("%s: %s", self._behind.opened.current.id, suspicion.reason)
        case = self._behind
        if time.monotonic() < case.next_s:
            return suspicion
        found = self._gather(case.opened, samples, suspects)
        verdict = verdict_on([s.rank for s in suspects], found.stacks, suspicion.reason)
        found = replace(found, verdict=verdict)
        case.opened.update(verdict=verdict, ranks=tuple((verdict or {}).get("ranks") or ()))
        hung, reason = self._judge(case, suspicion, found, suspects)
        if hung is None:
            case.next_s = time.monotonic() + self.options.notice.floor_s / 2
        elif hung is False or self._answer(case, found, reason, samples):
            self._behind = None
            self.deaths.answered |= pids
            if not hung:
                self._close(case.opened, reason)
        return suspicion

    def _of_one_replica(self, suspicion: Suspicion | None, samples: list[RankSample]) -> list[RankSample]:
        if suspicion is None:
            return []
        size = self.options.ranks_per_replica
        first = suspicion.quiet[0] // size
        return [s for s in samples if s.rank in suspicion.quiet and s.rank // size == first]

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
        after = {s.rank: s.mark for s in read_samples(self.options.folder)}
        moved = any(after.get(s.rank, s.mark) != s.mark for s in suspects)
        case.looks.append(Look(time.monotonic(), suspicion.quiet_s, found.stacks, moved))
        hung, reason = judge(case.looks, self.options.notice.cap_s)
        case.hung = hung is True
        log.info("%s: look %d: %s", case.opened.current.id, len(case.looks), reason)
        return hung, reason

    def _gather(
        self, opened: IncidentFolder, samples: list[RankSample], suspects: list[RankSample] | None = None,
        gathering: Gathering | None = None,
    ) -> Examination:  # fmt: skip
        """Boxes of all ranks; stacks of the suspects, which are all ranks unless said otherwise; others' parts."""
        begin = time.monotonic()
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        pids = {s.rank: s.pid for s in (samples if suspects is None else suspects) if s.alive}
        found = self._gatherer.examine(opened, pids, samples, gathering)
        durations = {**opened.current.durations_s, "evidence": time.monotonic() - begin}
        parts = f", parts of {len(gathering.agents)} other nodes" if gathering else ""
        opened.update(
            Moment("evidence", time.time(), f"{len(samples)} black boxes, stacks of {len(pids)} ranks{parts}"),
            missing=(*missing, *found.missing), verdict=found.verdict, stacks=found.stacks_json, durations_s=durations,
            ranks=tuple((found.verdict or {}).get("ranks") or ()),
        )  # fmt: skip
        return found

    def _answer(self, case: _Inquiry, found: Examination, reason: str, samples: list[RankSample]) -> bool:
        """Decides and acts; False when the action must wait for the back-off after the one before."""
        opened, verdict = case.opened, found.verdict or {}
        left_s = back_off_left_s(time.monotonic(), self._policy, self.options.policy)
        if left_s > 0:
            log.warning("%s: %s; acting in %.0f s at the earliest", opened.current.id, reason, left_s)
            case.next_s = time.monotonic() + left_s
            return False
        opened.update(Moment("verdict", time.time(), str(verdict.get("sentence") or reason)))
        log.error("%s: %s", opened.current.id, headline(opened.current))
        facts = Case(
            self.options.mode, str(verdict.get("cause") or ""), tuple(verdict.get("ranks") or ()),
            float(verdict.get("confidence") or 0.0), self.options.ranks_per_replica, self.options.replicas,
            members=tuple(sorted({s.rank // self.options.ranks_per_replica for s in samples if s.alive})),
        )  # fmt: skip
        action, why = decide_action(time.monotonic(), facts, self._policy, self.options.policy)
        opened.update(action=action)
        self._teller.publish(opened)  # the story so far is safe before anything is killed
        self._act(opened, action, why, samples)
        self._teller.publish(opened)
        self._recoveries.add(opened, samples, set(action.ranks))
        restarted = (
            self.options.whole_job and opened.current.action is not None and opened.current.action.done
        )
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
        self.deaths.answered |= {s.pid for s in samples if self.options.whole_job or s.rank // size in going}
        self._state = cure(self._state, time.monotonic())
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
        log.warning("%s: %s: %s", opened.current.id, action.kind, result)

    def _close_as_slow(self, reason: str) -> None:
        case, self._standstill = self._standstill, None
        if case is not None:
            self._close(case.opened, reason)

    def _close(self, opened: IncidentFolder, reason: str) -> None:
        opened.update(Moment("back to speed", time.time(), reason), kind="slow", closed=time.time())
        self._teller.write_page(opened)
