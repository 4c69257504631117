"""A replica in a process of its own, driven by lines on stdin, telling what happens as JSON lines on stdout.

    python victim.py '{"replica": "r1", "addresses": ["127.0.0.1:29510"], ...}'

join STEP [FAILURES] | leave | fork | hold_gil SECONDS | hold PORT NUMBER
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict

from allranks.errors import LighthouseError
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.model.cluster import Member, Notice

_lock = threading.Lock()


def tell(**values: object) -> None:
    with _lock:
        print(json.dumps(values), flush=True)


def on_notice(notice: Notice) -> None:
    tell(notice=type(notice).__name__, at=time.monotonic(), **asdict(notice))


def join(client: Client, step: int, failures: int = 0) -> None:
    try:
        member = Member(client.options.replica, step=step, commit_failures=failures)
        quorum = client.join(member, timeout_s=60)
        tell(quorum=quorum.number, epoch=quorum.epoch, members=list(quorum.names), reason=quorum.reason)
    except LighthouseError as error:
        tell(error=str(error), kind=type(error).__name__)


def main() -> None:
    values = json.loads(sys.argv[1])
    values["addresses"] = tuple(values["addresses"])
    client = Client(ClientOptions(**values))
    client.subscribe(on_notice)
    client.start(timeout_s=60)
    tell(ready=os.getpid(), session=client.session)
    kept = []
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "join":
            threading.Thread(target=join, args=(client, *map(int, rest)), daemon=True).start()
        elif word == "leave":
            client.leave("asked to")
            break
        elif word == "fork":
            child = os.fork()
            if child == 0:
                os.close(1)
                time.sleep(600)
                os._exit(0)
            tell(child=child)
        elif word == "hold_gil":
            tell(holding=True)
            ctypes.PyDLL(None).sleep(int(rest[0]))  # PyDLL keeps the GIL while it calls
            tell(holding=False)
        elif word == "hold":
            sock = socket.create_connection(("127.0.0.1", int(rest[0])))
            client.hold([sock.fileno()], int(rest[1]))
            kept.append(sock)
            tell(held=True)
    client.close()


if __name__ == "__main__":
    main()
