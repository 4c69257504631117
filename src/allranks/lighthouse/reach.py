"""Who can talk to whom. Pure: no clock, no sockets.

Members report whom they could not reach, and which claims could not be served. A pair that failed stays apart for a
back-off that doubles with each failure. A replica that is not a member yet is proved reachable before it may join
members that train: each of them connects to it, and it connects to each of them (client/link.py). Keys are sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

FIRST_BACKOFF_S, LAST_BACKOFF_S = 2.0, 60.0
FORGET_S = 60.0  # a pair that has worked for so long begins with the first back-off again
MAX_PAIRS = 20_000  # that are remembered
_BRANCHES = 2000  # of the exact search; beyond it the rest is decided greedily

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
    """Facts about pairs of sessions. Change it only by its methods."""

    apart: dict[Pair, Apart] = field(default_factory=dict)
    proved: dict[str, set[str]] = field(default_factory=dict)  # session -> those with which it was proved
    unserved: set[str] = field(default_factory=set)  # sessions whose claimed state could not be fetched
    probing: dict[str, set[str]] = field(default_factory=dict)  # session -> those asked to reach it

    def report(self, now: float, by: str, others: Iterable[str]) -> None:
        """`by` could not reach these."""
        for other in others:
            if other == by:
                continue
            pair = pair_of(by, other)
            before = self.apart.pop(pair, None)
            if before is not None and before.until > now:  # the other side of the same failure
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
        """The state that these claim could not be fetched: it does not count when sets are compared."""
        self.unserved.update(sessions)

    def is_proved(self, newcomer: str, members: Collection[str]) -> bool:
        """Whether each of these members and the newcomer have reached each other."""
        reached = self.proved.get(newcomer, set())
        return all(member in reached and newcomer in self.proved.get(member, ()) for member in members)

    def are_apart(self, now: float, one: str, other: str) -> bool:
        found = self.apart.get(pair_of(one, other))
        return found is not None and found.until > now

    def apart_from(self, now: float, session: str, others: Collection[str]) -> list[str]:
        """Those of `others` with which it cannot talk just now."""
        if not self.apart:
            return []
        return [other for other in others if other != session and self.are_apart(now, session, other)]

    def pairs(self, now: float, sessions: Collection[str]) -> dict[str, set[str]]:
        """Of these: session -> those it is apart from."""
        found: dict[str, set[str]] = {}
        for (one, other), entry in self.apart.items():
            if entry.until > now and one in sessions and other in sessions:
                found.setdefault(one, set()).add(other)
                found.setdefault(other, set()).add(one)
        return found

    def begin_probe(self, session: str, others: Iterable[str]) -> list[str]:
        """Those of `others` that are to reach `session` and were not asked yet; they are from now on."""
        asked, proved = self.probing.setdefault(session, set()), self.proved.get(session, set())
        found = [other for other in others if other not in asked and other not in proved]
        asked.update(found)
        return found

    def forget(self, session: str) -> None:
        """This process is gone."""
        self.unserved.discard(session)
        for book in (self.proved, self.probing):
            book.pop(session, None)
            for others in book.values():
                others.discard(session)
        for pair in [pair for pair in self.apart if session in pair]:
            del self.apart[pair]

    def next_change(self, now: float) -> float | None:
        """When a pair may be tried again."""
        return min((found.until for found in self.apart.values() if found.until > now), default=None)

    def _unprove(self, one: str, other: str) -> None:
        for book in (self.proved, self.probing):
            book.get(one, set()).discard(other)
            book.get(other, set()).discard(one)


def largest_set(
    sessions: Collection[str], apart: Mapping[str, set[str]], worth: Callable[[Collection[str]], Worth]
) -> frozenset[str]:
    """The largest set in which nobody is apart from another; of equally large ones that of the highest `worth`.

    `apart`: session -> those it is apart from. Exact while few pairs are apart, which is all that happens; the search
    is bounded and falls back to dropping the one with most failed pairs.
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
        # the same one wherever the search begins: the busiest, then by name
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
