"""Which nodes should compare the calls of their ranks: two whose hashes of the same calls differ, or all when every rank waits.

A difference is a reason to look, not a finding: a program may call from another line on one rank. On the loop's thread; no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks.model.cluster import NodeReport

STILL_S = 1.2  # that all ranks must wait at least
MAX_ASKED = 64  # agents; with more of them only those that differ are asked,
SOME = 8  # and a few others: most of them show what is usual
KEPT, MAX_GROUPS = 64, 4096  # windows of a group; groups, of all attempts
FIRST_S, LAST_S = 10.0, 600.0  # between two looks at a group whose hashes differ


@dataclass
class _Known:
    """One group's hashes, and who told them first."""

    windows: dict[int, tuple[int, str]] = field(default_factory=dict)
    next_s: float = 0.0
    wait_s: float = FIRST_S


@dataclass
class Differences:
    """`find` is asked with every report."""

    _groups: dict[str, _Known] = field(default_factory=dict)
    _moved_s: float = 0.0  # when a rank was last seen to move
    _still: bool = False  # all have waited since
    _awake: set[str] = field(default_factory=set)  # agents with a rank that does not wait
    _longest_s: float = 0.0  # that all waited, and went on
    _looks: int = 0  # at the present wait
    _next_s: float = 0.0  # when the next node may look whose own ranks differ

    def find(
        self, now_s: float, report: NodeReport, before: NodeReport | None, reports: Mapping[str, NodeReport]
    ) -> tuple[str, ...]:
        """The agents with which the reporter should compare calls, itself if there is no other; () when nothing differs."""
        if report.differs and now_s >= self._next_s:  # one node: many may see the same
            chosen = _others(report, reports)[:SOME] or [report.agent] * (len(reports) == 1)
            self._next_s = now_s + FIRST_S if chosen else 0.0  # ranks of other nodes are about to start
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
        """The agent that told another hash of the same calls; "" when there is none, or they were looked at lately."""
        if key not in self._groups and len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        known = self._groups.setdefault(key, _Known())
        found = ""
        for window, value in report.windows[key].items():
            told, agent = known.windows.setdefault(window, (value, report.agent))
            found = agent if told != value and agent != report.agent else found
        for window in sorted(known.windows)[:-KEPT]:
            del known.windows[window]
        if not found or now_s < known.next_s:
            return ""
        known.next_s, known.wait_s = now_s + known.wait_s, min(LAST_S, 2 * known.wait_s)
        return found

    def _wait(
        self, now_s: float, before: NodeReport | None, report: NodeReport, reports: Mapping[str, NodeReport]
    ) -> bool:
        """Whether all ranks have waited in calls for longer than ever before, and it is time to look (again)."""
        moved = before is None or before.calls != report.calls
        if report.doing.strip("w"):
            self._awake.add(report.agent)
        else:
            self._awake.discard(report.agent)
        if moved or self._awake & reports.keys():
            if self._still:
                self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s, self._still, self._looks = now_s, False, 0
            return False
        self._still = True
        if now_s - self._moved_s < max(STILL_S, self._longest_s) * 2**self._looks:
            return False
        self._looks += 1
        return True


def _others(report: NodeReport, reports: Mapping[str, NodeReport]) -> list[str]:
    return sorted(name for name, one in reports.items() if one.ranks and name != report.agent)
