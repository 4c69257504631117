"""The source side of healing: a small server in every rank that streams the offered state to members.

Runs in a rank: one named thread accepts, one per connection sends; both live in blocking socket calls, outside
the GIL. Bytes go from the training tensors to the socket; nothing is copied on the way but what lies on a device.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allranks.checkpoint.checksum import best_algorithm, new_hasher
from allranks.manager.heal_staging import Staging
from allranks.manager.heal_state import Offer
from allranks.manager.heal_wire import (
    HealWireError,
    Segment,
    greet_as_server,
    read_frame,
    send_frame,
    send_from,
    tune,
)
from allranks.manager.plan import Position

MAX_CONNECTIONS = 64


@dataclass(eq=False)
class HealServer:
    """`start()` listens; `offer()` makes a state fetchable, `withdraw()` ends that; `close()` stops all."""

    host: str = "127.0.0.1"
    secret: bytes = b""
    timeout_s: float = 60.0
    address: str = ""  # host:port once started
    sent_bytes: int = 0
    on_ballot: Callable[[str, int, socket.socket], None] | None = None  # takes a voter's connection over
    on_fetched: Callable[[tuple[int, int], int], None] | None = None  # a healing replica has all it needs
    _offer: Offer | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _listener: socket.socket | None = None
    _connections: set[socket.socket] = field(default_factory=set)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> HealServer:
        """Listens on a free port."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((self.host, 0))
        listener.listen(MAX_CONNECTIONS)
        self._listener = listener
        self.address = f"{self.host}:{listener.getsockname()[1]}"
        thread = threading.Thread(target=self._accept, name="allranks-heal-server", daemon=True)
        self._threads.append(thread)
        thread.start()
        return self

    def offer(self, offer: Offer) -> None:
        """From now on this state may be fetched; whoever waits for it is served."""
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def withdraw(self) -> None:
        """The state is about to change: nothing of it is sent any more."""
        with self._changed:
            self._offer = None

    def close(self) -> None:
        """Stops listening, cuts every connection, waits for the threads."""
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                listener.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            listener.close()
        with self._changed:
            connections = list(self._connections)
            self._changed.notify_all()
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _accept(self) -> None:
        while True:
            listener = self._listener
            if listener is None:
                return
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                crowded = len(self._connections) >= MAX_CONNECTIONS
                if not crowded:
                    self._connections.add(connection)
            if crowded:
                connection.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="allranks-heal-sender", daemon=True
            )
            self._threads = [old for old in self._threads if old.is_alive()] + [thread]
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        staging = Staging()
        try:
            tune(connection, self.timeout_s)
            greet_as_server(connection, self.secret)
            while (request := read_frame(connection)).get("want") != "ballot":
                self._answer(connection, request, staging)
            connection = self._hand_over(connection, request)
        except (OSError, HealWireError, ValueError, KeyError, TypeError):
            pass  # the receiver is gone or talks nonsense; it is told by the closed connection
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _hand_over(self, connection: socket.socket, request: dict[str, Any]) -> socket.socket:
        """A voter calls: its connection is not ours any more. What is left to close is a husk."""
        name, place = str(request["name"]), int(request["place"])
        if self.on_ballot is None:
            raise HealWireError("no votes here")
        send_frame(connection, {"ok": True})
        with self._changed:
            self._connections.discard(connection)
        self.on_ballot(name, place, socket.socket(fileno=connection.detach()))
        return connection

    def _answer(self, connection: socket.socket, request: dict[str, Any], staging: Staging) -> None:
        if request["want"] == "fetched":
            epoch, number = request["quorum"]
            if self.on_fetched is not None:
                self.on_fetched((int(epoch), int(number)), int(request["healer"]))
            send_frame(connection, {"ok": True})
            return
        position = (int(request["term"]), int(request["step"]))
        offer = self._wait_for(position, float(request.get("wait_s", 0.0)))
        if offer is None:
            send_frame(connection, {"ok": False, "why": f"the state at {position} is not offered here"})
        elif request["want"] == "layout":
            send_frame(connection, {"ok": True, **offer.layout.to_json()})
        else:
            self._send_stripe(connection, offer, [Segment(*item) for item in request["segments"]], staging)

    def _send_stripe(
        self, connection: socket.socket, offer: Offer, segments: list[Segment], staging: Staging
    ) -> None:
        algorithm = best_algorithm()
        hasher = new_hasher(algorithm)
        send_frame(connection, {"ok": True, "algorithm": algorithm})
        self.sent_bytes += send_from(connection, offer.read(segments, staging), hasher)
        if self._offer is not offer:
            raise HealWireError("withdrawn")  # some of it may be of the next state: it is not vouched for
        send_frame(connection, {"checksum": hasher.hexdigest()})

    def _wait_for(self, position: Position, wait_s: float) -> Offer | None:
        deadline = time.monotonic() + min(wait_s, self.timeout_s)
        with self._changed:
            while self._offer is None or self._offer.position != position:
                left = deadline - time.monotonic()
                if left <= 0 or self._listener is None:
                    return None
                self._changed.wait(left)
            return self._offer
