"""A node that died with its agent, and with all its ranks: one incident, by one of the agents that are left."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allranks.errors import AllranksError
from allranks.incidents.deaths import DeathIncidents
from allranks.incidents.evidence import Observed, read_observed
from allranks.incidents.folder import IncidentFolder
from allranks.incidents.pipeline import IncidentPipeline
from allranks.load import LoadOptions, load_paths
from allranks.model.cluster import Gathering
from allranks.model.diagnosis import Action, Finding, Moment
from allranks.model.formatting import ranks_text
from allranks.model.trace import RankTrace, State
from allranks.watch.nodes import Loss
from allranks.watch.samples import RankSample, last_good, read_samples

log = logging.getLogger("allranks.agent")

RECENT_S, LATER_S = 60.0, 1.0  # a call made longer before the loss, or after it, has nothing to do with it


@dataclass
class NodeLosses:
    """`note` may be called from any thread but the watch's: it asks the other agents."""

    pipeline: IncidentPipeline
    deaths: DeathIncidents
    us: str  # our agent's name

    def note(self, loss: Loss) -> IncidentFolder | None:
        """Keeps the evidence and opens the story; None when another agent does."""
        samples = read_samples(self.pipeline.options.folder)
        if self.pipeline.options.whole_job:  # their connections break because of it
            self.pipeline.explained.add(sample.pid for sample in samples)
        sentence = describe(loss)
        if loss.told_by not in ("", self.us):
            log.error("%s (told by %s)", sentence, loss.told_by)
            return None
        echo = self.deaths.pop_secondary_incident(loss.at)
        opened = echo or self.pipeline.open("death", sentence, samples, node=loss.node.node)
        gathering = self.pipeline.ask(opened, sentence, stacks=False)
        if self.pipeline.follows(gathering):
            if echo is None:
                opened.discard()
            return None
        self._report(opened, loss, samples)
        self.pipeline.explain_later(lambda: self._explain(opened, loss, samples, gathering))
        return opened

    def _report(self, opened: IncidentFolder, loss: Loss, samples: list[RankSample]) -> None:
        ranks, sentence = loss.node.ranks, describe(loss)
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
            action=self._action(loss),
        )
        self.pipeline.publisher.log(opened)
        self.pipeline.announce(opened, samples, ranks)

    def _action(self, loss: Loss) -> Action:
        ranks = loss.node.ranks
        if self.pipeline.options.whole_job:
            why = "the nodes that are left restart the job, where --nnodes and --max-restarts allow"
            return Action("restart_job", why, ranks)
        if loss.node.lighthouse:
            why = "the others wait for a lighthouse at the same address, with this node or without"
        else:
            why = "the others continue training without its replicas, which heal when the node is back"
        return Action("none", why, ranks)

    def _explain(
        self, opened: IncidentFolder, loss: Loss, samples: list[RankSample], gathering: Gathering | None
    ) -> None:
        self.pipeline.keep_boxes(opened, samples)  # once more: now they hold what the loss did to them
        observed = read_observed(opened.path) or Observed()
        self.pipeline.examine(opened, samples, observed, gathering=gathering)
        waiting = self._waiting(opened, loss)
        if waiting and observed.told is not None:  # known when the boxes of the other nodes are here
            known = replace(observed.told, sentence=f"{observed.told.sentence}; {waiting}")
            opened.update(Moment("waited", loss.at, waiting))
            missing = opened.current.missing
            self.pipeline.examine(opened, samples, replace(observed, told=known))
            opened.update(missing=missing)
        lost = f"black boxes of {_ranks(loss.node.ranks)}: they lie on the lost node"
        opened.update(missing=(*opened.current.missing, lost))
        self.pipeline.publisher.publish(opened)

    def _waiting(self, opened: IncidentFolder, loss: Loss) -> str:
        try:
            boxes = load_paths([str(opened.path / "boxes")], LoadOptions())
        except AllranksError:  # none can be read: said by the diagnosis
            return ""
        since, until = (int((loss.at + s) * 1e9) for s in (-RECENT_S, LATER_S))
        return find_waiting(boxes.traces, since, until)


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
