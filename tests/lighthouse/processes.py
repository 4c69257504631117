"""Real processes for the tests: a lighthouse by its command, replicas as victims, etcd, a proxy in between."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Told:
    """Reads JSON lines of a process; `wait` finds the first that fits."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def wait(self, fits: Callable[[dict[str, Any]], bool], timeout_s: float = 40.0) -> dict[str, Any]:
        """The first line, told before or from now on and not yet taken, that fits."""
        for line in self.lines:
            if fits(line):
                self.lines.remove(line)
                return line
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not told in {timeout_s} s; other lines: {self.lines}") from None
            if line is None:
                raise AssertionError(f"the process ended; other lines: {self.lines}")
            if fits(line):
                return line
            self.lines.append(line)

    def close(self) -> None:
        self._thread.join(60)


class Victim:
    """One replica process."""

    def __init__(self, prefix: Sequence[str] = (), **options: Any) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "victim.py"), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.replica = options["replica"]
        self.told = Told(self.process)

    def ready(self) -> Victim:
        self.pid = int(self.told.wait(lambda line: "ready" in line)["ready"])
        return self

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def notice(self, kind: str, **wanted: Any) -> dict[str, Any]:
        return self.told.wait(
            lambda line: (
                line.get("notice") == kind and all(line.get(key) == value for key, value in wanted.items())
            )
        )

    def quorum(self) -> dict[str, Any]:
        return self.told.wait(lambda line: "quorum" in line)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.kill(getattr(self, "pid", self.process.pid), number)
            except ProcessLookupError:
                pass
        self.process.kill()
        self.process.wait(20)
        self.told.close()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class LighthouseProcess:
    """`allranks lighthouse` as people run it; its log is kept."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int = 0,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.log_path = folder / f"lighthouse-{time.monotonic_ns()}.log"
        self._log = self.log_path.open("w")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "allranks", "lighthouse", "--json", "--no-token",
             "--bind", f"{host}:{port}", "--start-grace-ms", "0", *arguments],
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        self.hello = json.loads(line)
        self.address = self.hello["address"]
        self.port = int(self.address.rpartition(":")[2])  # for the next one at the same place

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_log(self, text: str, timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            if time.monotonic() > deadline:
                raise AssertionError(f"{text!r} not logged in {timeout_s} s:\n{self.log()}")
            time.sleep(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code


class Proxy:
    """Forwards one port to another; can delay, drop both ways, drop one way, or reset everything at once."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.delay_s = 0.0
        self.drop = {"up": False, "down": False}  # up: towards the target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.accepted = 0
        self._resetting: set[socket.socket] = set()
        self.dropped_bytes = 0
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._closed:
                client.close()
                return
            try:
                server = socket.create_connection(self._target, 5)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            self.pairs.append((client, server))
            self._start(self._pump, client, server, "up")
            self._start(self._pump, server, client, "down")

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        while True:
            try:
                data = source.recv(65536)
                if data and self.delay_s:
                    time.sleep(self.delay_s)
                if self.drop[way]:
                    self.dropped_bytes += len(data)
                    if data:
                        continue
                    return  # a cut line carries no close either
                if not data:
                    if source not in self._resetting:  # a reset carries no orderly close to the other side
                        target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
            except OSError:
                return

    def reset(self) -> int:
        """Cuts all connections with a TCP reset; returns how many there were."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            self._resetting.update(pair)
        for pair in pairs:
            for sock in pair:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                try:
                    sock.shutdown(socket.SHUT_RD)
                except OSError:
                    pass
                sock.close()
        return len(pairs)

    def close(self) -> None:
        self._closed = True
        try:
            socket.create_connection(self._listener.getsockname(), 1).close()
        except OSError:
            pass
        self._listener.close()
        for pair in self.pairs:
            for sock in pair:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                sock.close()
        for thread in self._threads:
            thread.join(60)
