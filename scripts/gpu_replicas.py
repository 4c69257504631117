"""Replicas of a training script on one GPU (or, with `cpu=True`, over gloo): starts, kills and awaits them.

Used by gpu_manager.py and gpu_shapes.py. A worker prints one line per event: time kind step participants extra.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Several NCCL ranks may share a GPU when each looks like a host of its own (NCCL_HOSTID) and nothing but sockets is used.
SHARED_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

LIGHTHOUSE = """
import sys
from allranks.lighthouse.options import Options
from allranks.lighthouse.server import Lighthouse
lighthouse = Lighthouse(Options(min_replicas=1, heartbeat_timeout_s=2.0, flap_limit=100)).start()
print(lighthouse.address, flush=True)
sys.stdin.read()
lighthouse.close()
"""


def say(kind: str, step: int = 0, participants: int = 0, extra: str = "-") -> None:
    """One event of a worker, in one write; into a file of its own in $EVENTS where a launcher has its output."""
    line = f"{time.monotonic():.6f} {kind} {step} {participants} {extra}\n"
    if folder := os.environ.get("EVENTS"):
        with open(f"{folder}/{os.environ['ALLRANKS_REPLICA']}-{os.getpid()}.log", "a") as file:
            file.write(line)
    else:
        print(line, end="", flush=True)


class LighthouseProcess:
    """A lighthouse without a token, on a free port."""

    def __init__(self, out: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=open(out / "lighthouse.err", "a"),  # noqa: SIM115
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


class Replica:
    """One replica, its processes (one per rank) and the events of its first rank."""

    def __init__(
        self,
        name: str,
        command: list[str],
        lighthouse: str,
        out: Path,
        ranks: int = 1,
        store_port: int = 0,
        env: dict[str, str] | None = None,
    ) -> None:
        self.name, self.path = name, out / f"{name}-{time.monotonic_ns()}.log"
        self.processes = []
        more = env or {}
        for rank in range(ranks):
            env = {
                **os.environ,
                **SHARED_GPU,
                "ALLRANKS_LIGHTHOUSE": lighthouse,
                "ALLRANKS_REPLICA": name,
                **more,
            }
            env["NCCL_HOSTID"] = f"{name}.{rank}"
            env.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            if ranks > 1:
                env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store_port))
            stem = self.path if rank == 0 else self.path.with_suffix(f".{rank}.log")
            with open(stem, "w") as stdout, open(f"{stem}.err", "w") as stderr:
                self.processes.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env))

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.processes[0]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def events(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines() if line.count(" ") == 4]

    def commits(self) -> list[float]:
        return [float(event[0]) for event in self.events() if event[1] == "commit"]

    def wait(self, kind: str, after: float = 0.0, participants: int = 0, limit_s: float = 30.0) -> float:
        """When the event happened; an error if the replica ends first or the time is over."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for at, what, _, count, _ in self.events():
                if what == kind and float(at) > after and (not participants or int(count) == participants):
                    return float(at)
            codes = [process.poll() for process in self.processes]
            if any(code is not None for code in codes):
                raise RuntimeError(f"{self.name} exited {codes}: {self.errors()}")
            time.sleep(0.005)
        raise TimeoutError(f"{self.name}: no {kind} with {participants} in {limit_s} s: {self.errors()}")

    def errors(self) -> str:
        paths = sorted(self.path.parent.glob(f"{self.path.stem}*.err"))
        return "\n".join(path.read_text()[-1500:] for path in paths)

    def stacks(self) -> str:
        """Where its ranks stand, from py-spy if it is here."""
        spy = shutil.which("py-spy") or str(
            Path(__file__).parent.parent / "carry" / "site" / "bin" / "py-spy"
        )
        found = []
        for process in self.processes:
            try:
                words = [spy, "dump", "--native", "--pid", str(process.pid)]
                found.append(
                    subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                found.append(f"no stacks of {process.pid}: {error}")
        return "\n".join(found)
