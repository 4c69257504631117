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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import scale
from _series import Result, Series
from allranks.watch.samples import RankSample, read_samples

PROGRAMS = str(Path(__file__).parent / "_goodput_programs.py")
JOB = str(Path(__file__).parent / "_goodput_job.py")

TURNS = "different ranks in turn"
#: Program, planted delay, its share, the cause that must be named. One rank pauses for a collection in every second step, so
#: a share of 0.3 is 15 % of the mean step. Only expert parallel calls show the length of inputs.
WHAT_IFS = (
    ("ddp", "slow", 0.5, "one rank always"), ("ddp", "loader", 0.8, TURNS), ("ddp", "gc", 0.3, "garbage collection"),
    ("ddp", "input", 0.4, TURNS),
    ("fsdp", "slow", 0.3, "one rank always"), ("fsdp", "loader", 0.8, TURNS), ("fsdp", "gc", 0.3, "garbage collection"),
    ("fsdp", "input", 0.4, TURNS),
    ("pipeline", "slow", 0.5, "one rank always"), ("pipeline", "stage", 0.5, "stage"), ("pipeline", "loader", 0.8, TURNS),
    ("pipeline", "gc", 0.3, "garbage collection"),
    ("tensor", "slow", 0.5, "one rank always"), ("tensor", "slow", 0.2, "one rank always"), ("tensor", "loader", 0.8, TURNS),
    ("tensor", "gc", 0.3, "garbage collection"),
    ("expert", "slow", 0.5, "one rank always"), ("expert", "loader", 0.8, TURNS), ("expert", "gc", 0.3, "garbage collection"),
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
    """The same program with the delay (its boxes give the prediction) and without it (what is really measured), at the same
    time: what else the machine does slows both."""
    rank = random.Random(seed).randrange(4)
    common = [
        "--kind",
        kind,
        "--steps",
        str(steps),
        "--step-s",
        "1.0",
        "--seed",
        str(seed),
        "--slow-rank",
        str(rank),
    ]
    jobs = [
        series.start(launch("delayed", 4, *common, "--cause", cause, "--share", str(share)), folder),
        series.start(launch("plain", 4, *common), folder, {"ALLRANKS_DIR": str(folder / "plain")}),
    ]
    delayed, plain = (series.finish(job) for job in jobs)
    text = series.run(["slow", "boxes", "--json"], folder)
    (folder / "what_if.slow.json").write_text(text)
    found = json.loads(text)
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


def sum_up(found: Sequence[Result]) -> Result:
    """Of all programs that ran: errors of the prediction, and how often the cause was right."""
    errors = [abs(one["error"]) for one in found if isinstance(one["error"], float)]
    return {
        "programs": len(found),
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "worst_error": max(errors, default=None),
        "cause_right": sum(one.get("cause_right") is True for one in found),
    }


SLACK_S = 75.0  # for starting, and the steps until all ranks have heard that it is over
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
    words = ["--kind", kind, "--steps", str(at + 60), "--step-s", "0.5", "--seed", str(seed), *HEALTHY]
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
    seconds = max(20.0, series.left_s - SLACK_S)
    words = ["--kind", kind, "--steps", "1000000", "--seconds", f"{seconds:.0f}", "--step-s", "1.0"]
    job = launch("healthy", ranks, *words, "--seed", str(seed), *HEALTHY)
    output = series.run(job, folder, limit_s=seconds + SLACK_S)
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

PLANS = ("kills", "pairs", "hangs")
LENGTH_S, STALL_S, STEP_S = 90.0, 17.0, 0.25


def plan_faults(plan: str, replicas: int, seed: int) -> list[scale.Failure]:
    """Seconds since all replicas train."""
    chance, found = random.Random(f"{plan} {replicas} {seed}"), []
    for turn in range(3):
        at = 12.0 + turn * 24.0 + chance.uniform(0, 6)
        first = chance.randrange(replicas - 1)
        size = 2 if plan == "pairs" and replicas > 3 else 1
        found.append(scale.Failure(at, size, first, plan == "hangs" and turn != 1))
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
    real, seen = run_replicas(series, replicas, faults, folder)
    assumed = replace(
        scale.Assumptions(),
        ours_save_s=0.0,
        gpus_per_replica=1,
        node_replaced_s=0.0,
        start_s=known["start_s"],
        ours_kill_s=known["kill_s"],
        notice_s=known["hang_s"],
        ours_evict_s=0.0,
    )
    simulated = scale.replicas_job(replicas, LENGTH_S, faults, "allranks replicas", assumed)
    error = simulated / real - 1
    return {
        "right": abs(error) <= 0.1,
        "real": round(real, 4),
        "simulated": round(simulated, 4),
        "error": round(error, 4),
        "away_s": [round(one, 2) for one in seen.away],
        "stalls_s": [round(one, 3) for one in seen.stalls],
    }


def calibrate(series: Series, folder: Path) -> dict[str, float]:
    """Costs on this machine: how long a killed replica is away, and what the others lose by a death and by a hang."""
    faults = [
        scale.Failure(12.0, 1, 0, False),
        scale.Failure(36.0, 1, 1, True),
        scale.Failure(62.0, 1, 0, False),
    ]
    _, seen = run_replicas(series, 4, faults, folder)
    kill, hang, again = seen.stalls
    return {"start_s": (seen.away[0] + seen.away[-1]) / 2, "kill_s": (kill + again) / 2, "hang_s": hang}


@dataclass
class Progress:
    """What the boxes of a job's replicas tell, look by look."""

    replicas: int
    useful_steps: int = 0  # of each replica those that it committed together with the others
    away: list[float] = field(default_factory=list)  # seconds that a replica that was hit did not train
    stalls: list[float] = field(default_factory=list)  # longest pause of all after each fault
    began: float = 0.0
    _top: int = -1
    _top_at: float = 0.0
    _hit_at: float = 0.0
    _pause: float = 0.0
    _steps: dict[int, tuple[int, int]] = field(default_factory=dict)  # replica -> pid, last step
    _gone: dict[int, float] = field(default_factory=dict)

    def look(self, now: float, samples: Sequence[RankSample]) -> None:
        newest = max((one.step for one in samples), default=-1)
        if self._top >= 0:
            self._pause = max(self._pause, now - self._top_at - STEP_S)
        if newest > self._top:
            self._top, self._top_at = newest, now
        if self._hit_at and now - self._hit_at > STALL_S:
            self.stalls.append(self._pause)
            self._hit_at = 0.0
        if self.began:
            self._count(now, samples)
        elif len(samples) == self.replicas and all(one.step >= 10 for one in samples):
            self.began, self._steps = now, {one.rank: (one.pid, one.step) for one in samples}

    def _count(self, now: float, samples: Sequence[RankSample]) -> None:
        for one in samples:
            pid, last = self._steps.get(one.rank, (0, one.step))
            if one.pid != pid:
                if one.step < max(self._top - 1, 1):
                    continue  # starts, or heals
                last = one.step
                if one.rank in self._gone:
                    self.away.append(now - self._gone.pop(one.rank))
            self.useful_steps += max(0, one.step - last)
            self._steps[one.rank] = one.pid, one.step

    def hit(self, now: float, fault: scale.Failure, samples: Sequence[RankSample], hangs: Path) -> None:
        for one in samples:
            if fault.first <= one.rank < fault.first + fault.gpus:
                if fault.hang:
                    (hangs / str(one.pid)).touch()
                else:
                    os.kill(one.pid, signal.SIGKILL)
                self._gone[one.rank] = now
        self._pause, self._hit_at = 0.0, now


def run_replicas(
    series: Series, replicas: int, faults: list[scale.Failure], folder: Path
) -> tuple[float, Progress]:
    """The share of useful time of a real job, and what was seen of it."""
    flags = ["--replicas", str(replicas), "--notice-s", "4"]
    hangs = folder / "hang"
    hangs.mkdir()
    script = [JOB, "--steps", "100000", "--step-s", str(STEP_S), "--hang-if", str(hangs)]
    job = series.start(["run", "--job", "real", *flags, *script], folder)
    seen, waiting = Progress(replicas), list(faults)
    while series.left_s > 20 and job.poll() is None:
        now, samples = time.monotonic(), [one for one in read_samples(folder / "boxes") if one.alive]
        seen.look(now, samples)
        if seen.began and now - seen.began > LENGTH_S:
            break
        if seen.began and waiting and now - seen.began >= waiting[0].at:
            seen.hit(now, waiting.pop(0), samples, hangs)
        time.sleep(0.02)
    took = time.monotonic() - seen.began
    assert seen.began and not waiting, f"it did not train long enough: {series.log_of(job)[-1500:]}"
    job.terminate()
    series.finish(job)
    return seen.useful_steps * measure_pace(folder) / (replicas * took), seen


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
