"""Thirty drilled jobs of both modes, for benchmarks/goodput.py: what the ledger books against what was planted.

A row is right within 5 % or 0.5 s for each rank; all rows must add up to the wall clock of all ranks within 0.5 %.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from _series import Result, Series

SCRIPT = str(Path(__file__).parent / "_goodput_job.py")
PLAIN = ("--steps", "60", "--step-s", "0.1")
LONG = ("--steps", "150", "--step-s", "0.1")
SAVED = (*PLAIN, "--save-every", "10", "--save-s", "0.3", "--state", "{folder}/state")


@dataclass(frozen=True)
class Run:
    """One `allranks run` of a drill."""

    launch: tuple[str, ...]
    ranks: int
    script: tuple[str, ...]


@dataclass(frozen=True)
class Drill:
    """`expected`: rank-seconds by state that follow from the arguments; the rest is what ranks print as planted."""

    name: str
    runs: tuple[Run, ...]
    expected: dict[str, float] = field(default_factory=dict)
    kill_agent_at: int = -1  # step, in the first run


def whole(*script: str, ranks: int = 2, flags: tuple[str, ...] = ()) -> Run:
    launch = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3", *flags)
    return Run(launch, ranks, script)


def replicas(*script: str, ranks: int = 3, flags: tuple[str, ...] = ()) -> Run:
    return Run(("--replicas", str(ranks), *flags), ranks, script)


def slow(rank: int, seconds: float) -> tuple[str, ...]:
    return ("--slow-rank", str(rank), "--slow-s", str(seconds))


def kill(step: int, rank: int = 0) -> tuple[str, ...]:
    return ("--kill-at", str(step), "--kill-rank", str(rank))


def drills() -> list[Drill]:
    hang = ("--hang-at", "40", "--hang-s", "15")
    soon = ("--notice-s", "4")
    evaluated = ("--eval-at", "30", "--eval-s", "4")
    nothing = {"waiting": 0.0, "stalled": 0.0, "repeated": 0.0}
    more = (
        "--steps",
        "90",
        "--step-s",
        "0.1",
        "--save-every",
        "10",
        "--save-s",
        "0.3",
        "--state",
        "{folder}/state",
    )
    return [
        Drill("whole job: nothing", (whole(*PLAIN),), {**nothing, "useful": 2 * 59 * 0.1}),
        Drill("whole job: first step", (whole(*PLAIN, "--first-s", "3"),), {"compiling": 2 * 3.1, "useful": 2 * 59 * 0.1}),
        Drill("whole job: slow start", (whole(*PLAIN, "--start-s", "4"),), {"useful": 2 * 59 * 0.1}),
        Drill("whole job: slow rank", (whole(*PLAIN, *slow(1, 0.1)),), {"waiting": 59 * 0.1}),
        Drill("whole job: slow rank of three", (whole(*PLAIN, *slow(2, 0.05), ranks=3),), {"waiting": 2 * 59 * 0.05}),
        Drill("whole job: slow rank of four", (whole(*PLAIN, *slow(0, 0.08), ranks=4),), {"waiting": 3 * 59 * 0.08}),
        Drill("whole job: saves", (whole(*SAVED),)),
        Drill("whole job: saves and a slow rank", (whole(*SAVED, *slow(1, 0.1)),), {"waiting": 59 * 0.1}),
        Drill("whole job: evaluation", (whole(*PLAIN, *evaluated),)),
        Drill("whole job: kill and restore", (whole(*SAVED, *kill(36)),), {"repeated": 2 * 5 * 0.1}),
        Drill("whole job: kill late", (whole(*SAVED, *kill(58, 1)),), {"repeated": 2 * 7 * 0.1}),
        Drill("whole job: kill of a slow rank", (whole(*SAVED, *slow(1, 0.1), *kill(35, 1)),), {"repeated": 5 * (0.2 + 0.1), "waiting": 59 * 0.1 + 0.4}),
        Drill("whole job: kill without a save", (whole(*PLAIN, *kill(20)),), {"repeated": 2 * 20 * 0.1}),
        Drill("whole job: hang that ends", (whole(*PLAIN, *hang, flags=soon),), {"stalled": 2 * 15.0}),
        Drill("whole job: hang of three that ends", (whole(*PLAIN, *hang, "--hang-rank", "2", ranks=3, flags=soon),), {"stalled": 3 * 15.0}),
        Drill("whole job: requeue", (whole(*SAVED), whole(*more)), {"repeated": 0.0, "useful": 2 * 88 * 0.1}),
        Drill("whole job: requeue with a rank more", (whole(*SAVED), whole(*more, ranks=3)), {"repeated": 0.0, "useful": 2 * 59 * 0.1 + 3 * 29 * 0.1}),
        Drill("whole job: requeue with a rank fewer", (whole(*SAVED, ranks=3), whole(*more, ranks=2)), {"repeated": 0.0, "useful": 3 * 59 * 0.1 + 2 * 29 * 0.1}),
        Drill("whole job: the agent is killed, requeue", (whole(*SAVED, *LONG[:2]), whole(*SAVED)), {}, kill_agent_at=35),
        Drill("replicas: nothing", (replicas(*PLAIN),), {"repeated": 0.0, "waiting": 0.0}),
        Drill("replicas: slow rank", (replicas(*PLAIN, *slow(1, 0.1)),), {"waiting": 2 * 59 * 0.1}),
        Drill("replicas: saves", (replicas(*PLAIN, "--save-every", "10", "--save-s", "0.3"),)),
        Drill("replicas: kill", (replicas(*LONG, *kill(20, 2)),), {"repeated": 0.0}),
        Drill("replicas: kill of the first of four", (replicas(*LONG, *kill(30, 0), ranks=4),), {"repeated": 0.0}),
        Drill("replicas: kill with evaluation", (replicas(*LONG, *kill(20), "--eval-at", "100", "--eval-s", "3"),)),
        Drill("replicas: hang that ends", (replicas("--steps", "250", *PLAIN[2:], "--hang-at", "40", "--hang-s", "12", flags=(*soon, "--recovery", "collect")),)),
        Drill("replicas: requeue with one more", (replicas(*PLAIN, ranks=2), replicas(*LONG, ranks=3)), {"repeated": 3 * 59 * 0.1}),
    ]  # fmt: skip


def cases(series: Series) -> dict[str, Callable[[Path], Result]]:
    found: dict[str, Callable[[Path], Result]] = {one.name: partial(measure, series, one) for one in drills()}
    found["whole job: two nodes, slow rank"] = partial(two_nodes, series, slow(3, 0.1), "2")
    found["whole job: a node joins"] = partial(two_nodes, series, (), "1:2", late=True)
    found["whole job: a node leaves"] = partial(two_nodes, series, (), "1:2", leaves=True)
    return found


def account(series: Series, folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(series.run(["goodput", "allranks-incidents", "--json"], folder))
    return found


def read_planted(output: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in output.splitlines():
        if "PLANTED" in line:
            _, state, seconds, _ = line.split("PLANTED ")[1].split()
            found[state] += float(seconds)
    return found


def measure(series: Series, drill: Drill, folder: Path) -> Result:
    planted, wall, before = defaultdict(float, drill.expected), 0.0, 0.0
    faults: set[str] = set()
    for number, run in enumerate(drill.runs):
        script = [word.replace("{folder}", str(folder)) for word in run.script]
        job = series.start(["run", "--job", "drill", *run.launch, SCRIPT, *script], folder)
        if number == 0 and drill.kill_agent_at >= 0:
            kill_at_step(series, job, folder, drill.kill_agent_at)
        output = series.finish(job)
        assert job.returncode == 0 or drill.kill_agent_at >= 0, output[-1500:]
        for state, seconds in read_planted(output).items():
            faults.add(state)
            planted[state] += seconds if state in ("saving", "evaluation") else 0.0
        running = float(str(account(series, folder)["running_s"]))
        wall, before = wall + (running - before) * run.ranks, running
    for word, name in (("--kill-at", "kill"), ("--hang-at", "hang"), ("--eval-at", "evaluation")):
        assert not any(word in run.script for run in drill.runs) or name in faults, (
            f"the fault {name} was not planted"
        )
    found = account(series, folder)
    if drill.kill_agent_at >= 0:
        planted.clear()  # what was printed after the last row is not known to the ledger
    return judge(planted, found, wall, max(run.ranks for run in drill.runs))


def kill_at_step(series: Series, job: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Kills the agent with all its ranks once the job has come so far, as a power cut does."""
    from allranks.watch.samples import read_samples

    boxes = folder / "boxes"
    while max((one.step for one in read_samples(boxes)), default=-1) < step:
        assert job.poll() is None, "it ended too early"
        if series.left_s < 1:
            break
        time.sleep(0.05)
    pids = [one.pid for one in read_samples(boxes) if one.alive]
    for pid in (job.pid, *pids):
        os.kill(pid, signal.SIGKILL)


def two_nodes(
    series: Series,
    script: tuple[str, ...],
    nnodes: str,
    folder: Path,
    late: bool = False,
    leaves: bool = False,
) -> Result:
    """Two agents on this machine, each with its own boxes, as on two machines."""
    from allranks.channel.frames import HeldPort
    from allranks.watch.samples import read_samples

    rendezvous, lighthouse = HeldPort(), HeldPort()
    steps = "200" if nnodes != "2" else "60"
    state = ("--save-every", "10", "--save-s", "0.05", "--state", f"{folder}/state") if nnodes != "2" else ()
    agents = []

    def start(name: str) -> None:
        where = ["--bind" if name == "a" else "--lighthouse", f"127.0.0.1:{lighthouse.number}"]
        launch = [
            "--nnodes", nnodes, "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
            f"127.0.0.1:{rendezvous.number}", "--rdzv-id", "drill", "--rdzv-conf", f"is_host={name == 'a'}",
            "--max-restarts", "3",
        ]  # fmt: skip
        words = [
            "run",
            "--job",
            "drill",
            *where,
            *launch,
            SCRIPT,
            "--steps",
            steps,
            "--step-s",
            "0.1",
            *script,
            *state,
        ]
        variables = {"ALLRANKS_TOKEN": "t", "ALLRANKS_DIR": str(folder / name)}
        agents.append(series.start(words, folder, variables))

    def reached() -> int:
        return max((one.step for one in read_samples(folder / "a")), default=-1)

    start("a")
    while late and reached() < 30 and agents[0].poll() is None and series.left_s > 1:
        time.sleep(0.1)
    start("b")
    while leaves and reached() < 60 and agents[0].poll() is None and series.left_s > 1:
        time.sleep(0.1)
    if leaves:
        agents[1].send_signal(signal.SIGTERM)
    outputs = [series.finish(agent) for agent in agents]
    assert agents[0].returncode == 0, outputs[0][-1500:]
    found = account(series, folder)
    spans = agent_spans(folder)
    planted = read_planted("".join(outputs))
    expected = {"waiting": 3 * 59 * 0.1} if script else {}
    if state:
        expected["saving"] = planted["saving"]
    assert len(spans) == 2, f"{len(spans)} ledgers"
    return judge(defaultdict(float, expected), found, sum(2 * span for span in spans), 4)


def agent_spans(folder: Path) -> list[float]:
    """How long each agent ran."""
    from allranks.ledger.file import find_ledgers, read_ledger
    from allranks.ledger.records import RunEnd, RunStart

    spans = []
    for path in find_ledgers(folder / "allranks-incidents"):
        records = read_ledger(path).records
        start = next(one.at for one in records if isinstance(one, RunStart))
        spans.append(max(one.at for one in records if isinstance(one, RunEnd)) - start)
    return spans


def judge(planted: dict[str, float], found: dict[str, object], wall: float, ranks: int) -> Result:
    booked = found["rank_seconds"]
    assert isinstance(booked, dict)
    off = abs(sum(booked.values()) / wall - 1)
    rows = {}
    for state, seconds in sorted(planted.items()):
        if state in booked:
            right = abs(booked[state] - seconds) <= max(0.05 * seconds, 0.5 * ranks)
            rows[state] = {"planted": round(seconds, 3), "booked": round(booked[state], 3), "right": right}
    return {
        "right": off <= 0.005 and all(row["right"] for row in rows.values()),
        "sum_off": round(off, 6),
        "rows": rows,
        "booked": {state: round(seconds, 2) for state, seconds in booked.items() if seconds},
        "goodput": found["goodput"],
    }
