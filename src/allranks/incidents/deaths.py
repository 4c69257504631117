"""Deaths, cut connections, lost nodes: each becomes one incident, with its evidence and its verdict, at once. In the agent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from allranks.blackbox.header import process_state
from allranks.diagnosis.weak_findings import same_error
from allranks.incidents.evidence import Observed, read_observed
from allranks.incidents.folder import IncidentFolder, keep_newest
from allranks.incidents.pipeline import IncidentPipeline
from allranks.incidents.policy import decide_leaving
from allranks.model.cluster import FOLLOW_S, Gathering, Presence
from allranks.model.diagnosis import Action, Failure, Finding, Moment
from allranks.model.formatting import ranks_text
from allranks.model.trace import RankTrace, State
from allranks.watch.exits import Death, Ending, count_memory_kills, find_deaths, find_first
from allranks.watch.nodes import Loss
from allranks.watch.samples import ProcessId, RankSample, last_good, read_sample, read_samples

log = logging.getLogger("allranks.agent")

ENDING_S = 10.0  # freeing the memory of a GPU takes a while
FLAP_S = 60.0  # a replica that is cut off again within this time has the same trouble
SAME_S = 5.0  # a death on another node this much later is another one; a secondary failure may come later
ECHO_OF_S = 60.0  # the loss of a node may be known this much later than the connections to it broke
# a call made longer before the loss of a node, or after it, has nothing to do with it
RECENT_S, LATER_S = 60.0, 1.0
ECHO_S = 1.0  # a broken connection is examined this much later: its cause may still show


@dataclass
class DeathIncidents:
    """`note_death` and `note_lost` may be called from any thread, `check` from the watch's."""

    pipeline: IncidentPipeline
    in_background: bool = False  # `check` only finds deaths: keeping evidence and asking others take seconds
    echo_patience_s: Callable[[], float] = lambda: ECHO_S
    _started_ns: int = field(default_factory=time.time_ns)  # ranks that started earlier are of another run
    # of the attempt that ended: no times, a clock may be set
    _past: set[ProcessId] = field(default_factory=set)
    _known: dict[ProcessId, IncidentFolder] = field(default_factory=dict)
    _failures_s: list[float] = field(default_factory=list)  # monotonic, of this node's ranks
    _cut: dict[tuple[int, ...], IncidentFolder] = field(default_factory=dict)  # ranks -> their last partition
    # since when only secondary failures are known
    _doubtful: tuple[float, list[Death], list[RankSample]] | None = None
    _echo: IncidentFolder | None = None  # the last incident that was opened for secondary failures alone
    _stopped: tuple[float, str] = (float("-inf"), "")  # when another node was (monotonic), and which
    _failed: tuple[Failure, IncidentFolder] | None = None  # the program's last failure, and its incident
    _memory_kills: int = field(default_factory=count_memory_kills)
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.options = self.pipeline.options

    def check(
        self, samples: list[RankSample], endings: Mapping[int, Ending], patience_s: float | None = None
    ) -> None:
        """Whole-job mode: all deaths. Replica mode: ranks that raised; the supervisor reports the others."""
        explained, whole = self.pipeline.explained, self.options.whole_job
        new = [s for s in samples if s.process not in self._past]
        if any(s.closed or not s.alive for s in new):
            explained.hear(self.options.folder)
        new = [s for s in new if not explained.covers(s)]
        deaths = find_deaths(new, endings, since_ns=self._started_ns, raised_only=not whole)
        first, samples = self._settle(deaths, samples, patience_s)
        if first is None:
            return
        if first.echo and self._follows_stop(first, samples):
            return
        of = self.options.replica_of
        ending = [s.pid for s in samples if whole or of(s.rank) == of(first.rank)]
        self.pipeline.explained.add([first.pid, *ending])
        if self.in_background:
            death = first
            self.pipeline.start(lambda: self.note_death(death, samples), "allranks-death")
        else:
            self.note_death(first, samples)
        if whole:
            self._past = {s.process for s in samples}

    def note_stopped(self, node: str) -> None:
        """The agent of another node leaves in good order: that connections to its ranks break is not an incident."""
        self._stopped = (time.monotonic(), node)

    def _follows_stop(self, first: Death, samples: list[RankSample]) -> bool:
        """Whether a broken connection follows from a node that was stopped a moment ago; then its attempt is explained."""
        if time.monotonic() - self._stopped[0] > ECHO_OF_S:
            return False
        log.warning("%s: %s was stopped or has ended", first.sentence, self._stopped[1])
        self.pipeline.explained.add(sample.pid for sample in samples)
        return True

    def _settle(
        self, deaths: list[Death], samples: list[RankSample], patience_s: float | None
    ) -> tuple[Death | None, list[RankSample]]:
        """The death to report now, with the ranks of its attempt: a broken connection waits for a better cause to show."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None:  # some or all may have been started again meanwhile
            samples = [read_sample(sample.path) or sample for sample in doubtful[2]]
        if not deaths and doubtful is not None:
            covered = {s.pid for s in samples if self.pipeline.explained.covers(s)}
            return find_first([d for d in doubtful[1] if d.pid not in covered]), samples
        first, now = find_first(deaths), time.monotonic()
        since = doubtful[0] if doubtful else now
        if first is not None and first.echo and now - since < self._patience_s(samples, patience_s):
            self._doubtful = (since, deaths, samples)
            return None, samples
        return first, samples

    def _patience_s(self, samples: list[RankSample], given_s: float | None) -> float:
        patience = self.echo_patience_s() if given_s is None else given_s
        # one that said nothing and is being taken down is most likely the cause
        ending = any(not s.closed and process_state(s.pid) == "X" for s in samples)
        return max(patience, ENDING_S) if ending else patience

    def note_death(self, death: Death, samples: list[RankSample] | None = None) -> IncidentFolder | None:
        """A rank died (seen by its supervisor, or by us): keeps the evidence and opens its story, once.

        `samples` of the ranks when it was seen: they may have been started again since.
        """
        samples = read_samples(self.options.folder) if samples is None else samples
        started_ns = max((s.start_ns for s in samples if s.pid == death.pid), default=0)
        process, failure = ProcessId(death.pid, started_ns), death.failure(samples)
        with self._noting:  # short: deaths of one moment do not wait for each other's evidence
            known = self._known.get(process)
            if known is not None:
                known.update(Moment("gone", death.at, death.reason))
                return known
            self.pipeline.explained.add([death.pid])
            again = self._failed_again(death, failure)
            if again is not None:
                self._known[process] = again
                return again
            death = self._with_memory(death)
            opened = self.pipeline.open("death", death.sentence, samples, ranks=(death.rank,), boxes=False)
            self._known[process] = opened
            keep_newest(self._known)
            self._failed = (failure, opened) if failure is not None else self._failed
            self._echo = opened if death.echo else None
        return self._report(process, death, samples, opened)

    def _report(
        self, process: ProcessId, death: Death, samples: list[RankSample], opened: IncidentFolder
    ) -> IncidentFolder | None:
        """Evidence and verdict of a new incident; None when another node leads it."""
        self._write_facts(opened, death, samples)
        gathering = None
        if self.options.whole_job:
            follow_s = FOLLOW_S if death.echo else SAME_S
            gathering = self.pipeline.ask(opened, death.sentence, stacks=False, follow_s=follow_s)
        if self.pipeline.follows(gathering):
            with self._noting:
                self._known.pop(process, None)
                self._failed = (
                    None if self._failed is not None and self._failed[1] is opened else self._failed
                )
                self._echo = None if self._echo is opened else self._echo
            opened.discard()
            return None
        self.pipeline.publisher.log(opened)
        self.pipeline.announce(opened, samples, [death.rank])
        if self.options.whole_job and not death.echo:
            self.count_failure(opened)
        self.pipeline.explain_later(lambda: self._explain(opened, samples, gathering))
        return opened

    def _failed_again(self, death: Death, failure: Failure | None) -> IncidentFolder | None:
        """The incident of the same failure of the program, if this one only repeats it."""
        if failure is None or self._failed is None or not failure.repeats(self._failed[0]):
            return None
        opened = self._failed[1]
        opened.update(Moment("again", death.at, death.sentence), closed=None)
        log.error("%s: again %s", opened.current.id, death.sentence)
        self.pipeline.publisher.publish(opened)
        return opened

    def _with_memory(self, death: Death) -> Death:
        """Says so when the kernel has ended processes for lack of memory."""
        before, self._memory_kills = self._memory_kills, count_memory_kills()
        starved = self._memory_kills - before
        if not starved or "SIGKILL" not in death.reason:
            return death
        what = "it" if starved == 1 else f"{starved} processes"
        return replace(death, reason=f"{death.reason}: the kernel ended {what} for lack of memory")

    def _write_facts(self, opened: IncidentFolder, death: Death, samples: list[RankSample]) -> None:
        noticed = death.seen or time.time()
        self.pipeline.keep_boxes(opened, samples)
        sure = 0.9 if death.echo else 1.0
        verdict = Finding("rank_died", (death.rank,), death.sentence, confidence=sure, where=death.where)
        raised = {sample.rank: sample.closed for sample in samples if sample.closed.startswith("exception: ")}
        alike = same_error(raised) if len(raised) == len(samples) else None
        if alike is not None:
            verdict = alike
        elif death.echo and death.where and death.of_torch:  # it lost a peer, and no peer has died
            sentence = f"connections between ranks broke and no rank had died before: {death.sentence}"
            verdict = Finding("none_finished", (), sentence, confidence=0.7, where=death.where)
        own = next((s for s in samples if s.pid == death.pid), None)
        if own is not None and own.last_ns:
            last = last_good(own.step, [own])
            opened.update(Moment("last good step", min(own.last_ns / 1e9, death.at), last))
        kept = len(samples) - len(opened.current.missing)
        self.pipeline.keep_told(
            opened,
            verdict,
            Moment("evidence", time.time(), f"{kept} black boxes"),
            Moment("died", death.at, death.sentence),
            Moment("noticed", max(noticed, death.at), "by its agent"),
            noticed_s=max(0.0, noticed - death.at),
            action=self._action(death.rank),
        )

    def _action(self, rank: int) -> Action:
        if self.options.whole_job:
            why = "the launcher restarts the job while --max-restarts allows"
            return Action("restart_job", why, (rank,))
        return Action(
            "restart_rank", "the supervisor starts it again", (rank,), self.options.replica_of(rank)
        )

    def _explain(
        self, opened: IncidentFolder, samples: list[RankSample], gathering: Gathering | None
    ) -> None:
        """A rank may have died of what another did: calls that do not match are found in the boxes of all."""
        observed, before = read_observed(opened.path) or Observed(), opened.current.verdict
        found = self.pipeline.examine(opened, samples, observed, gathering=gathering).verdict
        if found is not None and before is not None and found.sentence != before.sentence:
            self.pipeline.publisher.log(opened)  # what was logged at once was a consequence
        self.pipeline.publisher.publish(opened)

    def count_failure(self, opened: IncidentFolder) -> None:
        """A rank of this node was the cause: a node that fails again and again leaves the job, where it may."""
        now = time.monotonic()
        window_s = self.options.policy.window_s
        self._failures_s = [*(t for t in self._failures_s if now - t < window_s), now]
        kind, why = decide_leaving(now, self._failures_s, self.options.policy)
        if kind is None or not self.options.may_leave:
            return
        log.error("%s: %s", opened.current.id, why)
        action = Action(kind, why, opened.current.ranks)
        opened.update(action=action)
        self.pipeline.publisher.publish(opened)  # before this node ends
        self.pipeline.act(opened, action)
        self.pipeline.publisher.publish(opened)

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
        runs = "its process runs" if len(ranks) == 1 else "their processes run"
        sentence = f"{ranks_text(ranks)} lost the lighthouse, but {runs} (the lighthouse: {reason})"
        opened = self.pipeline.open("partition", sentence, samples, ranks=ranks, step=step)
        verdict = Finding(
            "none_finished", ranks, f"{sentence}: a fault of the network, not of the program", confidence=0.9
        )
        why = "it comes back by itself when the network does; the others continue training"
        noticed = Moment("noticed", at, "by the lighthouse; its agent sees the process run")
        action = Action("none", why, ranks)
        self.pipeline.keep_told(opened, verdict, Moment("fault", at, reason), noticed, action=action)
        self._cut[ranks] = opened
        keep_newest(self._cut)
        self.pipeline.announce(opened, samples, ranks)
        return opened

    # a node that died with its agent, and with all its ranks: one incident, by one of the agents that are left

    def note_node(self, loss: Loss) -> IncidentFolder | None:
        """Keeps the evidence and opens the story; None when another agent does. Asks the other agents: not from the
        watch's thread."""
        samples = read_samples(self.options.folder)
        if self.options.whole_job:  # their connections break because of it
            self.pipeline.explained.add(sample.pid for sample in samples)
        sentence, us = describe(loss), self.pipeline.peers.name if self.pipeline.peers is not None else ""
        if loss.told_by not in ("", us):
            log.error("%s (told by %s)", sentence, loss.told_by)
            return None
        # opened a moment ago for broken connections alone: now their cause is known
        echo, self._echo = self._echo, None
        if echo is not None and loss.at - echo.current.opened >= ECHO_OF_S:
            echo = None
        opened = echo or self.pipeline.open("death", sentence, samples, node=loss.node.node)
        gathering = self.pipeline.ask(opened, sentence, stacks=False)
        if self.pipeline.follows(gathering):
            if echo is None:
                opened.discard()
            return None
        ranks = loss.node.ranks
        verdict = Finding("rank_died", ranks, sentence, confidence=1.0 if loss.certain else 0.8)
        step = opened.current.step
        last = max((s.last_ns for s in samples if s.step == step), default=0) / 1e9 or loss.at
        self.pipeline.keep_told(
            opened,
            verdict,
            Moment("last good step", min(last, loss.at), last_good(step, samples)),
            Moment("died", loss.at, f"node {loss.node.node} with {_ranks(ranks)}"),
            Moment("noticed", loss.at, loss.reason),
            node=loss.node.node,
            reason=sentence,
            action=self._action_for_node(loss.node),
        )
        self.pipeline.publisher.log(opened)
        self.pipeline.announce(opened, samples, ranks)
        self.pipeline.explain_later(lambda: self._explain_node(opened, loss, samples, gathering))
        return opened

    def _action_for_node(self, node: Presence) -> Action:
        if self.options.whole_job:
            why = "the nodes that are left restart the job, where --nnodes and --max-restarts allow"
            return Action("restart_job", why, node.ranks)
        if node.lighthouse:
            why = "the others wait for a lighthouse at the same address, with this node or without"
        else:
            why = "the others continue training without its replicas, which heal when the node is back"
        return Action("none", why, node.ranks)

    def _explain_node(
        self, opened: IncidentFolder, loss: Loss, samples: list[RankSample], gathering: Gathering | None
    ) -> None:
        self.pipeline.keep_boxes(opened, samples)  # once more: now they hold what the loss did to them
        observed = read_observed(opened.path) or Observed()
        found = self.pipeline.examine(opened, samples, observed, gathering=gathering)
        since, until = (int((loss.at + s) * 1e9) for s in (-RECENT_S, LATER_S))
        waiting = find_waiting(found.evidence.traces, since, until)
        if waiting and observed.told is not None:  # known when the boxes of the other nodes are here
            known = replace(observed.told, sentence=f"{observed.told.sentence}; {waiting}")
            opened.update(Moment("waited", loss.at, waiting))
            missing = opened.current.missing
            self.pipeline.examine(opened, samples, replace(observed, told=known))
            opened.update(missing=missing)
        lost = f"black boxes of {_ranks(loss.node.ranks)}: they lie on the lost node"
        opened.update(missing=(*opened.current.missing, lost))
        self.pipeline.publisher.publish(opened)


def describe(loss: Loss) -> str:
    node, ranks = loss.node.node, loss.node.ranks
    if loss.certain:
        return f"node {node} was lost with {_ranks(ranks)}: {loss.reason}"
    return f"node {node} with {_ranks(ranks)} is dead, frozen or cut off: {loss.reason}"


def find_waiting(traces: Iterable[RankTrace], since_ns: int, until_ns: int) -> str:
    """Which ranks were in which call that is open or broke: "ranks 0, 1 waited in all_reduce #57 of default_pg"."""
    found: dict[str, list[int]] = {}
    for trace in traces:
        calls = trace.calls
        around = (calls["created_ns"] >= since_ns) & (calls["created_ns"] <= until_ns)
        unfinished = calls[(calls["state"] != State.COMPLETED) & around]
        if trace.header.rank is None or not len(unfinished):
            continue
        call = unfinished[unfinished["created_ns"].argmax()]
        group = trace.groups[int(call["group"])]
        name = f"{trace.names[int(call['op'])]} #{int(call['seq'])} of {group.desc or group.name}"
        found.setdefault(name, []).append(trace.header.rank)
    return ", ".join(f"{_ranks(sorted(ranks))} waited in {name}" for name, ranks in sorted(found.items()))


def _ranks(ranks: Sequence[int]) -> str:
    return ranks_text(ranks) if ranks else "all its ranks"
