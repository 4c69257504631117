"""Replicas that die at bad moments on one GPU: while they join, two shortly after each other, at random (storm), and one after
the other under `allranks run --replicas 4`, which starts them again (kills).

    gpu_joins.py OUT [--cpu] [--seconds 150] [--count N] [--seed 1] [--only joins|pairs|storm|kills]

A part ends after --seconds, or after --count kills. Each kill is a line in OUT/PART.jsonl as it is made.

The storm kills one of its replicas (--replicas 5) every 3 s on average, in 15 % of cases two at once, whatever they do at that
moment; one that has the state is always left. No gap between commits may be longer than 2 s, no replica may end by itself, and
all must hold equal bits at the end, those of a training alone up to rounding.

Replacements are started ahead and wait, so that a kill costs seconds. Replicas that commit nothing for 2 s say every 2 s in
which phase they are, and are looked at from outside: py-spy for Python, eu-stack (elfutils; ./carry/eu or the PATH) for all
native threads, into OUT/stacks.txt. OUT/gaps.txt has, for each gap above 2 s, what every replica logged in it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpu_manager
from gpu_replicas import SHARED_GPU, LighthouseProcess, Replica, say

CARRY = Path(__file__).parent.parent / "carry"
SURVIVORS = ("r0", "r2")
STANDS_S = 2.0
LOGGED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) r\d+ (.*)")
LIMIT_S = 90.0  # of waiting for a commit; told as the time of a kill after which none came


def worker(name: str, out: Path) -> None:
    """gpu_manager's training; it joins when OUT/go-PID appears."""

    def wait() -> None:
        logging.getLogger("allranks.manager").setLevel(logging.DEBUG)
        threading.Thread(target=tell_phases, daemon=True).start()
        say("warm")
        while not (out / f"go-{os.getpid()}").exists():
            time.sleep(0.005)

    gpu_manager.OUT = out
    gpu_manager.worker(name, wait)


def tell_phases() -> None:
    """Logs what a step that does not end has done so far, and where its groups are in the making."""
    from allranks.manager.manager import Manager

    log = logging.getLogger("allranks.manager")
    managers = [found for found in gc.get_objects() if isinstance(found, Manager)]
    last, since = -1, time.monotonic()
    while managers:
        time.sleep(0.25)
        training = managers[0].training
        if training.step != last:
            last, since = training.step, time.monotonic()
        elif time.monotonic() - since > STANDS_S:
            since = time.monotonic()
            left = sum(thread.name == "allranks-making" for thread in threading.enumerate())
            generation = training.generation.number if training.generation else 0
            log.debug(
                "stands: step %d, %s, group %d, forming %d, wanted %r, making threads %d; %s",
                last, training.phase.value, generation, training.forming, training.wanted, left, training.times.parts(),
            )  # fmt: skip


def worker_under_run(out: Path) -> None:
    """gpu_manager's training as a replica of `allranks run`."""
    name = os.environ["ALLRANKS_REPLICA"]
    os.environ["NCCL_HOSTID"] = name
    gpu_manager.OUT = out
    gpu_manager.worker(name)


class Crew:
    """The replicas of one run, and their replacements."""

    def __init__(self, out: Path, names: tuple[str, ...], doomed: tuple[str, ...]) -> None:
        gpu_manager.forget(out)
        self.out, self._over = out, threading.Event()
        self.lighthouse = LighthouseProcess(out)
        self.replicas = {name: self._start(name) for name in names}
        self.waiting = {
            name: [self._start(name) for _ in range(1 if gpu_manager.CPU else max(2, 6 // len(doomed)))]
            for name in doomed
        }

    def begin(self) -> None:
        """Returns when all train together."""
        for replica in self.replicas.values():
            replica.wait("warm", limit_s=180)
        for replica in self.replicas.values():
            self._go(replica)
        self.wait_for_all(0.0)
        (self.out / "begun").touch()
        threading.Thread(target=self._look_at_who_stands, daemon=True).start()

    def _start(self, name: str) -> Replica:
        more = ["--cpu"] if gpu_manager.CPU else []
        command = [sys.executable, __file__, "worker", name, str(self.out), *more]
        return Replica(name, command, self.lighthouse.address, self.out)

    def _go(self, replica: Replica) -> None:
        (self.out / f"go-{replica.process.pid}").touch()

    def replace(self, name: str) -> Replica:
        """A waiting one joins under the same name."""
        self.waiting[name].append(self._start(name))
        replica = self.waiting[name].pop(0)
        replica.wait("warm", limit_s=180)
        self._go(replica)
        self.replicas[name] = replica
        return replica

    def kill(self, name: str) -> float:
        at = time.monotonic()
        self.replicas.pop(name).process.kill()
        return at

    def next_commits(self, after: float, members: int) -> float:
        """How long the slowest survivor took."""
        return max(self.replicas[name].wait("commit", after, members, LIMIT_S) - after for name in SURVIVORS)

    def wait_for_all(self, after: float) -> None:
        for replica in self.replicas.values():
            replica.wait("commit", after, len(self.replicas), LIMIT_S)

    def _look_at_who_stands(self) -> None:
        seen: dict[str, float] = {}  # when each was looked at
        native = shutil.which("eu-stack") or str(CARRY / "eu" / "eu-stack")
        spy = shutil.which("py-spy") or str(CARRY / "site" / "bin" / "py-spy")
        while not self._over.wait(0.5):
            for name, replica in list(self.replicas.items()):
                last = next(reversed(replica.commits()), None)
                if last is None:  # just replaced
                    continue
                if time.monotonic() - max(last, seen.get(name, 0.0)) < STANDS_S:
                    continue
                seen[name] = time.monotonic()
                pid = str(replica.process.pid)
                for command in ([spy, "dump", "--pid", pid], [native, "-n", "24", "-p", pid]):
                    self._note(name, command)

    def _note(self, name: str, command: list[str]) -> None:
        libraries = {"LD_LIBRARY_PATH": str(CARRY / "eu")} if str(CARRY) in command[0] else {}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, env={**os.environ, **libraries}
            )
            text = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            text = str(error)
        with open(self.out / "stacks.txt", "a") as file:
            file.write(f"==== {name} at {time.monotonic():.3f}: {command[0]}\n{text}\n")

    def close(self) -> None:
        self._over.set()
        for replica in [*self.replicas.values(), *(one for some in self.waiting.values() for one in some)]:
            replica.kill()
        self.lighthouse.close()


def kill_joining(crew: Crew, chance: random.Random) -> float:
    """Mostly while its communicator is connected or its first step runs; then one joins undisturbed."""
    crew.kill("r1")
    joining = crew.replace("r1")
    joining.wait("ready")
    time.sleep(chance.uniform(0.2, 0.55) if chance.random() < 0.8 else 1.2)
    at = crew.kill("r1")
    took = crew.next_commits(at, 2)
    crew.replace("r1").wait("commit", at, 3, LIMIT_S)
    return took


def kill_pair(crew: Crew, chance: random.Random) -> float:
    """The second dies while the others leave the first."""
    crew.kill("r1")
    time.sleep(chance.uniform(0.0, 1.0))
    at = crew.kill("r3")
    took = crew.next_commits(at, 2)
    crew.replace("r1")
    crew.replace("r3")
    crew.wait_for_all(at)
    return took


def note(out: Path, part: str, **row: object) -> None:
    """One line of OUT/PART.jsonl, also on the screen."""
    text = json.dumps(row)
    with open(out / f"{part}.jsonl", "a") as file:
        file.write(text + "\n")
    print(part, text, flush=True)


def gaps_of(commits: list[float]) -> list[float]:
    """Between any two consecutive commits of all replicas; the longest first."""
    found = [round(b - a, 3) for a, b in itertools.pairwise(sorted(commits))]
    return sorted(found, reverse=True)


def explain_gaps(out: Path, began: float, ended: float, above_s: float = 2.0) -> list[str]:
    """One line per gap: when, how long, and the longest phases of the step that ended it. OUT/gaps.txt has all log lines."""
    commits, lines = list[float](), list[tuple[float, str, str]]()
    to_monotonic = time.time() - time.monotonic()
    for path in out.glob("r*.log"):
        events = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 4]
        commits += [float(at) for at, kind, *_ in events if kind == "commit" and began <= float(at) <= ended]
        for line in Path(f"{path}.err").read_text(errors="replace").splitlines():
            if found := LOGGED.match(line):
                at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1e3
                lines.append((at - to_monotonic, path.stem, found[3]))
    told = []
    with open(out / "gaps.txt", "w") as file:
        for a, b in itertools.pairwise(sorted(commits)):
            if b - a <= above_s:
                continue
            inside = [
                one for one in sorted(lines) if a - 0.2 <= one[0] <= b + 0.1 and "of the state" not in one[2]
            ]
            file.write(f"==== gap of {b - a:.2f} s at {a - began:.2f} s\n")
            file.writelines(f"{at - a:8.3f} {name} {text}\n" for at, name, text in inside)
            phases = longest_phases([text for _, _, text in inside if "since the last commit" in text])
            told.append(
                f"{b - a:.2f} s at {a - began:.1f} s: {phases or 'no step that began before it was committed'}"
            )
    return told


def longest_phases(texts: list[str]) -> str:
    """The three longest phases of the steps whose times were logged, longest first."""
    found: dict[str, int] = {}
    for text in texts:
        marks = [mark.rsplit(" ", 1) for mark in text.partition("last commit: ")[2].split(", ")]
        for (before, since), (after, until) in itertools.pairwise(marks):
            name = f"{before} -> {after}"
            found[name] = max(found.get(name, 0), int(until) - int(since))
    longest = sorted(found, key=lambda name: -found[name])[:3]
    return ", ".join(f"{name} {found[name]} ms" for name in longest)


def compare_with_alone(out: Path, part: str) -> dict[str, bool]:
    claim = f"{part}: the weights of a training alone"
    if not (out / "end.pt").exists():
        return {claim: False}
    steps, apart = gpu_manager.movement_beside_alone(out / "end.pt")
    note(out, part, steps=steps, away_from_training_alone=apart)
    return {claim: apart < gpu_manager.ALIKE}


def storm(out: Path, seconds: float, seed: int, size: int) -> tuple[dict[str, bool], list[float]]:
    """Several replicas under random kills: the claims, and the gaps of more than half a second between any two commits."""
    names = tuple(f"r{number}" for number in range(size))
    crew, chance = Crew(out, names, names), random.Random(seed)
    everyone, kills, alone, error = list(crew.replicas.values()), 0, dict[str, str](), ""
    ends: set[tuple[str, ...]] = set()
    began = ended = time.monotonic()
    try:
        crew.begin()
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            time.sleep(chance.expovariate(1 / 3.0))
            doomed = chance.sample(names, 2 if chance.random() < 0.15 else 1)
            if not {name for name, one in crew.replicas.items() if one.commits()} - set(doomed):
                continue  # nobody would have the state
            alone |= {
                n: one.errors()[-1500:] for n, one in crew.replicas.items() if one.process.poll() is not None
            }
            for name in doomed:
                crew.kill(name)
            for name in doomed:
                kills += 1
                everyone.append(crew.replace(name))
            note(
                out,
                "storm",
                at=round(time.monotonic() - began, 2),
                killed=doomed,
                kills=kills,
                ended=sorted(alone),
            )
        ended = time.monotonic()
        crew.wait_for_all(ended)
        ended = time.monotonic()
        (out / "stop").touch()
        for one in crew.replicas.values():
            one.process.wait(60)
        done = [event for one in crew.replicas.values() for event in one.events() if event[1] == "done"]
        ends = {tuple(event[2::2]) for event in done}
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as failure:
        error, ended = str(failure)[-3000:], time.monotonic()
    finally:
        crew.close()
    gaps = gaps_of([at for one in everyone for at in one.commits() if began <= at <= ended])
    note(
        out, "storm", kills=kills, seconds=round(ended - began, 1), commits=len(gaps) + 1, longest_gaps=gaps[:12],
        explained=explain_gaps(out, began, ended), ended_by_themselves=alone, ends=sorted(ends), error=error,
    )  # fmt: skip
    verdicts = {
        "storm: no gap above 2 s": bool(gaps) and gaps[0] <= 2.0,
        "storm: no replica ended by itself": not alone and not error,
        "storm: equal bits": len(ends) == 1,
        **compare_with_alone(out, "storm"),
    }
    return verdicts, [gap for gap in gaps if gap > 0.5]


class Run:
    """`allranks run --replicas 4`; its ranks tell what they do in files."""

    SIZE = 4

    def __init__(self, out: Path) -> None:
        gpu_manager.forget(out)
        self.events = out / "events"
        self.events.mkdir()
        script = [__file__, "worker-under-run", str(out), *(["--cpu"] if gpu_manager.CPU else [])]
        words = [
            "--replicas",
            str(self.SIZE),
            "--max-restarts",
            "1000",
            "--incidents",
            str(out / "incidents"),
            *script,
        ]
        environment = {**os.environ, **SHARED_GPU, "EVENTS": str(self.events)}
        with open(out / "run.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "allranks", "run", *words],
                stdout=log,
                stderr=log,
                env=environment,
                cwd=out,
            )

    def rows(self) -> list[tuple[float, str, int, int, str]]:
        """(when, what, members, process, extra) of everybody, in order."""
        found = []
        for path in self.events.glob("*.log"):
            pid = int(path.stem.rpartition("-")[2])
            for line in path.read_text().splitlines():
                if line.count(" ") == 4:
                    at, kind, _, members, extra = line.split()
                    found.append((float(at), kind, int(members), pid, extra))
        return sorted(found)

    def wait_for_all(self, after: float) -> list[int]:
        """Until all train together; their processes."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            rows = self.rows()
            pids = {
                pid
                for at, kind, members, pid, _ in rows
                if at > after and kind == "commit" and members == self.SIZE
            }
            if len(pids) == self.SIZE:
                return sorted(pids)
            if self.process.poll() is not None:
                raise RuntimeError(f"allranks run ended with {self.process.returncode}")
            time.sleep(0.05)
        raise TimeoutError(f"not all train together after {LIMIT_S} s")


def kills_under_run(out: Path, seconds: float, count: int, seed: int) -> tuple[dict[str, bool], list[float]]:
    """One of four is killed, then the next when all train together again: the claims, and the longest gap after each kill."""
    run, chance, took, ends, error = Run(out), random.Random(seed), list[float](), set[str](), ""
    began = time.monotonic()
    try:
        pids = run.wait_for_all(0.0)
        (out / "begun").touch()
        while len(took) < count and time.monotonic() < began + seconds:
            time.sleep(chance.uniform(0.5, 1.5))
            at = time.monotonic()
            os.kill(chance.choice(pids), 9)
            pids = run.wait_for_all(time.monotonic())
            took.append(
                gaps_of([row[0] for row in run.rows() if row[1] == "commit" and row[0] > at - 0.5])[0]
            )
            note(
                out,
                "kills",
                number=len(took),
                longest_gap_s=took[-1],
                until_all_train_s=round(time.monotonic() - at, 2),
            )
        (out / "stop").touch()
        code = run.process.wait(60)
        ends = {row[4] for row in run.rows() if row[1] == "done"}
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired, OSError) as failure:
        error, code = str(failure), -1
    finally:
        run.process.terminate()
        try:
            run.process.wait(20)
        except subprocess.TimeoutExpired:
            run.process.kill()
    note(
        out,
        "kills",
        kills=len(took),
        gaps=sorted(took, reverse=True),
        ends=sorted(ends),
        code=code,
        error=error,
    )
    verdicts = {
        f"kills: {count} under `allranks run --replicas 4`": len(took) == count and not error,
        "kills: no gap above 1 s": bool(took) and max(took) <= 1.0,
        "kills: equal bits": len(ends) == 1 and code == 0,
        **compare_with_alone(out, "kills"),
    }
    return verdicts, took


RUNS = {
    "joins": (kill_joining, ("r0", "r1", "r2"), ("r1",)),
    "pairs": (kill_pair, ("r0", "r1", "r2", "r3"), ("r1", "r3")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=5, help="of the storm")
    parser.add_argument("--count", type=int, default=1 << 30)
    parser.add_argument("--only", choices=[*RUNS, "storm", "kills"], default=None)
    args = parser.parse_args()
    verdicts: dict[str, bool] = {}
    numbers: dict[str, list[float]] = {}
    for name, (kill, names, doomed) in RUNS.items():
        if args.only not in (None, name):
            continue
        crew, chance = Crew(args.out, names, doomed), random.Random(args.seed)
        took = numbers.setdefault(name, [])
        try:
            crew.begin()
            end = time.monotonic() + args.seconds
            while time.monotonic() < end and len(took) < args.count:
                took.append(round(kill(crew, chance), 3))
                note(args.out, name, number=len(took), seconds=took[-1])
        except (RuntimeError, TimeoutError) as error:
            print(str(error)[-3000:])
            took.append(LIMIT_S)
        finally:
            crew.close()
        verdicts[f"{name}: the others continued within 2 s"] = bool(took) and max(took) < 2
    if args.only in (None, "storm"):
        found, numbers["storm"] = storm(args.out, args.seconds, args.seed, args.replicas)
        verdicts |= found
    if args.only in (None, "kills"):
        found, numbers["kills"] = kills_under_run(args.out, args.seconds, min(args.count, 20), args.seed)
        verdicts |= found
    for claim, holds in verdicts.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    for name, took in numbers.items():
        print(
            f"{name}: {len(took)} times, median {sorted(took)[len(took) // 2] if took else 0} s, worst {max(took, default=0)} s"
        )
    (args.out / "gpu_joins.json").write_text(json.dumps({"verdicts": verdicts, "numbers": numbers}, indent=1))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["worker-under-run"]:
        worker_under_run(Path(sys.argv[2]))
    else:
        sys.exit(main())
