"""The receiving side of healing: takes one state from several sources at once, stripe by stripe.

Runs in a rank. One named thread per source takes stripes from a common list, so a fast source does more; a
source that dies puts its stripe back and the others go on. `run` may be called again with other sources: what
has arrived is kept as long as the wanted state is the same.
"""

from __future__ import annotations

import collections
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.checkpoint.checksum import new_hasher
from allranks.errors import AllranksError, HealingFailed
from allranks.manager.heal_state import Landing, Layout, make_landing, stripes
from allranks.manager.heal_wire import (
    HealWireError,
    Segment,
    greet_as_client,
    read_frame,
    read_into,
    send_frame,
    tune,
)
from allranks.manager.plan import Position

MAX_SOURCES = 4
_AHEAD = 2  # stripes asked for before the first has arrived


@dataclass(frozen=True)
class Source:
    """A member that holds the wanted state."""

    address: str
    secret: bytes
    name: str = ""


@dataclass(eq=False)
class Fetch:
    """One healing. `own_state` gives our tensors, into which the bytes go directly."""

    position: Position
    own_state: Callable[[], Any]
    timeout_s: float = 60.0
    device: torch.device | None = None
    received_bytes: int = 0
    failures: list[str] = field(default_factory=list)  # "source: why", in order
    _landing: Landing | None = None
    _left: collections.deque[tuple[Segment, ...]] = field(default_factory=collections.deque)
    _flying: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _sockets: set[socket.socket] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Every byte is here and checked."""
        return self._landing is not None and not self._left and self._flying == 0

    @property
    def total_bytes(self) -> int:
        return self._landing.layout.total_bytes if self._landing else 0

    def run(self, sources: Sequence[Source]) -> None:
        """Fetches what is missing; raises HealingFailed when these sources cannot provide it."""
        self._cancelled.clear()
        self.failures.clear()
        threads = [
            threading.Thread(target=self._pull, args=(source,), name=f"allranks-heal-{source.name}", daemon=True)
            for source in sources[:MAX_SOURCES]
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.complete:
            why = "; ".join(self.failures) or ("cancelled" if self._cancelled.is_set() else "no source")
            raise HealingFailed(
                f"healing stopped after {self.received_bytes} of {self.total_bytes} bytes: {why}",
                self.received_bytes,
                self.total_bytes,
            )

    def cancel(self) -> None:
        """Ends `run` soon, from any thread; what has arrived is kept."""
        self._cancelled.set()
        with self._lock:
            self._lock.notify_all()
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def state(self) -> Any:
        """The fetched state. Only after `complete`."""
        if not self.complete or self._landing is None:
            raise HealingFailed("the state has not arrived yet", self.received_bytes, self.total_bytes)
        return self._landing.state()

    def _pull(self, source: Source) -> None:
        asked: collections.deque[tuple[Segment, ...]] = collections.deque()
        sock: socket.socket | None = None
        try:
            sock = self._connect(source)
            greet_as_client(sock, source.secret)
            self._agree_on_layout(sock)
            while not self._cancelled.is_set():
                while len(asked) < _AHEAD and (stripe := self._take()) is not None:
                    asked.append(stripe)
                    self._ask(sock, stripe)
                if asked:
                    self._receive(sock, asked[0])
                    asked.popleft()
                    with self._lock:
                        self._flying -= 1
                        self._lock.notify_all()
                elif self._finished():
                    return
        except (OSError, HealWireError, AllranksError, ValueError, KeyError, TypeError) as error:
            self.failures.append(f"{source.name or source.address}: {error}")
        finally:
            with self._lock:
                self._left.extendleft(reversed(asked))
                self._flying -= len(asked)
                self._lock.notify_all()
                if sock is not None:
                    self._sockets.discard(sock)
            if sock is not None:
                sock.close()

    def _connect(self, source: Source) -> socket.socket:
        host, _, port = source.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=min(self.timeout_s, 10.0))
        tune(sock, self.timeout_s)
        with self._lock:
            self._sockets.add(sock)
        return sock

    def _agree_on_layout(self, sock: socket.socket) -> None:
        """The first source's layout counts; one that describes another state is not used."""
        term, step = self.position
        send_frame(sock, {"want": "layout", "term": term, "step": step, "wait_s": self.timeout_s / 2})
        answer = read_frame(sock)
        if not answer.get("ok"):
            raise HealWireError(str(answer.get("why", "refused")))
        layout = Layout.from_json(answer)
        with self._lock:
            if self._landing is None:
                self._landing = make_landing(layout, self.own_state(), self.device)
                self._left.extend(stripes(layout))
            elif self._landing.layout.notes != layout.notes:
                raise HealWireError("this source holds other tensors than the first one")

    def _take(self) -> tuple[Segment, ...] | None:
        with self._lock:
            if not self._left:
                return None
            self._flying += 1
            return self._left.popleft()

    def _finished(self) -> bool:
        """Nothing is left for this thread; waits while another source may still fail and hand back its stripe."""
        with self._lock:
            self._lock.wait_for(
                lambda: bool(self._left) or self._flying == 0 or self._cancelled.is_set(), self.timeout_s
            )
            return not self._left

    def _ask(self, sock: socket.socket, stripe: tuple[Segment, ...]) -> None:
        term, step = self.position
        segments = [[part.tensor, part.offset, part.length] for part in stripe]
        send_frame(sock, {"want": "stripe", "term": term, "step": step, "segments": segments})

    def _receive(self, sock: socket.socket, stripe: tuple[Segment, ...]) -> None:
        assert self._landing is not None
        answer = read_frame(sock)
        if not answer.get("ok"):
            raise HealWireError(str(answer.get("why", "refused")))
        views = self._landing.views(stripe)
        read_into(sock, views)
        hasher = new_hasher(str(answer["algorithm"]))
        for view in views:
            hasher.update(view)
        if hasher.hexdigest() != answer["checksum"]:
            raise HealWireError("a stripe arrived damaged")
        self._landing.settle(stripe, views)
        with self._lock:
            self.received_bytes += sum(part.length for part in stripe)
