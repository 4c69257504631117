"""Series of real jobs for benchmarks/goodput.py: what-if against measured steps, ranks that become slow, healthy hours, and
simulated against real goodput of replicas.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import scale
from _series import Result, Series

PROGRAMS = str(Path(__file__).parent / "_goodput_programs.py")
JOB = str(Path(__file__).parent / "_goodput_job.py")

TURNS = "different ranks in turn"
#: Program, planted delay, its share, the cause that must be named. Only expert parallel calls show the length of inputs.
WHAT_IFS = (
    ("ddp", "slow", 0.5, "one rank always"), ("ddp", "loader", 0.8, TURNS), ("ddp", "gc", 0.0, "garbage collection"),
    ("ddp", "input", 0.4, TURNS),
    ("fsdp", "slow", 0.3, "one rank always"), ("fsdp", "loader", 0.8, TURNS), ("fsdp", "gc", 0.0, "garbage collection"),
    ("fsdp", "input", 0.4, TURNS),
    ("pipeline", "slow", 0.5, "one rank always"), ("pipeline", "stage", 0.5, "stage"), ("pipeline", "loader", 0.8, TURNS),
    ("pipeline", "gc", 0.0, "garbage collection"),
    ("tensor", "slow", 0.5, "one rank always"), ("tensor", "slow", 0.2, "one rank always"), ("tensor", "loader", 0.8, TURNS),
    ("tensor", "gc", 0.0, "garbage collection"),
    ("expert", "slow", 0.5, "one rank always"), ("expert", "loader", 0.8, TURNS), ("expert", "gc", 0.0, "garbage collection"),
    ("expert", "input", 0.4, "input length"),
)  # fmt: skip


def launch(job: str, ranks: int, *words: str) -> list[str]:
    run = ["run", "--job", job, "--standalone", "--no-spares", "--nproc-per-node", str(ranks)]
    return [*run, PROGRAMS, *words]


def measured_step_s(output: str) -> float:
    lines = [line for line in output.splitlines() if "STEP_S " in line]
    assert lines, output[-1500:]
    return float(lines[-1].split("STEP_S ")[1].split()[0])


def what_if_cases(series: Series, seed: int, steps: int) -> dict[str, Callable[[Path], Result]]:
    return {
        f"{kind} {cause} {share:g}": partial(what_if, series, kind, cause, share, expected, seed + n, steps)
        for n, (kind, cause, share, expected) in enumerate(WHAT_IFS)
    }


def what_if(
    series: Series, kind: str, cause: str, share: float, expected: str, seed: int, steps: int, folder: Path
) -> Result:
    """The same program with the delay (its boxes give the prediction) and without it (what is really measured)."""
    rank = random.Random(seed).randrange(4)
    common = ["--kind", kind, "--steps", str(steps), "--seed", str(seed), "--slow-rank", str(rank)]
    delayed = series.run(launch("delayed", 4, *common, "--cause", cause, "--share", str(share)), folder)
    text = series.run(["slow", "boxes", "--json"], folder)
    (folder / "what_if.slow.json").write_text(text)
    found = json.loads(text)
    plain = series.run(launch("plain", 4, *common), folder, {"ALLRANKS_DIR": str(folder / "plain")})
    real = measured_step_s(plain)
    best = found["what_ifs"][0] if found["what_ifs"] else {"who": "", "step_s": found["step_s"], "ranks": []}
    error = best["step_s"] / real - 1
    named = cause != "slow" or best["ranks"] == [rank]
    return {
        "right": abs(error) <= 0.1 and found["cause"] == expected and named,
        "error": round(error, 4),
        "cause": found["cause"],
        "cause_right": found["cause"] == expected,
        "named": named,
        "who": best["who"],
        "predicted_s": round(best["step_s"], 5),
        "measured_s": round(real, 5),
        "delayed_s": round(measured_step_s(delayed), 5),
        "replay_off": round(found["replayed_s"] / found["step_s"] - 1, 4),
        "evidence": found["evidence"],
    }


HEALTHY = ("--noise", "0.02", "--eval-every", "37", "--save-every", "25", "--inputs", "1")


def slow_alarms(folder: Path) -> list[tuple[tuple[int, ...], float, str]]:
    """Ranks, when it was noticed, and the sentence of every report of a slow rank."""
    from allranks.ledger.file import find_ledgers, read_ledger
    from allranks.ledger.records import Outage

    records = [
        one for path in find_ledgers(folder / "allranks-incidents") for one in read_ledger(path).records
    ]
    latest = {one.id: one for one in records if isinstance(one, Outage) and one.kind == "slow"}
    return [(one.ranks, one.noticed, one.text) for one in latest.values()]


def fail_slow_cases(series: Series, seed: int, runs: int) -> dict[str, Callable[[Path], Result]]:
    kinds = ("ddp", "fsdp", "expert", "tensor", "pipeline")
    return {
        f"fail-slow {n}": partial(fail_slow, series, kinds[n % len(kinds)], seed + n) for n in range(runs)
    }


def fail_slow(series: Series, kind: str, seed: int, folder: Path) -> Result:
    """A rank becomes a tenth slower; the job ends 60 steps later, so a report in time is one that is there."""
    chance = random.Random(f"fail-slow {seed}")
    rank, at = chance.randrange(4), chance.randrange(70, 110)
    words = ["--kind", kind, "--steps", str(at + 60), "--step-s", "0.25", "--seed", str(seed), *HEALTHY]
    planted = ["--cause", "slow", "--share", "0.1", "--slow-rank", str(rank), "--slow-at", str(at)]
    measured_step_s(series.run(launch("slow", 4, *words, *planted), folder))
    alarms = slow_alarms(folder)
    return {
        "right": [ranks for ranks, _, _ in alarms] == [(rank,)],
        "kind": kind,
        "rank": rank,
        "alarms": [text for _, _, text in alarms],
    }


def healthy_cases(series: Series, seed: int, runs: int) -> dict[str, Callable[[Path], Result]]:
    kinds = (("ddp", 2), ("fsdp", 2), ("expert", 3), ("tensor", 4), ("pipeline", 4), ("ddp", 4))
    return {f"healthy {n}": partial(healthy, series, *kinds[n % len(kinds)], seed + n) for n in range(runs)}


def healthy(series: Series, kind: str, ranks: int, seed: int, folder: Path) -> Result:
    """So long that it has ended before the limit of the series, with a slow start."""
    seconds = max(20.0, series.left_s - 110)
    words = ["--kind", kind, "--steps", "1000000", "--seconds", f"{seconds:.0f}", "--step-s", "0.2"]
    job = launch("healthy", ranks, *words, "--seed", str(seed), *HEALTHY)
    output = series.run(job, folder, limit_s=seconds + 110)
    alarms = slow_alarms(folder)
    steps = int(output.split("STEP_S ")[1].split()[1])
    return {
        "right": not alarms,
        "kind": kind,
        "hours": round(seconds / 3600, 4),
        "steps": steps,
        "alarms": [text for _, _, text in alarms],
    }


# simulated against real replicas

PLANS = ("kills", "pairs", "freezes")
LENGTH_S, STALL_S = 90.0, 9.0


def plan_faults(plan: str, replicas: int, seed: int) -> list[scale.Failure]:
    """Seconds since all replicas train."""
    chance, found = random.Random(f"{plan} {replicas} {seed}"), []
    for turn in range(3):
        at = 12.0 + turn * 24.0 + chance.uniform(0, 6)
        first = chance.randrange(replicas - 1)
        size = 2 if plan == "pairs" and replicas > 3 else 1
        found.append(scale.Failure(at, size, first, plan == "freezes" and turn != 1))
    return found


def replica_cases(
    series: Series, seed: int, sizes: tuple[int, ...], known: Mapping[str, float]
) -> dict[str, Callable[[Path], Result]]:
    return {
        f"replicas {size} {plan}": partial(real_replicas, series, plan, size, seed, known)
        for size in sizes
        for plan in PLANS
    }


def real_replicas(
    series: Series, plan: str, replicas: int, seed: int, known: Mapping[str, float], folder: Path
) -> Result:
    """A real job with these faults, and the simulator with the same ones and the costs of `calibrate`."""
    faults = plan_faults(plan, replicas, seed)
    real, away, stalls = run_replicas(series, replicas, faults, folder)
    assumed = replace(
        scale.Assumptions(),
        ours_save_s=0.0,
        gpus_per_replica=1,
        node_replaced_s=0.0,
        start_s=known["start_s"],
        ours_kill_s=known["kill_s"],
        notice_s=known["freeze_s"],
        ours_evict_s=0.0,
    )
    simulated = scale.replicas_job(replicas, LENGTH_S, faults, "allranks replicas", assumed)
    error = simulated / real - 1
    return {
        "right": abs(error) <= 0.1,
        "real": round(real, 4),
        "simulated": round(simulated, 4),
        "error": round(error, 4),
        "away_s": [round(one, 2) for one in away],
        "stalls_s": [round(one, 3) for one in stalls],
    }


def calibrate(series: Series, folder: Path) -> dict[str, float]:
    """Costs on this machine: how long a killed replica is away, and what the others lose by a death and by a freeze."""
    faults = [
        scale.Failure(12.0, 1, 0, False),
        scale.Failure(36.0, 1, 1, True),
        scale.Failure(62.0, 1, 0, False),
    ]
    _, away, stalls = run_replicas(series, 4, faults, folder)
    return {
        "start_s": statistics.median(away or [5.0]),
        "kill_s": (stalls[0] + stalls[2]) / 2,
        "freeze_s": stalls[1],
    }


def run_replicas(
    series: Series,
    replicas: int,
    faults: list[scale.Failure],
    folder: Path,
) -> tuple[float, list[float], list[float]]:
    """(share of useful time, seconds that each replica was away, longest stall of all after each fault) of a real job.

    Useful: of each replica the time of the steps that it committed together with the others, as its own box tells.
    """
    from allranks.watch.samples import read_samples

    words = [
        "run",
        "--job",
        "real",
        "--replicas",
        str(replicas),
        "--notice-s",
        "4",
        JOB,
        "--steps",
        "100000",
        "--step-s",
        "0.1",
    ]
    job = series.start(words, folder)
    step_s, useful = 0.1, 0.0
    steps: dict[int, tuple[int, int]] = {}  # replica -> pid, last step
    gone: dict[int, float] = {}
    away: list[float] = []
    stalls: list[float] = []
    top, top_at, began, hit_at, pause, waiting = -1, 0.0, 0.0, 0.0, 0.0, list(faults)
    while series.left_s > 20 and job.poll() is None and (not began or time.monotonic() - began < LENGTH_S):
        now, samples = time.monotonic(), [one for one in read_samples(folder / "boxes") if one.alive]
        newest = max((one.step for one in samples), default=-1)
        pause = max(pause, now - top_at - step_s) if top >= 0 else 0.0
        if newest > top:
            top, top_at = newest, now
        if hit_at and now - hit_at > STALL_S:
            stalls.append(pause)
            hit_at = 0.0
        if not began:
            if len(samples) == replicas and all(one.step >= 10 for one in samples):
                began, steps = now, {one.rank: (one.pid, one.step) for one in samples}
            time.sleep(0.05)
            continue
        for one in samples:
            pid, last = steps.get(one.rank, (0, one.step))
            if one.pid != pid:
                if one.step < top - 1 or one.step < 1:
                    continue  # starts, or heals
                last = one.step
                if one.rank in gone:
                    away.append(now - gone.pop(one.rank))
            useful += max(0, one.step - last) * step_s
            steps[one.rank] = one.pid, one.step
        if waiting and now - began >= waiting[0].at:
            fault = waiting.pop(0)
            hit = [one for one in samples if fault.first <= one.rank < fault.first + fault.gpus]
            for one in hit:
                os.kill(one.pid, signal.SIGSTOP if fault.hang else signal.SIGKILL)
                gone[one.rank] = now
            pause, hit_at = 0.0, now
        time.sleep(0.02)
    took = time.monotonic() - began if began else 0.0
    if not took or waiting:
        raise AssertionError(f"the job did not train long enough: {job.log.read_text()[-1500:]}")  # type: ignore[attr-defined]
    job.terminate()
    series.finish(job)
    step_s_real = measure_pace(folder)
    return useful / step_s * step_s_real / (replicas * took), away, stalls


def measure_pace(folder: Path) -> float:
    """Median seconds between two steps while nothing happened, from a box."""
    import numpy as np

    from allranks.load import LoadOptions, load_paths

    traces = load_paths([str(folder / "boxes")], LoadOptions()).traces
    gaps = []
    for trace in traces:
        _, first = np.unique(trace.calls["step"], return_index=True)
        at = trace.calls["created_ns"][first] / 1e9
        gaps += list(np.diff(at))
    return float(np.median(gaps))
