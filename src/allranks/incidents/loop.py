"""The agent's watch over one node's ranks: notices deaths and stalls, and starts their examination.

One thread per node, allranks-watch, samples the ranks and is woken by deaths. A suspicion is examined on another thread
(allranks-examine). Actions on ranks go to the launcher's `Actor`.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.header import process_stat
from allranks.channel.worker import carefully
from allranks.incidents.deaths import DeathIncidents
from allranks.incidents.hangs import HangInvestigator
from allranks.incidents.peers import PeerAgents
from allranks.incidents.pipeline import Actor, IncidentPipeline, WatchOptions
from allranks.incidents.publish import IncidentPublisher
from allranks.incidents.slow import SlowRanks
from allranks.model.cluster import Motion
from allranks.model.diagnosis import Finding, Incident
from allranks.model.trace import RankTrace
from allranks.watch.calls import CallComparison, CallWindows, read_calls
from allranks.watch.exits import ExitWatcher
from allranks.watch.samples import ProcessId, RankSample, read_samples
from allranks.watch.silence import ProgressHistory, Suspicion

log = logging.getLogger("allranks.agent")

CLOSE_S, CLOSE_POLL_S = 5.0, 0.05  # recovery is checked more often for this long after an incident
END_S = 30.0  # limit for an examination at the end of the job
FAILED = "hang check failed; will retry"
ALL = -1  # the comparison of all ranks
PARTS_S, TIMES = 3.0, 2  # limit for boxes of other nodes; a difference must show this many times
COMPARED = "calls of ranks may differ: comparing them"
ANCESTORS = 8  # a rank may be a grandchild of its agent (a shell, numactl)


@dataclass
class Watch:
    """Watches one node's ranks. `start()` and `close()` own the threads; `look()` is one turn."""

    options: WatchOptions
    actor: Actor | None = None
    #: gets the highest step, the completed calls of all ranks of this node, the state of the job and its reason
    on_look: Callable[[int, int, Motion, str], None] = lambda step, calls, motion, reason: None
    #: gets every sample, and the running ranks of this agent; for the ledger
    on_samples: Callable[[Sequence[RankSample], Sequence[int]], None] = lambda samples, ours: None
    pipeline: IncidentPipeline = field(init=False)
    history: ProgressHistory = field(init=False)
    deaths: DeathIncidents = field(init=False)
    hangs: HangInvestigator = field(init=False)
    slow: SlowRanks = field(init=False)
    ranks: tuple[int, ...] = ()  # running ranks of this agent
    hung_at_end: bool = False  # the job hung when its ranks were asked to end
    exits: ExitWatcher = field(default_factory=ExitWatcher)
    windows: CallWindows = field(default_factory=CallWindows)
    _calls: defaultdict[int, CallComparison] = field(default_factory=lambda: defaultdict(CallComparison))
    _nodes: CallComparison = field(default_factory=CallComparison)
    _comparing: threading.Lock = field(default_factory=threading.Lock)
    _ours: dict[ProcessId, bool] = field(default_factory=dict)
    _stop: bool = False
    _thread: threading.Thread | None = None
    _examining: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.pipeline = IncidentPipeline(
            self.options, self.actor, IncidentPublisher(self.options.webhooks, self.options.folder)
        )
        self.history = ProgressHistory(self.options.notice)
        self.deaths = DeathIncidents(self.pipeline)
        self.hangs = HangInvestigator(self.pipeline, self.history, self.deaths)
        self.slow = SlowRanks(self.pipeline)
        self._nodes.of_replicas = self._calls[ALL].of_replicas = not self.options.whole_job

    def start(self) -> None:
        self.pipeline.background = True
        self.exits.start()
        self._thread = threading.Thread(target=self._run, name="allranks-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the threads and writes the last state of open incidents."""
        self._stop = True
        self.exits.wake()
        if self._thread is not None:
            self._thread.join(timeout=END_S)
            self._thread = None
            self.deaths.check(self._sample(), self.exits.endings, patience_s=0.0)
        if self._examining is not None:
            self._examining.join(timeout=END_S)
        self.exits.close()
        self.hangs.close()
        self.pipeline.close()

    def join(self, peers: PeerAgents | None, on_incident: Callable[[Incident], None]) -> None:
        """Before `start`: sets the agents of other nodes, and the receiver of incidents."""
        self.pipeline.peers = peers
        self._calls[ALL].windows = self.windows if peers is not None else None
        self.pipeline.publisher.on_incident = on_incident

    def expect_end(self, pids: Iterable[int]) -> None:
        """These ranks are being asked to end: their end, however slow, is not an incident. From any thread."""
        self.hung_at_end = self.hangs.motion[0] == "hung"
        self.pipeline.asked_to_end.add(asked := tuple(pids))
        self.pipeline.explained.share(asked, self.options.folder)

    def look(self, now_s: float | None = None) -> Suspicion | None:
        """One turn: samples the ranks, reports deaths, starts the examination of a suspicion."""
        now = time.monotonic() if now_s is None else now_s
        samples = self._sample()
        ending = self._note_ranks(samples)
        self.on_samples(samples, self.ranks)
        self.history.observe(now, samples)
        carefully(lambda: self._compare(now, samples), FAILED)
        self.deaths.check(samples, self.exits.endings)
        for opened in self.pipeline.recoveries.look(samples):
            self.pipeline.publisher.publish(opened)
        if ending:
            return None
        if self._examining is not None and self._examining.is_alive():
            return None
        suspicion, examine = self.hangs.suspect(now, samples)
        if examine is not None:
            self._examining = self.pipeline.run(examine, "allranks-examine")
        return suspicion

    def _sample(self) -> list[RankSample]:
        """Reads the ranks, and how the dead ones ended."""
        samples = read_samples(self.options.folder)
        still_ending = self.exits.note_dead(s.pid for s in samples if not s.alive)
        return [replace(s, alive=True) if s.pid in still_ending else s for s in samples]

    def _compare(self, now_s: float, samples: list[RankSample]) -> None:
        """Reports calls that differ before a rank has waited long: inside each replica, and between all ranks."""
        options, worlds = self.options, defaultdict[int, list[RankSample]](list)
        for sample in [] if options.whole_job else samples:
            worlds[options.replica_of(sample.rank)].append(sample)
        worlds[ALL] = samples
        for number, ranks in worlds.items():
            found = self._calls[number].look(now_s, ranks)
            if found is not None and number == ALL and self.pipeline.peers is not None:
                self.windows.local = found  # the majority is known only with the ranks of other nodes
            else:
                self._note_divergence(found)

    def _note_divergence(self, found: Finding | None) -> None:
        if found is not None:
            self.pipeline.note_divergence(found)
            self.history.note_divergence()

    def compare_nodes(self, agents: tuple[str, ...]) -> None:
        """Compares the calls of this node's ranks with those of other agents. From any thread; quick."""
        if self.pipeline.peers is not None and self._comparing.acquire(blocking=False):
            peers = self.pipeline.peers
            self.pipeline.start(lambda: self._compare_nodes(peers, agents), "allranks-compare")

    def _compare_nodes(self, peers: PeerAgents, agents: tuple[str, ...]) -> None:
        local, self.windows.local = self.windows.local, None
        try:
            for _ in range(TIMES):
                with tempfile.TemporaryDirectory(prefix="allranks-calls-") as name:
                    folder, id = Path(name), f"calls-{time.time_ns():x}"
                    asked = peers.ask(id, COMPARED, folder, stacks=False, alone=False, agents=agents)
                    if asked is None or not asked.agents:
                        self._note_divergence(local)
                        return
                    peers.wait(asked, PARTS_S)
                    self._note_divergence(self._nodes.judge(self._read_all_calls(folder)))
        finally:
            self._comparing.release()

    def _read_all_calls(self, folder: Path) -> list[RankTrace]:
        """The newest calls of this node's ranks and of the boxes in the folder."""
        samples = [*read_samples(folder / "boxes"), *read_samples(self.options.folder)]
        newest = {sample.rank: sample.path for sample in samples}  # two agents of one host share their boxes
        traces = read_calls(list(newest.values()))
        attempt = max((trace.header.attempt for trace in traces), default=0)
        return [t for t in traces if t.header.attempt == attempt or not self.options.whole_job]

    def _note_ranks(self, samples: list[RankSample]) -> bool:
        """Reports the running ranks; True when all of them have been asked to end."""
        running = [s for s in samples if s.alive and not s.closed]
        ours = [s for s in running if self._is_ours(s)]
        self._ours = {s.process: self._ours[s.process] for s in running}
        self.ranks = tuple(s.rank for s in ours)
        self.exits.hold(s.pid for s in running)
        if running:
            calls = sum(s.calls_completed for s in ours)
            self.on_look(max(s.step for s in running), calls, *self.hangs.motion)
        return bool(running) and all(self.pipeline.asked_to_end.covers(s) for s in ours or running)

    def _is_ours(self, sample: RankSample) -> bool:
        """Whether this agent started the process: two agents of one host share the job's folder."""
        if sample.process not in self._ours:
            self._ours[sample.process] = _descends(sample.pid, os.getpid())
        return self._ours[sample.process]

    def _run(self) -> None:
        while not self._stop:
            carefully(self.look, FAILED)
            recent = self.pipeline.recoveries.recent(CLOSE_S)
            self.exits.wait(CLOSE_POLL_S if recent else self.options.poll_s)


def _descends(pid: int, ancestor: int) -> bool:
    for _ in range(ANCESTORS):
        if pid == ancestor:
            return True
        fields = process_stat(pid)
        if not fields:
            return False
        pid = int(fields[1])
    return False
