"""The agent's watch over one node's ranks: notices deaths and standstills, and has them looked into.

One thread per node, named allranks-watch, which never waits for anything but the ranks: it is woken by deaths, and a
suspicion is examined on a thread of its own (allranks-examine). It never touches a rank by itself: actions go to the
`Actor` that the launcher gives it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allranks.incidents.deaths import DeathIncidents
from allranks.incidents.evidence import Gatherer
from allranks.incidents.folder import open_incident
from allranks.incidents.hangs import Actor, HangInvestigator
from allranks.incidents.options import WatchOptions
from allranks.incidents.peers import PeerAgents
from allranks.incidents.publish import IncidentPublisher
from allranks.incidents.recoveries import Recoveries
from allranks.incidents.waiting import Waiting
from allranks.model.incident import Incident
from allranks.watch.exits import ExitWatcher
from allranks.watch.history import History
from allranks.watch.samples import read_samples
from allranks.watch.silence import Suspicion

log = logging.getLogger("allranks.agent")

CLOSE_S, CLOSE_POLL_S = 5.0, 0.05  # after an incident recovery is looked for more often, for a while
END_S = 30.0  # how long the end of the job waits for an examination


@dataclass
class Watch:
    """Watches one node's ranks. `start()` and `close()` own the threads; `look()` is one turn."""

    options: WatchOptions
    actor: Actor | None = None
    on_look: Callable[[int, str], None] = lambda step, waits: None  # highest step, who waits for whom
    gatherer: Gatherer = field(init=False)
    teller: IncidentPublisher = field(init=False)
    recoveries: Recoveries = field(default_factory=Recoveries)
    history: History = field(init=False)
    deaths: DeathIncidents = field(init=False)
    inquiries: HangInvestigator = field(init=False)
    ranks: tuple[int, ...] = ()  # that ran at the last look
    _lines: ExitWatcher = field(default_factory=ExitWatcher)
    _waiting: Waiting = field(default_factory=Waiting)
    _stop: bool = False
    _thread: threading.Thread | None = None
    _examining: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.gatherer = Gatherer(self.options)
        self.teller = IncidentPublisher(self.options.webhooks)
        self.history = History(self.options.notice)
        self.deaths = DeathIncidents(self.options, self.gatherer, self.teller, self.recoveries)
        self.inquiries = HangInvestigator(
            self.options, self.history, self.gatherer, self.teller, self.deaths, self.recoveries, self.actor
        )

    def start(self) -> None:
        """Starts the thread."""
        if self.actor is not None:
            self.deaths.act, self.inquiries.actor = self.actor.act, self.actor
        self.deaths.in_background = True
        self._lines.start()
        self._thread = threading.Thread(target=self._run, name="allranks-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the threads and writes the last state of open incidents."""
        self._stop = True
        self._lines.wake()
        if self._thread is not None:
            self._thread.join(timeout=END_S)
            self._thread = None
            self.deaths.look(read_samples(self.options.folder), self._lines.endings, patience_s=0.0)
        if self._examining is not None:
            self._examining.join(timeout=END_S)
        self.deaths.close()
        self._lines.close()
        self.inquiries.close()
        for opened in self.recoveries.open():
            self.teller.write_page(opened)

    def collect_now(self, reason: str) -> Incident:
        """Evidence on demand, without a suspicion."""
        opened = open_incident(
            self.options.incidents,
            kind="request",
            job=self.options.job,
            reason=reason,
            node=self.options.node,
        )
        self.inquiries.gather(opened, read_samples(self.options.folder))
        opened.update(closed=time.time())
        self.teller.publish(opened)
        return opened.current

    def join(self, company: PeerAgents | None, on_incident: Callable[[Incident], None]) -> None:
        """Before `start`: the other nodes' agents, and who is told of incidents."""
        self.gatherer.company = company
        self.teller.on_incident = on_incident

    def copy_to(self, keep: Callable[[Path], None]) -> None:
        """Before `start`: `keep` copies incident folders elsewhere as they grow."""
        self.teller.keep = keep

    def look(self, now_s: float | None = None) -> Suspicion | None:
        """One turn: read, tell deaths, decide. A suspicion is examined beside it (before `start`: in this call)."""
        now = time.monotonic() if now_s is None else now_s
        samples = read_samples(self.options.folder)
        running = [s for s in samples if s.alive and not s.closed]
        self.ranks = tuple(s.rank for s in running)
        self._lines.hold(s.pid for s in running)
        if running:
            self.on_look(max(s.step for s in running), self._waiting.look(running))
        self.history.observe(now, samples)
        self.deaths.look(samples, self._lines.endings)
        for opened in self.recoveries.look(samples):
            self.teller.publish(opened)
        if self._examining is not None and self._examining.is_alive():
            return None
        suspicion, examine = self.inquiries.suspect(now, samples)
        if examine is not None and self._thread is None:
            examine()
        elif examine is not None:
            self._examining = threading.Thread(
                target=_carefully, args=(examine,), name="allranks-examine", daemon=True
            )
            self._examining.start()
        return suspicion

    def _run(self) -> None:
        while not self._stop:
            _carefully(self.look)
            self._lines.wait(CLOSE_POLL_S if self.recoveries.recent(CLOSE_S) else self.options.poll_s)


def _carefully(work: Callable[[], object]) -> None:
    """At a thread's entry: a failure is told, and the next turn comes."""
    try:
        work()
    except Exception:
        log.exception("the watch failed once and goes on")
