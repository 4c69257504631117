"""Real trainings under faults for as long as you like: `make soak`, or

    python -m tests.soak.run [--length SECONDS] [--seed NUMBER] [--faults COUNT] [--keep]

Prints one line per fault, what is wrong as soon as it is seen, a table, and the command that repeats the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.soak.checks import JobChecks, ReplicaChecks, Row
from tests.soak.faults import PLAN, REPORTED, Planned, inflict, plan
from tests.soak.world import World

from allranks.incidents.folder import read_incidents

RECOVER_S = 180.0  # how long a training may stand still after a fault
REPORT_S = 150.0


class Soak:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.replicas, self.job = ReplicaChecks(), JobChecks()
        self.done: Counter[tuple[str, str]] = Counter()
        self.absent: Counter[tuple[str, str]] = Counter()
        self.recovered_s: dict[tuple[str, str], float] = {}
        self.expected: list[tuple[Planned, str, float]] = []  # fault, replica or rank, when
        self.wrong: list[str] = []
        self._read: dict[Path, int] = {}

    def run(self, seed: int, length_s: float, count: int) -> None:
        """Faults, one after the other, each followed by proof that both trainings go on."""
        self.wait_for_progress("the start", 240.0)
        end = time.monotonic() + length_s
        for planned in plan(seed):
            if time.monotonic() > end or planned.number > count or self.wrong:
                return
            self.one(planned)

    def one(self, planned: Planned) -> None:
        """One fault."""
        key, at = (planned.kind, planned.fault), time.time()
        who = {**self.world.ranks("replicas"), **self.world.ranks("job")}
        pid = inflict(self.world, planned)
        if pid is None:
            self.absent[key] += 1
            return
        if key in REPORTED:
            self.expected.append((planned, who[pid], at))
        took = self.wait_for_progress(
            f"fault {planned.number} ({planned.fault} of {planned.kind})", RECOVER_S
        )
        self.done[key] += 1
        self.recovered_s[key] = max(took, self.recovered_s.get(key, 0.0))
        print(
            f"{planned.number:4} {planned.kind:<15} {planned.fault:<10} both went on after {took:5.1f} s",
            flush=True,
        )

    def wait_for_progress(self, after: str, limit_s: float) -> float:
        """Until both trainings made three steps that nobody had made before."""
        began = time.monotonic()
        self.look()
        targets = [max(each.hashes, default=0) + 3 for each in (self.replicas, self.job)]
        while [max(each.hashes, default=0) for each in (self.replicas, self.job)] < targets or max(
            self.job.hashes, default=0
        ) < targets[1]:
            time.sleep(0.2)
            self.look()
            if self.wrong:
                break
            if time.monotonic() - began > limit_s:
                steps = [max(each.hashes, default=0) for each in (self.replicas, self.job)]
                self.wrong.append(f"a training stands still for {limit_s:.0f} s after {after}: steps {steps}")
                break
        return time.monotonic() - began

    def look(self) -> None:
        """Takes what the trainings wrote since the last look."""
        for path in sorted(self.world.folder.glob("*-*.jsonl")):
            rows = list(self._new_rows(path))
            (self.replicas if path.name.startswith("replica") else self.job).take(rows)
        for checks in (self.replicas, self.job):
            self.wrong += checks.wrong
            checks.wrong.clear()
        for name, agent in self.world.agents.items():
            if agent.poll() is not None:
                self.wrong.append(f"agent {name} ended by itself with exit code {agent.returncode}")

    def _new_rows(self, path: Path) -> Iterator[Row]:
        start = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data.rpartition(b"\n")[0]
        self._read[path] = start + len(whole) + bool(whole)
        for line in whole.splitlines():
            if line.strip():
                yield json.loads(line)

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
        while (
            left := [each for each in self.world.left() if "allranks" in each]
        ) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.wrong += [f"left behind: {each}" for each in left]

    def unreported(self) -> list[str]:
        """Faults that no incident names with the right rank."""
        missing = []
        for planned, who, at in self.expected:
            incidents = read_incidents(self.world.folder / "incidents" / planned.kind.partition("-")[2])
            number = who.rpartition("-")[2]
            near = [i for i in incidents if at - 5 <= float(i["opened"]) <= at + REPORT_S]
            named = [i for i in near if number in {str(r) for r in (i.get("verdict") or {}).get("ranks", ())}]
            if not named:
                found = [(i["kind"], (i.get("verdict") or {}).get("ranks")) for i in near]
                missing.append(f"fault {planned.number} ({planned.fault} of {who}) was not reported: {found}")
        return missing

    def table(self) -> str:
        """For people and for docs/reliability.md."""
        lines = ["| process | fault | times | slowest recovery |", "|---|---|---:|---:|"]
        for kind, faults in PLAN.items():
            for fault in faults:
                count, took = self.done[kind, fault], self.recovered_s.get((kind, fault))
                lines.append(
                    f"| {kind} | {fault} | {count} | {f'{took:.1f} s' if took is not None else '–'} |"
                )
        steps = [max(each.hashes, default=0) for each in (self.replicas, self.job)]
        lines.append("")
        lines.append(
            f"{sum(self.done.values())} faults; {steps[0]} steps of the replicas and {steps[1]} of the whole job, "
            f"{self.job.restores} restores; {len(self.expected)} faults that had to be reported."
        )
        return "\n".join(lines)


@contextmanager
def working_folder(keep: bool) -> Iterator[Path]:
    """A folder whose `store` is a small disk of its own, if we are root."""
    folder = Path(tempfile.mkdtemp(prefix="allranks-soak-"))
    disk = folder / "run" / "store"
    disk.mkdir(parents=True)
    mounted = (
        os.getuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "soak", str(disk)], check=False
        ).returncode
    )
    try:
        yield folder / "run"
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=False)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Exit 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=float, default=3600.0, help="seconds (3600)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) % 100_000, help="of the plan (by the clock)"
    )
    parser.add_argument("--faults", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--keep", action="store_true", help="keep the folder, also when all held")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with working_folder(args.keep) as folder:
        world = World(folder, f"soak-{args.seed}-{os.getpid()}")
        soak = Soak(world)
        try:
            world.start()
            soak.run(args.seed, args.length, args.faults)
            soak.finish()
        finally:
            world.close()
            print(soak.table())
        for sentence in dict.fromkeys(soak.wrong):
            print(f"WRONG: {sentence}")
        if soak.wrong:
            faults = sum(soak.done.values()) + sum(soak.absent.values()) + 1
            kept = folder.with_name("failed")
            with suppress(OSError):
                shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("s3", "store", "etcd-0"))
            print(f"again: python -m tests.soak.run --seed {args.seed} --faults {faults} --keep")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
