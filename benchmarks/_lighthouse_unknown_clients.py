"""Unknown clients at the lighthouse's door: thousands of half-open connections, some of which drip a byte a second.

    python benchmarks/_lighthouse_unknown_clients.py HOST:PORT COUNT

Keeps COUNT connections open as far as the lighthouse bears it: one that is closed comes again, at most RATE a
second. Ends with its standard input and prints how often it knocked and how many were closed on it.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

from allranks.channel.frames import HEAD
from allranks.lighthouse.connection import raise_open_files
from allranks.lighthouse.messages import PREAMBLE

RATE = 1000
DRIP = PREAMBLE + HEAD.pack(4096, 1) + b"{" * 4096  # a hello that never ends


class UnknownClients:
    """Each is a socket and the number of bytes it has dripped; odd ones never say anything."""

    def __init__(self, address: str, count: int) -> None:
        host, port = address.rsplit(":", 1)
        self._target, self._count = (host, int(port)), count
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, int]] = {}
        self.knocked = self.closed = 0

    def knock(self) -> None:
        """One more connection."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self._target)
        self._open[sock.fileno()] = (sock, 0)
        self._poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        self.knocked += 1

    def fill(self, at_most: int) -> None:
        """As many as are missing."""
        for _ in range(min(at_most, self._count - len(self._open))):
            self.knock()

    def drip(self) -> None:
        """Every second one says one byte more."""
        for fd, (sock, said) in list(self._open.items()):
            if fd % 2 == 0:
                try:
                    sock.send(DRIP[said : said + 1])
                except OSError:
                    continue
                self._open[fd] = (sock, said + 1)

    def listen(self, timeout_s: float) -> None:
        """Takes note of those that were closed."""
        for fd, _ in self._poll.poll(timeout_s, 4096):
            sock, _ = self._open.pop(fd)
            self._poll.unregister(fd)
            sock.close()
            self.closed += 1

    @property
    def held(self) -> int:
        """How many are open now."""
        return len(self._open)


def main() -> int:
    """Until standard input ends."""
    raise_open_files()
    clients = UnknownClients(sys.argv[1], int(sys.argv[2]))
    most, last, dripped = 0, time.monotonic(), time.monotonic()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        now = time.monotonic()
        clients.fill(int(min(now - last, 0.1) * RATE))
        last = now
        clients.listen(0.0)
        most = max(most, clients.held)
        if now - dripped >= 1.0:
            dripped = now
            clients.drip()
    print(json.dumps({"knocked": clients.knocked, "closed": clients.closed, "most_open": most}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
