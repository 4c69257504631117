"""How long training stands still: seconds from a fault to the survivor's next committed step, and the like.

    python benchmarks/recovery.py [--quick] [--json] [--only allranks|torchft]

allranks and torchft 0.2.0 (in its own virtual environment, its crashing DDP hook repaired) train the same model
on the same machine, two replicas over gloo, both at their default settings. Each number is the median of its
rounds. Faults: kill -9, good-bye, SIGSTOP, a hanging main thread (evicted through the lighthouse), a killed
lighthouse. Also: healing a 100 MB model, the cost of a step, crashes of survivors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from _lighthouse_torchft import find_server

HERE = Path(__file__).parent
TINY = {"width": 64, "layers": 2, "steps": 10**9, "compute_s": 0.005}
# 100.8 MB of state, a twelfth of it trained: the step itself is short, so that a pause shows.
HEAVY = {"width": 1024, "layers": 24, "frozen": 22, "steps": 10**9, "rows": 2}
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
    zygote: subprocess.Popen[str] | None = None
    count: int = 0
    running: list[Replica] = field(default_factory=list)

    def open(self) -> None:
        env = {**os.environ, "RUST_LOG": "off", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        self.zygote = subprocess.Popen(
            [self.python, str(HERE / "_recovery_worker.py"), self.name], stdin=subprocess.PIPE,
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

    def __init__(self, library: Library) -> None:
        self.library = library
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        scheme = "http://" if self.library.name == "torchft" else ""
        return f"{scheme}127.0.0.1:{self.port}"

    def start(self) -> None:
        bind = f"127.0.0.1:{self.port}"
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
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the lighthouse of {self.library.name} does not listen")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


# ---- what is measured -------------------------------------------------------------------------------------


def kill(library: Library, rounds: int) -> tuple[list[float], int]:
    """kill -9 at a random moment: seconds until the survivor's next commit, and how many survivors crashed."""
    times, crashes = [], 0
    for _ in range(rounds):
        try:
            with pair(library, TINY) as (survivor, victim, _lighthouse):
                time.sleep(random.uniform(0, 0.05))
                at = time.monotonic()
                os.kill(victim.pid, signal.SIGKILL)
                times.append(survivor.wait("commit", after=at, participants=1).at - at)
        except RuntimeError as error:
            say(f"  {error}")
            crashes += 1
    return times, crashes


def leave(library: Library, rounds: int) -> tuple[list[float], int]:
    """A good-bye between two steps: seconds until the survivor's next commit; steps that it had to retry."""
    times, retries = [], 0
    for _ in range(rounds):
        with pair(library, TINY) as (survivor, victim, _lighthouse):
            os.kill(victim.pid, signal.SIGUSR1)
            at = victim.wait("leave").at
            times.append(survivor.wait("commit", after=at, participants=1).at - at)
            retries += sum(e.kind == "retry" and e.at > at for e in survivor.events())
    return times, retries


def freeze(library: Library) -> float:
    with pair(library, TINY) as (survivor, victim, _lighthouse):
        at = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP)
        return survivor.wait("commit", after=at, participants=1).at - at


def hang(library: Library) -> float:
    """The victim's main thread hangs inside a step; an operator (or the closed loop) evicts it."""
    from allranks.lighthouse.client import Client, ClientOptions

    with pair(library, TINY) as (survivor, victim, lighthouse):
        os.kill(victim.pid, signal.SIGUSR2)
        victim.wait("hang")
        with Client(ClientOptions(addresses=(lighthouse.address,), role="observer")) as client:
            at = time.monotonic()
            client.evict("b", "no progress")
            return survivor.wait("commit", after=at, participants=1).at - at


def lighthouse_away(library: Library, for_s: float) -> tuple[float, int]:
    """The lighthouse is killed and back after some seconds: longest pause between commits, steps retried."""
    with pair(library, TINY) as (survivor, _other, lighthouse):
        at = time.monotonic()
        lighthouse.kill()
        time.sleep(for_s)
        lighthouse.start()
        back = time.monotonic()
        survivor.wait("commit", after=back, count=20)
        return longest_gap(survivor, at, time.monotonic()), sum(
            e.kind == "retry" and e.at > at for e in survivor.events()
        )


def heal(library: Library, rounds: int) -> dict[str, float]:
    """A replica of a 100 MB model dies and comes back: ready -> healed -> first common step; the other's pause."""
    healed, joined, stall, normal = [], [], [], []
    for _ in range(rounds):
        with pair(library, HEAVY, warm=5) as (survivor, victim, lighthouse):
            usual = [e.at for e in survivor.events() if e.kind == "commit"]
            normal.append(statistics.median(b - a for a, b in itertools.pairwise(usual)))
            at = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            survivor.wait("commit", after=at, participants=1, count=3)
            back = library.start("b", lighthouse.address, **HEAVY)
            ready = back.wait("ready").at
            healed.append(back.wait("healed").at - ready)
            full = survivor.wait("commit", after=ready, participants=2, count=3)
            joined.append(back.wait("commit", after=ready, participants=2).at - ready)
            stall.append(longest_gap(survivor, ready, full.at))
    return {
        "healed_s": statistics.median(healed),
        "first_common_step_s": statistics.median(joined),
        "longest_stall_s": statistics.median(stall),
        "stall_beyond_a_step_s": statistics.median(stall) - statistics.median(normal),
        "normal_step_s": statistics.median(normal),
    }


def longest_gap(replica: Replica, after: float, until: float) -> float:
    times = [e.at for e in replica.events() if e.kind == "commit" and after - 1.0 < e.at <= until]
    return max((b - a for a, b in itertools.pairwise(times) if b > after), default=0.0)


def step_cost(libraries: list[Library], steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of a tiny model, with nothing else to do; rounds of all taken in turn.

    The fastest tenth of the steps: what a step costs, not what else the machine does meanwhile.
    """
    found: dict[str, list[float]] = {library.name: [] for library in libraries}
    tiny = {"width": 64, "layers": 2, "steps": steps}
    for _ in range(rounds):
        for library in libraries:
            if library.name == "plain":
                store = library.folder / f"store{library.count}"
                both = [library.start(str(r), rank=r, store=str(store), **tiny) for r in (0, 1)]
                both[0].wait("commit", count=steps)
                events = both[0].events()
                library.end()
            else:
                with pair(library, {**tiny, "steps": 10**9}) as (first, _second, _lighthouse):
                    first.wait("commit", participants=2, count=steps)
                    events = [e for e in first.events() if e.participants == 2]
            times = [e.at for e in events if e.kind == "commit"][steps // 10 :]
            gaps = sorted(b - a for a, b in itertools.pairwise(times))
            found[library.name].append(gaps[len(gaps) // 10] * 1e3)
    return {name: min(values) for name, values in found.items()}


def bandwidth() -> dict[str, float]:
    """Healing between two threads' sockets against plain socket copies and a memory copy, GB/s."""
    code = (HERE / "_recovery_bandwidth.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


# ---- the run ----------------------------------------------------------------------------------------------


def measure(library: Library, quick: bool, numbers: dict[str, float]) -> None:
    """All numbers of one library, under `NAME_...`."""
    name, ours = library.name, library.name == "allranks"
    rounds = (3 if ours else 1) if quick else (50 if ours else 5)

    def note(what: str, value: float) -> None:
        numbers[f"{name}_{what}"] = round(value, 4)
        say(f"  {name} {what}: {value:.4f}")

    times, crashes = kill(library, rounds)
    if times:
        note("kill_s", statistics.median(times))
        note("kill_worst_s", max(times))
    note("kill_survivor_crashes", crashes)
    note("kill_rounds", rounds)
    if ours or not quick:
        times, retries = leave(library, 1 if quick else 5)
        note("leave_s", statistics.median(times))
        note("leave_retried_steps", retries)
    for what, value in heal(library, 1 if quick else 5).items():
        note(f"heal_{what}", value)
    if ours or not quick:
        note("freeze_s", freeze(library))
    if ours:
        note("hang_evicted_s", hang(library))
        gap, retries = lighthouse_away(library, 1.0 if quick else 3.0)
        note("lighthouse_away_gap_s", gap)
        note("lighthouse_away_retried_steps", retries)


def ratios(numbers: dict[str, float]) -> dict[str, float]:
    found = {}
    for what in (
        "kill_s",
        "leave_s",
        "freeze_s",
        "heal_healed_s",
        "heal_longest_stall_s",
        "heal_stall_beyond_a_step_s",
    ):
        ours, theirs = numbers.get(f"allranks_{what}"), numbers.get(f"torchft_{what}")
        if ours is not None and theirs:
            found[f"{what.removesuffix('_s')}_vs_torchft"] = round(ours / theirs, 4)
    plain = numbers.get("step_plain_ms")
    for name in ("allranks", "torchft"):
        if plain and f"step_{name}_ms" in numbers:
            numbers[f"step_overhead_{name}_ms"] = round(numbers[f"step_{name}_ms"] - plain, 3)
    ours, theirs = numbers.get("step_overhead_allranks_ms"), numbers.get("step_overhead_torchft_ms")
    if ours is not None and theirs is not None and theirs > 0:
        found["step_overhead_vs_torchft"] = round(max(ours, 0.0) / theirs, 3)
    if "heal_gb_per_s" in numbers:
        found["heal_bandwidth_vs_loopback"] = round(
            numbers["heal_gb_per_s"] / numbers["loopback_gb_per_s"], 3
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--only", choices=("allranks", "torchft"), help="measure one side")
    args = parser.parse_args()
    numbers: dict[str, float] = {}
    os.environ["ALLRANKS_TOKEN"] = secrets.token_hex(16)  # for the lighthouse and the workers of this run
    with tempfile.TemporaryDirectory(prefix="allranks-recovery-") as folder:
        libraries = [Library("allranks", sys.executable, Path(folder))]
        script = find_server() if args.only != "allranks" else None
        if script is not None:
            libraries.append(Library("torchft", str(script.with_name("python")), Path(folder)))
        elif args.only != "allranks":
            say("torchft could not be installed here: left out")
        if args.only:
            libraries = [library for library in libraries if library.name == args.only]
        plain = Library("plain", sys.executable, Path(folder))
        try:
            for library in [*libraries, plain]:
                library.open()
            for library in [*libraries, plain]:
                library.wait_ready()
            for library in libraries:
                say(f"{library.name}:")
                measure(library, args.quick, numbers)
            costs = step_cost([plain, *libraries], 500 if args.quick else 1000, 1 if args.quick else 4)
            numbers |= {f"step_{name}_ms": round(value, 3) for name, value in costs.items()}
            if args.only != "torchft":
                numbers |= bandwidth()
        finally:
            for library in [*libraries, plain]:
                library.close()
    found = ratios(numbers)
    for what, value in sorted({**numbers, **found}.items()):
        say(f"{what:40} {value}")
    if args.json:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        print(json.dumps({"name": "recovery", "ratios": found, "numbers": numbers, "machine": machine}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
