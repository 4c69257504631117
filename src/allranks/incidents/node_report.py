"""Reports the state of this node's ranks and GPUs to the lighthouse, for the page. Runs in the agent, on two threads.

Headers of black boxes are read once a second. The boxes themselves are read only while ranks are silent, and every few minutes
for the process groups. nvidia-smi is run every 15 s where it is installed.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.channel.worker import carefully
from allranks.errors import AllranksError
from allranks.incidents.job_overview import TOKEN_FILE, find_open, who_waits
from allranks.lighthouse.client.client import Client
from allranks.load import LoadOptions, load_paths
from allranks.model.cluster import GpuReport, NodeAnswer, NodeReport
from allranks.model.job_state import StepWork
from allranks.model.trace import RankTrace
from allranks.stacktraces.gpus import query_gpus
from allranks.watch.calls import CallWindows
from allranks.watch.samples import SILENT_S, RankSample, letter_of, read_samples, sleeps

log = logging.getLogger("allranks.agent")

BOXES_S, GROUPS_S = 2.0, 300.0  # between two readings of boxes: while ranks are silent, else for groups
GPUS_S = 15.0
MAX_GROUPS = 64
GPU_QUERY = "--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,name"
#: Part of a GPU's name -> dense bf16 operations per second; longer names first.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}


@dataclass(frozen=True)
class BoxFacts:
    """Facts from the boxes themselves, beyond their headers."""

    places: Mapping[int, str] = field(default_factory=dict)  # rank -> its open call
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # name -> ranks
    waiting: str = ""  # which ranks wait for which


def build_report(
    agent: str,
    node: str,
    samples: Sequence[RankSample],
    before: Mapping[int, RankSample],
    boxes: BoxFacts,
    gpus: Sequence[GpuReport],
    now: float,
    asleep: Callable[[int], bool] = sleeps,
) -> NodeReport:
    """The report of these ranks; `before` are the samples of the previous report."""
    losses = [sample.loss for sample in samples if sample.loss]
    return NodeReport(
        agent=agent,
        node=node,
        ranks=tuple(sample.rank for sample in samples),
        names=tuple(sample.name for sample in samples) if any(sample.name for sample in samples) else (),
        pids=tuple(sample.pid for sample in samples),
        doing="".join(letter_of(sample, now, asleep) for sample in samples),
        steps=tuple(sample.step for sample in samples),
        calls=tuple(sample.calls_completed for sample in samples),
        step_s=tuple(step_time(before.get(sample.rank), sample) for sample in samples),
        memory_mb=tuple(resident_mb(sample.pid) if sample.alive else 0 for sample in samples),
        places=tuple(boxes.places.get(sample.rank, "") for sample in samples),
        loss=tuple(losses[:1]),
        work=work_of(samples, gpus),
        gpus=tuple(gpus),
        groups=dict(boxes.groups),
    )


def work_of(samples: Sequence[RankSample], gpus: Sequence[GpuReport]) -> StepWork:
    """Tokens and operations per step of these ranks. The peak is known if all GPUs are of one kind; each rank has one."""
    alive = [sample for sample in samples if sample.alive]
    kinds = {gpu.name for gpu in gpus}
    peak = next((peak for word, peak in PEAKS.items() if len(kinds) == 1 and word in min(kinds)), 0.0)
    tokens, flops = sum(sample.tokens for sample in alive), sum(sample.flops for sample in alive)
    return StepWork(tokens, flops, peak * sum(sample.flops > 0 for sample in alive))


def step_time(before: RankSample | None, now: RankSample) -> float:
    """Seconds per step between two samples of one process; 0.0 without a step."""
    if before is None or before.process != now.process or not 0 <= before.step < now.step:
        return 0.0
    return round((now.step_ns - before.step_ns) / 1e9 / (now.step - before.step), 6)


def resident_mb(pid: int) -> int:
    """Resident memory of a process; 0 when it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 // 1_000_000
    except (OSError, IndexError, ValueError):
        return 0


def read_boxes(traces: Sequence[RankTrace], running: Collection[int]) -> BoxFacts:
    """The open call of each rank, the groups of several ranks, and which of the running ranks wait for which."""
    places: dict[int, str] = {}
    groups: dict[str, tuple[int, ...]] = {}
    for trace in traces:
        if trace.header.rank is None:
            continue
        places[trace.header.rank] = next(iter(find_open(trace).values()), "")
        for group in trace.groups:
            if len(group.ranks) > 1 and len(groups) < MAX_GROUPS:
                groups[group.desc if group.desc not in ("", "undefined") else group.name] = group.ranks
    return BoxFacts(places, groups, who_waits(one for one in traces if one.header.rank in running))


def read_gpus() -> tuple[GpuReport, ...]:
    """The GPUs of this node and their processes; () without a driver."""
    users: dict[str, list[int]] = {}
    for row in query_gpus("--query-compute-apps=pid,gpu_uuid"):
        if row[0].isdigit():
            users.setdefault(row[1], []).append(int(row[0]))
    return parse_gpus(query_gpus(GPU_QUERY), users)


def parse_gpus(rows: Sequence[Sequence[str]], users: Mapping[str, Sequence[int]]) -> tuple[GpuReport, ...]:
    """Reads the rows of nvidia-smi; partitioned GPUs report "[N/A]"."""

    def number(text: str) -> int:
        try:
            return round(float(text))
        except ValueError:
            return -1

    def gpu(row: Sequence[str]) -> GpuReport:
        busy, used, total, heat, power = map(number, row[2:7])
        return GpuReport(int(row[0]), busy, used, total, heat, power, tuple(users.get(row[1], ())), row[7])

    return tuple(gpu(row) for row in rows if len(row) >= 8 and row[0].isdigit())


@dataclass
class NodeReporter:
    """`start()` and `close()` own the threads. `ranks` returns the running ranks of this agent."""

    client: Client
    folder: Path
    node: str
    ranks: Callable[[], tuple[int, ...]]
    calls: CallWindows = field(default_factory=CallWindows)
    on_compare: Callable[[tuple[str, ...]], None] = lambda agents: None  # their calls may differ from ours
    _known: set[int] = field(default_factory=set)
    _before: dict[int, RankSample] = field(default_factory=dict)
    _boxes: BoxFacts = field(default_factory=BoxFacts)
    _read_s: float = float("-inf")
    _every_s: float = 1.0
    _gpus: tuple[GpuReport, ...] = ()
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        works = [("allranks-report", self._run)]
        if shutil.which("nvidia-smi") is not None:
            works.append(("allranks-gpus", self._watch_gpus))
        for name, work in works:
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=15.0)
        self._threads.clear()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            carefully(self._report, "ranks could not be reported; will retry")

    def _report(self) -> None:
        try:
            wanted = self.client.report_node(self.look()) if self.client.connected else NodeAnswer()
        except (AllranksError, OSError) as error:
            log.debug("ranks not reported: %s", error)
            return
        self._every_s = wanted.every_s
        if wanted.compare:
            self.on_compare(wanted.compare)

    def look(self) -> NodeReport:
        """Makes one report."""
        now = time.time()
        self._known.update(self.ranks())
        # the launcher knows only its own world, so ranks with names of other worlds count too
        samples = [one for one in read_samples(self.folder) if one.name or one.rank in self._known]
        self._read_boxes(samples, now)
        report = build_report(
            self.client.options.replica, self.node, samples, self._before, self._boxes, self._gpus, now
        )
        self._before = {sample.rank: sample for sample in samples}
        token = self.folder / TOKEN_FILE
        windows, differs = self.calls.hashes, self.calls.local is not None
        return replace(
            report, token_file=str(token) if token.exists() else "", windows=windows, differs=differs
        )

    @property
    def waiting(self) -> str:
        """Which ranks wait for which; "" while the job moves. From any thread."""
        return self._boxes.waiting

    def _read_boxes(self, samples: Sequence[RankSample], now: float) -> None:
        latest = max((sample.last_ns for sample in samples), default=0) / 1e9
        silent = bool(latest) and now - latest >= SILENT_S
        called = any(sample.calls_completed for sample in samples)
        age = time.monotonic() - self._read_s
        if age >= (BOXES_S if silent else GROUPS_S) and (silent or called):
            self._read_s = time.monotonic()
            loaded = load_paths([sample.path for sample in samples], LoadOptions(allow_nothing=True))
            self._boxes = read_boxes(loaded.traces, {s.rank for s in samples if s.alive and not s.closed})
        elif not silent and self._boxes.places:
            self._boxes = BoxFacts({}, self._boxes.groups)

    def _watch_gpus(self) -> None:
        while True:
            self._gpus = read_gpus()
            if self._stop.wait(GPUS_S):
                return
