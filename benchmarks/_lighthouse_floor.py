"""The least that a push can cost: a bare epoll loop that writes one ready frame to every other connection.

    python benchmarks/_lighthouse_floor.py

No names, no state, no log, no acknowledgement kept: what remains is the kernel's work and that of the clients.
Prints its address, ends with its standard input.
"""

from __future__ import annotations

import select
import socket
import sys

from allranks.lighthouse.connection import raise_open_files
from allranks.lighthouse.messages import PREAMBLE, Welcome, encode
from allranks.model.cluster import MemberLost

WELCOME = encode(Welcome("floor", 1.0, 30.0, 1, 1))
NOTICE = encode(MemberLost("replica-00000", "connection closed without a good-bye", "0" * 32, 1, 2.0), 1)


def main() -> int:
    """Until standard input ends."""
    raise_open_files()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    poll = select.epoll()
    poll.register(listener.fileno(), select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN)
    lines: dict[int, socket.socket] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == sys.stdin.fileno():
                return 0
            if fd == listener.fileno():
                line, _ = listener.accept()
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                lines[line.fileno()] = line
                poll.register(line.fileno(), select.EPOLLIN)
                continue
            data = lines[fd].recv(65536)
            if data.startswith(PREAMBLE):
                lines[fd].send(WELCOME)
            elif not data:
                lines.pop(fd).close()
                for line in lines.values():
                    line.send(NOTICE)


if __name__ == "__main__":
    sys.exit(main())
