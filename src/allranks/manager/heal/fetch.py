"""The receiving side of healing: fetches one state from several sources at once, stripe by stripe.

Runs in a rank. One thread per source takes stripes from a common list, so a fast source does more; the stripe of a source
that dies goes back to the list. After `finish`, `begin` may be called again with other sources: received stripes are kept.
"""

from __future__ import annotations

import collections
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.channel.frames import (
    JsonObject,
    cut,
    is_intact,
    read_into,
    receive_json,
    send_json,
    split_address,
    tune_for_bulk,
)
from allranks.channel.keys import ChannelError, Credential, greet_as_client
from allranks.checkpoint.checksum import new_hasher
from allranks.errors import AllranksError, HealingFailed
from allranks.manager.heal.state import HealSegment, Landing, LiveState, Staging, StateLayout, stripes
from allranks.manager.plan import MAX_SOURCES, Lineage, Position

log = logging.getLogger("allranks.manager")

_CONNECTIONS = 6  # to the sources of a state on a GPU
_AHEAD = 2  # stripes requested at a time per connection
_CONNECT_S = 10.0
_DAMAGED = 3  # damaged stripes from one source before it is abandoned
_RETRY_S = 0.05


@dataclass(frozen=True)
class HealSource:
    """A member that holds the wanted state."""

    address: str
    credential: Credential  # of the quorum
    name: str = ""


@dataclass(eq=False)
class Fetch:
    """Fetches one state. `live` gives our own tensors, into which the bytes go directly, or new ones (`keep`)."""

    position: Position
    live: LiveState
    timeout_s: float = 60.0
    keep: bool = False  # keep our own state complete for as long as possible
    #: waits until our own tensors may change, while its argument returns True
    before_change: Callable[[Callable[[], bool]], None] = lambda wanted: None
    on_change: Callable[[], None] = lambda: None  # called before the first byte of our own tensors changes
    lineage: Lineage = ()  # of the wanted state
    received_bytes: int = 0
    failures: list[str] = field(default_factory=list)  # "source: why", in order
    began_at: float = 0.0
    _landing: Landing | None = None
    _left: collections.deque[tuple[HealSegment, ...]] = field(default_factory=collections.deque)
    _flying: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _sockets: set[socket.socket] = field(default_factory=set)
    _threads: list[threading.Thread] = field(default_factory=list)
    _running: int = 0  # threads
    _unanswered: int = 0  # threads whose source has not sent a layout yet
    _changed: bool = False  # bytes of our own tensors were replaced
    _before: int = 0  # bytes received before `begin`

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived and was checked."""
        return self._landing is not None and not self._left and self._flying == 0

    @property
    def begun(self) -> bool:
        """Whether `finish` must still be called."""
        return bool(self._threads)

    @property
    def received_nothing(self) -> bool:
        """Whether no byte has arrived since `begin`."""
        return self.received_bytes == self._before

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled since `begin`."""
        return self._cancelled.is_set()

    @property
    def total_bytes(self) -> int:
        return self._landing.layout.total_bytes if self._landing else 0

    def run(self, sources: Sequence[HealSource]) -> None:
        """Fetches the missing bytes; raises HealingFailed when these sources cannot provide them."""
        self.begin(sources)
        self.finish()

    def begin(self, sources: Sequence[HealSource]) -> None:
        """Starts to fetch the missing bytes."""
        self._cancelled.clear()
        self.failures.clear()
        self._before = self.received_bytes
        self.began_at = time.monotonic()
        self._threads = [
            threading.Thread(
                target=self._pull, args=(source,), name=f"allranks-heal-{source.name}", daemon=True
            )
            for source in _connections(sources[:MAX_SOURCES])
        ]
        self._running = self._unanswered = len(self._threads)
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Waits for the threads that `begin` started; raises HealingFailed when bytes are missing."""
        with self._lock:  # every thread has its own time limits
            self._lock.wait_for(lambda: self.complete or self.cancelled or self._running == 0)
        for thread in self._threads:
            while thread.is_alive():
                self._cut()  # repeatedly: the thread may be about to connect
                thread.join(0.02)
        self._threads = []
        if not self.complete:
            why = "; ".join(self.failures) or ("cancelled" if self._cancelled.is_set() else "no source")
            raise HealingFailed(
                f"healing stopped after {self.received_bytes} of {self.total_bytes} bytes: {why}",
                self.received_bytes,
                self.total_bytes,
            )

    def cancel(self) -> None:
        """Ends `finish` soon, from any thread; received stripes are kept."""
        self._cancelled.set()
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            self._lock.notify_all()
            for sock in self._sockets:
                cut(sock)

    def state(self) -> Any:
        """The fetched state. Only after `complete`."""
        if not self.complete or self._landing is None:
            raise HealingFailed("the state has not arrived yet", self.received_bytes, self.total_bytes)
        return self._landing.state()

    def _pull(self, source: HealSource) -> None:
        asked: collections.deque[tuple[HealSegment, ...]] = collections.deque()
        sock = self._socket(source)
        try:
            try:
                self._connect(sock, source)
                greet_as_client(sock, source.credential, source.address)
                self._agree_on_layout(sock)
            finally:
                with self._lock:
                    self._unanswered -= 1
                    self._lock.notify_all()
            self._announce_change()
            self._take_stripes(sock, asked, source.name)
        except (OSError, AllranksError, ValueError, KeyError, TypeError) as error:
            self.failures.append(f"{source.name or source.address}: {error}")
        finally:
            self._hand_back(asked)
            with self._lock:
                self._sockets.discard(sock)
                self._running -= 1
                self._lock.notify_all()
            sock.close()

    def _take_stripes(
        self, sock: socket.socket, asked: collections.deque[tuple[HealSegment, ...]], source: str
    ) -> None:
        staging, damaged, began = Staging(), 0, time.monotonic()
        while not self._cancelled.is_set():
            while len(asked) < _AHEAD and (stripe := self._take()) is not None:
                asked.append(stripe)
                self._ask(sock, stripe)
            if asked:
                sound = self._receive(sock, asked[0], staging)
                stripe = asked.popleft()
                damaged += not sound
                self._hand_back([] if sound else [stripe], landed=sound)
                if damaged >= _DAMAGED:
                    raise ChannelError(f"{damaged} stripes arrived damaged")
            elif self._finished():
                took, copying = (time.monotonic() - began) * 1e3, staging.copying_s * 1e3
                taken = staging.moved_bytes / 1e6
                log.debug(
                    "took %.1f MB from %s in %.0f ms, %.0f of them copying", taken, source, took, copying
                )
                return

    def _hand_back(self, stripes: Sequence[tuple[HealSegment, ...]], landed: bool = False) -> None:
        """Returns stripes that did not arrive to the list; `landed`: one stripe has arrived."""
        with self._lock:
            self._left.extendleft(reversed(stripes))
            self._flying -= len(stripes) + landed
            self._lock.notify_all()

    def _socket(self, source: HealSource) -> socket.socket:
        """A socket that `cancel` can end, even while it connects."""
        family = socket.AF_INET6 if source.address.count(":") > 1 else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        with self._lock:
            self._sockets.add(sock)
        return sock

    def _connect(self, sock: socket.socket, source: HealSource) -> None:
        if self._cancelled.is_set():
            raise ChannelError("cancelled")
        tune_for_bulk(sock, min(self.timeout_s, _CONNECT_S))
        sock.connect(split_address(source.address))
        sock.settimeout(self.timeout_s)

    def _agree_on_layout(self, sock: socket.socket) -> None:
        """Takes the first source's layout; raises if this source has another one."""
        term, step = self.position
        send_json(sock, {"want": "layout", "term": term, "step": step, "wait_s": self.timeout_s / 2})
        layout = StateLayout.from_json(_receive_ok(sock))
        with self._lock:
            if self._landing is None:
                landing = self.live.landing(layout, self.keep)
                # in this order: `complete` is read without the lock
                self._left.extend(stripes(layout))
                self._landing = landing
            elif self._landing.layout.notes != layout.notes:
                raise ChannelError("this source holds other tensors than the first one")

    def _announce_change(self) -> None:
        """Called before bytes go into our own tensors; with `keep`, waits until all sources have answered."""
        if self._landing is None or self._landing.apart or self._changed:
            return
        self.before_change(lambda: not self.cancelled)
        with self._lock:
            if self.keep:
                self._lock.wait_for(lambda: not self._unanswered or self.cancelled, self.timeout_s)
            if not self._changed and not self.cancelled:
                self.on_change()
                self._changed = True

    def _take(self) -> tuple[HealSegment, ...] | None:
        with self._lock:
            if not self._left:
                return None
            self._flying += 1
            return self._left.popleft()

    def _finished(self) -> bool:
        """Whether no stripe is left; waits while another source may still fail and return its stripe."""
        with self._lock:
            self._lock.wait_for(
                lambda: bool(self._left) or self._flying == 0 or self._cancelled.is_set(), self.timeout_s
            )
            return not self._left

    def _ask(self, sock: socket.socket, stripe: tuple[HealSegment, ...]) -> None:
        term, step = self.position
        segments = [[part.tensor, part.offset, part.length] for part in stripe]
        send_json(sock, {"want": "stripe", "term": term, "step": step, "segments": segments})

    def _receive(self, sock: socket.socket, stripe: tuple[HealSegment, ...], staging: Staging) -> bool:
        """Receives one stripe into its tensors; False when its checksum is wrong."""
        assert self._landing is not None
        hasher = new_hasher(str(_receive_ok(sock)["algorithm"]))
        read_into(sock, self._landing.views(stripe, staging), hasher)
        if not is_intact(sock, hasher):
            return False
        self._landing.settle(stripe, staging)
        length = sum(part.length for part in stripe)
        staging.moved_bytes += length
        with self._lock:
            self.received_bytes += length
        return True


def _receive_ok(sock: socket.socket) -> JsonObject:
    answer = receive_json(sock)
    if not answer.get("ok"):
        raise ChannelError(str(answer.get("why", "refused")))
    return answer


def _connections(sources: Sequence[HealSource]) -> Sequence[HealSource]:
    """One connection per source; several for states on a GPU, because a connection alternately copies and sends."""
    if not sources or not torch.cuda.is_initialized():
        return sources
    return [sources[turn % len(sources)] for turn in range(max(_CONNECTIONS, len(sources)))]


def report_fetched(source: HealSource, healer: int, limit_s: float, wanted: Callable[[], bool]) -> None:
    """Notifies a source that replica `healer` of its key's quorum has fetched its state; retries while `wanted`."""
    address, deadline = split_address(source.address), time.monotonic() + limit_s
    while wanted() and time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=min(limit_s, _CONNECT_S)) as sock:
                tune_for_bulk(sock, min(limit_s, _CONNECT_S))
                greet_as_client(sock, source.credential, source.address)
                send_json(sock, {"want": "fetched", "healer": healer})
                receive_json(sock)
                return
        except (OSError, ValueError):
            time.sleep(_RETRY_S)
