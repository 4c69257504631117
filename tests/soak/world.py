"""What the soak runs: etcd, two lighthouses, S3, a job of replicas on two agents and a whole job; all real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.s3server import S3Server, weed_binary
from tests.lighthouse.etcd_cluster import EtcdCluster
from tests.soak import sandbox

from allranks.checkpoint.stores import StoreSpec
from allranks.checkpoint.stores.object_store import ObjectBlobs

ROOT = Path(__file__).parents[2]
REPLICAS_EACH = 2
NOTICE_S = "4"
#: What runs in processes of their own beside ranks, by a piece of their command line.
_COMMANDS = {"proxy": "client.liveness_proxy", "helper": "save.helper", "spare": "launch.spares"}


@dataclass
class World:
    """`start` everything, find processes by kind, `stop` in good order."""

    folder: Path
    name: str  # marks every process of this run in its environment
    etcd: EtcdCluster | None = None
    s3: S3Server | None = None
    lighthouses: list[subprocess.Popen[str]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    clock: Path | None = None  # the library that moves wall clocks
    # file of a rank -> its process and name
    _names: dict[Path, tuple[int, str]] = field(default_factory=dict)

    # ---- start ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """In the order in which they need each other."""
        for each in ("store", "tmp", "incidents/replicas", "incidents/job"):
            (self.folder / each).mkdir(parents=True, exist_ok=True)
        self.clock = build_clock(self.folder)
        for job in CLOCKS:
            self.set_clock(job, 0)
        self.etcd = EtcdCluster(self.folder, 1, self.folder)  # faults fill /dev/shm
        if weed_binary() is not None:
            self.s3 = S3Server(self.folder / "s3")
            self.s3.start()
            ObjectBlobs(StoreSpec("s3://soak", self.s3.options())).put("made", [memoryview(b"x")], 1)
        for place in (0, 1):
            self.start_lighthouse(place)
        for agent in ("replicas-0", "replicas-1", "job"):
            self.start_agent(agent)

    def start_lighthouse(self, place: int) -> None:
        """The first or the second; again at its old port."""
        assert self.etcd is not None
        port = self.ports[place] if place < len(self.ports) else 0
        host = sandbox.HERE if sandbox.inside() else "127.0.0.1"
        words = ["--bind", f"{host}:{port}", "--etcd", self.etcd.endpoints, "--lease-s", "2", "--json"]
        log = (self.folder / f"lighthouse-{place}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks", "lighthouse", *words],
            stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment("lighthouse"), cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        if place < len(self.lighthouses):
            self.lighthouses[place] = process
        else:
            self.lighthouses.append(process)
            self.ports.append(int(address.rpartition(":")[2]))

    def start_agent(self, agent: str) -> None:
        """One of the two that run replicas, or the one of the whole job."""
        folder = self.folder / "incidents" / agent.partition("-")[0]
        common = ["--incidents", str(folder), "--quiet", "--notice-s", NOTICE_S]
        if agent == "job":
            words = ["--job", f"{self.name}-job", "--standalone", "--nproc-per-node", "2", "--max-restarts", "10000",
                     "--recovery", "on", "-m", "tests.soak.train_job", str(self.folder), str(self.folder / "store")]  # fmt: skip
        else:
            first = int(agent[-1]) * REPLICAS_EACH
            host = sandbox.HERE if sandbox.inside() else "127.0.0.1"
            where = ",".join(f"{host}:{port}" for port in self.ports)
            words = ["--job", f"{self.name}-replicas", "--replicas", str(REPLICAS_EACH), "--first-replica", str(first),
                     "--total-replicas", str(2 * REPLICAS_EACH), "--lighthouse", where,
                     "-m", "tests.soak.train_replicas", str(self.folder)]  # fmt: skip
        log = (self.folder / f"{agent}.log").open("ab")
        second = agent == "replicas-1" and sandbox.inside()
        there = ["nsenter", f"--net=/run/netns/{sandbox.NODE}"] if second else []
        self.agents[agent] = subprocess.Popen(
            [*there, sys.executable, "-m", "allranks", "run", *common, *words],
            stdout=log, stderr=log, env=self.environment(agent.partition("-")[0]), cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def environment(self, job: str) -> dict[str, str]:
        """Of every process; each job has a clock of its own."""
        s3 = {"SOAK_S3": json.dumps(self.s3.options())} if self.s3 is not None else {}
        own = {
            "ALLRANKS_SOAK": f"{self.name}-{job}",
            "ALLRANKS_TOKEN": f"token-of-{self.name}",
            "TMPDIR": str(self.folder / "tmp"),
        }
        clock = {"LD_PRELOAD": str(self.clock), "SOAK_CLOCK": str(self.folder / f"clock-{job}")}
        return {
            **os.environ,
            **own,
            **s3,
            **(clock if self.clock else {}),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }

    def set_clock(self, job: str, seconds: int) -> None:
        """Moves the wall clock of one job's processes, or of the lighthouses, at once."""
        path = self.folder / f"clock-{job}"
        with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    # ---- look -------------------------------------------------------------------------------------------

    def pids(self, kind: str) -> list[int]:
        """Living processes of a kind; the word after a dash says of which job."""
        what, _, job = kind.partition("-")
        if what == "lighthouse":
            return [each.pid for each in self.lighthouses if each.poll() is None]
        if what == "agent":
            return [p.pid for name, p in self.agents.items() if name.startswith(job) and p.poll() is None]
        if what == "etcd":
            return [node.pid for node in self.etcd.nodes if node is not None] if self.etcd else []
        if what == "s3":
            return [self.s3.process.pid] if self.s3 and self.s3.process else []
        if what == "rank":
            return [pid for pid in self.ranks(job) if _alive(pid)]
        ranks = {*self.ranks("replicas"), *self.ranks("job")}
        return [
            pid for pid in find(f"{self.name}-{job}") if _COMMANDS[what] in _command(pid) and pid not in ranks
        ]

    def ranks(self, job: str) -> dict[int, str]:
        """Process -> replica or rank, of those that train; a spare that became a rank is one."""
        for path in self.folder.glob("replica-*.jsonl" if job == "replicas" else "job-*.jsonl"):
            if path not in self._names:
                with path.open() as file:
                    line = file.readline()
                if line.endswith("\n"):
                    row = json.loads(line)
                    self._names[path] = (row["pid"], row["replica"])
        start = "replica-" if job == "replicas" else "job-"
        return dict(found for path, found in self._names.items() if path.name.startswith(start))

    def left(self) -> list[str]:
        """What is still there of this run, as sentences."""
        return [
            f"process {pid}: {_command(pid)[:120]}" for pid in find(self.name) if "allranks" in _command(pid)
        ]

    # ---- stop -------------------------------------------------------------------------------------------

    def stop(self, limit_s: float = 120.0) -> list[str]:
        """Both trainings end by themselves; sentences about those that did not."""
        (self.folder / "stop").touch()
        wrong = []
        deadline = time.monotonic() + limit_s
        for name, agent in self.agents.items():
            try:
                code = agent.wait(max(1.0, deadline - time.monotonic()))
                if code:
                    wrong.append(f"agent {name} ended with exit code {code}")
            except subprocess.TimeoutExpired:
                wrong.append(f"agent {name} did not end")
        for lighthouse in self.lighthouses:
            lighthouse.terminate()
            lighthouse.wait(20)
        return wrong

    def close(self) -> None:
        """Ends whatever is left."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGCONT)
            agent.terminate()
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for lighthouse in self.lighthouses:
            lighthouse.kill()
            lighthouse.wait()
        if self.etcd is not None:
            self.etcd.close()
        if self.s3 is not None:
            self.s3.kill()
        send(find(self.name), signal.SIGKILL)


CLOCKS = ("replicas", "job", "lighthouse")


def build_clock(folder: Path) -> Path | None:
    """The library that moves the wall clock of a process; None without a C compiler."""
    compiler, library = shutil.which("cc"), folder / "clock.so"
    if compiler is None:
        return None
    source = Path(__file__).with_name("clock.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def send(pids: Sequence[int], number: int) -> None:
    """A signal to those that still are there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def find(name: str) -> list[int]:
    """Processes whose environment says that they are of this run, or of one job of it."""
    mark = f"ALLRANKS_SOAK={name}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(pid for pid in found if _alive(pid))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
