"""One node's agent: connects the supervisor or torchrun, the watch, and the lighthouse client."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.channel.worker import Worker
from allranks.errors import AllranksError
from allranks.incidents.deaths import PATIENCE_S
from allranks.incidents.folder import keep_newest
from allranks.incidents.loop import Watch
from allranks.incidents.node_report import NodeReporter
from allranks.incidents.peers import PeerAgents
from allranks.incidents.publish import EVIDENCE
from allranks.lighthouse.client.client import Client
from allranks.model.cluster import (
    CollectEvidence,
    Evicted,
    MemberLeft,
    MemberLost,
    Motion,
    PublishedIncident,
    RestartWanted,
    write_health,
)
from allranks.model.diagnosis import Action, Failure, Incident
from allranks.recording.dump import dump_ended_ranks
from allranks.report.story import decision, headline, lasted
from allranks.supervise.replicas import Event, Request, Supervisor
from allranks.supervise.restarts import SAME_FAILURES, find_program_error
from allranks.watch.exits import Death, Ending, find_deaths, find_first
from allranks.watch.nodes import AWAY_S, NodeMonitor
from allranks.watch.samples import read_samples

log = logging.getLogger("allranks.agent")

#: A dying process closes its connections a moment before it is gone; one that runs after this time was cut off.
STILL_THERE_S = 0.3
#: A script that has trained this much without a Manager has none.
MANAGER_LOOK_S, PLAIN_S, PLAIN_CALLS = 2.0, 20.0, 20
NO_MANAGER = (
    "the script did not make a Manager: its {replicas} replicas would train {replicas} separate models. Either run it as one "
    "job (allranks run --standalone --nproc-per-node {replicas} SCRIPT), or make a Manager in the script "
    "(docs/tasks/survive_kill.md)"
)
#: A replica that was killed after this much training is restarted at once.
TRAINED_S, TRAINED_CALLS = 10.0, 20
CALLS_S = 15.0  # the end of the job waits this long for calls to the lighthouse
READMIT_TRIES, READMIT_S = 60, 0.2  # attempts to lift an eviction, and the first pause between two
MAX_STORY = 1 << 20  # characters of a page sent to the lighthouse


def replica_name(number: int) -> str:
    return f"replica-{number}"


def replica_number(name: str) -> int | None:
    """The number in a replica's name; None for another kind of name."""
    number = name.removeprefix("replica-")
    return int(number) if name.startswith("replica-") and number.isdigit() else None


def _read_file(incident: Incident, name: str) -> str:
    """A file of the incident for the lighthouse's page; "" when it is missing or too large."""
    try:
        text = (Path(incident.folder) / name).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
    return text if len(text) <= MAX_STORY else ""


@dataclass
class NodeAgent:
    """`supervisor` is None in whole-job mode, `client` without a lighthouse; both belong to the caller."""

    watch: Watch | None
    client: Client | None = None
    supervisor: Supervisor | None = None
    peers: PeerAgents | None = None  # None: this node's agent is the only one, or there is no lighthouse
    holds_lighthouse: bool = False  # the lighthouse runs in this process and is lost with this node
    _nodes: NodeMonitor | None = None
    _reporter: NodeReporter | None = None
    _evicted: set[int] = field(default_factory=set)
    _reported: dict[str, str] = field(default_factory=dict)  # incident -> what was last reported of it
    _closing: threading.Event = field(default_factory=threading.Event)
    _failures: list[Failure] = field(default_factory=list)  # of the program, in whole-job mode
    _started_ns: int = field(default_factory=time.time_ns)
    #: Makes calls to the lighthouse, in order, so that the supervisor's loop does not wait for them.
    _calls: Worker = field(default_factory=lambda: Worker("allranks-notify"))

    def start(self) -> None:
        """Starts the watch, and subscribes to the lighthouse and the supervisor."""
        if self.watch is not None:
            self.watch.pipeline.actor = self
            self.watch.join(self.peers, self._report)
            self.watch.start()
        if self.client is not None:
            self.client.subscribe(self._on_notice)
            self._watch_nodes(self.client)
        if self.supervisor is not None:
            self.supervisor.on_event = self._on_event
            self.supervisor.trained = self.has_trained
            self.supervisor.failure = self.find_failure
            self.supervisor.before_end = lambda: self._calls.flush(CALLS_S)
            if self.client is not None and self.watch is not None:
                threading.Thread(target=self._expect_manager, name="allranks-manager", daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        for each in (self._reporter, self._nodes):
            if each is not None:
                each.close()
        if self.watch is not None:
            self.watch.close()
            self._write_torch_dumps(self.watch.options.folder)
        self._calls.close(CALLS_S)
        if self.peers is not None:
            self.peers.close()

    def expect_end(self, pids: set[int], by_user: bool) -> None:
        """Our ranks are about to be stopped. `by_user`: leaves the lighthouse, so that the others do not miss this node."""
        if self.watch is not None:
            self.watch.expect_end(pids)
        client = self.client
        if by_user and client is not None:
            self.client = None  # nothing is sent to the lighthouse after this
            client.leave("stopped by a signal")

    def register_child(self, rank: subprocess.Popen[bytes]) -> None:
        """A launcher has started a rank and waits for it, so it may know the exit code before the watch does."""
        if self.watch is not None:
            self.watch.exits.know(rank)

    def _write_torch_dumps(self, folder: Path) -> None:
        """Writes the dump files that torch's variables request for killed ranks, from their black boxes."""
        try:
            dump_ended_ranks(folder.glob("*.box"), os.environ)
        except (AllranksError, OSError) as error:
            log.warning("torch's dump files of ended ranks could not be written: %s", error)

    def _watch_nodes(self, client: Client) -> None:
        if self.watch is None:
            return
        watch, options = self.watch, self.watch.options
        nodes = NodeMonitor(client, lambda: watch.ranks, options.node, self.holds_lighthouse)
        nodes.on_lost, nodes.on_left = watch.deaths.note_node, watch.deaths.note_stopped
        # while the lighthouse is unreachable, connections between ranks may have broken because its node was lost
        watch.deaths.patience_s = lambda: PATIENCE_S + (AWAY_S if nodes.host_is_away else 0.0)
        client.subscribe(nodes.noticed)
        nodes.start()
        self._nodes = nodes
        self._reporter = reporter = NodeReporter(
            client,
            options.folder,
            options.node,
            lambda: watch.ranks,
            watch.windows,
            watch.compare_nodes,
        )
        reporter.start()

        def report(step: int, calls: int, motion: Motion, reason: str) -> None:
            health = write_health(motion, reporter.waiting or reason)
            client.report(step, step if step >= 0 else calls, health)

        watch.on_look = report

    # actions, requested by the watch

    def act(self, action: Action, incident: Incident) -> str:
        """Carries out the policy's decision; runs on the watch's thread."""
        if action.kind == "command":
            return self._run_command(action, incident)
        if action.kind == "leave_node":
            # torchrun's agent ends its ranks and leaves the rendezvous open
            os.kill(os.getpid(), signal.SIGTERM)
            return "this node is leaving the job"
        if self.supervisor is not None and action.replica is not None:
            if action.kind == "set_aside":
                return self._set_aside(action, incident)
            return self._evict(action, incident)
        return self._kill(action)

    def _evict(self, action: Action, incident: Incident) -> str:
        """Evicts a replica: notifies the survivors, which abort and continue, then restarts its processes on their node."""
        assert self.supervisor is not None and action.replica is not None
        name = replica_name(action.replica)
        notified = self._call(lambda client: client.evict(name, f"{incident.id}: {action.reason}"))
        if not self.supervisor.has(action.replica):
            done = f"{name} was evicted; the agent of its node restarts it"
        else:
            self._replace(action.replica, f"evicted: {action.reason}")
            finished = self.supervisor.training_over
            outcome = "ended: the training has finished" if finished else "evicted and is restarted"
            done = f"{name} was {outcome}"
        return done + ("" if notified else " (lighthouse not notified)")

    def _set_aside(self, action: Action, incident: Incident) -> str:
        """Stops a replica for good; the others continue without it."""
        assert self.supervisor is not None and action.replica is not None
        name, replica = replica_name(action.replica), action.replica
        if not self.supervisor.has(replica):
            return f"{name} runs on another node"
        self._evicted.add(replica)
        self._call(lambda client: client.evict(name, f"{incident.id}: {action.reason}"))
        self.supervisor.request(Request("set_aside", replica, action.reason))
        return f"{name} was set aside"

    def _replace(self, replica: int, reason: str) -> None:
        assert self.supervisor is not None
        self._evicted.add(replica)
        self.supervisor.request(Request("restart", replica, reason))

    def _kill(self, action: Action) -> str:
        """Whole-job mode: kills the blamed ranks, or the first of this node if they are elsewhere; torchrun restarts all."""
        assert self.watch is not None
        samples = [s for s in read_samples(self.watch.options.folder) if s.alive]
        chosen = [s for s in samples if not action.ranks or s.rank in action.ranks] or samples[:1]
        for sample in chosen:
            try:
                os.kill(sample.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        names = ", ".join(str(s.rank) for s in chosen)
        return (
            f"rank {names} was ended; the launcher restarts the job" if names else "no rank runs on this node"
        )

    def _run_command(self, action: Action, incident: Incident) -> str:
        command = action.command.replace("{incident}", shlex.quote(incident.folder))
        command = command.replace("{ranks}", shlex.quote(",".join(map(str, action.ranks))))
        try:
            done = subprocess.run(
                command, shell=True, timeout=60, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return f"`{command}` did not end within 60 s"
        return f"`{command}` ended with code {done.returncode}"

    # events and notices

    def _on_event(self, event: Event) -> None:
        """An event of the supervisor, on its thread: must not block."""
        if event.kind == "rank_exited" and event.exit_code and not event.expected:
            at = time.time()
            death = Death(event.rank or 0, event.pid or 0, at, event.detail, seen=at)
            self._start(lambda: self._note_death(event.replica, death), "allranks-death")
        elif event.kind == "finished":
            self._calls.put(lambda: self._note_finished(event.replica))
        elif event.kind == "started" and event.replica in self._evicted:
            self._evicted.discard(event.replica)
            threading.Thread(
                target=self._readmit, args=(event.replica,), name="allranks-readmit", daemon=True
            ).start()

    def _readmit(self, replica: int) -> None:
        """Lifts the eviction of a replica that has been restarted: until then the lighthouse refuses it. Tries for minutes."""
        for attempt in range(READMIT_TRIES):
            if replica in self._evicted:  # again, for another reason
                return
            if self._call(lambda client: client.readmit(replica_name(replica))):
                return
            if self._closing.wait(min(READMIT_S * 2**attempt, 10.0)):
                return

    def _note_finished(self, replica: int) -> None:
        self._check_manager(over=True)
        self._call(lambda client: client.finish(replica_name(replica)))
        self._stop_latecomers()

    def has_trained(self, replica: int) -> bool:
        """Whether the newest processes of a replica trained for a while, by their black boxes."""
        if self.watch is None:
            return False
        size = self.watch.options.ranks_per_replica
        own = [s for s in read_samples(self.watch.options.folder) if s.rank // size == replica]
        return bool(own) and all(
            s.calls_completed >= TRAINED_CALLS and s.step_ns - s.start_ns >= TRAINED_S * 1e9 for s in own
        )

    def find_failure(self, replica: int | None, exits: dict[int, int]) -> Failure | None:
        """How the program of a replica (None: of the job) failed; None when unknown, and for a kill."""
        if self.watch is None:
            return None
        size, now = self.watch.options.ranks_per_replica, time.time()
        samples = [s for s in read_samples(self.watch.options.folder) if replica in (None, s.rank // size)]
        own = [s for s in samples if not exits or s.pid in exits]
        endings = {pid: Ending(pid, code, now) for pid, code in exits.items()}
        first = find_first(find_deaths(own, endings, since_ns=self._started_ns))
        return first.failure(own) if first is not None else None

    def why_not_again(self, exits: dict[int, int]) -> str:
        """Whole-job mode, after a failure: why the launcher should not restart the ranks; "" when it should."""
        failure = self.find_failure(None, exits)
        if failure is not None:
            self._failures = [*self._failures, failure][-SAME_FAILURES:]
        return find_program_error(self._failures) if failure is not None else ""

    def _expect_manager(self) -> None:
        """Waits until the first replica has made a Manager."""
        while not self._closing.wait(MANAGER_LOOK_S) and not self._check_manager():
            pass

    def _check_manager(self, over: bool = False) -> bool:
        """Ends the job if its script has no Manager and so would train each replica separately. False: not known yet."""
        client, watch, supervisor = self.client, self.watch, self.supervisor
        if client is None or watch is None or supervisor is None:
            return True
        samples = [s for s in read_samples(watch.options.folder) if s.start_ns >= self._started_ns]
        calls = max((s.calls_completed for s in samples), default=0)
        trains_s = time.time() - min((s.start_ns for s in samples), default=time.time_ns()) / 1e9
        if not (calls if over else calls >= PLAIN_CALLS and trains_s >= PLAIN_S):
            return False
        try:
            status = client.status()
        except (AllranksError, OSError):
            return False
        if status["number"] or any(r["state"] not in ("expected", "observer") for r in status["replicas"]):
            return True
        supervisor.give_up(NO_MANAGER.format(replicas=watch.options.replicas))
        return True

    def _stop_latecomers(self) -> None:
        """The training has finished: stops restarted replicas that have not joined, which would start it again alone."""
        if self.watch is None or self.supervisor is None:
            return
        size, pids = self.watch.options.ranks_per_replica, self.supervisor.pids()
        samples = read_samples(self.watch.options.folder)
        joined = {s.rank // size for s in samples if s.calls_completed and pids.get(s.rank) == s.pid}
        for replica in self.supervisor.restarted():
            if replica not in joined:
                self.supervisor.request(Request("stop", replica, "the training has finished"))

    def _note_death(self, replica: int, death: Death) -> None:
        """Reports a death to the lighthouse, which notifies the survivors, then to the watch."""
        self._call(lambda client: client.accuse(replica_name(replica), death.reason))
        if self.watch is not None:
            samples = [s for s in read_samples(self.watch.options.folder) if s.pid == death.pid]
            raised = find_deaths(samples, {}, since_ns=0, raised_only=True)  # with the rank's own message
            self.watch.deaths.note_death(replace(raised[0], seen=death.seen) if raised else death)

    def _start(self, work: Callable[[], object], name: str) -> None:
        """Runs work on another thread."""
        if self.watch is not None:
            self.watch.pipeline.start(work, name)
        else:
            self._calls.put(work)

    def _on_notice(self, notice: object) -> None:
        """A notice of the lighthouse, on the client's thread: must not block."""
        if isinstance(notice, (MemberLost, MemberLeft)) and self.peers is not None:
            self.peers.give_up(notice.replica)
        if isinstance(notice, CollectEvidence) and self.watch is not None:
            self._start(lambda: self._collect(notice), "allranks-collect")
        elif isinstance(notice, RestartWanted) and self.watch is not None and self.supervisor is None:
            log.warning("restarting the job: %s", notice.reason)
            self._calls.put(lambda: log.warning("%s", self._kill(Action("restart_job", notice.reason))))
        elif isinstance(notice, MemberLost) and self.watch is not None:
            pids, at = self._pids(notice), time.time()
            self._start(lambda: self._check_lost(notice, pids, at), "allranks-lost")
        elif isinstance(notice, Evicted) and self.supervisor is not None and self.peers is not None:
            replica, (incident, _, reason) = replica_number(notice.replica), notice.reason.partition(": ")
            if replica is not None and self.supervisor.has(replica) and self.peers.took_part_in(incident):
                self._replace(replica, f"evicted: {reason}")

    def _collect(self, wanted: CollectEvidence) -> None:
        assert self.watch is not None
        if wanted.upload and self.peers is not None:
            self.peers.contribute(wanted, self.watch.pipeline.collect_part)
        else:
            self.watch.pipeline.collect_now(f"requested by the lighthouse: {wanted.reason}")

    def _pids(self, notice: MemberLost) -> dict[int, int]:
        """The lost replica's ranks that run here: rank -> pid."""
        replica = replica_number(notice.replica)
        supervisor = self.supervisor
        if supervisor is None or self.watch is None or replica is None or not supervisor.has(replica):
            return {}
        size = self.watch.options.ranks_per_replica
        # a process that has not begun to train is not the lost one: it is the next process
        samples = read_samples(self.watch.options.folder)
        trained = {s.pid for s in samples if s.calls_started or s.step >= 0}
        found = {rank: pid for rank, pid in supervisor.pids().items() if rank // size == replica}
        return found if trained.issuperset(found.values()) else {}

    def _check_lost(self, notice: MemberLost, before: dict[int, int], at: float) -> None:
        """Reports a lost replica whose processes still run as cut off. The watch handles frozen processes."""
        self._closing.wait(STILL_THERE_S)
        replica = replica_number(notice.replica)
        if not before or replica is None or self._pids(notice) != before or self.supervisor is None:
            return
        states = [process_state(pid) for pid in before.values()]
        if self.watch is None or replica in self._evicted or not self.supervisor.is_running(replica):
            return
        if all(state not in ("", "Z", "X", "T", "t") for state in states):
            self.watch.deaths.note_lost(tuple(sorted(before)), notice.reason, at)

    def _report(self, incident: Incident) -> None:
        """Reports an incident to the lighthouse, unless nothing has changed; queued, so that the watch does not wait."""
        outcome = incident.action.result if incident.action is not None else ""
        content = f"{headline(incident)}\n{outcome}\n{incident.closed}\n{len(incident.timeline)}"
        if self._reported.get(incident.id) != content:
            self._reported[incident.id] = content
            keep_newest(self._reported)
            self._calls.put(lambda: self._publish(incident, outcome), incident.id)

    def _publish(self, incident: Incident, outcome: str) -> None:
        published = PublishedIncident(
            incident=incident.id,
            sentence=headline(incident),
            replicas=(replica_name(incident.action.replica),)
            if incident.action is not None and incident.action.replica is not None
            else (),
            node=incident.node,
            path=incident.folder,
            cause=(incident.verdict.cause if incident.verdict is not None else "") or incident.kind,
            at=incident.opened,
            kind=incident.kind,
            outcome=outcome,
            decided=decision(incident.action),
            ranks=incident.ranks,
            took_s=round(lasted(incident, time.time()), 1),
            closed=incident.closed is not None,
            story=_read_file(incident, "story.html"),
            evidence=_read_file(incident, EVIDENCE),
        )
        self._call(lambda client: client.report_incident(published))

    def _call(self, call: Callable[[Client], object]) -> bool:
        """Calls the lighthouse if it is connected; logs a failure. Whether it succeeded."""
        client = self.client
        if client is None or not client.connected:
            return False
        try:
            call(client)
            return True
        except (AllranksError, OSError) as error:
            log.warning("lighthouse not notified: %s", error)
            return False
