"""Opens and closes a manager's resources: lighthouse client, healing server, store, regrouping thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from allranks import recording as record
from allranks import torch_private
from allranks.channel.frames import loopback
from allranks.channel.keys import Keyring, find_token
from allranks.errors import LighthouseError, LighthouseUnreachable
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.manager.drift import StateSums
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.hosted_store import host_store
from allranks.manager.groups.teardown import start_thread
from allranks.manager.heal.healing import Healing
from allranks.manager.heal.serve import HealServer
from allranks.manager.heal.state import LiveState
from allranks.manager.options import ManagerOptions
from allranks.manager.plan import Position
from allranks.manager.registered_state import RegisteredState
from allranks.manager.regroup import Regrouper
from allranks.manager.replica_rendezvous import ReplicaRendezvous, mesh_name
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import VoteMesh
from allranks.model import cluster

log = logging.getLogger("allranks.manager")

_REPORT_EVERY_S = 0.1
_FINISH_S = 5.0  # wait for the other ranks of a replica that has finished
_LEAVE_S = 0.5  # the same for one that has not
_CLOSE_S = 2.0  # wait for each thread
_LEASE_POLL_S = 0.02


@dataclass(eq=False)
class ManagerResources:
    """`start` opens everything, `close` leaves the job and closes everything."""

    options: ManagerOptions
    training: TrainingState
    group: ReconfigurableGroup
    registered: RegisteredState
    sums: StateSums
    client: Client = field(init=False)
    server: HealServer = field(init=False)
    regrouper: Regrouper = field(init=False)
    _store: dist.TCPStore | None = None
    _thread: threading.Thread | None = None
    health: str = ""  # shown by the lighthouse
    _reported: float = 0.0

    def start(self, live: LiveState, may_come_late: Callable[[], bool]) -> ManagerResources:
        """Connects to the lighthouse and starts the regrouping thread."""
        options = self.options
        self._store = store = host_store(options.host)
        self.group.choose_device()
        preparing = start_thread("allranks-prepare", self.group.prepare)
        rendezvous = ReplicaRendezvous(
            options.rank, options.world_size, self._replica_store(), lambda: self.training.closing
        )
        session = rendezvous.agree("session", uuid.uuid4().hex, options.connect_timeout_s)
        self.client = self._connect(session)
        self.server = HealServer(options.host, Keyring(options.token or find_token()), options.timeout_s)
        self.server.on_fetched = self.training.transferred
        votes = self._make_votes(rendezvous)
        self._attach_group()
        self.server.start()
        rendezvous.connect(session, self.server.address, self.server.keys, options.connect_timeout_s)
        self.regrouper = Regrouper(
            options=options,
            training=self.training,
            client=self.client,
            rendezvous=rendezvous,
            group=self.group,
            votes=votes,
            server=self.server,
            store_address=f"{options.host}:{store.port}" if rendezvous.is_leader else "",
            healing=Healing(
                options, self.training, self.server, live, self.registered, self.sums, rendezvous
            ),
            may_come_late=may_come_late,
        )
        preparing.join()
        self.client.subscribe(self._on_notice)
        self._thread = start_thread("allranks-regroup", self.regrouper.run)
        return self

    def report(self, step: int) -> None:
        """Reports the step to the lighthouse, a few times a second."""
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self.client.report(step=step, progress=step, health=self.health)

    def wait_for_lease(self, limit_s: float) -> None:
        """Before each vote: returns at once while no other process can have this replica's name. After a long time without
        contact to the lighthouse it waits for contact; raises when another process has the name."""
        if self.client.may_commit():
            return
        log.warning(
            "no contact with the lighthouse for long: waiting, another process may have this replica's name"
        )
        deadline = time.monotonic() + limit_s
        with self.training.parking():
            while not self.client.may_commit():
                self.client.check_name()
                if time.monotonic() > deadline:
                    raise LighthouseUnreachable(
                        f"no contact with the lighthouse for {limit_s:.0f} s more: this replica must not commit"
                    )
                time.sleep(_LEASE_POLL_S)

    def evict(self, replica: str, reason: str) -> None:
        """Asks the lighthouse to evict a replica, in a thread, so that training continues."""
        log.error("evicting %s: %s", replica, reason)

        def ask() -> None:
            try:
                self.client.evict(replica, reason)
            except LighthouseError as error:
                log.warning("%s could not be evicted: %s", replica, error)

        start_thread("allranks-evict", ask)

    def close(self, reason: str, finished: bool) -> None:
        """Leaves, stops the thread, closes groups and server."""
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store may be gone
            self.regrouper.rendezvous.wait_for_others(_FINISH_S if finished else _LEAVE_S)
        self.client.leave(reason, finished, *self.training.position)
        generation = self.training.generation
        if generation is not None:
            generation.replaced = True
        self.regrouper.votes.shutdown()
        self.regrouper.rendezvous.mesh.shutdown()
        self.group.shutdown()
        self.regrouper.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        self.client.close(_CLOSE_S)
        self.server.close()
        self._store = None

    def _connect(self, session: str) -> Client:
        options = self.options
        recorder = record.current()
        black_box = str(recorder.path) if recorder is not None and recorder.path is not None else ""
        return Client(
            ClientOptions(
                addresses=tuple(options.lighthouse.split(",")),
                token=options.token or "",
                replica=options.replica_id,
                session=session,
                rank=options.rank,
                connections=options.world_size,
                beacon=options.proactive,
                black_box=black_box,
            )
        ).start(options.connect_timeout_s)

    def _attach_group(self) -> None:
        """Lets the liveness proxy shut down a gloo group's sockets when a member is gone."""
        if isinstance(self.group, ProcessGroupGloo):
            self.group.mesh.host = self.group.mesh.host or self.options.host
            if self.options.proactive:
                self.group.on_connected = self.client.hold

    def _make_votes(self, rendezvous: ReplicaRendezvous) -> VoteMesh:
        votes = VoteMesh(self.options.timeout_s)
        if self.options.proactive:
            votes.on_connected = self.client.hold
        own = mesh_name(self.client.session)
        self.server.on_voter = lambda name, *voter: (rendezvous.mesh if name == own else votes).accept(
            name, *voter
        )
        return votes

    def _replica_store(self) -> dist.Store | None:
        """The store that the ranks of this replica share: their process group's, the one that already listens at the
        address (torchrun's, the script's own), or a new one."""
        options = self.options
        if options.world_size == 1:
            return None
        if dist.is_initialized():
            store = torch_private.default_store()
        else:
            limit = timedelta(seconds=options.connect_timeout_s)
            host = options.store_host or loopback()
            hosts = options.rank == 0 and not _listens(host, options.store_port)
            store = dist.TCPStore(
                host, options.store_port, is_master=hosts, wait_for_workers=False, timeout=limit
            )
        return dist.PrefixStore(f"allranks/{options.replica_id}", store)

    def _on_notice(self, notice: cluster.Notice) -> None:
        """Runs on the client's thread and must not block."""
        if isinstance(notice, cluster.MemberLost | cluster.MemberLeft | cluster.Evicted):
            left = notice if isinstance(notice, cluster.MemberLeft) else None
            position = (left.term, left.step) if left and left.step >= 0 else None
            gone = f"{notice.replica} is gone: {notice.reason}"
            act = self.options.proactive or left is not None
            self._on_lost(notice.number, notice.reason, gone, act, position)
        elif isinstance(notice, cluster.QuorumWanted) and notice.broken:
            self._on_lost(notice.number, notice.reason, notice.reason)
        elif isinstance(notice, cluster.QuorumWanted):
            self._on_replicas_waiting(notice)
        elif isinstance(notice, cluster.Superseded):
            log.error("this process must stop: %s", notice.reason)
            if (generation := self.training.generation) is not None:
                self.training.break_group(generation, notice.reason)
        elif isinstance(notice, cluster.ConnectionLost):
            log.warning("no lighthouse can be reached (%s); training continues", notice.reason)
        elif isinstance(notice, cluster.LeaderMoved):
            log.info("the lighthouse is now %s", notice.address)

    def _on_lost(
        self, number: int, reason: str, text: str, act: bool = True, position: Position | None = None
    ) -> None:
        """A member of this quorum is gone, or has left its group: the group is broken."""
        if self.training.lost(number, reason, act, position):
            log.warning("quorum %d: %s", number, text)
        self.regrouper.interrupt(number, reason)

    def _on_replicas_waiting(self, notice: cluster.QuorumWanted) -> None:
        generation = self.training.generation
        if not self.regrouper.next_group.prepare(notice):
            self.training.on_replicas_waiting(notice.reason)
        if generation is not None and generation.usable and self.regrouper.votes.peer_gone():
            self.training.break_group(generation, notice.reason)


def _listens(host: str, port: int) -> bool:
    """Whether a store already listens there."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True
