"""Gathers the evidence of one incident: of this node, and of the others where there are any. Runs in the agent."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.incidents.examine import Examination, Others, collect_stacks, examine
from allranks.incidents.folder import IncidentFolder, copy_boxes
from allranks.incidents.judge import Observed
from allranks.incidents.options import WatchOptions
from allranks.incidents.peers import PeerAgents
from allranks.model.cluster import FOLLOW_S, Gathering
from allranks.watch.samples import RankSample, read_samples


@dataclass
class Gatherer:
    """`company` is None on a node that is alone."""

    options: WatchOptions
    company: PeerAgents | None = None

    def ask(
        self, opened: IncidentFolder, reason: str, *, stacks: bool = True, follow_s: float = FOLLOW_S
    ) -> Gathering | None:
        """Asks the agents of other nodes for their part; None when there are none.

        `follow_s`: what another one asked for within this time before is the same incident.
        """
        company = self.company
        found = company.ask(opened.current.id, reason, stacks=stacks, follow_s=follow_s) if company else None
        if found is None or not (found.agents or self.follows(found)):
            return None
        if not self.follows(found) and self.company is not None:
            self.company.expect(found, opened.path)
        return found

    def follows(self, gathering: Gathering | None) -> bool:
        """Whether another node leads."""
        return gathering is not None and self.company is not None and gathering.lead != self.company.name

    def examine(
        self,
        opened: IncidentFolder,
        pids: dict[int, int],
        samples: list[RankSample],
        gathering: Gathering | None,
        observed: Observed | None = None,
    ) -> Examination:
        """Stacks of these ranks and the parts of others, judged together with the boxes that were kept."""
        others = None
        if gathering is not None and self.company is not None:
            company = self.company
            others = Others(company.name, lambda: company.wait(gathering))
        seen = replace(
            observed or Observed(),
            taken_ns=time.time_ns(),
            gone=tuple(s.rank for s in samples if not s.alive and not s.closed),
            marked=tuple(s.rank for s in samples if s.step >= 0),
            still_s=self.options.notice.floor_s,
        )
        chosen = pids if self.options.collect_stacks else {}
        return examine(opened.path, chosen, job_folder=self.options.folder, observed=seen, others=others)

    def collect_part(self, folder: Path, stacks: bool) -> list[str]:
        """Our part of an incident that another node leads; returns what is missing."""
        samples = read_samples(self.options.folder)
        _, missing = copy_boxes([Path(sample.path) for sample in samples], folder / "boxes")
        pids = {s.rank: s.pid for s in samples if s.alive}
        if stacks and pids and self.options.collect_stacks:
            place = folder / "stacks" / (self.company.name if self.company else self.options.node)
            collect_stacks(place, pids, self.options.folder, missing)
        return missing
