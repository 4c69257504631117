"""Which replicas can connect to each other. Pure: no clock, no sockets.

Members report the replicas that they could not reach, and claimed states that they could not fetch. A failed pair
stays apart for a back-off that doubles with each failure. A newcomer must be proved reachable before it joins training
members: each of them connects to it, and it connects to each of them (client/link.py). Keys are sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

FIRST_BACKOFF_S, LAST_BACKOFF_S = 2.0, 60.0
FORGET_S = 60.0  # a pair that has worked this long starts with the first back-off again
MAX_PAIRS = 20_000
_BRANCHES = 2000  # of the exact search; the rest is decided greedily

Pair = tuple[str, str]  # sessions, sorted
Worth = tuple[int, int, tuple[int, ...]]  # of a set of sessions, to compare sets


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True)
class Apart:
    """A pair that could not connect."""

    until: float
    tries: int


@dataclass
class Reach:
    """What is known of pairs of sessions. Change it only by its methods."""

    apart: dict[Pair, Apart] = field(default_factory=dict)
    proved: dict[str, set[str]] = field(default_factory=dict)  # session -> sessions that have connected to it
    unserved: set[str] = field(default_factory=set)  # sessions whose claimed state could not be fetched
    probing: dict[str, set[str]] = field(default_factory=dict)  # session -> sessions asked to connect to it

    def report(self, now: float, by: str, others: Iterable[str]) -> None:
        """`by` could not connect to these."""
        for other in others:
            if other == by:
                continue
            pair = pair_of(by, other)
            before = self.apart.pop(pair, None)
            if before is not None and before.until > now:  # the same failure, seen from the other side
                self.apart[pair] = before
            else:
                tries = 1 + (before.tries if before and now < before.until + FORGET_S else 0)
                pause = min(FIRST_BACKOFF_S * 2.0 ** (tries - 1), LAST_BACKOFF_S)
                self.apart[pair] = Apart(now + pause, tries)
            self._unprove(by, other)
        while len(self.apart) > MAX_PAIRS:
            del self.apart[next(iter(self.apart))]

    def prove(self, by: str, other: str) -> None:
        """`by` has connected to `other`."""
        self.proved.setdefault(other, set()).add(by)
        self.probing.get(other, set()).discard(by)

    def discredit(self, sessions: Iterable[str]) -> None:
        """The states that these claim to hold could not be fetched: they do not count when sets are compared."""
        self.unserved.update(sessions)

    def is_proved(self, newcomer: str, members: Collection[str]) -> bool:
        """Whether each of these members and the newcomer have reached each other."""
        reached = self.proved.get(newcomer, set())
        return all(member in reached and newcomer in self.proved.get(member, ()) for member in members)

    def are_apart(self, now: float, one: str, other: str) -> bool:
        found = self.apart.get(pair_of(one, other))
        return found is not None and found.until > now

    def apart_from(self, now: float, session: str, others: Collection[str]) -> list[str]:
        """Those of `others` that it cannot connect to now."""
        if not self.apart:
            return []
        return [other for other in others if other != session and self.are_apart(now, session, other)]

    def pairs(self, now: float, sessions: Collection[str]) -> dict[str, set[str]]:
        """Session -> those of `sessions` that it is apart from."""
        found: dict[str, set[str]] = {}
        for (one, other), entry in self.apart.items():
            if entry.until > now and one in sessions and other in sessions:
                found.setdefault(one, set()).add(other)
                found.setdefault(other, set()).add(one)
        return found

    def begin_probe(self, session: str, others: Iterable[str]) -> list[str]:
        """Those of `others` that must still be asked to connect to `session`; marks them as asked."""
        asked, proved = self.probing.setdefault(session, set()), self.proved.get(session, set())
        found = [other for other in others if other not in asked and other not in proved]
        asked.update(found)
        return found

    def doubt(self, session: str) -> None:
        """It must be proved again: the network has changed since."""
        for table in (self.proved, self.probing):
            table.pop(session, None)
            for others in table.values():
                others.discard(session)

    def forget(self, session: str) -> None:
        self.unserved.discard(session)
        self.doubt(session)
        for pair in [pair for pair in self.apart if session in pair]:
            del self.apart[pair]

    def next_change(self, now: float) -> float | None:
        """When a pair may be tried again."""
        return min((found.until for found in self.apart.values() if found.until > now), default=None)

    def _unprove(self, one: str, other: str) -> None:
        for table in (self.proved, self.probing):
            table.get(one, set()).discard(other)
            table.get(other, set()).discard(one)


def largest_set(
    sessions: Collection[str], apart: Mapping[str, set[str]], worth: Callable[[Collection[str]], Worth]
) -> frozenset[str]:
    """The largest set in which no two are apart; of equally large sets the one with the highest `worth`.

    `apart`: session -> those it is apart from. Exact while few pairs are apart, as is usual; the search is bounded and
    falls back to dropping the session with the most failed pairs.
    """
    free = frozenset(sessions) - apart.keys()
    best: frozenset[str] | None = None
    best_key: tuple[int, Worth] | None = None
    stack = [frozenset(apart)]
    seen: set[frozenset[str]] = set()
    while stack:
        left = stack.pop()
        if left in seen or (best is not None and len(free) + len(left) < len(best)):
            continue
        seen.add(left)
        conflicts = {one: apart[one] & left for one in left}
        # deterministic: the session with the most conflicts, then the first by name
        worst = max(sorted(left), key=lambda one: len(conflicts[one]), default="")
        if not worst or not conflicts[worst]:
            found = free | left
            key = (len(found), worth(found))
            if best_key is None or key > best_key:
                best, best_key = found, key
            continue
        stack.append(left - {worst})
        if len(seen) < _BRANCHES:
            stack.append(left - conflicts[worst])
    assert best is not None
    return best
