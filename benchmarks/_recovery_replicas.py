"""What benchmarks/recovery.py plays with: replicas of a library, its lighthouse, a second network.

Workers are forked from one process per library that has imported torch (`_recovery_worker.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from allranks.channel.frames import HeldPort

HERE = Path(__file__).parent
LIMIT_S = 90.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Event:
    at: float
    kind: str
    step: int
    participants: int


@dataclass
class Replica:
    """A running worker and its log."""

    name: str
    pid: int
    log: Path

    def events(self) -> list[Event]:
        if not self.log.exists():
            return []
        rows = [line.split() for line in self.log.read_text().splitlines() if line.count(" ") == 3]
        return [Event(float(at), kind, int(step), int(count)) for at, kind, step, count in rows]

    def wait(self, kind: str, after: float = 0.0, participants: int = 0, count: int = 1) -> Event:
        """The `count`-th event of that kind after a moment; raises when it does not come or the worker died."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            events = self.events()
            found = [
                e for e in events
                if e.kind == kind and e.at > after and (not participants or e.participants == participants)
            ]  # fmt: skip
            if len(found) >= count:
                return found[count - 1]
            crash = next((e for e in events if e.kind.startswith("crash") and e.at > after), None)
            if crash is not None:
                raise RuntimeError(f"{self.name} crashed: {crash.kind}")
            time.sleep(0.01)
        raise TimeoutError(f"{self.name}: no {kind} with {participants} participants in {LIMIT_S} s")


@dataclass
class Library:
    """allranks, torchft or plain DDP: a zygote that forks workers."""

    name: str
    python: str
    folder: Path
    prefix: tuple[str, ...] = ()  # of the command: puts its workers into another network
    zygote: subprocess.Popen[str] | None = None
    count: int = 0
    running: list[Replica] = field(default_factory=list)

    def open(self) -> None:
        env = {**os.environ, "RUST_LOG": "off", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        self.zygote = subprocess.Popen(
            [*self.prefix, self.python, str(HERE / "_recovery_worker.py"), self.name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip

    def wait_ready(self) -> None:
        assert self.zygote is not None and self.zygote.stdout is not None
        if self.zygote.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the worker of {self.name} does not start")

    def start(self, name: str, lighthouse: str = "", **job: object) -> Replica:
        assert self.zygote is not None and self.zygote.stdin is not None and self.zygote.stdout is not None
        self.count += 1
        log = self.folder / f"{self.name}-{self.count}-{name}"
        spec = {"name": name, "log": str(log), "lighthouse": lighthouse, **job}
        self.zygote.stdin.write(json.dumps(spec) + "\n")
        self.zygote.stdin.flush()
        replica = Replica(name, int(self.zygote.stdout.readline()), log)
        self.running.append(replica)
        return replica

    def end(self) -> None:
        for replica in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(replica.pid, signal.SIGKILL)
        self.running.clear()

    def close(self) -> None:
        self.end()
        if self.zygote is not None and self.zygote.stdin is not None:
            self.zygote.stdin.close()
            self.zygote.wait(10)


class Lighthouse:
    """Our lighthouse or torchft's, as a process of its own, at its defaults but for the smallest quorum."""

    def __init__(self, library: Library, host: str = "127.0.0.1") -> None:
        self.library = library
        self.host = host
        self._held = HeldPort()
        self.port = self._held.number
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        scheme = "http://" if self.library.name == "torchft" else ""
        return f"{scheme}{self.host}:{self.port}"

    def start(self) -> None:
        bind = f"{self.host}:{self.port}"
        if self.library.name == "torchft":
            script = Path(self.library.python).with_name("torchft_lighthouse")
            command = [str(script), "--min_replicas", "1", "--bind", bind]
        else:
            command = [sys.executable, "-m", "allranks", "lighthouse", "--bind", bind, "--min-replicas", "1"]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "RUST_LOG": "off"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the lighthouse of {self.library.name} does not listen")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@contextlib.contextmanager
def pair(
    library: Library, model: dict[str, object], warm: int = 10
) -> Iterator[tuple[Replica, Replica, Lighthouse]]:
    """Two replicas that train together, `warm` steps long already."""
    lighthouse = Lighthouse(library)
    try:
        lighthouse.start()
        first = library.start("a", lighthouse.address, **model)
        second = library.start("b", lighthouse.address, **model)
        for replica in (first, second):
            replica.wait("commit", participants=2, count=warm)
        yield first, second, lighthouse
    finally:
        library.end()
        lighthouse.kill()


@contextlib.contextmanager
def second_network() -> Iterator[tuple[str, str, str] | None]:
    """(name, our address, address inside) of a network namespace; None where none can be made."""
    name, third = f"allranks{os.getpid()}", os.getpid() % 250
    here, there = f"10.213.{third}.1", f"10.213.{third}.2"
    made = [
        f"ip netns add {name}",
        f"ip link add ar{third}h type veth peer name eth0 netns {name}",
        f"ip addr add {here}/30 dev ar{third}h",
        f"ip link set ar{third}h up",
        f"ip -n {name} addr add {there}/30 dev eth0",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for command in made:
            subprocess.run(command.split(), check=True, capture_output=True)
        ok = True
    except (OSError, subprocess.CalledProcessError):
        ok = False
    try:
        yield (name, here, there) if ok else None
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
