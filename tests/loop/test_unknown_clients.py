"""A real job, and unknown clients at every port that its processes open: they learn nothing, and training and healing continue."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.soak.world import find

from allranks.channel.frames import HEAD
from allranks.channel.keys import MAGIC, Keyring
from allranks.lighthouse.messages import PREAMBLE, Hello, encode

pytestmark = pytest.mark.usefixtures("forks")

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-a-job-with-unknown-clients"
CROWD = 100  # silent connections at each port, more than a server greets at a time
SENT = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 64,
    "a hello": PREAMBLE + encode(Hello(replica="unknown")),
    "a huge frame": PREAMBLE + HEAD.pack(0xFFFFFFFF, 1),
    "a huge length": struct.pack("!I", 0xFFFFFFFF) * 16,
    "a wrong proof": b"\x05votes" + bytes(48),
    "its own greeting": MAGIC + bytes(16),
    "the page": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "the status": b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "events": b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "metrics": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an eviction": b"POST /api/replicas/replica-0/evict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
}


@dataclass
class RunningJob:
    """`allranks run --replicas 2` with a known token."""

    folder: Path
    name: str = f"unknown-clients-{os.getpid()}"
    agent: subprocess.Popen[bytes] | None = None
    _crowd: list[socket.socket] = field(default_factory=list)

    def start(self) -> None:
        own = {
            "ALLRANKS_SOAK": self.name,
            "ALLRANKS_TOKEN": TOKEN,
            "ALLRANKS_DIR": str(self.folder / "boxes"),
        }
        words = [
            "--job",
            self.name,
            "--replicas",
            "2",
            "--incidents",
            str(self.folder / "incidents"),
            "--quiet",
        ]
        with (self.folder / "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "allranks", "run", *words, "-m", "tests.soak.train_replicas", str(self.folder)],
                stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **own, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            )  # fmt: skip

    def commits(self) -> list[dict[str, object]]:
        """All so far, of all replicas."""
        lines = [
            line for path in self.folder.glob("replica-*.jsonl") for line in path.read_text().split("\n")[:-1]
        ]
        return [row for row in map(json.loads, lines) if row["kind"] == "commit"]

    def wait_for_steps(self, more: int) -> None:
        """Until both replicas have committed so many steps more, together."""

        def together() -> int:
            return sum(row["size"] == 2 and row["place"] == 0 for row in self.commits())

        target, deadline = together() + more, time.monotonic() + 100
        while together() < target:
            assert time.monotonic() < deadline, (self.folder / "agent.log").read_text()
            time.sleep(0.1)

    def ports(self) -> set[tuple[str, int]]:
        """Where processes of the job listen."""
        inodes = set()
        for pid in find(self.name):
            for path in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    inodes.add(os.readlink(path))
                except OSError:
                    continue
        found = set()
        for table, host in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.add((host, int(fields[1].rpartition(":")[2], 16)))
        return found

    def crowd(self, ports: set[tuple[str, int]]) -> None:
        """Connections that stay, and say nothing."""
        for port in ports:
            self._crowd += [sock for _ in range(CROWD) if (sock := dial(port)) is not None]
        assert len(self._crowd) >= CROWD

    def stop(self) -> None:
        (self.folder / "stop").touch()
        for sock in self._crowd:
            sock.close()
        assert self.agent is not None
        try:
            self.agent.wait(60)
        finally:
            self.agent.kill()
            self.agent.wait()
            for pid in find(self.name):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunningJob]:
    running = RunningJob(tmp_path)
    running.start()
    try:
        running.wait_for_steps(3)
        yield running
    finally:
        running.stop()


def dial(port: tuple[str, int]) -> socket.socket | None:
    """A connection; None when nobody takes it (a backlog that is full, a port that has just gone)."""
    try:
        return socket.create_connection(port, 2)
    except OSError:
        return None


def answers(ports: set[tuple[str, int]]) -> dict[tuple[tuple[str, int], str], bytes]:
    """What anyone who listens there says to each of SENT, until there is the status and a second of silence."""
    said: dict[tuple[tuple[str, int], str], bytes] = {}
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for port in ports:
            for name, data in SENT.items():
                sock = dial(port)
                if sock is not None:
                    stack.enter_context(sock)
                    said[port, name] = b""
                    selector.register(sock, selectors.EVENT_READ, (port, name))
                    with suppress(OSError):
                        sock.sendall(data)
        while selector.get_map():
            ready = selector.select(1.0)
            if not ready and any(b'"epoch":' in got for got in said.values()):
                break
            for key, _ in ready:
                try:
                    piece = key.fileobj.recv(65536)  # type: ignore[union-attr]
                except OSError:
                    piece = b""
                said[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
    return said


def test_unknown_clients_at_every_port_learn_nothing_and_stop_nothing(job: RunningJob) -> None:
    """While a hundred silent ones stay at each port a killed replica comes back, heals, and votes."""
    ports = job.ports()
    assert len(ports) >= 3  # the lighthouse's, and those of two replicas
    said = answers(ports)
    statuses = [got for (_, name), got in said.items() if name == "the status" and b'"epoch":' in got]
    epoch = json.loads(statuses[0].partition(b"\r\n\r\n")[2])["epoch"]
    keys = [Keyring(TOKEN).for_quorum(epoch, number) for number in range(10)]
    keys += [Keyring(TOKEN).for_purpose(purpose) for purpose in ("lighthouse", "snapshots", "evidence")]
    secrets = [TOKEN.encode(), *(key.key for key in keys), *(key.key.hex().encode() for key in keys)]
    for where, got in said.items():
        assert not any(secret in got for secret in secrets), where
        assert b"Traceback" not in got, where
        if where[1] == "an eviction" and got.startswith(b"HTTP"):
            assert b" 401 " in got.partition(b"\r\n")[0], where
    job.crowd(ports)
    victim = next(iter({int(str(row["pid"])) for row in job.commits()[-2:]}))
    os.kill(victim, signal.SIGKILL)
    job.wait_for_steps(5)
    assert job.ports() & ports
    log = (job.folder / "agent.log").read_text()
    assert TOKEN not in log and "Traceback" not in log
