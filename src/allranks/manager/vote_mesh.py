"""The vote that ends a step, over plain sockets: every rank sends its vote to every rank, on the training thread.

Ranks vote after every gradient has been reduced. After a successful vote every rank knows that all ranks hold the same
gradients, and whether the membership should change, so all act at the same step boundary, without the lighthouse.

Runs in a rank. A gloo allreduce of five numbers costs four thread switches; a send and a receive cost none. The healing
server accepts the connections (same port, same authentication). A vote costs about 12 us of CPU for each other voter:
0.8 ms for 64, 1.5 ms for 128, 15 ms for 1,024.
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
    """One rank's vote at the end of a step."""

    good: bool  # its gradients are reduced and it wants to commit
    news: bool  # the membership should change at this boundary
    step: int  # the step to commit
    small: int = 0  # digest of learning rates, loss scale and sampler positions; 0: none
    state: int = 0  # digest of parameters and optimizer state, in some steps; 0: none


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
        """Whether all voted for the step."""
        return self.good == self.voters

    @property
    def reason(self) -> str:
        return (
            "all voted for the step" if self.passed else f"{self.voters - self.good} voted against the step"
        )


MAX_VOTERS = 4096
_WAITING_S = 0.2
_CUT_S = 2.5  # a connection whose peer's kernel does not answer for this long is ended
# a connection without an answer for this long was cut, not closed; an open one has one each second
_SILENT_S = 1.3
_GREETED = 100  # handshakes that a server runs at a time: in a larger quorum clients retry
_RETRY_S = 0.05
_REMEMBERED = 8  # meshes whose early connections are kept


@dataclass(frozen=True)
class Voter:
    """Another voter: its index among the voters, its address, and the credential that it expects."""

    place: int
    address: str
    credential: Credential


@dataclass(eq=False)
class VoteMesh:
    """Connections to all voters of one quorum at a time; `abort` may come from any thread and ends a blocked vote."""

    timeout_s: float = 60.0
    places: int = MAX_VOTERS  # voters with a higher index are refused
    on_connected: Callable[[list[int], int], None] | None = None  # (descriptors, quorum number)
    _early: dict[str, dict[int, socket.socket]] = field(default_factory=dict)  # mesh name -> voter -> socket
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _open: list[socket.socket] = field(default_factory=list)  # also while connecting
    # once all are connected, in the order of the voters
    _lines: list[socket.socket] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)  # of the voters at the other ends
    silent: frozenset[int] = frozenset()  # voters that were cut off when the mesh ended
    _place: int = 0  # our index among the voters
    _error: str = ""

    def connect(
        self,
        name: str,
        number: int,
        place: int,
        others: Sequence[Voter],
        limit_s: float,
    ) -> None:
        """Connects to every other voter: to those before us; those after us connect to us."""
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

    def accept(self, name: str, place: int, line: socket.socket) -> None:
        """Takes a voter's connection from the healing server, perhaps before we know of its quorum."""
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

    def vote(self, vote: Vote) -> Tally:
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

        `counts`: how many numbers each voter sends, if not as many as this one. `waiting` is called every 0.2 s; with it
        there is no time limit, since another rank may be saving or evaluating. Raises GroupAborted when a voter is gone.
        """
        lines, message = self._lines, struct.pack(f"!{len(numbers)}q", *numbers)
        sizes = [8 * count for count in counts] or [len(message)] * (len(lines) + 1)
        del sizes[self._place]
        found = [message]
        try:
            for line in lines:
                self._send(line, message)
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
        """Ends all connections, also while connecting."""
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
        self.abort("shut down")
        with self._changed:
            for callers in self._early.values():
                for line in callers.values():
                    line.close()
            self._early.clear()

    def peer_gone(self) -> bool:
        """Whether a voter has closed its connection."""
        return bool(self.gone())

    def gone(self) -> list[int]:
        """The voters that have closed their connections."""
        watch = select.poll()
        with self._changed:
            places = dict(zip((line.fileno() for line in self._lines), self._places, strict=True))
            for descriptor in places:
                watch.register(descriptor, select.POLLRDHUP)
            return sorted(places[descriptor] for descriptor, _ in watch.poll(0)) if places else []

    def close_in_child(self) -> None:
        for line in self._open:
            line.close()

    def _send(self, line: socket.socket, message: bytes) -> None:
        line.sendall(message)

    def _call(self, name: str, place: int, voter: Voter, deadline: float, again: int) -> socket.socket:
        line = self._dial(voter, max(0.1, deadline - time.monotonic()))
        try:
            greet_as_client(line, voter.credential, voter.address)
            send_json(line, {"want": "ballot", "name": name, "place": place})
            receive_json(line)
        except ChannelError as error:
            if self._error or not again:
                raise GroupAborted(self._error or f"voter {voter.place}: {error}") from None
            time.sleep(_RETRY_S)
            return self._call(name, place, voter, deadline, again - 1)
        return line

    def _dial(self, voter: Voter, limit_s: float) -> socket.socket:
        """Connects with a socket that `abort` knows: nothing may come back from a network that is cut."""
        host, port = split_address(voter.address)
        failed: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            line = socket.socket(family, kind, protocol)
            self._own(line)
            try:
                line.settimeout(limit_s)
                line.connect(address)
                self._tune(line)
                return line
            except OSError as error:
                failed = error
                if self._error:
                    raise GroupAborted(self._error) from None
        raise GroupAborted(f"voter {voter.place} cannot be reached: {failed}")

    def _await(self, name: str, places: set[int], deadline: float) -> list[socket.socket]:
        found: dict[int, socket.socket] = {}

        def connected() -> bool:
            found.update(self._early.pop(name, {}))
            return bool(self._error) or places <= set(found)

        with self._changed:
            self._changed.wait_for(connected, max(0.0, deadline - time.monotonic()))
        for line in found.values():
            self._tune(line)
            self._own(line)
        if self._error:
            raise GroupAborted(self._error)
        if not places <= set(found):
            raise GroupAborted(f"voters {sorted(places - set(found))} did not connect")
        return [found[place] for place in sorted(places)]

    def _own(self, line: socket.socket) -> None:
        with self._changed:
            if self._error:
                line.close()
                raise GroupAborted(self._error)
            self._open.append(line)

    def _tune(self, line: socket.socket) -> None:
        tune_for_bulk(line, self.timeout_s)
        watch_connection(line, _CUT_S)
