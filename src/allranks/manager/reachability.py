"""Members that this rank could not reach or fetch a state from, for its next request for a quorum.

Runs in a rank. While a group takes long to make, its members are probed: when one accepts no connection, the attempt ends
and the next request names that member, so that the lighthouse forms a quorum of replicas that can connect.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from allranks.channel.frames import find_unreachable
from allranks.manager.groups.teardown import start_thread
from allranks.model.cluster import Member, Quorum, addresses_of

log = logging.getLogger("allranks.manager")

PATIENCE_S = 0.5  # a group takes milliseconds to make; after this its members are probed
PROBE_S = 1.5  # within which each must accept a connection
_EVERY_S = 1.0
_PROBED = 64  # members that one rank probes; each rank probes different ones
_SERVE_TRIES = 2  # failed fetches from a reachable replica before its claim is reported as unserved


@dataclass(eq=False)
class Reachability:
    """Sessions to report. Filled by any thread, emptied by the next request."""

    unreached: set[str] = field(default_factory=set)
    _failed_serves: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, members: Collection[Member]) -> None:
        """These members could not be reached."""
        with self._lock:
            self.unreached.update(member.session for member in members)

    def note_not_served(self, sources: Sequence[Member]) -> None:
        """No state came from these: each is unreachable, or, if it accepts connections, does not hold what it claims."""
        lost = self._unreachable(sources)
        self.note(lost)
        with self._lock:
            self._failed_serves.update(source.session for source in sources if source not in lost)

    def report(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(unreached, unserved) for the next request. Each failure is reported once."""
        with self._lock:
            unserved = (session for session, times in self._failed_serves.items() if times >= _SERVE_TRIES)
            unreached, self.unreached = self.unreached, set()
            return tuple(sorted(unreached)), tuple(sorted(unserved))

    def served(self) -> None:
        """A state has arrived, or is not needed: forgets failed fetches."""
        with self._lock:
            self._failed_serves.clear()

    @contextlib.contextmanager
    def watching(self, quorum: Quorum, index: int, stop: Callable[[str], None]) -> Iterator[None]:
        """While a group is made: calls `stop(reason)` when one of its members cannot be reached."""
        over = threading.Event()
        others = (*quorum.members[index + 1 :], *quorum.members[:index])[:_PROBED]
        if others:
            start_thread("allranks-probe", self._watch, others, over, stop)
        try:
            yield
        finally:
            over.set()

    def _watch(self, others: Sequence[Member], over: threading.Event, stop: Callable[[str], None]) -> None:
        pause_s = PATIENCE_S
        while not over.wait(pause_s):
            lost, pause_s = self._unreachable(others), _EVERY_S
            if lost and not over.is_set():
                self.note(lost)
                stop(f"cannot connect to {', '.join(member.replica for member in lost)}")
                return

    def _unreachable(self, members: Sequence[Member]) -> list[Member]:
        addresses = {member.session: addresses_of(member) for member in members}
        failed = find_unreachable([each for found in addresses.values() for each in found], PROBE_S)
        return [member for member in members if failed.intersection(addresses[member.session])]
