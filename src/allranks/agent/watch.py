"""The loop of the agent: notice → evidence → verdict → action → story. One thread per node, named allranks-watch.

It never touches a rank by itself: actions go to the `Actor` that the launcher gives it. Evidence is on disk
before anything is asked of the actor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from allranks.agent.examine import Examination, examine
from allranks.agent.incidents import IncidentFolder, open_incident, write_atomically
from allranks.agent.judge import Look, judge
from allranks.agent.notice import NoticeOptions, NoticeState, Suspicion, excuse, notice, observe
from allranks.agent.policy import Case, Mode, PolicyOptions, PolicyState, decide_action
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
class Watch:
    """Watches one node's ranks. `start()` and `close()` own the thread; `look()` is one turn of it."""

    options: WatchOptions
    actor: Actor | None = None
    on_incident: Callable[[Incident], None] = lambda incident: None
    _state: NoticeState = field(default_factory=NoticeState)
    _policy: PolicyState = field(default_factory=PolicyState)
    _looks: list[Look] = field(default_factory=list)
    _open: IncidentFolder | None = None  # being examined
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
            Moment("died", at, reason), Moment("noticed", time.time(), "by its agent (pidfd)"),
            verdict=verdict, missing=tuple(missing), action=action, durations_s={"noticed": max(0.0, time.time() - at)},
        )  # fmt: skip
        self._publish(opened)
        survivors = {s.rank: s.mark for s in samples if s.rank not in ranks and s.alive and not s.closed}
        self._recovering.append((opened, survivors, time.monotonic()))
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
        if suspicion is None:
            if self._open is not None and self._state.excused == 0:
                self._close_as_slow("the job went on by itself")
            return None
        self._examine(suspicion, samples)
        return suspicion

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
        now = time.time()
        if self._open is None:
            since = now - suspicion.quiet_s
            self._open = open_incident(
                self.options.incidents, kind="hang", job=self.options.job, reason=suspicion.reason,
                node=self.options.node, step=max((s.step for s in samples), default=-1),
            )  # fmt: skip
            self._open.update(
                Moment("last good step", since, f"step {self._open.current.step}"),
                Moment(
                    "overdue", since + suspicion.limit_s, f"silent for more than {suspicion.limit_s:.1f} s"
                ),
                Moment("noticed", now, suspicion.reason),
                durations_s={"noticed": suspicion.quiet_s},
            )
            log.warning("%s: %s", self._open.current.id, suspicion.reason)
        opened = self._open
        found = self._gather(opened, samples)
        after = {s.rank: s.mark for s in read_samples(self.options.folder)}
        moved = any(after.get(s.rank, s.mark) != s.mark for s in samples)
        self._looks.append(Look(time.monotonic(), suspicion.quiet_s, found.stacks, moved))
        hung, reason = judge(self._looks, self.options.notice.cap_s)
        log.info("%s: look %d: %s", opened.current.id, len(self._looks), reason)
        if hung is None:
            self._state = excuse(self._state, time.monotonic(), self.options.notice)
        elif hung is False:
            self._close_as_slow(reason)
        else:
            self._answer(opened, found, reason, samples)

    def _gather(self, opened: IncidentFolder, samples: list[RankSample]) -> Examination:
        begin = time.monotonic()
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        pids = {s.rank: s.pid for s in samples if s.alive}
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

    def _answer(
        self, opened: IncidentFolder, found: Examination, reason: str, samples: list[RankSample]
    ) -> None:
        verdict = found.verdict or {}
        opened.update(Moment("verdict", time.time(), str(verdict.get("sentence") or reason)))
        log.error("%s: %s", opened.current.id, headline(opened.current))
        case = Case(
            self.options.mode, str(verdict.get("cause") or ""), tuple(verdict.get("ranks") or ()),
            float(verdict.get("confidence") or 0.0), self.options.ranks_per_replica, self.options.replicas,
            members=tuple(sorted({s.rank // self.options.ranks_per_replica for s in samples if s.alive})),
        )  # fmt: skip
        action, why = decide_action(time.monotonic(), case, self._policy, self.options.policy)
        opened.update(action=action)
        self._publish(opened)  # the story so far is safe before anything is killed
        if action.kind in ("evict", "restart_rank", "restart_job", "command") and self.actor is not None:
            result = self.actor.act(action, opened.current)
            done = Action(
                action.kind, action.reason, action.ranks, action.replica, action.command, True, result
            )
            self._policy = self._policy.after(time.monotonic(), action.replica, self.options.policy.window_s)
            opened.update(
                Moment("action", time.time(), f"{action.kind.replace('_', ' ')}: {result}"), action=done
            )
            log.warning("%s: %s: %s", opened.current.id, action.kind, result)
        else:
            opened.update(Moment("action", time.time(), f"none ({action.kind.replace('_', ' ')}): {why}"))
            log.warning("%s: no action: %s", opened.current.id, why)
        self._publish(opened)
        guilty = set(action.ranks)
        marks = {s.rank: s.mark for s in samples if s.rank not in guilty and s.alive and not s.closed}
        self._recovering.append((opened, marks, time.monotonic()))
        self._open, self._looks = None, []
        # The same standstill is not reported twice: a new suspicion needs a whole further limit.
        for _ in range(4):
            self._state = excuse(self._state, time.monotonic(), self.options.notice)

    def _close_as_slow(self, reason: str) -> None:
        opened, self._open, self._looks = self._open, None, []
        if opened is not None:
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
        self._tell_story(opened)
        self.on_incident(opened.current)
        send(self.options.webhooks, opened.current, headline(opened.current))

    def _tell_story(self, opened: IncidentFolder) -> None:
        report = opened.path / "diagnosis.txt"
        lines = tuple(report.read_text().splitlines()) if report.exists() else ()
        write_atomically(opened.path / "story.html", render_story(opened.current, lines))


def _further(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Completed calls or steps went on (a new process counts from zero again and also trains)."""
    return now[0] > before[0] or now[2] > before[2] or now[1] < before[1]
