"""What unknown clients cost the lighthouse: its memory, and how long members wait, while thousands knock at its port.

    python benchmarks/unknown_clients.py [--quick] [--json]

None of them knows the job token. 5,000 connections that say nothing or drip one byte a second, 200 that send
requests and read no answer, and 1,000 that keep HTTP connections open. Meanwhile a member asks the lighthouse
something every 10 ms and a person at another address opens the page. Limits: 100 MB, 50 ms (99th percentile), and
the person is always answered. The attackers, the member and the lighthouse share the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.connection import raise_open_files

UNKNOWN_CLIENTS, PIPELINED, KEPT = 5000, 200, 1000
RATE = 500  # new HTTP connections a second
LIMIT_MB, LIMIT_MS = 100, 50
TOKEN = "benchmark"


def main() -> int:
    """Prints a table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10 s instead of 60")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--nag", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_open_files()
    if args.nag:
        nag(args.nag)
        return 0
    seconds = 10.0 if args.quick else 60.0
    with lighthouse() as (pid, address):
        quiet = Watch(address, 3.0)
        quiet.run()
        with crowd(address):
            loud = Watch(address, seconds)
            loud.run()
        peak = peak_mb(pid)
    numbers = {
        "peak_mb": peak,
        "member_p50_ms": loud.percentile(0.5),
        "member_p99_ms": loud.percentile(0.99),
        "member_worst_ms": loud.percentile(1.0),
        "member_p99_ms_without_unknown_clients": quiet.percentile(0.99),
        "pages_asked": loud.pages,
        "pages_refused": loud.refused,
    }
    if not args.json:
        for name, value in numbers.items():
            print(f"{name:<34} {value}")
    holds = peak < LIMIT_MB and loud.percentile(0.99) < LIMIT_MS and not loud.refused
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"name": "unknown_clients", "numbers": numbers, "holds": holds, "machine": machine}))
    return 0 if holds else 1


@contextmanager
def lighthouse() -> Iterator[tuple[int, str]]:
    """(process, address) of a lighthouse with a token."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        command = [sys.executable, "-m", "allranks", "lighthouse", "--bind", "127.0.0.1:0", "--json"]
        process = subprocess.Popen(
            [*command, "--token-file", str(token), "--log-level", "error"], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def crowd(address: str) -> Iterator[None]:
    """Unknown clients, in processes of their own: those of the frames' protocol, and those who speak HTTP."""
    script = Path(__file__).with_name("_lighthouse_unknown_clients.py")
    commands = [
        [sys.executable, str(script), address, str(UNKNOWN_CLIENTS)],
        [sys.executable, __file__, "--nag", address],
    ]
    processes = [
        subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for each in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            process.communicate()


def nag(address: str) -> None:
    """Some never read their answers, some keep connections open; who is closed comes again, at most RATE a second."""
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    unread, kept = [dial(address, 4096) for _ in range(PIPELINED)], [dial(address)]
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        again = RATE // 10
        for place, sock in enumerate(unread):
            if not alive(sock, request * 500) and again > 0:
                sock.close()
                unread[place], again = dial(address, 4096), again - 1
        for place, sock in enumerate(kept):
            if not alive(sock, request if place % 10 == 0 else b"") and again > 0:
                sock.close()
                kept[place], again = dial(address), again - 1
        kept += [dial(address) for _ in range(min(again, KEPT - len(kept)))]


def alive(sock: socket.socket, data: bytes) -> bool:
    """Sends if it can; whether the other side still bears us."""
    try:
        if data:
            sock.send(data)
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def dial(address: str, receive_bytes: int = 0) -> socket.socket:
    """A connection that never blocks us."""
    host, port = address.rsplit(":", 1)
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    sock.connect_ex((host, int(port)))
    return sock


class Watch:
    """A member that asks every 10 ms, and a person at 127.0.0.2 who opens the page every half second."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address, self.seconds = address, seconds
        self.waited_ms: list[float] = []
        self.pages = self.refused = 0

    def run(self) -> None:
        """Until the time is over."""
        with Client(ClientOptions(addresses=(self.address,), token=TOKEN, replica="member")) as client:
            end = time.monotonic() + self.seconds
            page_at = 0.0
            while time.monotonic() < end:
                began = time.perf_counter()
                client.presence("agent-nobody")
                self.waited_ms.append((time.perf_counter() - began) * 1000)
                if time.monotonic() >= page_at:
                    self.open_page()
                    page_at = time.monotonic() + 0.5
                time.sleep(0.01)

    def open_page(self) -> None:
        """Once."""
        host, port = self.address.rsplit(":", 1)
        page = http.client.HTTPConnection(host, int(port), timeout=5, source_address=("127.0.0.2", 0))
        self.pages += 1
        try:
            page.request("GET", "/")
            self.refused += page.getresponse().status != 200
        except OSError:
            self.refused += 1
        finally:
            page.close()

    def percentile(self, share: float) -> float:
        """Of the member's waits, in milliseconds."""
        ordered = sorted(self.waited_ms)
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def peak_mb(pid: int) -> float:
    """The most memory that a process ever held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)


if __name__ == "__main__":
    sys.exit(main())
