"""Compares the calls of running ranks, from their black boxes and at no cost to the ranks. Runs in the agent.

Ranks of one node are compared directly. Between nodes, each agent reports hashes of windows of calls (`CallWindows`) to the
lighthouse. When two differ, or all ranks of the job wait, the agents compare the boxes themselves (incidents/loop.py).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from allranks.blackbox.reader import opened_box, read_box
from allranks.blackbox.tables import Tables
from allranks.diagnosis.divergence import find_divergence
from allranks.errors import InputError
from allranks.model.diagnosis import Finding
from allranks.model.trace import Flag, RankTrace
from allranks.watch.samples import ProcessId, RankSample

PERIOD_S = 0.5
SHARE = 0.02  # of one core at most
NEWEST, ALL_CALLS = 600, 40_000  # calls compared per rank, and of all ranks
UNEVEN = ("scatter", "all_to_all", "alltoall")  # operations with sizes that may differ between ranks
IDLE_S = 20.0  # ranks that have not moved for this long are not compared again
MAX_REPORTED = 3  # per set of processes: one difference leads to others
WINDOW = 32  # calls of a group per hash
SENT = 8  # windows reported per group, from the last RECENT_S
RECENT_S = 6.0
REPLICAS = "replicas/"  # prefix of the names of groups of replicas


@dataclass
class CallWindows:
    """Hashes of windows of calls in groups that span several nodes. The first rank of a group represents the node, since the
    others are compared with it here. `hashes` may be read from any thread."""

    hashes: dict[str, dict[int, int]] = field(default_factory=dict)  # group -> window -> hash
    local: Finding | None = None  # a difference on this node that is not yet compared with other nodes
    _seen: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)

    def note(self, now_s: float, traces: Sequence[RankTrace]) -> None:
        here = {trace.header.rank for trace in traces}
        found: dict[str, dict[int, int]] = {}
        for trace in sorted(traces, key=lambda trace: trace.header.rank or 0):
            for index, group in enumerate(trace.groups):
                if len(group.ranks) > 1 and not here.issuperset(group.ranks):
                    # replicas restart one by one and make new groups
                    attempt = 0 if group.name.startswith(REPLICAS) else trace.header.attempt
                    key = f"{attempt} {group.name} {zlib.crc32(repr(group.ranks).encode()):x}"
                    found.setdefault(key, hash_windows(trace, index))
        for key, windows in found.items():
            seen = {w: old for w, old in self._seen.get(key, {}).items() if now_s - old[1] < RECENT_S}
            found[key] = {w: windows[w] if w in windows else seen[w][0] for w in {*seen, *windows}}
            self._seen[key] = {
                w: (value, seen[w][1] if w in seen else now_s) for w, value in found[key].items()
            }
        self._seen = {key: self._seen[key] for key in found}
        self.hashes = {key: choose_windows(windows) for key, windows in found.items() if windows}


def choose_windows(windows: dict[int, int]) -> dict[int, int]:
    """The windows with the roundest numbers, so that nodes that sample at different times choose the same."""
    chosen = sorted(windows, key=lambda window: (window & -window, window), reverse=True)[:SENT]
    return {window: windows[window] for window in chosen}


def hash_windows(trace: RankTrace, group: int) -> dict[int, int]:
    """Window -> hash of the complete windows of a group's collectives. Sizes that may differ in a correct job are left out."""
    calls, apart = trace.calls, int(Flag.P2P | Flag.COALESCED_PART)
    rows = calls[(calls["group"] == group) & (calls["flags"] & apart == 0) & (calls["seq"] > 0)]
    window = (rows["seq"] - 1) // WINDOW
    numbers, counts = np.unique(window, return_counts=True)
    whole = np.isin(window, numbers[counts == WINDOW])
    rows, window = rows[whole], window[whole]
    if not len(rows):
        return {}
    replicas = trace.groups[group].name.startswith(REPLICAS)  # a healing replica is at an earlier step
    sized = ~np.isin(rows["op"], [i for i, name in enumerate(trace.names) if name.startswith(UNEVEN)])
    columns = (
        _hashed(rows["op"], lambda number: trace.names[number]),
        _hashed(rows["stack"], lambda number: [(frame.name, frame.line) for frame in trace.stacks[number]]),
        _hashed(rows["shapes"], lambda number: trace.shapes[number].input_dtypes[:1]),
        np.where(sized, rows["in_numel"], 0).astype(np.uint64),
        rows["root"].astype(np.uint64),
        np.zeros(len(rows), np.uint64) if replicas else rows["step"].astype(np.uint64),
        rows["seq"].astype(np.uint64),
    )
    words = np.zeros(len(rows), np.uint64)
    for column in columns:
        words = (words ^ column) * np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
    return {
        int(w): int(np.bitwise_xor.reduce(words[window == w]) >> np.uint64(32)) for w in np.unique(window)
    }


def _hashed(column: np.ndarray, value: Callable[[int], object]) -> np.ndarray:
    """Hashes of the values that the numbers in a column refer to."""
    numbers, where = np.unique(column, return_inverse=True)
    hashes = np.array([zlib.crc32(repr(value(int(number))).encode()) for number in numbers], np.uint64)
    found: np.ndarray = hashes[where]
    return found


@dataclass
class CallComparison:
    """Reports a difference once, when two samples in a row show it. Not thread-safe."""

    windows: CallWindows | None = None  # in a job of several nodes
    of_replicas: bool = False  # compares replicas, not the ranks inside each replica
    _next_s: float = 0.0
    _moved_s: float = 0.0
    _marks: tuple[object, ...] = ()
    _processes: frozenset[ProcessId] = frozenset()
    _seen: tuple[object, ...] = ()
    _reported: set[tuple[object, ...]] = field(default_factory=set)

    def look(self, now_s: float, samples: Sequence[RankSample]) -> Finding | None:
        """Compares the ranks if it is time; a new difference, else None."""
        samples = [s for s in samples if s.alive] if self.of_replicas else _of_one_run(samples)
        if now_s < self._next_s or not self._due(now_s, samples):
            return None
        begin = time.thread_time()
        traces = read_calls([sample.path for sample in samples])
        if self.windows is not None:
            self.windows.note(now_s, traces)
        found = self.judge(traces)
        self._next_s = now_s + max(PERIOD_S, (time.thread_time() - begin) / SHARE)
        return found

    def judge(self, traces: Sequence[RankTrace]) -> Finding | None:
        """A difference between these calls that the previous calls also showed, once."""
        processes = frozenset(ProcessId(t.header.pid, t.header.start_ns) for t in traces)
        if processes != self._processes:
            self._processes, self._seen, self._reported = processes, (), set()
        found = find_divergence(traces, time.time_ns(), self.of_replicas) if len(traces) > 1 else None
        key = (found.kind, found.ranks, found.group, found.sequence) if found is not None else ()
        sure, self._seen = bool(key) and key == self._seen, key
        if not sure or key[:3] in self._reported or len(self._reported) >= MAX_REPORTED:
            return None
        self._reported.add(key[:3])
        return found

    def _due(self, now_s: float, samples: Sequence[RankSample]) -> bool:
        """Whether there are calls that were not compared before."""
        marks = tuple((s.process, s.mark) for s in samples)
        if marks != self._marks:
            self._marks, self._moved_s = marks, now_s
        calling = sum(sample.calls_started > 0 for sample in samples)
        return calling > (self.windows is None) and now_s - self._moved_s < IDLE_S


def _of_one_run(samples: Sequence[RankSample]) -> list[RankSample]:
    """The ranks of the newest attempt, without ranks of an earlier run: those that ended before another rank started."""
    newest = max((sample.attempt for sample in samples), default=0)
    started = max((sample.start_ns for sample in samples if sample.alive), default=0)
    return [s for s in samples if s.attempt == newest and (s.alive or s.last_ns > started)]


def read_calls(paths: Sequence[str]) -> list[RankTrace]:
    """The newest calls in these black boxes, on shared tables; files that cannot be read are left out."""
    tables, traces = Tables(), []
    newest = min(NEWEST, ALL_CALLS // max(1, len(paths)))
    for path in paths:
        try:
            with opened_box(path) as file:
                traces.append((read_box(file, tables, newest=newest), path))
        except InputError:
            continue
    shared = tables.freeze()
    return [trace.with_tables(*shared, path) for trace, path in traces]
