"""Opens an incident for each death, cut connection and lost node, with evidence and verdict. Runs in the agent."""

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

ENDING_S = 10.0  # time to free the memory of a GPU
FLAP_S = 60.0  # a replica that is cut off again within this time has the same incident
SAME_S = 5.0  # primary deaths on two nodes within this time are one incident
NODE_LOSS_S = 60.0  # the loss of a node may be noticed this long after the connections to it broke
RECENT_S, LATER_S = 60.0, 1.0  # before and after the loss of a node: the calls that it may have broken
PATIENCE_S = 1.0  # wait for the cause before a secondary failure is reported


@dataclass
class DeathIncidents:
    """`note_death` and `note_lost` may be called from any thread, `check` from the watch's."""

    pipeline: IncidentPipeline
    patience_s: Callable[[], float] = lambda: PATIENCE_S
    _started_ns: int = field(default_factory=time.time_ns)  # earlier ranks are of another run
    _past: set[ProcessId] = field(default_factory=set)  # of the attempt that ended; clocks may change
    _known: dict[ProcessId, IncidentFolder] = field(default_factory=dict)
    _failures_s: list[float] = field(default_factory=list)  # monotonic, of this node's ranks
    _cut: dict[tuple[int, ...], IncidentFolder] = field(default_factory=dict)  # ranks -> their last partition
    # since when only secondary failures are known, these, and the ranks
    _waiting: tuple[float, list[Death], list[RankSample]] | None = None
    _secondary: IncidentFolder | None = None  # the last incident, if it is of a secondary failure
    _stopped: tuple[float, str] = (float("-inf"), "")  # when another node stopped (monotonic), and its name
    _failed: tuple[Failure, IncidentFolder] | None = None  # the program's last failure, and its incident
    _memory_kills: int = field(default_factory=count_memory_kills)
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.options = self.pipeline.options

    def check(
        self, samples: list[RankSample], endings: Mapping[int, Ending], patience_s: float | None = None
    ) -> None:
        """Finds deaths: all of them in whole-job mode, ranks that raised in replica mode (the supervisor reports the others)."""
        explained, whole = self.pipeline.explained, self.options.whole_job
        new = [s for s in samples if s.process not in self._past]
        if any(s.closed or not s.alive for s in new):
            explained.read_shared(self.options.folder)
        new = [s for s in new if not explained.covers(s)]
        deaths = find_deaths(new, endings, since_ns=self._started_ns, raised_only=not whole)
        first, samples = self._settle(deaths, samples, patience_s)
        if first is None:
            return
        if first.secondary and self._follows_stop(first, samples):
            return
        of, death = self.options.replica_of, first
        ending = [s.pid for s in samples if whole or of(s.rank) == of(first.rank)]
        explained.add([first.pid, *ending])
        self.pipeline.run(lambda: self.note_death(death, samples), "allranks-death")
        if whole:
            self._past = {s.process for s in samples}

    def note_stopped(self, node: str) -> None:
        """The agent of another node shuts down: broken connections to its ranks are not an incident."""
        self._stopped = (time.monotonic(), node)

    def _follows_stop(self, first: Death, samples: list[RankSample]) -> bool:
        """Whether a broken connection follows from a node that was just stopped; then this attempt is explained."""
        if time.monotonic() - self._stopped[0] > NODE_LOSS_S:
            return False
        log.warning("%s: %s was stopped or has ended", first.sentence, self._stopped[1])
        self.pipeline.explained.add(sample.pid for sample in samples)
        return True

    def _settle(
        self, deaths: list[Death], samples: list[RankSample], patience_s: float | None
    ) -> tuple[Death | None, list[RankSample]]:
        """The death to report now, with the ranks of its attempt. A broken connection waits for its cause to show."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:  # ranks may have been restarted in the meantime
            samples = [read_sample(sample.path) or sample for sample in waiting[2]]
        if not deaths and waiting is not None:
            covered = {s.pid for s in samples if self.pipeline.explained.covers(s)}
            return find_first([d for d in waiting[1] if d.pid not in covered]), samples
        first, now = find_first(deaths), time.monotonic()
        since = waiting[0] if waiting else now
        if first is not None and first.secondary and now - since < self._wait_s(samples, patience_s):
            self._waiting = (since, deaths, samples)
            return None, samples
        return first, samples

    def _wait_s(self, samples: list[RankSample], given_s: float | None) -> float:
        patience = self.patience_s() if given_s is None else given_s
        # a process that recorded no error and is being torn down is most likely the cause
        ending = any(not s.closed and process_state(s.pid) == "X" for s in samples)
        return max(patience, ENDING_S) if ending else patience

    def note_death(self, death: Death, samples: list[RankSample] | None = None) -> IncidentFolder | None:
        """Opens the incident of a rank that died, once. `samples` are those of the moment when the death was noticed, since ranks
        may have been restarted."""
        samples = read_samples(self.options.folder) if samples is None else samples
        started_ns = max((s.start_ns for s in samples if s.pid == death.pid), default=0)
        process, failure = ProcessId(death.pid, started_ns), death.failure(samples)
        with self._noting:  # held shortly: simultaneous deaths do not wait for each other's evidence
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
            self._secondary = opened if death.secondary else None
        return self._report(process, death, samples, opened)

    def _report(
        self, process: ProcessId, death: Death, samples: list[RankSample], opened: IncidentFolder
    ) -> IncidentFolder | None:
        """Adds evidence and verdict to a new incident; None when another node leads it."""
        self._write_facts(opened, death, samples)
        gathering = None
        if self.options.whole_job:
            follow_s = FOLLOW_S if death.secondary else SAME_S
            gathering = self.pipeline.ask(opened, death.sentence, stacks=False, follow_s=follow_s)
        if self.pipeline.follows(gathering):
            with self._noting:
                self._known.pop(process, None)
                if self._failed is not None and self._failed[1] is opened:
                    self._failed = None
                if self._secondary is opened:
                    self._secondary = None
            opened.discard()
            return None
        self.pipeline.publisher.log(opened)
        self.pipeline.announce(opened, samples, [death.rank])
        if self.options.whole_job and not death.secondary:
            self.count_failure(opened)
        self.pipeline.explain_later(lambda: self._explain(opened, samples, gathering))
        return opened

    def _failed_again(self, death: Death, failure: Failure | None) -> IncidentFolder | None:
        """The incident of the last failure, if this one repeats it."""
        if failure is None or self._failed is None or not failure.repeats(self._failed[0]):
            return None
        opened = self._failed[1]
        opened.update(Moment("again", death.at, death.sentence), closed=None)
        log.error("%s: again %s", opened.current.id, death.sentence)
        self.pipeline.publisher.publish(opened)
        return opened

    def _with_memory(self, death: Death) -> Death:
        """Adds to the reason that the kernel has killed processes for lack of memory."""
        before, self._memory_kills = self._memory_kills, count_memory_kills()
        killed = self._memory_kills - before
        if not killed or "SIGKILL" not in death.reason:
            return death
        what = "it" if killed == 1 else f"{killed} processes"
        return replace(death, reason=f"{death.reason}: the kernel killed {what} for lack of memory")

    def _write_facts(self, opened: IncidentFolder, death: Death, samples: list[RankSample]) -> None:
        noticed = death.seen or time.time()
        self.pipeline.keep_boxes(opened, samples)
        sure = 0.9 if death.secondary else 1.0
        verdict = Finding("rank_died", (death.rank,), death.sentence, confidence=sure, where=death.where)
        raised = {sample.rank: sample.closed for sample in samples if sample.closed.startswith("exception: ")}
        alike = same_error(raised) if len(raised) == len(samples) else None
        if alike is not None:
            verdict = alike
        elif death.secondary and death.where and death.of_torch:  # it lost a peer, and no peer has died
            sentence = f"{death.loss} and no rank had died before: {death.sentence}"
            verdict = Finding("none_finished", (), sentence, confidence=0.7, where=death.where)
        own = next((s for s in samples if s.pid == death.pid), None)
        if own is not None and own.last_ns:
            last = last_good(own.step, [own])
            opened.update(Moment("last good step", min(own.last_ns / 1e9, death.at), last))
        kept = len(samples) - len(opened.current.missing)
        self.pipeline.write_finding(
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
        why = "the supervisor starts it again"
        return Action("restart_rank", why, (rank,), self.options.replica_of(rank))

    def _explain(
        self, opened: IncidentFolder, samples: list[RankSample], gathering: Gathering | None
    ) -> None:
        """Judges the boxes of all ranks: another rank may be the cause of the death, as with calls that do not match."""
        observed, before = read_observed(opened.path) or Observed(), opened.current.verdict
        found = self.pipeline.examine(opened, samples, observed, gathering=gathering).verdict
        if found is not None and before is not None and found.sentence != before.sentence:
            self.pipeline.publisher.log(opened)
        self.pipeline.publisher.publish(opened)

    def count_failure(self, opened: IncidentFolder) -> None:
        """Counts a failure caused by a rank of this node. A node that fails repeatedly leaves the job, if it may."""
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
        """Opens the incident of a replica that the lighthouse lost although its processes run here: the network is cut. A flapping
        connection is one incident."""
        known = self._cut.get(ranks)
        if known is not None and at - known.current.timeline[-1].at < FLAP_S:
            known.update(Moment("cut again", at, reason))
            return known
        samples = read_samples(self.options.folder)
        step = max((s.step for s in samples if s.rank in ranks), default=-1)
        runs = "its process runs" if len(ranks) == 1 else "their processes run"
        sentence = f"{ranks_text(ranks)} lost the lighthouse, but {runs} (the lighthouse: {reason})"
        opened = self.pipeline.open("partition", sentence, samples, ranks=ranks, step=step)
        fault = f"{sentence}: a fault of the network, not of the program"
        verdict = Finding("none_finished", ranks, fault, confidence=0.9)
        why = "it rejoins when the network is back; the others continue training"
        noticed = Moment("noticed", at, "by the lighthouse; its agent sees the process run")
        action = Action("none", why, ranks)
        self.pipeline.write_finding(opened, verdict, Moment("fault", at, reason), noticed, action=action)
        self._cut[ranks] = opened
        keep_newest(self._cut)
        self.pipeline.announce(opened, samples, ranks)
        return opened

    def note_node(self, loss: Loss) -> IncidentFolder | None:
        """Opens the incident of a node that was lost with its agent and ranks; None when another agent does. Asks the other
        agents, so not from the watch's thread."""
        samples = read_samples(self.options.folder)
        if self.options.whole_job:  # the loss breaks their connections
            self.pipeline.explained.add(sample.pid for sample in samples)
        sentence, us = describe(loss), self.pipeline.peers.name if self.pipeline.peers is not None else ""
        if loss.filed_by not in ("", us):
            log.error("%s (filed by %s)", sentence, loss.filed_by)
            return None
        # a recent incident of broken connections alone: now their cause is known
        earlier, self._secondary = self._secondary, None
        if earlier is not None and loss.at - earlier.current.opened >= NODE_LOSS_S:
            earlier = None
        opened = earlier or self.pipeline.open("death", sentence, samples, node=loss.node.node)
        gathering = self.pipeline.ask(opened, sentence, stacks=False)
        if self.pipeline.follows(gathering):
            if earlier is None:
                opened.discard()
            return None
        ranks = loss.node.ranks
        verdict = Finding("rank_died", ranks, sentence, confidence=1.0 if loss.certain else 0.8)
        step = opened.current.step
        last = max((s.last_ns for s in samples if s.step == step), default=0) / 1e9 or loss.at
        self.pipeline.write_finding(
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
            why = "the remaining nodes restart the job, if --nnodes and --max-restarts allow"
            return Action("restart_job", why, node.ranks)
        if node.lighthouse:
            why = "the others wait for a lighthouse at the same address, with this node or without"
        else:
            why = "the others continue training without its replicas, which heal when the node is back"
        return Action("none", why, node.ranks)

    def _explain_node(
        self, opened: IncidentFolder, loss: Loss, samples: list[RankSample], gathering: Gathering | None
    ) -> None:
        self.pipeline.keep_boxes(opened, samples)  # again: now with the calls that the loss broke
        observed = read_observed(opened.path) or Observed()
        found = self.pipeline.examine(opened, samples, observed, gathering=gathering)
        since, until = (int((loss.at + s) * 1e9) for s in (-RECENT_S, LATER_S))
        waiting = find_waiting(found.evidence.traces, since, until)
        missing = opened.current.missing
        if waiting and observed.told is not None:
            known = replace(observed.told, sentence=f"{observed.told.sentence}; {waiting}")
            opened.update(Moment("waited", loss.at, waiting))
            self.pipeline.examine(opened, samples, replace(observed, told=known))
        lost = f"black boxes of {_ranks(loss.node.ranks)}: they are on the lost node"
        opened.update(missing=(*missing, lost))
        self.pipeline.publisher.publish(opened)


def describe(loss: Loss) -> str:
    node, ranks = loss.node.node, loss.node.ranks
    if loss.certain:
        return f"node {node} was lost with {_ranks(ranks)}: {loss.reason}"
    return f"node {node} with {_ranks(ranks)} is dead, frozen or cut off: {loss.reason}"


def find_waiting(traces: Iterable[RankTrace], since_ns: int, until_ns: int) -> str:
    """The ranks in unfinished or broken calls: "ranks 0, 1 waited in all_reduce #57 of default_pg"."""
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
