"""One process per name. Pure: no clock, no sockets.

Another process that wants a name is refused while the first lives, and waits until that is known. One whose name was given to
another never gets it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from allranks.lighthouse.messages import Refused
from allranks.lighthouse.sessions import Session
from allranks.model.cluster import MemberLost

T = TypeVar("T")
_REMEMBERED = 10_000  # sessions of the past that are still known


@dataclass
class Names:
    """What is known of sessions that do not have their name now."""

    lost: dict[str, MemberLost] = field(default_factory=dict)  # declared lost; they may come back
    _retired: dict[str, str] = field(default_factory=dict)  # their name is another's
    _applied: dict[str, float] = field(default_factory=dict)  # they want a name that is taken, since when

    def refuse(
        self, name: str, session: str, first: Session | None, now: float, beat_s: float
    ) -> Refused | None:
        """Why this session cannot have the name now; `first` is another process that has it.

        The first lives when it is heard again after the second has come.
        """
        if session in self._retired:
            return superseded(name)
        if first is None:
            self._applied.pop(session, None)
            return None
        since = self._applied.get(session, now)
        _note(self._applied, session, since)
        heard_s = max(0.0, now - first.heard)
        age = f"{name} is the name of another process on {first.node or '?'}, heard {heard_s:.1f} s ago"
        if first.peer is None or first.heard - since < beat_s / 2:
            return Refused("waiting", f"{age}: waiting until it is known whether that process lives")
        return Refused("taken", age)

    def retire(self, name: str, session: str) -> None:
        """Its name is another's from now on."""
        _note(self._retired, session, name)

    def retire_lost(self, name: str, session: str) -> None:
        """Processes of this name that were lost, other than this one, never come back."""
        for other in [
            other for other, lost in self.lost.items() if lost.replica == name and other != session
        ]:
            self.retire(name, other)
            del self.lost[other]

    def lose(self, lost: MemberLost) -> None:
        _note(self.lost, lost.session, lost)


def superseded(name: str) -> Refused:
    return Refused("superseded", f"{name}: another process of the same name took this one's place")


def _note(book: dict[str, T], key: str, value: T) -> None:
    book[key] = value
    if len(book) > _REMEMBERED:
        del book[next(iter(book))]
