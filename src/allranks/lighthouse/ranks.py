"""Agents' reports of their ranks, combined for the page: cells, nodes, step times, one rank in detail. Also decides
which nodes compare the calls of their ranks: two whose hashes of the same calls differ, or all when every rank waits.

A difference is a reason to compare, not a finding: one rank may make the same call from another line of the program.
On the loop's thread; no sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from allranks.model.cluster import DOING, NodeAnswer, NodeReport
from allranks.model.job_state import StepWork

STILL_S = 1.2  # all ranks must wait at least this long
MAX_ASKED = 64  # agents; with more, only those that differ are asked,
SOME = 8  # and a few others, most of which show the usual calls
KEPT, MAX_GROUPS = 64, 4096  # windows per group; groups of all attempts
FIRST_S, LAST_S = 10.0, 600.0  # between two comparisons of a group whose hashes differ


@dataclass
class _Known:
    """One group's hashes, each with the agent that reported it first."""

    windows: dict[int, tuple[int, str]] = field(default_factory=dict)
    next_s: float = 0.0
    wait_s: float = FIRST_S


@dataclass
class Differences:
    """`find` is called with every report."""

    _groups: dict[str, _Known] = field(default_factory=dict)
    _moved_s: float = 0.0  # when a rank last moved
    _still: bool = False  # all ranks have waited since then
    _awake: set[str] = field(default_factory=set)  # agents with a rank that is not waiting
    _longest_s: float = 0.0  # longest wait of all ranks that ended
    _compared: int = 0  # comparisons during the present wait
    _next_s: float = 0.0  # when the next node whose own ranks differ may compare them

    def find(
        self, now_s: float, report: NodeReport, before: NodeReport | None, reports: Mapping[str, NodeReport]
    ) -> tuple[str, ...]:
        """The agents with which the reporter should compare calls, itself if it is the only one; () when nothing differs."""
        if report.differs and now_s >= self._next_s:  # one node: many may see the same
            chosen = _others(report, reports)[:SOME] or [report.agent] * (len(reports) == 1)
            self._next_s = now_s + FIRST_S if chosen else 0.0  # 0: ranks of other nodes are about to start
            return tuple(chosen)
        if len(reports) < 2:
            return ()
        differs = [agent for key in report.windows if (agent := self._differs(now_s, key, report))]
        waits = self._wait(now_s, before, report, reports) and len(reports) <= MAX_ASKED
        if not waits and not differs:
            return ()
        found = tuple(dict.fromkeys((*differs, *_others(report, reports))))
        return found if waits else found[: max(len(differs), SOME)]

    def _differs(self, now_s: float, key: str, report: NodeReport) -> str:
        """The agent that reported another hash of the same calls; "" for none, or if the group was compared recently."""
        if key not in self._groups and len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        known = self._groups.setdefault(key, _Known())
        found = ""
        for window, value in report.windows[key].items():
            first, agent = known.windows.setdefault(window, (value, report.agent))
            found = agent if first != value and agent != report.agent else found
        for window in sorted(known.windows)[:-KEPT]:
            del known.windows[window]
        if not found or now_s < known.next_s:
            return ""
        known.next_s, known.wait_s = now_s + known.wait_s, min(LAST_S, 2 * known.wait_s)
        return found

    def _wait(
        self, now_s: float, before: NodeReport | None, report: NodeReport, reports: Mapping[str, NodeReport]
    ) -> bool:
        """Whether all ranks have waited in calls for longer than ever before, and a comparison is due."""
        moved = before is None or before.calls != report.calls
        if report.doing.strip("w"):
            self._awake.add(report.agent)
        else:
            self._awake.discard(report.agent)
        if moved or self._awake & reports.keys():
            if self._still:
                self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s, self._still, self._compared = now_s, False, 0
            return False
        self._still = True
        if now_s - self._moved_s < max(STILL_S, self._longest_s) * 2**self._compared:
            return False
        self._compared += 1
        return True


def _others(report: NodeReport, reports: Mapping[str, NodeReport]) -> list[str]:
    return sorted(name for name, one in reports.items() if one.ranks and name != report.agent)


T = TypeVar("T")
MAX_RANK = 1_000_000
_SHOWN = ("node", "ranks", "names", "gpus", "pids", "doing", "steps", "calls", "places")  # on the page
AGENTS_PER_S = 200  # reports; with more nodes each reports less often


@dataclass
class RankTable:
    """The newest report of every agent. `version` changes with the layout."""

    reports: dict[str, NodeReport] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)  # agent -> when, on the lighthouse's clock
    version: int = 0
    _differences: Differences = field(default_factory=Differences)

    def note(self, report: NodeReport, now: float) -> NodeAnswer:
        """Keeps a report; returns what the lighthouse wants next."""
        size = len(report.ranks)
        if any(rank < 0 or rank > MAX_RANK for rank in report.ranks) or len(report.doing) != size:
            report = replace(report, ranks=(), doing="")
        before = self.reports.get(report.agent)
        self.reports[report.agent], self.heard[report.agent] = report, now
        layout = report.ranks, report.names, report.gpus
        if before is None or (before.ranks, before.names, before.gpus) != layout:
            self.version += 1
        every_s = max(1.0, len(self.reports) / AGENTS_PER_S)
        return NodeAnswer(every_s, self._differences.find(now, report, before, self.reports))

    def drop(self, agent: str, lost: bool) -> None:
        """An agent is gone; `lost`: its ranks are dead."""
        report = self.reports.get(agent)
        if report is None:
            return
        self.version += 1
        if lost:
            self.reports[agent] = replace(report, doing="d" * len(report.ranks), work=StepWork())
        else:
            del self.reports[agent], self.heard[agent]

    def cells(self) -> str:
        """One letter per rank, starting with rank 0."""
        size = 1 + max((rank for report in self.reports.values() for rank in report.ranks), default=-1)
        found = ["."] * size
        for report in self.reports.values():
            for rank, letter in zip(report.ranks, report.doing, strict=False):
                found[rank] = letter
        return "".join(found)

    def step_times(self) -> tuple[float, float] | None:
        """(median, 99th percentile) of the ranks that made a step since their last report."""
        times = sorted(s for report in self.reports.values() for s in report.step_s if s > 0)
        if not times:
            return None
        return times[len(times) // 2], times[min(len(times) - 1, int(0.99 * len(times)))]

    def loss(self) -> float | None:
        reports = (one for one in self.reports.values() if one.loss and one.ranks)
        return min(((one.ranks[0], one.loss[0]) for one in reports), default=(0, None))[1]

    def work(self) -> StepWork:
        return sum((report.work for report in self.reports.values()), StepWork())

    def token_file(self) -> str:
        return next(
            (f"{one.token_file} on {one.node}" for one in self.reports.values() if one.token_file), ""
        )

    def nodes(self) -> dict[str, object]:
        """The layout: nodes with their ranks and GPUs, and the process groups."""
        reports = sorted(self.reports.values(), key=lambda one: min(one.ranks, default=MAX_RANK))
        rows = [{name: getattr(one, name) for name in _SHOWN} for one in reports]
        groups: dict[str, tuple[int, ...]] = {}
        for report in self.reports.values():
            groups.update(report.groups)
        return {"version": self.version, "nodes": rows, "groups": groups}

    def detail(self, rank: int, evidence: Iterable[tuple[str, str]]) -> dict[str, object] | None:
        """One rank: its newest report, and its entry in the newest evidence (incident, JSON); None: unknown rank."""
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
