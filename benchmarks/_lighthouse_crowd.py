"""A crowd of light replicas in one process: raw sockets that speak the lighthouse's frames. For benchmarks and soaks."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from allranks.channel.frames import HEAD
from allranks.lighthouse.messages import (
    EMPTY_BEAT,
    FIRST_NOTICE,
    PREAMBLE,
    QUORUM,
    WELCOME,
    Ack,
    Beat,
    Hello,
    Join,
    Proof,
    encode,
)
from allranks.model.cluster import Member

LOST = FIRST_NOTICE
NO_PROOF = encode(Proof(""))  # the lighthouse of a benchmark has no token


@dataclass
class Light:
    """One connection."""

    name: str
    sock: socket.socket
    session: str = ""
    buffer: bytearray = field(default_factory=bytearray)
    out: bytes = b""


class Crowd:
    """Connects `size` replicas and waits for frames on all of them. Frames are counted, not decoded."""

    def __init__(self, address: str, size: int, prefix: str = "replica", beat_s: float = 0.0) -> None:
        self._beat_s, self._beaten = beat_s, 0.0
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._poll = select.epoll()
        self._room = memoryview(bytearray(1 << 18))
        self.lights: dict[int, Light] = {}
        self.names = [f"{prefix}-{i:05d}" for i in range(size)]
        self.closed: list[str] = []
        self._acks: list[tuple[Light, int]] = []
        for start in range(0, size, 500):
            fresh = [self.connect(name) for name in self.names[start : start + 500]]
            self.wait(WELCOME, {light.sock.fileno() for light in fresh}, 60.0)

    def connect(self, name: str) -> Light:
        """Connects and says hello; the answer is not awaited."""
        sock = socket.create_connection(self._target, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        light = Light(name, sock)
        self.lights[sock.fileno()] = light
        self._poll.register(sock.fileno(), select.EPOLLIN)
        light.session = f"{name}-{time.monotonic_ns()}"
        self._send(
            light, PREAMBLE + encode(Hello(replica=name, session=light.session, node="bench")) + NO_PROOF
        )
        return light

    def _send(self, light: Light, data: bytes) -> None:
        sent = 0 if light.out else light.sock.send(data)
        if sent < len(data):
            light.out += data[sent:]
            self._poll.modify(light.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def beat(self, light: Light, step: int) -> None:
        """One heartbeat that says something new."""
        self._send(light, encode(Beat(step, step, 0.0, "ok")))

    def beat_if_due(self) -> None:
        """Everybody beats, when that was asked for and it is time."""
        now = time.perf_counter()
        if self._beat_s and now - self._beaten >= self._beat_s:
            self._beaten = now
            for light in self.lights.values():
                self._send(light, EMPTY_BEAT)

    def join_all(self, step: int, timeout_s: float = 120.0) -> float:
        """Everybody asks; seconds until the last has its answer."""
        frames = {
            fd: encode(
                Join(
                    Member(light.name, light.session, "bench", f"10.0.0.1:{fd}", f"10.0.0.1:{fd + 1}", step),
                    1 << 60,
                )
            )
            for fd, light in self.lights.items()
        }
        waiting = set(self.lights)
        began = time.perf_counter()
        for fd, light in self.lights.items():
            self._send(light, frames[fd])
        self.wait(QUORUM, waiting, timeout_s)
        return time.perf_counter() - began

    def wait(
        self, kind: int, waiting: set[int], timeout_s: float, each: Callable[[int], None] | None = None
    ) -> None:
        """Until every descriptor in `waiting` had a frame of `kind`; notices are acknowledged."""
        deadline = time.perf_counter() + timeout_s
        waiting = set(waiting)
        while waiting:
            left = deadline - time.perf_counter()
            if left <= 0:
                raise TimeoutError(
                    f"{len(waiting)} of {len(self.lights)} did not get kind {kind} in {timeout_s} s"
                )
            self.beat_if_due()
            for fd in self.pump(min(left, 0.1), kind):
                if fd in waiting:
                    waiting.discard(fd)
                    if each is not None:
                        each(fd)

    def pump(self, timeout_s: float, kind: int = -1) -> list[int]:
        """Reads what is there; descriptors that got a frame of `kind`. Acknowledges when nothing is left to read.

        A thousand machines would acknowledge beside each other; here one process is all of them, and must
        not let the first ones' acknowledgements delay the others' reading.
        """
        got = []
        ready = self._poll.poll(0.0 if self._acks else timeout_s, 4096)
        if not ready and self._acks:
            acks, self._acks = self._acks, []
            for light, notice_id in acks:
                if notice_id and light.sock.fileno() >= 0:
                    self._send(light, encode(Ack(notice_id)))
            ready = self._poll.poll(timeout_s, 4096)
        for fd, events in ready:
            light = self.lights.get(fd)
            if light is None:
                continue
            if events & select.EPOLLOUT and light.out:
                light.out = light.out[light.sock.send(light.out) :]
                if not light.out:
                    self._poll.modify(fd, select.EPOLLIN)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and self._read(light, kind):
                got.append(fd)
        return got

    def _read(self, light: Light, wanted: int) -> bool:
        try:
            data = bytes(self._room[: light.sock.recv_into(self._room)])
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.closed.append(light.name)
            self.drop(light)
            return False
        if not light.buffer and len(data) < 4096 and int.from_bytes(data[:4], "big") == len(data) - HEAD.size:
            if data[4] & 0x7F >= FIRST_NOTICE:  # one whole small frame
                self._acks.append((light, int.from_bytes(data[5:13], "big")))
            return data[4] & 0x7F == wanted
        light.buffer += data
        found, start, size = False, 0, len(light.buffer)
        while size - start >= HEAD.size:
            length, kind = HEAD.unpack_from(light.buffer, start)
            end = start + HEAD.size + length
            if end > size:
                break
            found = found or kind & 0x7F == wanted
            if kind & 0x7F >= FIRST_NOTICE:
                notice_id = int.from_bytes(light.buffer[start + HEAD.size : start + HEAD.size + 8], "big")
                self._acks.append((light, notice_id))
            start = end
        del light.buffer[:start]
        return found

    def settle(self, seconds: float) -> None:
        """Reads and acknowledges for a while."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.pump(0.005)

    def drop(self, light: Light) -> None:
        """Closes without a good-bye: a death."""
        self._poll.unregister(light.sock.fileno())
        del self.lights[light.sock.fileno()]
        light.sock.close()

    def close(self) -> None:
        """Closes all."""
        for light in list(self.lights.values()):
            self.drop(light)
        self._poll.close()
