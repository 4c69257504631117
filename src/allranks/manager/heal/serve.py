"""The source side of healing: a small server in every rank that sends the offered state to members.

Runs in a rank. channel/server.py authenticates clients and limits connections. Bytes go from the training tensors to the
socket without a copy, except from a device.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from allranks.channel.frames import (
    JsonObject,
    listen,
    receive_json,
    send_checksum,
    send_from,
    send_json,
    tune_for_bulk,
)
from allranks.channel.keys import ChannelError, Keyring
from allranks.channel.server import MemberServer
from allranks.checkpoint.checksum import best_algorithm, new_hasher
from allranks.manager.heal.state import HealSegment, Offer, Staging
from allranks.manager.plan import Position

log = logging.getLogger("allranks.manager")

_BACKLOG = 512


@dataclass(eq=False)
class HealServer:
    """`start()` listens; `offer()` makes a state fetchable, `withdraw()` ends that; `close()` stops all."""

    host: str = "127.0.0.1"
    keys: Keyring = field(default_factory=Keyring)
    timeout_s: float = 60.0
    address: str = ""  # host:port once started
    sent_bytes: int = 0
    on_voter: Callable[[str, int, socket.socket], None] | None = None  # takes a voter's connection over
    # a healing replica has fetched its state
    on_fetched: Callable[[tuple[int, int], int], None] | None = None
    _offer: Offer | None = None
    _quorum: tuple[int, int] = (0, 0)  # of the offer
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _members: MemberServer | None = None

    def start(self) -> HealServer:
        """Listens on a free port."""
        listener = listen(self.host, 0, _BACKLOG)
        self.address = f"{self.host}:{listener.getsockname()[1]}"
        self._members = MemberServer(self.keys, "quorum", self._serve, "allranks-heal", proves=self.address)
        self._members.start(listener)
        return self

    def offer(self, offer: Offer, quorum: tuple[int, int] = (0, 0)) -> None:
        """Lets members of this quorum, or of a later one that we do not know yet, fetch this state."""
        with self._changed:
            self._offer, self._quorum = offer, quorum
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Ends the offer, because the state is about to change."""
        with self._changed:
            self._offer = None

    def close(self) -> None:
        """Stops listening, ends all connections, waits for the threads."""
        members, self._members = self._members, None
        with self._changed:
            self._changed.notify_all()
        if members is not None:
            members.close()

    def _serve(self, connection: socket.socket, purpose: str) -> None:
        staging, began = Staging(), time.monotonic()
        tune_for_bulk(connection, self.timeout_s)
        quorum = _quorum_of(purpose)
        try:
            while (request := receive_json(connection)).get("want") != "ballot":
                self._answer(connection, request, quorum, staging)
            self._hand_over(connection, request, purpose)
        finally:
            if staging.moved_bytes:
                took, copying = (time.monotonic() - began) * 1e3, staging.copying_s * 1e3
                sent = staging.moved_bytes / 1e6
                log.debug("sent %.1f MB of the state in %.0f ms, %.0f of them copying", sent, took, copying)

    def _hand_over(self, connection: socket.socket, request: JsonObject, purpose: str) -> None:
        """Passes a voter's connection on."""
        name, place = str(request["name"]), int(request["place"])
        if self.on_voter is None or purpose != f"quorum {name}":
            raise ChannelError("no votes here")
        send_json(connection, {"ok": True})
        self.on_voter(name, place, socket.socket(fileno=connection.detach()))

    def _answer(
        self, connection: socket.socket, request: JsonObject, quorum: tuple[int, int], staging: Staging
    ) -> None:
        if request["want"] == "fetched":
            if self.on_fetched is not None:
                self.on_fetched(quorum, int(request["healer"]))
            send_json(connection, {"ok": True})
            return
        position = (int(request["term"]), int(request["step"]))
        offer = self._wait_for(position, quorum, float(request.get("wait_s", 0.0)))
        if offer is None:
            send_json(connection, {"ok": False, "why": f"the state at {position} is not offered here"})
        elif request["want"] == "layout":
            send_json(connection, {"ok": True, **offer.layout.to_json()})
        else:
            self._send_stripe(
                connection, offer, [HealSegment(*item) for item in request["segments"]], staging
            )

    def _send_stripe(
        self, connection: socket.socket, offer: Offer, segments: list[HealSegment], staging: Staging
    ) -> None:
        algorithm = best_algorithm()
        hasher = new_hasher(algorithm)
        send_json(connection, {"ok": True, "algorithm": algorithm})
        sent = send_from(connection, offer.read(segments, staging), hasher)
        self.sent_bytes += sent
        staging.moved_bytes += sent
        if self._offer is not offer:
            raise ChannelError("withdrawn")  # some bytes may be of the next state: sends no checksum
        send_checksum(connection, hasher)

    def _wait_for(self, position: Position, quorum: tuple[int, int], wait_s: float) -> Offer | None:
        """Waits for an offer of this position to members of this quorum."""
        deadline = time.monotonic() + min(wait_s, self.timeout_s)
        with self._changed:
            while self._offer is None or self._offer.position != position or quorum < self._quorum:
                left = deadline - time.monotonic()
                if left <= 0 or self._members is None:
                    return None
                self._changed.wait(left)
            return self._offer


def _quorum_of(purpose: str) -> tuple[int, int]:
    """(epoch, number) of a key's quorum; (-1, -1) for the key of a replica's own ranks."""
    found = re.fullmatch(r"quorum (\d+)\.(\d+)", purpose)
    return (int(found[1]), int(found[2])) if found else (-1, -1)
