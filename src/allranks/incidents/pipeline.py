"""The steps of every incident: open, evidence, verdict, action, publication. Runs in the agent.

A suspicion (hangs.py), a death, a cut connection or a lost node (deaths.py), a slow rank (slow.py) or a request starts an
incident. All of them share one `IncidentPipeline`, with the processes whose end is already explained (`Explained`) and the
incidents that wait until the survivors train again (`Recoveries`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from allranks.channel.worker import carefully
from allranks.incidents.evidence import Evidence, Observed, attempt, read_incident, read_observed
from allranks.incidents.folder import Changes, IncidentFolder, copy_boxes, keep_newest, open_incident
from allranks.incidents.judge import judge
from allranks.incidents.peers import PeerAgents
from allranks.incidents.policy import Mode, PolicyOptions
from allranks.incidents.publish import IncidentPublisher
from allranks.model.cluster import FOLLOW_S, Gathering
from allranks.model.diagnosis import Action, Diagnosis, Finding, Incident, Kind, Moment
from allranks.model.files import write_atomically
from allranks.model.formatting import ranks_text
from allranks.report import as_json, text
from allranks.stacktraces import CollectOptions, Selection, collect, find_targets, write_bundle
from allranks.stacktraces.text import report_json
from allranks.watch.samples import RankSample, read_samples
from allranks.watch.silence import NoticeOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

PATIENCE_S = 600.0


@dataclass(frozen=True)
class _Awaited:
    opened: IncidentFolder
    before: dict[int, RankSample]  # of the ranks that must make progress
    since_s: float
    new_only: bool  # only new processes count: old ones may finish a step before they end
    patience_s: float = PATIENCE_S
    lost: dict[int, RankSample] = field(default_factory=dict)  # ranks that should come back
    recovered: bool = False  # the other ranks train again


@dataclass
class Recoveries:
    """Incidents that wait for progress."""

    _waiting: list[_Awaited] = field(default_factory=list)
    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=9))  # the last recoveries

    @property
    def usual_s(self) -> float:
        """How long this job takes to train again after an action; 0.0 before the first action."""
        return median(self._took_s) if self._took_s else 0.0

    def add(
        self,
        opened: IncidentFolder,
        samples: Sequence[RankSample],
        guilty: Iterable[int],
        *,
        new_only: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Waits for progress of the ranks that are not guilty. Without survivors, or with `new_only`, new processes of all
        ranks must make progress."""
        guilty = set(guilty)
        survivors = {s.rank: s for s in samples if s.rank not in guilty and s.alive and not s.closed}
        ranks = {s.rank: s for s in samples}
        lost = {rank: s for rank, s in ranks.items() if rank in guilty} if survivors and not new_only else {}
        before, now_s = survivors or ranks, time.monotonic()
        self._waiting.append(_Awaited(opened, before, now_s, new_only, patience_s, lost))

    def recent(self, for_s: float) -> bool:
        """Whether an incident was answered within this time and has not recovered."""
        now_s = time.monotonic()
        return any(now_s - one.since_s < for_s for one in self._waiting if not one.recovered)

    def open(self) -> list[IncidentFolder]:
        """The incidents that have not recovered."""
        return [waiting.opened for waiting in self._waiting if not waiting.recovered]

    def look(self, samples: list[RankSample]) -> Iterator[IncidentFolder]:
        """Closes and yields the incidents whose ranks all train again; drops those that have waited too long."""
        now = {s.rank: s for s in samples}
        for waiting in list(self._waiting):
            before, opened, now_s = waiting.before, waiting.opened, time.monotonic()
            moved = [r for r, old in before.items() if r in now and _trains(now[r], old, waiting.new_only)]
            took = now_s - waiting.since_s
            if before and len(moved) == len(before):
                self._waiting.remove(waiting)
                step, at = max(now[rank].step for rank in moved), time.time()
                train = "1 rank trains" if len(moved) == 1 else f"{len(moved)} ranks train"
                text = f"{train} again" + (f", at step {step:,}" if step >= 0 else "")
                if waiting.recovered:
                    opened.update(Moment("back", at, text))
                else:
                    opened.update(Moment("recovered", at, text), closed=at, durations_s={"recovered": took})
                    if waiting.lost:  # these ranks should come back in new processes
                        self._waiting.append(_Awaited(opened, waiting.lost, now_s, True, recovered=True))
                    if opened.current.acted or opened.current.kind == "death":
                        self._took_s.append(took)
                yield opened
            elif not before or took > waiting.patience_s:
                self._waiting.remove(waiting)


def _trains(now: RankSample, before: RankSample, new_only: bool) -> bool:
    """Whether a rank has completed more calls or steps than before. A new process counts from zero."""
    if new_only or now.calls_started < before.calls_started:
        return now.process != before.process and now.calls_completed > 0
    return now.step > before.step or now.calls_completed > before.calls_completed


log = logging.getLogger("allranks.agent")

EXPLAIN_S = 3.0  # after a death, the launcher restarts the ranks before the examination
JOIN_S = 30.0


@dataclass(frozen=True)
class WatchOptions:
    folder: Path  # black boxes of the job on this node
    incidents: Path  # parent of the incident folders; shared by all nodes
    job: str
    node: str = ""
    mode: Mode = "whole_job"
    ranks_per_replica: int = 1
    replicas: int = 1
    poll_s: float = 0.5
    notice: NoticeOptions = field(default_factory=NoticeOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    webhooks: tuple[str, ...] = ()
    collect_stacks: bool = True
    may_leave: bool = False  # the job can continue with fewer nodes (whole-job mode)

    @property
    def whole_job(self) -> bool:
        """Whether all ranks end and start together."""
        return self.mode == "whole_job"

    def replica_of(self, rank: int) -> int:
        return rank // self.ranks_per_replica


MAX_EXPLAINED = 100_000  # processes
ASKED_TO_END = "asked_to_end"  # a file in the job's folder: pids, and when they were asked


@dataclass
class Explained:
    """Processes whose end needs no incident, since it was requested, follows from another end, or has one. Thread-safe.

    A process that started after its pid was added is another process.
    """

    _added: dict[int, int] = field(default_factory=dict)  # pid -> epoch nanoseconds

    def add(self, pids: Iterable[int]) -> None:
        self._added.update(dict.fromkeys(pids, time.time_ns()))
        keep_newest(self._added, MAX_EXPLAINED)

    def share(self, pids: Iterable[int], folder: Path) -> None:
        """Adds processes, also for the other agents of this host that use the job's folder."""
        self.add(pids := tuple(pids))
        if not pids:
            return
        with contextlib.suppress(OSError), open(folder / ASKED_TO_END, "a") as file:
            file.write("".join(f"{pid} {self._added[pid]}\n" for pid in pids))

    def read_shared(self, folder: Path) -> None:
        """Adds the processes that other agents of this host have shared."""
        with contextlib.suppress(OSError):
            lines = re.findall(r"^(\d{1,10}) (\d{1,19})$", (folder / ASKED_TO_END).read_text(), re.MULTILINE)
            self._added |= {int(pid): max(int(at), self._added.get(int(pid), 0)) for pid, at in lines}

    def covers(self, sample: RankSample) -> bool:
        """Whether the end of the process that writes this box is explained."""
        return self._added.get(sample.pid, -1) >= sample.start_ns


@dataclass(frozen=True)
class Examination:
    evidence: Evidence
    diagnosis: Diagnosis

    @property
    def verdict(self) -> Finding | None:
        """None when nothing is wrong, or nothing could be read."""
        return self.diagnosis.verdict

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.verdict.ranks if self.verdict is not None else ()


class Actor(Protocol):
    """Carries out the actions of the policy."""

    def act(self, action: Action, incident: Incident) -> str:
        """Carries out the action, and returns the result as a sentence."""
        ...


# the actions that an actor carries out; others are only reported
ACTIONS = ("evict", "restart_rank", "restart_job", "command", "set_aside", "leave_node")


@dataclass
class IncidentPipeline:
    """`peers` is None in a job of one node."""

    options: WatchOptions
    actor: Actor | None = None
    publisher: IncidentPublisher = field(default_factory=IncidentPublisher)
    recoveries: Recoveries = field(default_factory=Recoveries)
    explained: Explained = field(default_factory=Explained)
    asked_to_end: Explained = field(default_factory=Explained)  # the ranks that the launcher is ending
    peers: PeerAgents | None = None
    diverged: tuple[float, Finding] | None = None  # when calls of ranks were found to differ, and how
    background: bool = False  # `run` starts threads
    _threads: list[threading.Thread] = field(default_factory=list)
    _starting: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """Waits for running threads, and writes the last state of open incidents."""
        self._closing.set()
        while self._threads:  # a thread may add another one
            self._threads.pop(0).join(timeout=JOIN_S)
        for opened in self.recoveries.open():
            self.publisher.write_page(opened)
        self.publisher.close()

    def note_divergence(self, found: Finding) -> None:
        """Logs that calls of ranks differ, and keeps the finding for an incident that follows."""
        s = "s" if len(found.waiting) == 1 else ""
        waits = f"; {ranks_text(found.waiting)} wait{s}" if found.waiting else ""
        log.warning("the calls of ranks differ: %s%s", found.sentence, waits)
        self.diverged = (time.time(), found)

    # evidence

    def open(
        self,
        kind: Kind,
        reason: str,
        samples: Sequence[RankSample],
        *,
        ranks: tuple[int, ...] = (),
        step: int | None = None,
        node: str = "",
        boxes: bool = True,
    ) -> IncidentFolder:
        """Opens an incident, with the black boxes of this node unless they are copied later."""
        opened = open_incident(
            self.options.incidents,
            kind=kind,
            job=self.options.job,
            reason=reason,
            node=node or self.options.node,
            ranks=ranks,
            step=max((s.step for s in samples), default=-1) if step is None else step,
        )
        started_s = max((s.start_ns for s in samples), default=0) / 1e9
        if self.diverged is not None and self.diverged[0] < started_s:
            self.diverged = None  # of processes that are gone
        if self.diverged is not None:
            opened.update(Moment("calls differ", self.diverged[0], self.diverged[1].sentence))
        if boxes:
            self.keep_boxes(opened, samples)
        return opened

    def keep_boxes(self, opened: IncidentFolder, samples: Sequence[RankSample]) -> None:
        """Copies the black boxes in their present state."""
        missing = copy_boxes([Path(sample.path) for sample in samples], opened.path / "boxes")
        opened.update(missing=tuple(missing))

    def ask(
        self, opened: IncidentFolder, reason: str, *, stacks: bool = True, follow_s: float = FOLLOW_S
    ) -> Gathering | None:
        """Asks the agents of other nodes for their part; None without other nodes. A request of another agent within the last
        `follow_s` is the same incident, and this one follows it."""
        if self.peers is None:
            return None
        found = self.peers.ask(opened.current.id, reason, opened.path, stacks=stacks, follow_s=follow_s)
        return found if found is not None and (found.agents or self.follows(found)) else None

    def follows(self, gathering: Gathering | None) -> bool:
        """Whether another node leads."""
        return gathering is not None and self.peers is not None and gathering.lead != self.peers.name

    def collect_part(self, folder: Path, stacks: bool) -> list[str]:
        """Collects this node's part of an incident that another node leads; returns what is missing."""
        samples = read_samples(self.options.folder)
        missing = copy_boxes([Path(sample.path) for sample in samples], folder / "boxes")
        if stacks:
            name = self.peers.name if self.peers else self.options.node
            self._collect_stacks(folder / "stacks" / name, samples, missing)
        return missing

    def _collect_stacks(
        self, folder: Path, samples: Sequence[RankSample], missing: list[str], look: int = 1
    ) -> None:
        """Collects the stacks of these ranks; those that could not be read are added to `missing`."""
        pids = {s.rank: s.pid for s in samples if s.alive}
        if not pids or not self.options.collect_stacks:
            return
        chosen = Selection(pids=tuple(pids.values()), box_folders=(self.options.folder,))

        def work() -> set[int | None]:
            native = "suspects" if look == 1 else "never"
            options = CollectOptions(raw_folder=folder, rounds=2 if look else 1, native=native)
            capture = collect(find_targets(chosen), options)
            folder.mkdir(parents=True, exist_ok=True)
            write_bundle(capture, folder)
            missing.extend(capture.notes)  # such as a missing py-spy
            return {p.rank for p in capture.processes if any(shot.stacks for shot in p.snapshots)}

        seen = attempt("stacks", work, missing)
        if seen is not None:
            lost = sorted(set(pids) - seen)
            missing += [f"stacks of rank {rank}: nothing could be read" for rank in lost]

    # verdict

    def examine(
        self,
        opened: IncidentFolder,
        samples: Sequence[RankSample],
        observed: Observed,
        *,
        stacks_of: Sequence[RankSample] = (),
        look: int = 1,
        gathering: Gathering | None = None,
        taken_ns: int = 0,
    ) -> Examination:
        """Collects stacks of `stacks_of` and the parts of other nodes, judges them with the boxes, and updates the incident.

        The first look (0) is never final and reads stacks once, without native frames, since collecting takes seconds on a
        busy node. Native frames stop the process shortly and are read in the second look only. `taken_ns` is the time of the
        copied boxes if ranks may have made progress since; 0: they have not.
        """
        missing: list[str] = []
        folder = opened.path / "stacks"
        peers = self.peers if gathering is not None else None
        self._collect_stacks(folder / peers.name if peers is not None else folder, stacks_of, missing, look)
        if peers is not None and gathering is not None:
            missing += peers.wait(gathering)
        replace(
            observed,
            taken_ns=taken_ns or time.time_ns(),
            gone=tuple(s.rank for s in samples if not s.alive and not s.closed),
            left=tuple(s.rank for s in samples if s.closed == "exit"),
            marked=tuple(s.rank for s in samples if s.step >= 0),
            still_s=self.options.notice.floor_s,
            diverged=self.diverged[1] if self.diverged is not None else None,
        ).write(opened.path)
        evidence = read_incident(opened.path)
        missing += evidence.missing
        found = Examination(evidence, judge(evidence))
        self._write_diagnosis(opened, found.diagnosis)
        changes: Changes = {"missing": tuple(dict.fromkeys((*opened.current.missing, *missing)))}
        if evidence.report is not None:
            changes["stacks"] = report_json(evidence.report)
        # an earlier verdict stays if there is no new one; a stall gets its verdict with its outcome
        if found.verdict is not None and opened.current.kind != "stall":
            changes["verdict"], changes["ranks"] = found.verdict, found.ranks
        opened.update(**changes)
        return found

    def write_finding(
        self,
        opened: IncidentFolder,
        found: Finding,
        *moments: Moment,
        noticed_s: float = 0.0,
        **changes: Unpack[Changes],
    ) -> None:
        """Writes a finding that is known without a diagnosis."""
        reason = changes.get("reason", opened.current.reason)
        Observed(taken_ns=time.time_ns(), told=found, reason=reason).write(opened.path)
        changes |= {"verdict": found, "ranks": found.ranks, "durations_s": {"noticed": noticed_s}}
        opened.update(*moments, **changes)

    def announce(self, opened: IncidentFolder, samples: Sequence[RankSample], lost: Sequence[int]) -> None:
        """Publishes the incident, and waits until the other ranks train again."""
        self.publisher.publish(opened)
        self.recoveries.add(opened, samples, lost, new_only=self.options.whole_job)

    def acts(self, action: Action) -> bool:
        """Whether the action is carried out, not only reported."""
        return action.kind in ACTIONS and self.actor is not None

    def act(self, opened: IncidentFolder, action: Action) -> None:
        """Carries out the action, and adds its result, or the reason for no action, to the story."""
        name = action.kind.replace("_", " ")
        if self.actor is None or not self.acts(action):
            opened.update(Moment("action", time.time(), f"none ({name}): {action.reason}"), action=action)
            log.warning("%s: no action: %s", opened.current.id, action.reason)
            return
        try:
            result, done = self.actor.act(action, opened.current), True
        except Exception as error:  # of the launcher; the story records it
            log.exception("%s: %s failed", opened.current.id, name)
            result, done = f"failed: {error!r}", False
        action = replace(action, done=done, result=result)
        opened.update(Moment("action", time.time(), f"{name}: {result}"), action=action)
        log.warning("%s: %s: %s", opened.current.id, name, result)

    def settle(
        self, opened: IncidentFolder, outcome: str = "", ended: bool = False, looping: str = ""
    ) -> Diagnosis | None:
        """Writes the outcome of a stall ("": a hang), so that `allranks diagnose` on the folder gives the same verdict.
        `looping` is the reason when ranks complete calls but no step."""
        before = read_observed(opened.path) or Observed()
        observed = replace(before, outcome=outcome, ended=ended)
        if looping:
            observed = replace(observed, looping=True, reason=looping)
        if observed == before:
            return None
        observed.write(opened.path)
        diagnosis = judge(read_incident(opened.path))
        self._write_diagnosis(opened, diagnosis)
        return diagnosis

    def _write_diagnosis(self, opened: IncidentFolder, diagnosis: Diagnosis) -> None:
        write_atomically(opened.path / "diagnosis.json", json.dumps(as_json.to_object(diagnosis)))
        write_atomically(opened.path / "diagnosis.txt", "\n".join(text.render(diagnosis)) + "\n")

    # threads

    def explain_later(self, explain: Callable[[], object]) -> None:
        """Examines an incident after the launcher has restarted the ranks. Its evidence is on disk."""

        def work() -> None:
            self._closing.wait(EXPLAIN_S)
            explain()

        self.start(work, "allranks-explain")

    def run(self, work: Callable[[], object], name: str) -> threading.Thread | None:
        """Starts the work on a thread while the watch runs, else runs it in this call."""
        if self.background:
            return self.start(work, name)
        work()
        return None

    def start(self, work: Callable[[], object], name: str) -> threading.Thread:
        """Starts the work on a thread, from any thread. A failure is logged."""
        args = (work, "%s failed; the incident is incomplete", name)
        thread = threading.Thread(target=carefully, args=args, name=name, daemon=True)
        thread.start()
        with self._starting:
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        return thread

    def collect_now(self, reason: str) -> IncidentFolder:
        """Collects evidence on request, without a suspicion."""
        samples = read_samples(self.options.folder)
        opened = self.open("request", reason, samples)
        self.examine(opened, samples, Observed(), stacks_of=samples, taken_ns=time.time_ns())
        opened.update(Moment("evidence", time.time(), f"{len(samples)} black boxes"), closed=time.time())
        self.publisher.publish(opened)
        return opened
