"""One node's agent: joins the supervisor or torchrun, the watch, and the connection to the lighthouse."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field

from allranks.agent.replicas import Event, Request, Supervisor
from allranks.agent.sample import read_samples
from allranks.agent.watch import Watch
from allranks.errors import AllranksError
from allranks.lighthouse.client import Client
from allranks.model.cluster import CollectEvidence
from allranks.model.cluster import Incident as Told
from allranks.model.incident import Action, Incident
from allranks.report.story import headline

log = logging.getLogger("allranks.agent")

LIGHTHOUSE_WAIT_S = 5.0


def replica_name(number: int) -> str:
    """What a replica is called at the lighthouse."""
    return f"replica-{number}"


@dataclass
class NodeAgent:
    """Owns nothing that it did not start: `supervisor` is None in whole-job mode, `client` without a lighthouse."""

    watch: Watch | None
    client: Client | None = None
    supervisor: Supervisor | None = None
    _evicted: set[int] = field(default_factory=set)
    _told: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Starts watching and listening to the lighthouse."""
        if self.watch is not None:
            self.watch.actor = self
            self.watch.on_incident = self._tell
            self.watch.start()
        if self.client is not None:
            self.client.subscribe(self._noticed)
        if self.supervisor is not None:
            self.supervisor.on_event = self._happened

    def close(self) -> None:
        """Stops watching; the supervisor and the lighthouse belong to the caller."""
        if self.watch is not None:
            self.watch.close()

    # actions, asked for by the watch

    def act(self, action: Action, incident: Incident) -> str:
        """Carries out what the policy decided; runs on the watch's thread."""
        if action.kind == "command":
            return self._run_command(action, incident)
        if self.supervisor is not None and action.replica is not None:
            return self._evict(action)
        return self._kill(action)

    def _evict(self, action: Action) -> str:
        """Survivors first: they abort and go on; then the culprit's processes are replaced."""
        assert self.supervisor is not None and action.replica is not None
        name = replica_name(action.replica)
        told = self._ask(lambda client: client.evict(name, action.reason))
        self._evicted.add(action.replica)
        self.supervisor.request(Request("restart", action.replica, f"evicted: {action.reason}"))
        return f"{name} was evicted and is started again" + (
            "" if told else " (the lighthouse could not be told)"
        )

    def _kill(self, action: Action) -> str:
        """Whole-job mode: ends the guilty ranks of this node (all of them if none is named); torchrun restarts."""
        assert self.watch is not None
        samples = [s for s in read_samples(self.watch.options.folder) if s.alive]
        chosen = [s for s in samples if not action.ranks or s.rank in action.ranks]
        for sample in chosen:
            try:
                os.kill(sample.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        names = ", ".join(str(s.rank) for s in chosen)
        return (
            f"rank {names} was ended; the launcher restarts the job"
            if chosen
            else "the guilty rank is not on this node"
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

    # what happens

    def _happened(self, event: Event) -> None:
        """A replica's process came, went or was replaced; runs on the supervisor's thread: be quick."""
        if event.kind == "rank_exited" and event.exit_code and not event.expected:
            at = time.time()
            self._ask(lambda client: client.accuse(replica_name(event.replica), event.detail))
            if self.watch is not None:
                ranks = (event.rank,) if event.rank is not None else ()
                reason = f"rank {event.rank} {event.detail}"
                threading.Thread(
                    target=self._note_death, args=(self.watch, ranks, event.replica, reason, at), name="allranks-death",
                    daemon=True,
                ).start()  # fmt: skip
        elif event.kind == "finished":
            self._turn_away_latecomers()
        elif event.kind == "started" and event.replica in self._evicted:
            self._evicted.discard(event.replica)
            self._ask(lambda client: client.let_in(replica_name(event.replica)))

    def _turn_away_latecomers(self) -> None:
        """The training is over: a replica that was on its way back would begin it anew, alone."""
        if self.watch is None or self.supervisor is None:
            return
        size, pids = self.watch.options.ranks_per_replica, self.supervisor.pids()
        samples = read_samples(self.watch.options.folder)
        joined = {s.rank // size for s in samples if s.calls_completed and pids.get(s.rank) == s.pid}
        for replica in self.supervisor.restarted():
            if replica not in joined:
                self.supervisor.request(Request("stop", replica, "the training is over"))

    def _note_death(self, watch: Watch, ranks: tuple[int, ...], replica: int, reason: str, at: float) -> None:
        try:
            watch.note_death(ranks, replica, reason, at)
        except Exception:  # a full disk, say: the death itself is known to the lighthouse and in the log
            log.exception("the evidence of %s could not be kept", reason)

    def _noticed(self, notice: object) -> None:
        if isinstance(notice, CollectEvidence) and self.watch is not None:
            watch, reason = self.watch, f"asked for by the lighthouse: {notice.reason}"
            threading.Thread(
                target=watch.collect_now, args=(reason,), name="allranks-collect", daemon=True
            ).start()

    def _tell(self, incident: Incident) -> None:
        verdict = incident.verdict or {}
        if self._told.get(incident.id) == headline(incident):
            return
        self._told[incident.id] = headline(incident)
        told = Told(
            incident=incident.id,
            sentence=headline(incident),
            replicas=(replica_name(incident.action.replica),)
            if incident.action is not None and incident.action.replica is not None
            else (),
            node=incident.node,
            path=incident.folder,
            cause=str(verdict.get("cause") or incident.kind),
        )
        self._ask(lambda client: client.tell_incident(told))

    def _ask(self, question: object) -> bool:
        """Says something to the lighthouse; its absence never stops the agent."""
        if self.client is None or not self.client.connected:
            return False
        try:
            question(self.client)  # type: ignore[operator]
            return True
        except (AllranksError, OSError) as error:
            log.warning("the lighthouse was not told: %s", error)
            return False
