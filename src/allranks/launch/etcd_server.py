"""Starts, checks and stops an etcd on this machine: Debian's package or any `etcd` on PATH, without a container.

Its state is a folder: `etcd.json` (pid, ports), `etcd.log`, `data/`. The server outlives the command that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks.blackbox.header import is_alive, start_ticks
from allranks.channel.frames import HeldPort
from allranks.errors import EtcdError, InputError
from allranks.etcd import Etcd
from allranks.launch.torchrun_patches import port_state

_children: dict[int, subprocess.Popen[bytes]] = {}  # servers started by this process, which `stop` reaps


@dataclass(frozen=True)
class EtcdServer:
    """A server started on this machine."""

    pid: int
    client: str  # http://host:port
    folder: str
    start_ticks: int

    def running(self) -> bool:
        return self.start_ticks > 0 and is_alive(self.pid, self.start_ticks)


def default_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "allranks" / "etcd"


def start(folder: Path, *, bind: str = "127.0.0.1", port: int = 2379, wait_s: float = 20.0) -> EtcdServer:
    """Starts etcd and waits until it answers; returns a running etcd of this folder as it is."""
    known = read(folder)
    if known is not None and known.running():
        return known
    binary = shutil.which("etcd")
    if binary is None:
        raise InputError("etcd is not installed", hint="apt-get install etcd-server (or put `etcd` on PATH)")
    if port and port_state(f"{bind}:{port}") != "free":
        raise InputError(
            f"port {port} on {bind} cannot be used",
            hint=f"Find the process that uses it (ss -ltnp 'sport = :{port}'), or choose another with --port (0 takes a free one).",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = HeldPort(bind), HeldPort(bind)  # until this function returns
    client, peer = f"http://{bind}:{port or held[0].number}", f"http://{bind}:{held[1].number}"
    command = [
        binary, "--name", "allranks", "--data-dir", str(folder / "data"),
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"allranks={peer}", "--auto-compaction-retention", "1", *_v2_flags(binary),
    ]  # fmt: skip
    with open(folder / "etcd.log", "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.environ.get("ETCD_UNSUPPORTED_ARCH", "arm64")},
        )  # fmt: skip
    _children[process.pid] = process
    server = EtcdServer(process.pid, client, str(folder), start_ticks(process.pid))
    (folder / "etcd.json").write_text(json.dumps(asdict(server)))
    _wait_until_healthy(server, process, wait_s)
    return server


def read(folder: Path) -> EtcdServer | None:
    """The last server started in the folder, running or not."""
    try:
        return EtcdServer(**json.loads((folder / "etcd.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def stop(folder: Path, *, wait_s: float = 10.0) -> bool:
    """Stops the folder's server with SIGTERM, then SIGKILL; False when none was running."""
    server = read(folder)
    if server is None or not server.running():
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(server.pid, number)
        deadline = time.monotonic() + wait_s
        while server.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not server.running():
            break
    if child := _children.pop(server.pid, None):
        child.wait(wait_s)
    (folder / "etcd.json").unlink(missing_ok=True)
    return True


def _wait_until_healthy(server: EtcdServer, process: subprocess.Popen[bytes], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    etcd, log = Etcd((server.client,), timeout_s=2.0), Path(server.folder) / "etcd.log"
    while True:
        try:
            etcd.status()
            return
        except EtcdError as error:
            problem = ""
            if process.poll() is not None:
                tail = log.read_text(errors="replace").splitlines()[-3:]
                problem = f"etcd ended with code {process.returncode}: {' | '.join(tail)}"
            elif time.monotonic() > deadline:
                problem = f"etcd (pid {server.pid}) did not answer at {server.client} in {wait_s:g} s"
            if problem:
                raise EtcdError(problem, hint=f"See {log}") from error
            time.sleep(0.05)
        finally:
            etcd.close()


def _v2_flags(binary: str) -> list[str]:
    """The flag that enables v2, which torchrun's own etcd backends (etcd-v2, etcd) need; etcd dropped it in 3.6."""
    done = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False, timeout=20)
    return ["--enable-v2"] if "--enable-v2 " in done.stdout + done.stderr else []
