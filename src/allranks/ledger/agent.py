"""Writes this node's ledger from the samples and incidents of the watch. Runs on the watch's thread.

It never raises, and waits for nothing but its own small file. A ledger that cannot be written is logged once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import allranks
from allranks.blackbox.reader import read_trace
from allranks.blackbox.tables import Tables
from allranks.errors import InputError, why
from allranks.ledger.accounts import Accounts
from allranks.ledger.across import FOR_S, RECENT_S, SHORT_S, NodeLateness, note_passed
from allranks.ledger.arrivals import Waited, find_waits
from allranks.ledger.changes import ChangePoint
from allranks.ledger.file import LedgerFile, NodeLedger, find_ledgers, ledger_path, read_ledger, read_recent
from allranks.ledger.history import HistoryWriter, outage_events
from allranks.ledger.records import STATES, Booked, Outage, Passed, Record, RunEnd, RunStart, kind_of
from allranks.ledger.slow import Lateness
from allranks.ledger.summary import JobAccount, account
from allranks.model.diagnosis import Incident
from allranks.model.trace import RankTrace
from allranks.watch.samples import ProcessId, RankSample

log = logging.getLogger("allranks.agent")

OPEN_S = 5.0  # how often the open rows are written
SLOW_STEPS, SLOW_MIN_S, SLOW_S = 15, 5.0, 30.0  # ranks are compared after so many steps, within these limits
COMPARE_SHARE = 0.0003  # of a core per rank, at most, for comparing
READ_S = 0.5  # limit for reading the notes of other nodes
MAX_ENDED, MAX_AGENTS = 64, 64
FAULTS = ("died", "fault", "last good step")  # moments at which an incident begins, the best one first


@dataclass
class LedgerKeeper:
    """`start()` and `close()` own the file."""

    folder: Path  # of the incidents
    job: str
    node: str
    mode: str
    history: HistoryWriter | None = None  # nodes across jobs
    on_slow: Callable[[ChangePoint], None] = lambda change: None  # a rank became slow
    rows: list[Booked] = field(default_factory=list)  # of this run
    outages: dict[str, Outage] = field(default_factory=dict)
    _accounts: Accounts = field(init=False)
    _file: LedgerFile = field(init=False)
    _start: RunStart = field(init=False)
    _ours: set[ProcessId] = field(default_factory=set)
    _paths: dict[int, str] = field(default_factory=dict)
    _ended: list[str] = field(default_factory=list)  # boxes of processes that ended since the last row
    _open: list[Booked] = field(default_factory=list)
    _open_written_s: float = 0.0
    _slow: Lateness = field(default_factory=Lateness)
    _nodes: NodeLateness = field(default_factory=NodeLateness)
    _recent: Passed | None = None
    _compared_s: float = 0.0
    _compared_step: int = 0
    _compare_cpu_s: list[float] = field(default_factory=list)  # of the last three comparisons
    _recorded_s: float = 0.0  # begin of the last long window with a `Passed` record
    _passed: list[Passed] = field(default_factory=list)  # to be written with the next rows
    _failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, now: float | None = None) -> None:
        began = time.time() if now is None else now
        self._file = LedgerFile(ledger_path(self.folder, self.job, self.node))
        self._start = RunStart(began, self.job, self.node, self.mode, version=allranks.__version__)
        earlier: list[Record] = []

        def begin() -> None:
            self._file = self._own_file()
            earlier.extend(self._file.open())
            self._file.append([self._start])

        self._carefully(begin)
        reached = max((one.step for one in earlier if isinstance(one, Booked)), default=-1)
        self._accounts = Accounts(began, reached, self._waits)

    def _own_file(self) -> LedgerFile:
        """A second agent on the same machine has a file of its own."""
        names = (self.node, *(f"{self.node}-{number}" for number in range(2, MAX_AGENTS)))
        files = (LedgerFile(ledger_path(self.folder, self.job, name)) for name in names)
        return next(
            (file for file in files if file.lock()), LedgerFile(ledger_path(self.folder, self.job, ""))
        )

    def observe(
        self, samples: Sequence[RankSample], running: Sequence[int], now: float | None = None
    ) -> None:
        """Takes one sample of all ranks; `running` are the running ranks of this agent."""
        at = time.time() if now is None else now
        self._carefully(lambda: self._observe(samples, set(running), at))

    def note(self, incident: Incident) -> None:
        """Takes a new or changed incident. From any thread."""
        self._carefully(lambda: self._note(incident))

    def close(self, now: float | None = None) -> JobAccount:
        """Writes the last records; returns the account of this run on this node."""
        at = time.time() if now is None else now
        self._carefully(lambda: self._append([*self._accounts.close(at), RunEnd(at)]))
        self._carefully(self._file.close)
        if self.history is not None:  # the whole job, from the ledgers of all nodes
            folder, job = self.folder, self.job
            self.history.put_job(lambda: account([read_ledger(path) for path in find_ledgers(folder, job)]))
            self.history.close()
        return account([NodeLedger(self._file.path, [self._start, *self.rows, *self.outages.values()])])

    def spent(self) -> dict[str, float]:
        """Rank-seconds by state of this node's ranks, as of a few seconds ago."""
        sums: dict[str, float] = {}
        for row in (*self.rows, *self._open):
            for state, seconds in row.seconds.items():
                sums[kind_of(state)] = sums.get(kind_of(state), 0.0) + seconds
        return {state: sums[state] for state in STATES if state in sums}

    def _observe(self, samples: Sequence[RankSample], running: set[int], now: float) -> None:
        self._ours |= {s.process for s in samples if s.rank in running}
        ours = [s for s in samples if s.process in self._ours]
        for sample in ours:
            known = self._paths.get(sample.rank, sample.path)
            if known != sample.path and Path(known).exists():  # else the box of this process was renamed
                self._ended = [*self._ended, known][-MAX_ENDED:]
            self._paths[sample.rank] = sample.path
        if rows := self._accounts.observe(now, ours):
            self._append(rows)
            self._open_written_s = 0.0
        if not ours:
            return
        step = max(sample.step for sample in ours)
        interval_s = compare_interval_s(step - self._compared_step, self._compare_cpu_s, len(ours))
        if now - self._compared_s >= interval_s:
            self._compared_step, self._compared_s, begin = step, now, time.thread_time()
            self._find_slow(now)
            self._compare_cpu_s = [*self._compare_cpu_s, time.thread_time() - begin][-3:]
        complete = running <= {s.rank for s in ours} or now - self._accounts.began >= OPEN_S
        if complete and now - self._open_written_s >= OPEN_S:
            self._open_written_s = now
            self._open = self._accounts.open_rows(now)
            recent = [self._recent] if self._recent is not None else []
            self._file.write_open(self._start, [*self._open, *recent])

    def _find_slow(self, now: float) -> None:
        """Reports ranks and nodes that became slow and stayed slow, each once."""
        traces = _read_boxes(self._paths.values())
        for change in self._slow.add(traces):
            self._report_slow(change.rank, self.node, change.at, now, change.sentence)
            self.on_slow(change)
        self._recent = note_passed(traces, now - RECENT_S, now)
        if self._recent is not None and 0 in self._paths:
            for node, rank, share in self._nodes.add(self._read_notes(now)):
                text = f"node {node} became slow by {share:.0%} (rank {rank} comes last)"
                self._report_slow(rank, node, now - RECENT_S, now, text)

    def _read_notes(self, now: float) -> dict[str, Passed]:
        """The newest `Passed` record of every node of the job."""
        assert self._recent is not None
        found, limit = {self.node: self._recent}, time.monotonic() + READ_S
        for path in find_ledgers(self.folder, self.job):
            if path != self._file.path and time.monotonic() < limit:
                start, note = read_recent(path)
                if start is not None and note is not None and note.end > now - 3 * RECENT_S:
                    found[start.node if start.node not in found else path.stem] = note
        return found

    def _report_slow(self, rank: int, node: str, at: float, now: float, text: str) -> None:
        log.warning("%s: the other ranks wait for it (allranks slow %s)", text, self.job)
        id = f"slow-rank{rank}-{int(at)}"
        outage = Outage(id, "slow", "became_slow", node, (rank,), at, now, text=text)
        self.outages[id] = outage
        self._append([outage])
        if self.history is not None:
            self.history.put(outage_events(self.job, outage, {rank: node}))

    def _note(self, incident: Incident) -> None:
        if incident.kind in ("request", "slow"):
            return
        changed = self._accounts.note(outage_of(incident))
        if changed is not None:
            self.outages[changed.id] = changed
            self._append([changed])
            if self.history is not None and changed.closed:
                own = dict.fromkeys(self._paths, self.node)
                self.history.put(outage_events(self.job, changed, own))

    def _append(self, records: Sequence[Record]) -> None:
        records, self._passed = [*records, *self._passed], []
        self.rows += [one for one in records if isinstance(one, Booked)]
        self._file.append(records)

    def _waits(self, begin: float, end: float, outages: Sequence[Outage]) -> Waited:
        newest, ended = _read_boxes(self._paths.values()), _read_boxes(self._ended)
        late = {
            trace.path for trace in ended if len(trace.calls) and trace.calls["created_ns"].max() >= end * 1e9
        }
        self._ended = [path for path in self._ended if path in late]
        gone = {trace.header.rank for trace in ended}
        batches = [newest]
        if ended:
            batches.append([*ended, *(trace for trace in newest if trace.header.rank not in gone)])
        if end - begin < SHORT_S or begin - self._recorded_s >= FOR_S:
            self._recorded_s = begin
            if (passed := note_passed(newest, begin, end)) is not None:
                self._passed.append(passed)
        without = [(one.begin, one.closed or one.recovered or end) for one in outages]
        return find_waits(batches, begin, end, without, self._slow.non_blocking)

    def _carefully(self, work: Callable[[], None]) -> None:
        """Runs the work under the lock. A failure is logged once and never reaches the watch."""
        try:
            with self._lock:
                work()
        except Exception as error:
            if not self._failed:
                known = isinstance(error, OSError)
                reason = why(error) if isinstance(error, OSError) else error
                log.warning("the goodput ledger is not up to date: %s", reason, exc_info=not known)
            self._failed = True


def compare_interval_s(steps: int, cpu_s: Sequence[float], ranks: int) -> float:
    """Time between two comparisons of ranks, `steps` after the last one. `cpu_s` is the cost of the last ones; a first one
    alone does not count, since it includes imports."""
    cost = min(cpu_s) if len(cpu_s) > 1 else 0.0
    return max(SLOW_MIN_S if steps >= SLOW_STEPS else SLOW_S, min(SLOW_S, cost / (COMPARE_SHARE * ranks)))


def _read_boxes(paths: Iterable[str]) -> list[RankTrace]:
    traces, tables = [], Tables()
    for path in paths:
        try:
            traces.append(read_trace(path, tables))
        except InputError:
            continue  # removed in the meantime
    return traces


def outage_of(incident: Incident) -> Outage:
    """The ledger's record of an incident."""
    at = {moment.name: moment.at for moment in reversed(incident.timeline)}
    begin = next((at[name] for name in FAULTS if name in at), incident.opened)
    verdict = incident.verdict
    return Outage(
        incident.id,
        incident.kind,
        verdict.cause if verdict is not None else incident.kind,
        incident.node,
        tuple(verdict.ranks if verdict is not None and verdict.ranks else incident.ranks),
        begin,
        at.get("noticed", incident.opened),
        at.get("verdict", at.get("evidence", 0.0)),
        at.get("recovered", at.get("ended", 0.0)),
        incident.closed or 0.0,
        (verdict.sentence if verdict is not None else incident.reason)[:300],
    )
