"""A real S3 server (SeaweedFS) for the tests, and a proxy that makes it slow, failing or absent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allranks.channel.frames import HeldPort

KEY, SECRET = "tester", "tester-secret"
#: A user who may read another bucket only.
GUEST_KEY, GUEST_SECRET = "guest", "guest-secret"


def _untouched_port() -> HeldPort:
    """A port for which no killed server, perhaps another user's, left a socket behind."""
    while True:
        port = HeldPort()
        if not any(Path("/tmp").glob(f"seaweedfs-*-{port.number}.sock")):
            return port
        port.close()


def weed_binary() -> str | None:
    """The server's program: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass
class S3Server:
    """One `weed server -s3` in a folder of its own; restartable on the same ports."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    _held: list[HeldPort] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts and waits until S3 answers."""
        names = ("master", "volume", "filer", "s3", "master.grpc", "volume.grpc", "filer.grpc", "s3.grpc")
        if not self.ports:
            self._held = [_untouched_port() for _ in names]
            self.ports = {name: held.number for name, held in zip(names, self._held, strict=True)}
        self.folder.mkdir(parents=True, exist_ok=True)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
        guest = {
            "name": "g", "credentials": [{"accessKey": GUEST_KEY, "secretKey": GUEST_SECRET}],
            "actions": ["Read:elsewhere", "List:elsewhere"],
        }  # fmt: skip
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity, guest]}))
        ports = [
            f"-{name.replace('.grpc', '')}.port{'.grpc' if 'grpc' in name else ''}={port}"
            for name, port in self.ports.items()
        ]
        binary = weed_binary()
        assert binary is not None
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
            [binary, "-logtostderr", "server", f"-dir={self.folder}", "-s3", f"-s3.config={config}", "-ip=127.0.0.1",
             "-ip.bind=127.0.0.1", "-volume.max=2000", "-master.volumeSizeLimitMB=512", "-s3.port.iceberg=0", "-s3.port.lance=0",
             "-master.telemetry=false", f"-filer.localSocket={self.folder}/filer.sock", *ports],
            stdout=subprocess.DEVNULL, stderr=log, cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.kill()
                raise TimeoutError(f"no S3 after {timeout_s} s:\n{(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def _remove_sockets(self) -> None:
        """SeaweedFS leaves them behind when it is killed, and another user's server then cannot take the same port."""
        for port in self.ports.values():
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL, as a power cut."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
            self.process = None
        self._remove_sockets()

    def _answers(self) -> bool:
        """Whether a bucket can be written to: the volume server registers a little later than S3 answers."""
        from allranks.checkpoint.stores import StoreSpec
        from allranks.checkpoint.stores.object_store import ObjectBlobs

        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.ports["s3"]), 1).close()
            blobs = ObjectBlobs(
                StoreSpec("s3://ready", {**self.options(), "timeout_s": "3", "max_retries": "0"})
            )
            blobs.put("probe", [memoryview(b"x")], 1)
            return True
        return False

    def options(self, endpoint: str = "") -> dict[str, str]:
        """What `s3_options` needs to reach the server, or a proxy before it."""
        return {
            "endpoint": endpoint or self.endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1",
        }  # fmt: skip


class Proxy:
    """A TCP proxy in threads. `judge(request_line)` is asked about every request: None lets it pass, an HTTP
    status or whole answer (bytes) is sent in the server's place, "cut" closes the connection, "late" closes it when the server has answered, and
    "stall" lets it wait for ever. `delay_s` slows every block down. Whatever the
    protocol, a block with `cut_on` in it closes the connection."""

    def __init__(
        self,
        target: int,
        judge: Callable[[str], int | str | bytes | None] = lambda line: None,
        cut_on: bytes = b"",
    ) -> None:
        self.target = target
        self.cut_on = cut_on
        self.judge = judge
        self.delay_s = 0.0
        self.judged: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.endpoint = f"http://{self.address}"
        self._spawn(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in list(self._sockets):
            sock.close()

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.add(client)
            self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """One client connection; each request is judged by its first line, then streamed."""
        with contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self.target))
            self._sockets.add(server)
            late = threading.Event()
            self._spawn(self._pump, server, client, late)
            fresh = True
            while data := client.recv(1 << 18):
                if self.cut_on and self.cut_on in data:
                    self.judged.append("cut")
                    break
                line = data.split(b"\r\n", 1)[0].decode(errors="replace")
                is_request = line.endswith(" HTTP/1.1") and line.split(" ")[0].isupper()
                if fresh or is_request:
                    verdict = self.judge(line) if is_request else None
                    if verdict is not None:
                        self.judged.append(
                            f"{verdict!r} {line}" if isinstance(verdict, bytes) else f"{verdict} {line}"
                        )
                    if verdict == "stall":
                        continue
                    if verdict == "late":
                        late.set()
                    elif verdict is not None:
                        if isinstance(verdict, int):
                            body = b"<Error><Code>Injected</Code></Error>"
                            client.sendall(
                                b"HTTP/1.1 %d Injected\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                                % (verdict, len(body))
                                + body
                            )
                        elif isinstance(verdict, bytes):
                            client.sendall(verdict)
                        break
                fresh = False
                if self.delay_s:
                    time.sleep(self.delay_s)
                server.sendall(data)
        for sock in (client, *([server] if "server" in locals() else [])):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pump(self, server: socket.socket, client: socket.socket, late: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while (data := server.recv(1 << 18)) and not late.is_set():
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def http_answer(status: str, body: str, headers: str = "") -> bytes:
    """What a `judge` may have sent in the server's place."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n"
    return (head + body).encode()


#: A bucket's list without entries, whatever is in it.
EMPTY_LIST = http_answer(
    "200 OK",
    "<ListBucketResult><Name>b</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>",
)
_SIGN_IN = "<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in.</body></html>"
_OBJECT = 'ETag: "page"\r\nLast-Modified: Mon, 16 Nov 2026 06:00:00 GMT\r\nContent-Type: text/html\r\n'
#: What proxies answer who want a password: without and with the headers that an object has.
PAGES = [http_answer("200 OK", _SIGN_IN), http_answer("200 OK", _SIGN_IN, _OBJECT)]
