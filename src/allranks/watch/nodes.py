"""The job's other nodes: reports to the lighthouse what runs here, and notices which node is lost. Runs in the agent.

Ranks die with their agent, so an agent that is gone without shutting down is a lost node. The lighthouse notifies the
others. A lighthouse that is lost with its own node notifies nobody: the agents notice its absence, and the agent that it
had chosen before files the incident for those that are left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from allranks.channel.worker import carefully
from allranks.errors import AllranksError
from allranks.lighthouse.client.client import Client
from allranks.model.cluster import AGENT, ConnectionLost, Failover, MemberLeft, MemberLost, Presence

log = logging.getLogger("allranks.agent")

LOOK_S = 2.0  # how often our ranks are sampled
TELL_S = 10.0  # how often they are reported although nothing has changed, and the failover is asked for
YOUNG_S = 10.0
AWAY_S = 3.0  # a lighthouse that is away for this long has gone with its node


@dataclass(frozen=True)
class Loss:
    node: Presence
    reason: str
    at: float  # epoch seconds, of the notice
    certain: bool = True  # False: only silent
    told_by: str = ""  # the agent whose incident it is, where that is settled already; "": who asks first


@dataclass
class NodeMonitor:
    """`start()` and `close()` own the thread allranks-nodes. `noticed` is called with the notices of the lighthouse."""

    client: Client
    ranks: Callable[[], tuple[int, ...]]  # that run on this node now; cheap
    node: str
    holds_lighthouse: bool
    on_lost: Callable[[Loss], object] = lambda loss: None
    on_left: Callable[[str], object] = lambda agent: None  # another agent left in good order; quick
    _failover: Failover = field(default_factory=Failover)
    _told: tuple[tuple[int, ...], float] = ((), float("-inf"))  # ranks, when (monotonic)
    _changed_s: float = field(default_factory=time.monotonic)  # when they were others
    _away_s: float | None = None  # monotonic: since when there is no lighthouse
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="allranks-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=15.0)
            self._thread = None

    @property
    def host_is_away(self) -> bool:
        """Whether the lighthouse is gone with another node's agent, or will be back in a moment."""
        return self._away_s is not None and self._host() is not None

    def noticed(self, notice: object) -> None:
        """On the client's thread: quick."""
        if isinstance(notice, MemberLost) and notice.replica.startswith(AGENT):
            work = partial(self._look_up, notice, time.time())
            told = (work, "the loss of %s could not be reported", notice.replica)
            threading.Thread(target=carefully, args=told, name="allranks-node-lost", daemon=True).start()
        elif isinstance(notice, MemberLeft) and notice.replica.startswith(AGENT):
            self.on_left(notice.replica)
            host = self._host()
            if host is not None and host.agent == notice.replica:
                self._failover = Failover()
        elif isinstance(notice, ConnectionLost):
            self._away_s = self._away_s or time.monotonic()

    def _host(self) -> Presence | None:
        """The agent that holds the lighthouse, if it is another's."""
        host = self._failover.host
        return None if host is None or host.agent == self.client.options.replica else host

    def _run(self) -> None:
        while not self._stop.wait(self._pause()):
            carefully(self._turn, "this node's ranks could not be reported")

    def _pause(self) -> float:
        """Ranks that start come one after the other: often at first, and while the lighthouse is away."""
        young = time.monotonic() - self._changed_s < YOUNG_S
        return LOOK_S / 10 if self._away_s is not None or young else LOOK_S

    def _turn(self) -> None:
        now_s = time.monotonic()
        if self.client.connected:
            self._away_s = None
            try:
                self._report(now_s)
            except AllranksError as error:
                log.debug("this node's ranks were not reported to the lighthouse: %s", error)
        elif self._away_s is not None and now_s - self._away_s >= AWAY_S:
            self._miss_lighthouse(now_s - self._away_s)

    def _report(self, now_s: float) -> None:
        ranks = self.ranks()
        known, at = self._told
        if ranks == known and now_s - at < TELL_S:
            return
        if ranks != known:
            self._changed_s = now_s
        us = Presence(self.client.options.replica, self.node, ranks, self.holds_lighthouse)
        self._failover = self.client.present(us)
        self._told = (ranks, now_s)

    def _miss_lighthouse(self, away_s: float) -> None:
        """Once: it is gone, with the node that held it."""
        host, successor = self._host(), self._failover.successor
        self._failover = Failover()
        if host is not None and not self._stop.is_set():
            reason = f"its agent held the lighthouse, which does not answer for {away_s:.1f} s"
            self.on_lost(Loss(host, reason, time.time(), certain=False, told_by=successor))

    def _look_up(self, notice: MemberLost, at: float) -> None:
        node = self.client.presence(notice.replica) or Presence(notice.replica, notice.replica)
        if not self._stop.is_set():
            self.on_lost(Loss(node, notice.reason, at, notice.certain))
