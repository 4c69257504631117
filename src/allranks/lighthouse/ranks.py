"""What agents report of their ranks, put together for the page: cells, nodes, step times, one rank in detail. On the loop's
thread; no sockets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from allranks.lighthouse.differences import Differences
from allranks.model.cluster import DOING, NodeAnswer, NodeReport
from allranks.model.job_state import StepWork

T = TypeVar("T")
MAX_RANK = 1_000_000
AGENTS_PER_S = 200  # reports that are worth their CPU; with more nodes each reports less often


@dataclass
class RankTable:
    """The newest report of every agent. `version` changes with the layout."""

    reports: dict[str, NodeReport] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)  # agent -> when, on the lighthouse's clock
    version: int = 0
    _differences: Differences = field(default_factory=Differences)

    def note(self, report: NodeReport, now: float) -> NodeAnswer:
        """Keeps a report; what is wanted next."""
        size = len(report.ranks)
        if any(rank < 0 or rank > MAX_RANK for rank in report.ranks) or len(report.doing) != size:
            report = replace(report, ranks=(), doing="")
        before = self.reports.get(report.agent)
        self.reports[report.agent], self.heard[report.agent] = report, now
        if before is None or (before.ranks, before.names, before.gpus) != (
            report.ranks,
            report.names,
            report.gpus,
        ):
            self.version += 1
        every_s = max(1.0, len(self.reports) / AGENTS_PER_S)
        return NodeAnswer(every_s, self._differences.find(now, report, before, self.reports))

    def drop(self, agent: str, lost: bool) -> None:
        """An agent is gone; with `lost` its ranks are dead."""
        report = self.reports.get(agent)
        if report is None:
            return
        self.version += 1
        if lost:
            self.reports[agent] = replace(report, doing="d" * len(report.ranks), work=StepWork())
        else:
            del self.reports[agent], self.heard[agent]

    def cells(self) -> str:
        """One letter for each rank from 0 on."""
        size = 1 + max((rank for report in self.reports.values() for rank in report.ranks), default=-1)
        found = ["."] * size
        for report in self.reports.values():
            for rank, letter in zip(report.ranks, report.doing, strict=False):
                found[rank] = letter
        return "".join(found)

    def step_times(self) -> tuple[float, float] | None:
        """(median, 99th percentile) over the ranks that made a step since their last report."""
        times = sorted(s for report in self.reports.values() for s in report.step_s if s > 0)
        if not times:
            return None
        return times[len(times) // 2], times[min(len(times) - 1, int(0.99 * len(times)))]

    def loss(self) -> float | None:
        """Of the lowest rank that gives one."""
        given = [
            (report.ranks[0], report.loss[0])
            for report in self.reports.values()
            if report.loss and report.ranks
        ]
        return min(given)[1] if given else None

    def work(self) -> StepWork:
        return sum((report.work for report in self.reports.values()), StepWork())

    def token_file(self) -> str:
        return next(
            (f"{one.token_file} on {one.node}" for one in self.reports.values() if one.token_file), ""
        )

    def nodes(self) -> dict[str, object]:
        """The layout: nodes with their ranks and GPUs, and the process groups."""
        rows = [
            {
                "node": one.node,
                "ranks": one.ranks,
                "names": one.names,
                "gpus": one.gpus,
                "pids": one.pids,
                "doing": one.doing,
                "steps": one.steps,
                "calls": one.calls,
                "places": one.places,
            }
            for one in sorted(self.reports.values(), key=lambda one: min(one.ranks, default=MAX_RANK))
        ]
        groups: dict[str, tuple[int, ...]] = {}
        for report in self.reports.values():
            groups.update(report.groups)
        return {"version": self.version, "nodes": rows, "groups": groups}

    def detail(self, rank: int, evidence: Iterable[tuple[str, str]]) -> dict[str, object] | None:
        """One rank: the newest report, and what the newest evidence (incident, JSON) holds of it; None: not known."""
        report = next((one for one in self.reports.values() if rank in one.ranks), None)
        shown = _evidence_of(rank, evidence)
        if report is None:
            return {"rank": rank, "evidence": shown} if shown else None
        at = report.ranks.index(rank)
        pid = _entry(report.pids, at, 0)
        return {
            "rank": rank,
            "name": _entry(report.names, at, ""),
            "node": report.node,
            "pid": pid,
            "doing": DOING.get(report.doing[at], ""),
            "place": _entry(report.places, at, ""),
            "step": _entry(report.steps, at, -1),
            "calls": _entry(report.calls, at, 0),
            "step_s": _entry(report.step_s, at, 0.0),
            "memory_mb": _entry(report.memory_mb, at, 0),
            "gpus": [gpu for gpu in report.gpus if pid in gpu.pids],
            "evidence": shown,
        }


def _entry(column: tuple[T, ...], at: int, default: T) -> T:
    return column[at] if at < len(column) else default


def _evidence_of(rank: int, evidence: Iterable[tuple[str, str]]) -> dict[str, object] | None:
    for incident, text in evidence:
        try:
            entries = json.loads(text).get("ranks") or ()
            found = next((one for one in entries if rank in one.get("ranks", ())), None)
        except (ValueError, AttributeError, TypeError):
            continue
        if found is not None:
            return {**found, "incident": incident}
    return None
