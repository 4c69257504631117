"""Reports this node's ranks to the lighthouse, and notices when another node is lost. Runs in the agent.

Ranks die with their agent, so an agent that is gone without shutting down is a lost node. The lighthouse notifies the other
agents. If the lighthouse is lost with its node, the surviving agents notice, and the agent that the lighthouse had chosen
beforehand files the incident.
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

POLL_S = 2.0  # between two samples of this node's ranks
REPORT_S = 10.0  # between two reports without a change, which also refresh the failover
YOUNG_S = 10.0  # after a change, ranks are sampled more often for this long
AWAY_S = 3.0  # a lighthouse that is unreachable for this long is lost with its node


@dataclass(frozen=True)
class Loss:
    node: Presence
    reason: str
    at: float  # epoch seconds, of the notice
    certain: bool = True  # False: only silent
    filed_by: str = ""  # the agent that files the incident; "": the first one that asks


@dataclass
class NodeMonitor:
    """`start()` and `close()` own the thread allranks-nodes. `noticed` takes the notices of the lighthouse."""

    client: Client
    ranks: Callable[[], tuple[int, ...]]  # the running ranks of this node; cheap
    node: str
    holds_lighthouse: bool
    on_lost: Callable[[Loss], object] = lambda loss: None
    on_left: Callable[[str], object] = lambda agent: None  # another agent shut down; quick
    _failover: Failover = field(default_factory=Failover)
    _reported: tuple[tuple[int, ...], float] = ((), float("-inf"))  # ranks, when (monotonic)
    _changed_s: float = field(default_factory=time.monotonic)  # last change of the ranks
    _away_s: float | None = None  # monotonic: since when the lighthouse is unreachable
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
        """Whether a lighthouse on another node is unreachable at the moment."""
        return self._away_s is not None and self._host() is not None

    def noticed(self, notice: object) -> None:
        """Handles a notice. Called on the client's thread: quick."""
        if isinstance(notice, MemberLost) and notice.replica.startswith(AGENT):
            work = partial(self._report_lost, notice, time.time())
            args = (work, "the loss of %s could not be reported", notice.replica)
            threading.Thread(target=carefully, args=args, name="allranks-node-lost", daemon=True).start()
        elif isinstance(notice, MemberLeft) and notice.replica.startswith(AGENT):
            self.on_left(notice.replica)
            host = self._host()
            if host is not None and host.agent == notice.replica:
                self._failover = Failover()
        elif isinstance(notice, ConnectionLost):
            self._away_s = self._away_s or time.monotonic()

    def _host(self) -> Presence | None:
        """The agent that holds the lighthouse, if that is another node's agent."""
        host = self._failover.host
        return None if host is None or host.agent == self.client.options.replica else host

    def _run(self) -> None:
        while not self._stop.wait(self._pause()):
            carefully(self._turn, "this node's ranks could not be reported")

    def _pause(self) -> float:
        """Short after a change, since ranks start one by one, and while the lighthouse is unreachable."""
        young = time.monotonic() - self._changed_s < YOUNG_S
        return POLL_S / 10 if self._away_s is not None or young else POLL_S

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
        known, at = self._reported
        if ranks == known and now_s - at < REPORT_S:
            return
        if ranks != known:
            self._changed_s = now_s
        us = Presence(self.client.options.replica, self.node, ranks, self.holds_lighthouse)
        self._failover = self.client.present(us)
        self._reported = (ranks, now_s)

    def _miss_lighthouse(self, away_s: float) -> None:
        """Reports the loss of the node that held the lighthouse, once."""
        host, successor = self._host(), self._failover.successor
        self._failover = Failover()
        if host is not None and not self._stop.is_set():
            reason = f"its agent held the lighthouse, which has not answered for {away_s:.1f} s"
            self.on_lost(Loss(host, reason, time.time(), certain=False, filed_by=successor))

    def _report_lost(self, notice: MemberLost, at: float) -> None:
        node = self.client.presence(notice.replica) or Presence(notice.replica, notice.replica)
        if not self._stop.is_set():
            self.on_lost(Loss(node, notice.reason, at, notice.certain))
