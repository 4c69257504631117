"""Real trainings under faults for as long as you like: `make soak`, or

    python -m tests.soak.run [--length SECONDS] [--seed NUMBER] [--faults COUNT] [--keep]

Prints one line per fault, what is wrong as soon as it is seen, a table, and the command that repeats the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.soak import sandbox
from tests.soak.checks import JobChecks, ReplicaChecks, Row
from tests.soak.faults import DESTRUCTIVE, JUMP_S, REPORTED, STREAMS, Planned, inflict, plan
from tests.soak.table import Result
from tests.soak.world import REPLICAS_EACH, World

from allranks.incidents.folder import read_incidents

RECOVER_S = 180.0  # how long a training may stall after a fault
REPORT_S = 150.0
MAX_DEFERRED = 8


class Soak:
    """One run: two streams of faults side by side, each followed by proof that its training continues."""

    def __init__(self, world: World, only: Collection[str] = ()) -> None:
        self.world = world
        self.only = only
        self.replicas, self.job = ReplicaChecks(), JobChecks()
        self.result = Result()
        self.expected: list[tuple[Planned, str, float]] = []  # fault, replica or rank, when
        self.wrong: list[str] = []
        self._read: dict[Path, int] = {}
        self._looking = threading.Lock()

    def run(self, seed: int, length_s: float, count: int) -> None:
        """Until the time is over, a stream has done `count` faults, or something is wrong."""
        end = time.monotonic() + 240.0
        for stream in STREAMS:
            self.wait_for_progress(stream, "the start", end - time.monotonic())
        end = time.monotonic() + length_s
        threads = [threading.Thread(target=self._stream, args=(s, seed, end, count)) for s in STREAMS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _stream(self, stream: str, seed: int, end: float, count: int) -> None:
        planned, deferred = plan(seed, stream, self.only), deque[Planned]()
        for _ in range(count):
            if time.monotonic() > end or self.wrong:
                return
            fault = self._next(planned, deferred)
            if fault is None:
                return
            try:
                self.one(stream, fault)
            except Exception as error:  # of this thread: what it could not do must not pass for done
                self.wrong.append(f"{fault.fault} of {fault.kind} could not be done: {error!r}")

    def _next(self, planned: Iterator[Planned], deferred: deque[Planned]) -> Planned | None:
        """The next fault of the plan; those that take replicas away wait until all are there."""
        for fault in planned:
            self.look()
            if deferred and self.everybody():
                deferred.append(fault)
                return deferred.popleft()
            if fault.key not in DESTRUCTIVE or self.everybody():
                return fault
            deferred.append(fault)
            deadline = time.monotonic() + RECOVER_S
            while len(deferred) > MAX_DEFERRED and not self.everybody() and not self.wrong:
                time.sleep(0.2)
                self.look()
                if time.monotonic() > deadline:
                    self.wrong.append(f"only {self.replicas.members} replicas train {RECOVER_S:.0f} s later")
        return None  # nothing of this stream is wanted

    def everybody(self) -> bool:
        """Whether all replicas took part in the newest step."""
        return self.replicas.members == 2 * REPLICAS_EACH

    def one(self, stream: str, planned: Planned) -> None:
        """One fault."""
        at = time.time()
        who = self.world.ranks(stream)
        pid = inflict(self.world, planned)
        if pid is None:
            self.result.absent[planned.key] += 1
            time.sleep(0.5)
            return
        if planned.key in REPORTED:
            self.expected.append((planned, who.get(pid) or self.world.ranks(stream)[pid], at))
        what = f"fault {planned.number} ({planned.fault} of {planned.kind})"
        took = self.wait_for_progress(stream, what, RECOVER_S)
        self.result.add(planned.key, took)
        print(
            f"{time.strftime('%H:%M:%S')} {planned.number:4} {planned.kind:<16} {planned.fault:<10} "
            f"{planned.seconds:4.1f} s, continued after {took:5.1f} s",
            flush=True,
        )

    def wait_for_progress(self, stream: str, after: str, limit_s: float) -> float:
        """Until the training made three steps that nobody had made before."""
        began = time.monotonic()
        checks = self.replicas if stream == "replicas" else self.job
        self.look()
        target = max(checks.hashes, default=0) + 3
        while (step := max(checks.hashes, default=0)) < target and not self.wrong:
            time.sleep(0.1)
            self.look()
            if time.monotonic() - began > limit_s:
                self.wrong.append(f"{stream} stalled for {limit_s:.0f} s at step {step} after {after}")
        return time.monotonic() - began

    def look(self) -> None:
        """Takes what the trainings wrote since the last look."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        for path in sorted(self.world.folder.glob("*-*.jsonl")):
            rows = list(self._new_rows(path))
            (self.replicas if path.name.startswith("replica") else self.job).take(rows)
        for checks in (self.replicas, self.job):
            self.wrong += checks.wrong
            checks.wrong.clear()
        for name, agent in self.world.agents.items():
            if agent.poll() not in (None, -signal.SIGKILL):
                self.wrong.append(f"agent {name} ended by itself with exit code {agent.returncode}")

    def _new_rows(self, path: Path) -> Iterator[Row]:
        start = self._read.get(path, 0)
        if path.stat().st_size == start:
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data.rpartition(b"\n")[0]
        self._read[path] = start + len(whole) + bool(whole)
        for line in whole.splitlines():
            if line.strip():
                yield json.loads(line)

    def checks(self) -> tuple[tuple[str, ReplicaChecks | JobChecks], ...]:
        return ("replicas", self.replicas), ("job", self.job)

    def finish(self) -> None:
        """Both end well, everything was reported, nothing is left."""
        self.wrong += self.world.stop()
        for path in sorted(self.world.folder.glob("*-*.jsonl")):
            (self.replicas if path.name.startswith("replica") else self.job).take(self._new_rows(path))
        for checks in (self.replicas, self.job):
            checks.finish()
            self.wrong += checks.wrong
        self.wrong += self.unreported()
        deadline = time.monotonic() + 20
        while (left := self.world.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.wrong += [f"left behind: {each}" for each in left]

    def unreported(self) -> list[str]:
        """Faults that no incident names with the right rank."""
        missing = []
        for planned, who, at in self.expected:
            incidents = read_incidents(self.world.folder / "incidents" / planned.kind.partition("-")[2])
            number = who.rpartition("-")[2]
            near = [i for i in incidents if _near(float(i["opened"]) - at)]
            named = [i for i in near if number in {str(r) for r in (i.get("verdict") or {}).get("ranks", ())}]
            if not named:
                found = [(i["kind"], (i.get("verdict") or {}).get("ranks")) for i in near]
                missing.append(f"fault {planned.number} ({planned.fault} of {who}) was not reported: {found}")
        return missing


def _near(seconds: float) -> bool:
    """Whether an incident was opened soon after the fault, perhaps by a process whose clock had jumped."""
    return any(-5 <= seconds - jump <= REPORT_S for jump in (0, JUMP_S, -JUMP_S))


@contextmanager
def working_folder(keep: bool) -> Iterator[Path]:
    """A folder for one run; in the sandbox its `store` is a small disk of its own."""
    folder = Path(tempfile.mkdtemp(prefix="allranks-soak-"))
    (folder / "run" / "store").mkdir(parents=True)
    if sandbox.inside():
        sandbox.prepare(folder / "run" / "store")
    try:
        yield folder / "run"
    finally:
        if sandbox.inside():
            subprocess.run(["umount", "-l", str(folder / "run" / "store")], check=False)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Exit 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=float, default=3600.0, help="seconds (3600)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) % 100_000, help="of the plan (by the clock)"
    )
    parser.add_argument("--faults", type=int, default=1 << 30, help="at most so many in each stream")
    kinds = [kind for stream in STREAMS.values() for kind in stream]
    parser.add_argument("--only", action="append", default=[], choices=kinds, help="(repeatable)")
    parser.add_argument("--result", type=Path, help="write the counts there, for tests.soak.table")
    parser.add_argument(
        "--no-namespaces", action="store_true", help="as an ordinary user runs it: without what needs root"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder, also when all held")
    args = parser.parse_args()
    if os.getuid() == 0 and not args.no_namespaces and not sandbox.inside():
        return sandbox.enter(sys.argv[1:])
    print(f"seed {args.seed}", flush=True)
    with working_folder(args.keep) as folder:
        world = World(folder, f"soak-{args.seed}-{os.getpid()}")
        soak = Soak(world, args.only)
        began = time.monotonic()
        try:
            world.start()
            soak.run(args.seed, args.length, args.faults)
            soak.finish()
        finally:
            world.close()
        if sandbox.inside():
            soak.wrong += [f"left behind: {each}" for each in sandbox.left_behind()]
        result = soak.result
        result.seeds, result.seconds = [args.seed], time.monotonic() - began
        result.steps = {name: max(c.hashes, default=0) for name, c in soak.checks()}
        result.restores, result.reported = soak.job.restores, len(soak.expected)
        result.changed = vars(soak.replicas.changed)
        result.wrong = list(dict.fromkeys(soak.wrong))
        print(result.table())
        if args.result:
            result.write(args.result)
        if result.wrong:
            _explain(result, folder, args.seed)
    return 1 if soak.wrong else 0


def _explain(result: Result, folder: Path, seed: int) -> None:
    """What was wrong, how to repeat it, and a copy of the logs."""
    for sentence in result.wrong:
        print(f"WRONG: {sentence}")
    kept = Path(tempfile.gettempdir()) / f"allranks-soak-failed-{seed}"
    shutil.rmtree(kept, ignore_errors=True)
    with suppress(OSError, shutil.Error):
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("s3", "store", "etcd-0", "*.sock"))
    done = max(sum(n for (kind, _), n in result.tried() if kind in kinds) for kinds in STREAMS.values())
    print(f"logs: {kept}\nagain: python -m tests.soak.run --seed {seed} --faults {done + 1} --keep")


if __name__ == "__main__":
    sys.exit(main())
