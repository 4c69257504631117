"""The vote that ends a step, over plain sockets: every rank sends it to every rank, from the training thread.

It comes after every gradient has been reduced. If it succeeds, every rank knows that every rank holds the same
gradients, and whether the membership should change, so all act at the same boundary. The lighthouse is not asked.

Runs in a rank. A gloo allreduce of five numbers costs four hand-overs between threads; a send and a receive
cost none. Connections come in through the healing server (same port, same proof of membership). A vote costs about 12 us of
CPU for each other voter: 0.8 ms for 64, 1.5 ms for 128, 15 ms for 1,024.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from allranks.channel.frames import (
    cut,
    is_silent,
    read_exactly,
    receive_json,
    send_json,
    split_address,
    tune_for_bulk,
    watch_connection,
)
from allranks.channel.keys import ChannelError, Credential, greet_as_client
from allranks.errors import GroupAborted, ManagerError
from allranks.manager.groups.gloo import close_in_children


@dataclass(frozen=True)
class Vote:
    """What one rank says at the end of a step."""

    good: bool  # its gradients are reduced and it wants to commit
    news: bool  # the membership should change at this boundary
    step: int  # the step it is about to make
    small: int = 0  # digest of learning rates, loss scale and the like; 0: none
    state: int = 0  # digest of parameters and optimizer state, in some steps; 0: not in this one


@dataclass(frozen=True)
class Tally:
    """The sum of all votes."""

    voters: int
    good: int
    news: int
    small: tuple[int, ...] = ()  # in the order of the voters
    state: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Everybody wants the step."""
        return self.good == self.voters

    @property
    def reason(self) -> str:
        return (
            "all voted for the step" if self.passed else f"{self.voters - self.good} voted against the step"
        )


MAX_VOTERS = 4096
_WAITING_S = 0.2
# a connection whose other end answers nothing for this long is cut; a busy rank's kernel answers
_CUT_S = 2.5
# without any answer for this long when it ends: it was cut, not closed; a line that is open has one each second
_SILENT_S = 1.3
_GREETED = 100  # a server greets about so many callers at a time: in a larger quorum they call again
_CALL_AGAIN_S = 0.05
_REMEMBERED = 8  # early callers of that many meetings


@dataclass(frozen=True)
class Voter:
    """Another voter: its place among the voters, its address, and the credential that it expects."""

    place: int
    address: str
    credential: Credential


@dataclass(eq=False)
class VoteMesh:
    """At most one meeting at a time; `abort` may come from any thread and ends a blocked vote."""

    timeout_s: float = 60.0
    places: int = MAX_VOTERS  # a voter beyond is refused
    on_connected: Callable[[list[int], int], None] | None = None  # (descriptors, quorum number)
    _early: dict[str, dict[int, socket.socket]] = field(default_factory=dict)  # meeting -> caller -> socket
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _open: list[socket.socket] = field(default_factory=list)  # of the meeting, also while it is being made
    _lines: list[socket.socket] = field(
        default_factory=list
    )  # once all have come, in the order of the voters
    _places: list[int] = field(default_factory=list)  # of the voters at the other ends
    silent: frozenset[int] = frozenset()  # voters that were cut off from us when the meeting ended
    _place: int = 0  # ours among the voters
    _error: str = ""

    def meet(
        self,
        name: str,
        number: int,
        place: int,
        others: Sequence[Voter],
        limit_s: float,
    ) -> None:
        """Connects to every other voter: we call those before us, those after us call."""
        self.abort("the members changed")
        with self._changed:
            self._error, self.silent = "", frozenset()
        close_in_children(self)
        deadline = time.monotonic() + limit_s
        again = len(others) // _GREETED
        lines = [self._call(name, place, voter, deadline, again) for voter in others if voter.place < place]
        lines += self._await(name, {voter.place for voter in others if voter.place > place}, deadline)
        with self._changed:
            if self._error:
                raise GroupAborted(self._error)
            self._lines, self._place = lines, place
            self._places = [voter.place for voter in sorted(others, key=lambda voter: voter.place)]
            descriptors = [line.fileno() for line in lines]
        if self.on_connected is not None:
            self.on_connected(descriptors, number)

    def arrive(self, name: str, place: int, line: socket.socket) -> None:
        """The healing server hands a caller over; it may come before we know of the meeting."""
        if not 0 <= place < self.places:
            line.close()
            return
        with self._changed:
            callers = self._early.setdefault(name, {})
            if place in callers:
                callers[place].close()
            callers[place] = line
            while len(self._early) > _REMEMBERED:
                for forgotten in self._early.pop(next(iter(self._early))).values():
                    forgotten.close()
            self._changed.notify_all()

    def cast(self, vote: Vote) -> Tally:
        """Votes and waits for the others; raises GroupAborted when one of them is gone."""
        votes = self.exchange((vote.step, vote.good, vote.news, vote.small, vote.state))
        steps, good, news, small, state = zip(*votes, strict=True)
        if set(steps) != {vote.step}:
            raise ManagerError(f"members vote on steps {sorted(set(steps))}, we on step {vote.step}")
        return Tally(len(votes), sum(good), sum(news), small, state)

    def exchange_sums(self, sums: Sequence[int]) -> list[tuple[int, ...]]:
        """After a vote whose digests differ: the sums of all voters, in their order."""
        counts = [count for (count,) in self.exchange((len(sums),))]
        return self.exchange(sums, counts)

    def exchange(
        self,
        numbers: Sequence[int],
        counts: Sequence[int] = (),
        waiting: Callable[[], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """Sends numbers to every other voter; returns those of all, in the order of the voters.

        `counts`: how many numbers each sends, if not as many as we. `waiting` is called every 0.2 s, and then there is no
        limit: another rank may be saving or evaluating. A voter that is gone ends it with GroupAborted.
        """
        lines, message = self._lines, struct.pack(f"!{len(numbers)}q", *numbers)
        sizes = [8 * count for count in counts] or [len(message)] * (len(lines) + 1)
        del sizes[self._place]
        found = [message]
        try:
            for line in lines:
                self._tell(line, message)
            for line, size in zip(lines, sizes, strict=True):
                while waiting is not None and not select.select([line], (), (), _WAITING_S)[0]:
                    waiting()
                found.append(read_exactly(line, size))
        except (OSError, ValueError) as error:
            raise GroupAborted(self._error or f"a voter is gone: {error}") from None
        if self._error:
            raise GroupAborted(self._error)
        found.insert(self._place, found.pop(0))
        return [struct.unpack(f"!{len(data) // 8}q", data) for data in found]

    def abort(self, reason: str = "aborted") -> None:
        """Ends the meeting, finished or in the making."""
        with self._changed:
            self._error = self._error or reason
            if self._lines:
                pairs = zip(self._places, self._lines, strict=True)
                self.silent = frozenset(place for place, line in pairs if is_silent(line, _SILENT_S))
            ended, self._open, self._lines = self._open, [], []
            for line in ended:
                cut(line)
            self._changed.notify_all()
        for line in ended:
            line.close()

    def shutdown(self) -> None:
        """For good."""
        self.abort("shut down")
        with self._changed:
            for callers in self._early.values():
                for line in callers.values():
                    line.close()
            self._early.clear()

    def peer_gone(self) -> bool:
        """Whether a voter has closed its line already."""
        return bool(self.gone())

    def gone(self) -> list[int]:
        """The voters that have closed their lines."""
        watch = select.poll()
        with self._changed:
            places = dict(zip((line.fileno() for line in self._lines), self._places, strict=True))
            for descriptor in places:
                watch.register(descriptor, select.POLLRDHUP)
            return sorted(places[descriptor] for descriptor, _ in watch.poll(0)) if places else []

    def close_in_child(self) -> None:
        for line in self._open:
            line.close()

    def _tell(self, line: socket.socket, form: bytes) -> None:
        line.sendall(form)

    def _call(self, name: str, place: int, voter: Voter, deadline: float, again: int) -> socket.socket:
        left_s = max(0.1, deadline - time.monotonic())
        line = socket.create_connection(split_address(voter.address), timeout=left_s)
        self._own(line)
        try:
            greet_as_client(line, voter.credential, voter.address)
            send_json(line, {"want": "ballot", "name": name, "place": place})
            receive_json(line)
        except ChannelError as error:
            if self._error or not again:
                raise GroupAborted(self._error or f"voter {voter.place}: {error}") from None
            time.sleep(_CALL_AGAIN_S)
            return self._call(name, place, voter, deadline, again - 1)
        return line

    def _await(self, name: str, places: set[int], deadline: float) -> list[socket.socket]:
        found: dict[int, socket.socket] = {}

        def came() -> bool:
            found.update(self._early.pop(name, {}))
            return bool(self._error) or places <= set(found)

        with self._changed:
            self._changed.wait_for(came, max(0.0, deadline - time.monotonic()))
        for line in found.values():
            self._own(line)
        if self._error:
            raise GroupAborted(self._error)
        if not places <= set(found):
            raise GroupAborted(f"voters {sorted(places - set(found))} did not come")
        return [found[place] for place in sorted(places)]

    def _own(self, line: socket.socket) -> None:
        tune_for_bulk(line, self.timeout_s)
        watch_connection(line, _CUT_S)
        with self._changed:
            if self._error:
                line.close()
                raise GroupAborted(self._error)
            self._open.append(line)
