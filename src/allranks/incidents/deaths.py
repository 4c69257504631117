"""Deaths and cut connections: each becomes one incident, with its evidence and its verdict, at once. Runs in the agent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.incidents.evidence import Gatherer
from allranks.incidents.folder import IncidentFolder, open_incident
from allranks.incidents.judge import Observed, read_observed
from allranks.incidents.options import WatchOptions
from allranks.incidents.policy import decide_leaving
from allranks.incidents.publish import IncidentPublisher
from allranks.incidents.recoveries import Recoveries
from allranks.model.cluster import FOLLOW_S, Gathering
from allranks.model.diagnosis import Finding
from allranks.model.incident import Action, Failure, Incident, Moment
from allranks.report import as_json
from allranks.watch.exits import Ending
from allranks.watch.first_death import Death, find_deaths, find_first
from allranks.watch.memory_kills import MemoryKills
from allranks.watch.samples import RankSample, read_samples

log = logging.getLogger("allranks.agent")

FLAP_S = 60.0  # a replica that is cut off again within this time has the same trouble
EXPLAIN_S = 3.0
SAME_S = 5.0  # a death on another node this much later is another one; an echo is heard for longer
ECHO_OF_S = 60.0  # the loss of a node may be known this much later than the connections to it broke
ECHO_S = 1.0  # a broken connection is looked at this much later: its cause may still show


@dataclass
class Explained:
    """The one owner of "already explained": processes whose end needs no incident of its own, since it was asked for,
    follows from another's, or has one. May be used from any thread.

    A process is a pid and a time: one that was started after its pid was noted is another process.
    """

    _noted: dict[int, int] = field(default_factory=dict)  # pid -> epoch nanoseconds

    def add(self, pids: Iterable[int]) -> None:
        """From now on."""
        self._noted.update(dict.fromkeys(pids, time.time_ns()))

    def covers(self, sample: RankSample) -> bool:
        """Whether the end of the process that writes this box is explained."""
        return self._noted.get(sample.pid, -1) >= sample.start_ns


@dataclass
class DeathIncidents:
    """`note_death` and `note_lost` may be called from any thread, `look` from the watch's."""

    options: WatchOptions
    gatherer: Gatherer
    teller: IncidentPublisher
    recoveries: Recoveries
    explained: Explained = field(default_factory=Explained)
    _born_ns: int = field(default_factory=time.time_ns)  # ranks that started earlier are of another round
    _known: dict[tuple[int, int], IncidentFolder] = field(
        default_factory=dict
    )  # (pid, start) -> its incident
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    act: Callable[[Action, Incident], str] = lambda action, incident: ""
    _failures_s: list[float] = field(default_factory=list)  # monotonic, of this node's ranks
    _cut: dict[tuple[int, ...], IncidentFolder] = field(default_factory=dict)  # ranks -> their last partition
    _echo_s: float | None = None  # since when only echoes of a death are heard
    _threads: list[threading.Thread] = field(default_factory=list)
    in_background: bool = False  # `look` only finds deaths: keeping evidence and asking others take seconds
    _echo: IncidentFolder | None = None  # the last incident that was opened for echoes alone
    echo_patience_s: Callable[[], float] = lambda: ECHO_S
    _failed: tuple[Failure, IncidentFolder] | None = None  # the last failure of the program, and its incident
    _closing: threading.Event = field(default_factory=threading.Event)
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def note_death(self, death: Death) -> IncidentFolder | None:
        """A rank died (seen by its supervisor, or by us): keeps the evidence and opens its story, once."""
        with self._noting:
            samples = read_samples(self.options.folder)
            process = _identify(death, samples)
            known = self._known.get(process)
            if known is not None:
                known.update(Moment("gone", death.at, death.reason))
                return known
            self.explained.add([death.pid])
            failure = death.failure(samples)
            again = self._failed_again(death, failure)
            if again is not None:
                self._known[process] = again
                return again
            opened = self._open_death(death, samples)
            gathering = (
                self.gatherer.ask(
                    opened, death.sentence, stacks=False, follow_s=SAME_S if not death.echo else FOLLOW_S
                )
                if self.options.whole_job
                else None
            )
            if self.gatherer.follows(gathering):
                opened.discard()
                return None
            self._known[process] = opened
            self._failed = (failure, opened) if failure is not None else self._failed
            self._echo = opened if death.echo else None
        self.teller.say(opened)
        self.teller.publish(opened)
        self.recoveries.add(opened, samples, {death.rank}, reborn=self.options.whole_job)
        if self.options.whole_job and not death.echo:
            self.count_failure(opened)
        self.explain_later(lambda: self._explain(opened, samples, gathering))
        return opened

    def _failed_again(self, death: Death, failure: Failure | None) -> IncidentFolder | None:
        """The incident of the same failure of the program, if this one only repeats it."""
        if failure is None or self._failed is None or not failure.repeats(self._failed[0]):
            return None
        opened = self._failed[1]
        opened.update(Moment("again", death.at, death.sentence), closed=None)
        log.error("%s: again %s", opened.current.id, death.sentence)
        self.teller.publish(opened)
        return opened

    def explain_later(self, explain: Callable[[], object]) -> None:
        """The evidence is safe; thinking, and waiting for the parts of others, comes when the launcher has started the
        ranks anew."""

        def work() -> None:
            self._closing.wait(EXPLAIN_S)
            try:
                explain()
            except Exception:  # a thread's entry: the death itself is told
                log.exception("an incident could not be explained")

        self._start(work, "allranks-explain")

    def _start(self, work: Callable[[], object], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _note_carefully(self, death: Death) -> None:
        try:
            self.note_death(death)
        except Exception:  # a thread's entry; a full disk, say
            log.exception("the evidence of a death could not be kept: %s", death.sentence)

    def take_echo(self, at: float) -> IncidentFolder | None:
        """The incident that was opened a moment before `at` for broken connections alone: now their cause is known."""
        echo, self._echo = self._echo, None
        return echo if echo is not None and at - echo.current.opened < ECHO_OF_S else None

    def count_failure(self, opened: IncidentFolder) -> None:
        """A rank of this node was the cause: a node that fails again and again leaves the job, where it may."""
        now = time.monotonic()
        self._failures_s.append(now)
        kind, why = decide_leaving(now, self._failures_s, self.options.policy)
        if kind is None or not self.options.may_leave:
            return
        log.error("%s: %s", opened.current.id, why)
        action = Action(kind, why, opened.current.ranks)
        opened.update(Moment("action", time.time(), why), action=action)
        self.teller.publish(opened)
        if kind == "leave_node":
            self.act(action, opened.current)

    def close(self) -> None:
        """Ends what is under way."""
        self._closing.set()
        for thread in self._threads:  # one that notes a death may add one that explains it
            thread.join(timeout=30.0)

    def note_lost(self, ranks: tuple[int, ...], reason: str, at: float) -> IncidentFolder:
        """The lighthouse lost a replica whose processes run here: the network between them is cut.

        A connection that flaps is one incident.
        """
        known = self._cut.get(ranks)
        if known is not None and at - known.current.timeline[-1].at < FLAP_S:
            known.update(Moment("cut again", at, reason))
            return known
        samples = read_samples(self.options.folder)
        step = max((s.step for s in samples if s.rank in ranks), default=-1)
        sentence = f"rank {', '.join(map(str, ranks))} is cut off although its process runs: {reason}"
        opened = open_incident(
            self.options.incidents, kind="partition", job=self.options.job, reason=sentence, node=self.options.node,
            ranks=ranks, step=step,
        )  # fmt: skip
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        told = Finding("none_finished", ranks, f"{sentence} (the network, not the program)", confidence=0.9)
        Observed(taken_ns=time.time_ns(), told=told, reason=sentence).write(opened.path)
        opened.update(
            Moment("fault", at, reason), Moment("noticed", at, "by the lighthouse; its agent sees the process run"),
            verdict=as_json.verdict(told), missing=tuple(missing), durations_s={"noticed": 0.0},
            action=Action("none", "it comes back by itself when the network does; the others go on", ranks),
        )  # fmt: skip
        self._cut[ranks] = opened
        self.teller.publish(opened)
        self.recoveries.add(opened, samples, set(ranks))
        return opened

    def _open_death(self, death: Death, samples: list[RankSample]) -> IncidentFolder:
        noticed = death.seen or time.time()
        starved = self.memory_kills.new()
        if starved and "SIGKILL" in death.reason:
            word = "it" if starved == 1 else f"{starved} processes"
            death = replace(death, reason=f"{death.reason}: the kernel ended {word} for lack of memory")
        step = max((s.step for s in samples), default=-1)
        own = next((s for s in samples if s.pid == death.pid), None)
        opened = open_incident(
            self.options.incidents, kind="death", job=self.options.job, reason=death.sentence, node=self.options.node,
            ranks=(death.rank,), step=step,
        )  # fmt: skip
        _, missing = opened.keep_boxes([Path(sample.path) for sample in samples])
        told = Finding("rank_died", (death.rank,), death.sentence, confidence=1.0, where=death.where)
        if death.echo and death.where:  # it lost a peer, and no peer has died
            sentence = f"connections between ranks broke and no rank had died before: {death.sentence}"
            told = Finding("none_finished", (), sentence, confidence=0.7, where=death.where)
        Observed(taken_ns=time.time_ns(), told=told, reason=death.sentence).write(opened.path)
        if self.options.whole_job:
            action = Action(
                "restart_job", "the launcher restarts the job while --max-restarts allows", (death.rank,)
            )
        else:
            replica = death.rank // self.options.ranks_per_replica
            action = Action("restart_rank", "the supervisor starts it again", (death.rank,), replica)
        if own is not None and own.last_ns:
            last = f"step {own.step}" if own.step >= 0 else f"call {own.calls_completed}"
            opened.update(Moment("last good step", min(own.last_ns / 1e9, death.at), last))
        opened.update(
            Moment("evidence", time.time(), f"{len(samples) - len(missing)} black boxes"),
            Moment("died", death.at, death.sentence), Moment("noticed", max(noticed, death.at), "by its agent"),
            verdict=as_json.verdict(told), ranks=told.ranks, missing=tuple(missing), action=action,
            durations_s={"noticed": max(0.0, noticed - death.at)},
        )  # fmt: skip
        return opened

    def _explain(
        self, opened: IncidentFolder, samples: list[RankSample], gathering: Gathering | None
    ) -> None:
        """A rank may have died of what another did: calls that do not match are found in the boxes of all."""
        observed = read_observed(opened.path)
        found = self.gatherer.examine(opened, {}, samples, gathering, observed)
        opened.update(missing=(*opened.current.missing, *found.missing), **found.facts())
        self.teller.publish(opened)

    def look(
        self, samples: list[RankSample], endings: Mapping[int, Ending], patience_s: float | None = None
    ) -> None:
        """Whole-job mode: all deaths. Replica mode: ranks that raised; the supervisor tells of the others."""
        new = [sample for sample in samples if not self.explained.covers(sample)]
        first = find_first(
            find_deaths(new, endings, since_ns=self._born_ns, raised_only=not self.options.whole_job)
        )
        now = time.monotonic()
        if first is None:
            self._echo_s = None
            return
        patience = self.echo_patience_s() if patience_s is None else patience_s
        if first.echo and now - (self._echo_s or now) < patience:
            self._echo_s = self._echo_s or now
            return
        self._echo_s = None
        size = self.options.ranks_per_replica
        fellows = [s for s in samples if self.options.whole_job or s.rank // size == first.rank // size]
        self.explained.add({first.pid, *(s.pid for s in fellows)})
        if self.in_background:
            self._start(lambda: self._note_carefully(first), "allranks-death")
        else:
            self.note_death(first)
        if self.options.whole_job:
            self._born_ns = max(s.start_ns for s in samples) + 1


def _identify(death: Death, samples: list[RankSample]) -> tuple[int, int]:
    """The process that died: its pid and the start of its black box, 0 without one."""
    return death.pid, max((s.start_ns for s in samples if s.pid == death.pid), default=0)
