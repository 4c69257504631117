"""The loop of the agent: notice → evidence → verdict → action → story. One thread per node, named allranks-watch.

It never touches a rank by itself: actions go to the `Actor` that the launcher gives it. Evidence is on disk
before anything is asked of the actor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from allranks.agent.examine import Examination, examine, verdict_on
from allranks.agent.incidents import IncidentFolder, open_incident, write_atomically
from allranks.agent.judge import Look, judge
from allranks.agent.notice import (
    NoticeOptions,
    NoticeState,
    Suspicion,
    cure,
    excuse,
    left_behind,
    notice,
    observe,
)
from allranks.agent.policy import (
    Case,
    Mode,
    PolicyOptions,
    PolicyState,
    back_off_left_s,
    decide_action,
)
from allranks.agent.sample import RankSample, read_samples
from allranks.agent.webhook import send
from allranks.model.incident import Action, Incident, Moment
from allranks.report.story import headline, render_story

log = logging.getLogger("allranks.agent")


class Actor(Protocol):
    """Who carries out what the policy decided."""

    def act(self, action: Action, incident: Incident) -> str:
        """Does it, and says in a sentence what was done."""
        ...


@dataclass(frozen=True)
class WatchOptions:
    """What to watch and how to answer."""

    folder: Path  # black boxes of the job on this node
    incidents: Path  # where incident folders go; shared between nodes if there are several
    job: str
    node: str = ""
    mode: Mode = "whole_job"
    ranks_per_replica: int = 1
    replicas: int = 1
    poll_s: float = 0.5
    notice: NoticeOptions = field(default_factory=NoticeOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    webhooks: tuple[str, ...] = ()
    collect_stacks: bool = True


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
    on_incident: Callable[[Incident], None] = lambda incident: None
    _state: NoticeState = field(default_factory=NoticeState)
    _policy: PolicyState = field(default_factory=PolicyState)
    _standstill: _Inquiry | None = None  # nobody moves
    _behind: _Inquiry | None = None  # one rank does not move, the others do
    _answered: frozenset[int] = frozenset()  # pids that were left behind and have been answered for
    _recovering: list[tuple[IncidentFolder, dict[int, tuple[int, int, int]], float]] = field(
        default_factory=list
    )
    _wake: threading.Event = field(default_factory=threading.Event)
    _stop: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="allranks-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and writes the last state of open incidents."""
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=30.0)
            self._thread = None
        for case in (self._standstill, self._behind):
            if case is not None and not case.hung:
                self._close(case.opened, "the job ended before it was clear whether it hung")
        for opened, _, _ in self._recovering:
            self._tell_story(opened)

    def note_death(
        self, ranks: tuple[int, ...], replica: int | None, reason: str, at: float
    ) -> IncidentFolder:
        """A rank died (told by the supervisor, at once): keeps the evidence and opens its story."""
        samples = read_samples(self.options.folder)
        step = max((s.step for s in samples), default=-1)
        opened = open_incident(
            self.options.incidents, kind="death", job=self.options.job, reason=reason, node=self.options.node, ranks=ranks, step=step
        )  # fmt: skip
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        verdict = {
            "cause": "rank_died", "ranks": list(ranks), "group": "", "sequence": None, "confidence": 1.0,
            "where": "", "sentence": reason,
        }  # fmt: skip
        action = (
            Action("restart_rank", "the supervisor starts it again", ranks, replica)
            if replica is not None
            else None
        )
        opened.update(
            Moment("died", at, reason), Moment("noticed", at, "by its agent (pidfd)"),
            verdict=verdict, missing=tuple(missing), action=action, durations_s={"noticed": 0.0},
        )  # fmt: skip
        self._publish(opened)
        survivors = {s.rank: s.mark for s in samples if s.rank not in ranks and s.alive and not s.closed}
        everybody = {s.rank: s.mark for s in samples}  # all went at once: their next lives count
        self._recovering.append((opened, survivors or everybody, time.monotonic()))
        return opened

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
        self._publish(opened)
        return opened.current

    def look(self, now_s: float | None = None) -> Suspicion | None:
        """One turn: read, decide, and if there is a suspicion, examine it."""
        now = time.monotonic() if now_s is None else now_s
        samples = read_samples(self.options.folder)
        self._state = observe(now, self._state, samples, self.options.notice)
        self._watch_recovery(samples)
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
            self._wake.wait(self.options.poll_s)
            self._wake.clear()

    # from suspicion to action

    def _examine(self, suspicion: Suspicion, samples: list[RankSample]) -> None:
        case = self._standstill
        if case is None:
            opened = self._open(suspicion, max((s.step for s in samples), default=-1))
            case = self._standstill = _Inquiry(opened, frozenset(s.pid for s in samples))
        if time.monotonic() < case.next_s:
            return
        found = self._gather(case.opened, samples)
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

    def _look_behind(self, now: float, samples: list[RankSample]) -> Suspicion | None:
        """Replicas that the others have given up stand still beside a job that moves."""
        fresh = [s for s in samples if s.pid not in self._answered]
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
            self._answered |= pids
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
        log.warning("%s: %s", opened.current.id, suspicion.reason)
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
        self, opened: IncidentFolder, samples: list[RankSample], suspects: list[RankSample] | None = None
    ) -> Examination:
        """Boxes of all ranks; stacks of the suspects, which are all ranks unless said otherwise."""
        begin = time.monotonic()
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        pids = {s.rank: s.pid for s in (samples if suspects is None else suspects) if s.alive}
        found = examine(
            opened.path,
            pids if self.options.collect_stacks else {},
            job_folder=self.options.folder,
            gone=tuple(s.rank for s in samples if not s.alive and not s.closed),
        )
        durations = {**opened.current.durations_s, "evidence": time.monotonic() - begin}
        opened.update(
            Moment("evidence", time.time(), f"{len(samples)} black boxes, stacks of {len(pids)} ranks"),
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
        self._publish(opened)  # the story so far is safe before anything is killed
        self._act(opened, action, why)
        self._publish(opened)
        guilty = set(action.ranks)
        marks = {s.rank: s.mark for s in samples if s.rank not in guilty and s.alive and not s.closed}
        self._recovering.append((opened, marks, time.monotonic()))
        self._answered |= {s.pid for s in samples if s.rank in guilty}
        return True

    def _act(self, opened: IncidentFolder, action: Action, why: str) -> None:
        if action.kind not in ("evict", "restart_rank", "restart_job", "command") or self.actor is None:
            opened.update(Moment("action", time.time(), f"none ({action.kind.replace('_', ' ')}): {why}"))
            log.warning("%s: no action: %s", opened.current.id, why)
            return
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
        self._tell_story(opened)

    def _watch_recovery(self, samples: list[RankSample]) -> None:
        """Closes incidents whose survivors train again."""
        marks = {s.rank: s.mark for s in samples}
        for entry in list(self._recovering):
            opened, before, since = entry
            moved = [rank for rank, mark in before.items() if rank in marks and _further(marks[rank], mark)]
            if before and len(moved) == len(before):
                took = time.monotonic() - since
                step = max((s.step for s in samples), default=-1)
                opened.update(
                    Moment("recovered", time.time(), f"{len(moved)} ranks train again, step {step}"),
                    closed=time.time(), durations_s={**opened.current.durations_s, "recovered": took},
                )  # fmt: skip
                self._recovering.remove(entry)
                self._publish(opened)
            elif not before or time.monotonic() - since > 600:
                self._recovering.remove(entry)

    def _publish(self, opened: IncidentFolder) -> None:
        """Page, lighthouse, webhooks. None of them may stop the loop or each other."""
        tellers: tuple[Callable[[], object], ...] = (
            lambda: self._tell_story(opened),
            lambda: self.on_incident(opened.current),
            lambda: send(self.options.webhooks, opened.current, headline(opened.current)),
        )
        for tell in tellers:
            try:
                tell()
            except Exception:
                log.exception("%s could not be told everywhere", opened.current.id)

    def _tell_story(self, opened: IncidentFolder) -> None:
        report = opened.path / "diagnosis.txt"
        lines = tuple(report.read_text().splitlines()) if report.exists() else ()
        write_atomically(opened.path / "story.html", render_story(opened.current, lines))


def _further(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Completed calls or steps went on (a new process counts from zero again and also trains)."""
    return now[0] > before[0] or now[2] > before[2] or (now[1] < before[1] and now[2] > 0)
