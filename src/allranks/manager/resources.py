"""Everything a manager opens: lighthouse client, healing server, store, regrouping thread. Owns their life."""

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
_DEPART_S = 5.0  # of waiting for the other ranks of a replica that has finished
_DEPART_UNFINISHED_S = 0.5
_CLOSE_S = 2.0  # of waiting for each thread
_LEASE_LOOK_S = 0.02


@dataclass(eq=False)
class ManagerResources:
    """`start` opens everything, `close` leaves the job and takes it down."""

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
        inside = ReplicaRendezvous(
            options.rank, options.world_size, self._inside_store(), lambda: self.training.closing
        )
        session = inside.agree("session", uuid.uuid4().hex, options.connect_timeout_s)
        self.client = self._connect(session)
        self.server = HealServer(options.host, Keyring(options.token or find_token()), options.timeout_s)
        self.server.on_fetched = self.training.transferred
        box = self._box(inside)
        self._attach_group()
        self.server.start()
        inside.connect(session, self.server.address, self.server.keys, options.connect_timeout_s)
        self.regrouper = Regrouper(
            options=options,
            training=self.training,
            client=self.client,
            inside=inside,
            group=self.group,
            box=box,
            server=self.server,
            store_address=f"{options.host}:{store.port}" if inside.speaks else "",
            healing=Healing(options, self.training, self.server, live, self.registered, self.sums, inside),
            may_come_late=may_come_late,
        )
        preparing.join()
        self.client.subscribe(self._hear)
        self._thread = start_thread("allranks-regroup", self.regrouper.run)
        return self

    def report(self, step: int) -> None:
        """Tells the lighthouse how far we are, a few times a second."""
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self.client.report(step=step, progress=step, health=self.health)

    def wait_for_lease(self, limit_s: float) -> None:
        """Before each vote: returns at once while no other process can have our name. Without contact to the lighthouse
        for long it waits, for it can then not be known; raises when another process has the name."""
        if self.client.may_commit():
            return
        log.warning("no contact with the lighthouse for long: waiting, for another process may have our name")
        deadline = time.monotonic() + limit_s
        with self.training.parking():
            while not self.client.may_commit():
                self.client.check_name()
                if time.monotonic() > deadline:
                    raise LighthouseUnreachable(
                        f"no contact with the lighthouse for {limit_s:.0f} s more: this replica must not commit"
                    )
                time.sleep(_LEASE_LOOK_S)

    def evict(self, replica: str, reason: str) -> None:
        """Asks the lighthouse to; in a thread, for training continues meanwhile."""
        log.error("%s is evicted: %s", replica, reason)

        def ask() -> None:
            try:
                self.client.evict(replica, reason)
            except LighthouseError as error:
                log.warning("%s could not be evicted: %s", replica, error)

        start_thread("allranks-evict", ask)

    def close(self, reason: str, finished: bool) -> None:
        """Leaves, stops the thread, closes the groups and the servers."""
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store is gone already
            self.regrouper.inside.depart(_DEPART_S if finished else _DEPART_UNFINISHED_S)
        self.client.leave(reason, finished, *self.training.position)
        generation = self.training.generation
        if generation is not None:
            generation.over = True
        self.regrouper.box.shutdown()
        self.regrouper.inside.mesh.shutdown()
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
        box = str(recorder.path) if recorder is not None and recorder.path is not None else ""
        return Client(
            ClientOptions(
                addresses=tuple(options.lighthouse.split(",")),
                token=options.token or "",
                replica=options.replica_id,
                session=session,
                rank=options.rank,
                connections=options.world_size,
                beacon=options.proactive,
                black_box=box,
            )
        ).start(options.connect_timeout_s)

    def _attach_group(self) -> None:
        """Its sockets are found, and cut by the liveness proxy when a member is gone."""
        if isinstance(self.group, ProcessGroupGloo):
            self.group.mesh.host = self.group.mesh.host or self.options.host
            if self.options.proactive:
                self.group.on_connected = self.client.hold

    def _box(self, inside: ReplicaRendezvous) -> VoteMesh:
        box = VoteMesh(self.options.timeout_s)
        if self.options.proactive:
            box.on_connected = self.client.hold
        own = mesh_name(self.client.session)
        self.server.on_ballot = lambda name, *call: (inside.mesh if name == own else box).arrive(name, *call)
        return box

    def _inside_store(self) -> dist.Store | None:
        """The store that the ranks of this replica share: their process group's, the one that is at the address
        already (torchrun's, the script's own), or a new one."""
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

    def _hear(self, notice: cluster.Notice) -> None:
        """On the client's thread: note, wake, return."""
        if isinstance(notice, cluster.MemberLost | cluster.MemberLeft | cluster.Evicted):
            left = notice if isinstance(notice, cluster.MemberLeft) else None
            position = (left.term, left.step) if left and left.step >= 0 else None
            gone = f"{notice.replica} is gone: {notice.reason}"
            self._lost(
                notice.number, notice.reason, gone, self.options.proactive or left is not None, position
            )
        elif isinstance(notice, cluster.QuorumWanted) and notice.broken:
            self._lost(notice.number, notice.reason, notice.reason)
        elif isinstance(notice, cluster.QuorumWanted):
            self._wanted(notice)
        elif isinstance(notice, cluster.Superseded):
            log.error("this process must stop: %s", notice.reason)
            if (generation := self.training.generation) is not None:
                self.training.break_group(generation, notice.reason)
        elif isinstance(notice, cluster.ConnectionLost):
            log.warning("no lighthouse can be reached (%s); training continues", notice.reason)
        elif isinstance(notice, cluster.LeaderMoved):
            log.info("the lighthouse is now %s", notice.address)

    def _lost(
        self, number: int, reason: str, said: str, act: bool = True, position: Position | None = None
    ) -> None:
        """A member of this quorum is gone, or has given it up: its group cannot work for us either."""
        if self.training.lost(number, reason, act, position):
            log.warning("quorum %d: %s", number, said)
        self.regrouper.interrupt(number, reason)

    def _wanted(self, notice: cluster.QuorumWanted) -> None:
        generation = self.training.generation
        if not self.regrouper.next_group.prepare(notice):
            self.training.on_replicas_waiting(notice.reason)
        if generation is not None and generation.usable and self.regrouper.box.peer_gone():
            self.training.break_group(generation, notice.reason)


def _listens(host: str, port: int) -> bool:
    """Whether there is a store already."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True
