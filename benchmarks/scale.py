"""Goodput of large jobs on a virtual clock: our pure cores (quorum, restarts, checkpoint interval) with measured costs.

    benchmarks/scale.py [--gpus 100 1000 10000 16384 100000] [--days 54] [--seeds 5] [--start-s 120] [--json FILE] [--svg FILE]

Curves: allranks in replica and whole-job mode, torchft and torchrun with their measured times (benchmarks/results).
Failures come at the rate of the published training of Llama 3 (419 unexpected interruptions in 54 days of 16,384 GPUs), as
single GPUs, nodes of 8, racks of 64 and switches of 512. Every assumption is a field of `Assumptions` and is printed. Not in
the curves: what training with replicas itself costs (the same for allranks and torchft), planned stops, and stragglers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from allranks.ledger.advice import best_interval_s
from allranks.lighthouse.decide import Form, decide
from allranks.lighthouse.options import Options
from allranks.lighthouse.state import QuorumState
from allranks.model.cluster import Member
from allranks.model.formatting import count
from allranks.supervise.restarts import RestartHistory, RestartOptions, decide_restart

RESULTS = Path(__file__).parent / "results"
MODES = ("allranks replicas", "allranks whole job", "torchft", "torchrun")


def measured(file: str, *names: str) -> float:
    """A number of a kept result."""
    found = json.loads((RESULTS / f"{file}.json").read_text())["numbers"]
    for name in names:
        found = found[name]
    return float(found)


@dataclass(frozen=True)
class Assumptions:
    """Seconds unless said otherwise. The first part is measured here, the second is assumed alike for all curves."""

    ours_kill_s: float = measured("recovery", "allranks_kill_s")
    ours_freeze_s: float = measured("recovery", "allranks_freeze_s")
    ours_evict_s: float = measured("recovery", "allranks_hang_evicted_s")
    ours_heal_stall_s: float = measured("recovery", "allranks_heal_stall_beyond_a_step_s")
    ours_restart_s: float = measured("elastic", "kill_to_training_s")
    ours_save_s: float = measured("checkpoint", "2048mb", "saves", "allranks", "lost_s")
    quorum_per_1000_s: float = measured("lighthouse", "quorum_1000_s")
    torchft_kill_s: float = measured("torchft", "kill_s")
    torchft_quorum_per_1000_s: float = measured("lighthouse", "torchft_quorum_1000_s")
    torchrun_restart_s: float = measured("elastic", "torchrun_kill_to_training_s")
    other_save_s: float = measured("checkpoint", "2048mb", "saves", "dcp_async_thread_best", "lost_s")
    # assumed
    failures_per_gpu_day: float = 419 / 54 / 16384
    hang_share: float = 0.1  # of failures: nothing dies, training stops
    node_share: float = 0.25  # of failures: a node of 8 GPUs
    rack_share: float = 0.01  # 64 GPUs
    switch_share: float = 0.002  # 512 GPUs
    gpus_per_replica: int = 64
    start_s: float = 120.0  # processes, NCCL, first step of a large job; per replica too
    node_replaced_s: float = 300.0  # a spare node takes part: node, rack and switch failures
    notice_s: float = 12.0  # a hang, ours: silence of the job's own length, then evidence
    other_notice_s: float = 600.0  # a hang, torchrun: the timeout of NCCL
    torchft_notice_s: float = 60.0  # a hang, torchft: its timeout
    restore_memory_s: float = 5.0  # from the memory of other nodes
    restore_disk_s: float = 60.0
    stragglers: float = 0.0  # share of the time lost to slow ranks, alike for all


@dataclass(frozen=True)
class Failure:
    at: float
    gpus: int
    first: int  # GPU
    hang: bool


def plan_failures(gpus: int, days: float, known: Assumptions, chance: random.Random) -> list[Failure]:
    at, found = 0.0, []
    rate = gpus * known.failures_per_gpu_day / 86400
    while (at := at + chance.expovariate(rate)) < days * 86400:
        kind = chance.random()
        wide = 512 if kind < known.switch_share else 64 if kind < known.switch_share + known.rack_share else 0
        wide = wide or (8 if kind < known.switch_share + known.rack_share + known.node_share else 1)
        size = min(wide, gpus)
        hang = size == 1 and chance.random() < known.hang_share
        found.append(Failure(at, size, chance.randrange(gpus) // size * size, hang))
    return found


def quorum_delay_s(replicas: int) -> float:
    """How long our core waits, on its own clock, until the survivors of a death train again: 0 when nobody is awaited."""
    count = min(replicas, 256)
    state = QuorumState(Options(min_replicas=1, expect_replicas=count))
    names = [f"replica-{n}" for n in range(count)]

    def ask(now: float, who: list[str], step: int) -> None:
        for name in who:
            state.connect(now, name, f"s-{name}")
            state.ask(now, name, Member(name, session=f"s-{name}", step=step))

    def form(now: float) -> float:
        for _ in range(100):
            decision, _ = decide(now, state, state.options)
            if isinstance(decision, Form):
                state.form(state.next_quorum(decision.members, decision.spares, "simulated"), now)
                return now
            assert decision.until is not None
            now = decision.until
            state.advance(now)
        raise AssertionError("no quorum was formed")

    ask(0.0, names, 0)
    now = form(0.0) + 100.0
    state.lose(now, names[0], "killed", certain=True)
    ask(now, names[1:], 10)
    return form(now) - now


def replicas_job(gpus: int, seconds: float, failures: list[Failure], mode: str, known: Assumptions) -> float:
    """Share of useful time when replicas are restarted alone: the others stall for moments and continue."""
    ours = mode == "allranks replicas"
    size = min(known.gpus_per_replica, max(1, gpus // 2))
    replicas = gpus // size
    per_quorum = (known.quorum_per_1000_s if ours else known.torchft_quorum_per_1000_s) * replicas / 1000
    death = (known.ours_kill_s + quorum_delay_s(replicas)) if ours else known.torchft_kill_s
    notice = known.notice_s + known.ours_evict_s if ours else known.torchft_notice_s
    joining = (known.ours_heal_stall_s if ours else known.torchft_kill_s) + per_quorum
    away: list[tuple[float, int]] = []  # until when a replica is away
    histories: dict[int, RestartHistory] = {}
    out: dict[int, float] = {}
    lost = 0.0
    for failure in failures:
        while away and away[0][0] <= failure.at:
            _, back = heapq.heappop(away)
            out.pop(back, None)
        lost += gpus * ((notice if failure.hang else death) + per_quorum + joining)
        for replica in range(failure.first // size, (failure.first + failure.gpus - 1) // size + 1):
            history = histories.get(replica, RestartHistory()).after_failure(
                failure.at, 1e6, RestartOptions(max_restarts=10**6)
            )
            delay, _ = decide_restart(history, RestartOptions(max_restarts=10**6))
            histories[replica] = history.after_restart()
            gone = (delay or 0.0) + known.start_s + (known.node_replaced_s if failure.gpus > 1 else 0.0)
            begin = max(failure.at, out.get(replica, 0.0))
            out[replica] = failure.at + gone
            lost += size * max(0.0, out[replica] - begin)
            heapq.heappush(away, (out[replica], replica))
    # a save every ten minutes, for the worst case
    saves = 1 - known.ours_save_s / 600.0 if ours else 1 - known.other_save_s / 600.0
    return max(0.0, 1 - lost / (gpus * seconds)) * saves * (1 - known.stragglers)


def whole_job(gpus: int, seconds: float, failures: list[Failure], mode: str, known: Assumptions) -> float:
    """Share of useful time when every failure restarts all ranks from the last checkpoint."""
    ours = mode == "allranks whole job"
    save = known.ours_save_s if ours else known.other_save_s
    mtbf = 86400 / (gpus * known.failures_per_gpu_day)
    interval = max(10.0 if ours else 60.0, best_interval_s(save, mtbf))
    restore = known.restore_memory_s if ours else known.restore_disk_s
    notice = known.notice_s if ours else known.other_notice_s
    restart = known.ours_restart_s if ours else known.torchrun_restart_s
    now, useful, queue = 0.0, 0.0, list(failures)
    while now < seconds:
        ahead = next((one for one in queue if one.at > now), None)
        end = min(seconds, ahead.at if ahead is not None else seconds)
        trained = (end - now) * interval / (interval + save)
        if ahead is None or ahead.at >= seconds:
            return (useful + trained) / seconds * (1 - known.stragglers)
        useful += trained - trained % interval
        replaced = known.node_replaced_s if ahead.gpus > 1 else 0.0
        now = end + (notice if ahead.hang else 0.0) + restart + replaced + known.start_s + restore
        queue = [one for one in queue if one.at > ahead.at]
    return useful / seconds * (1 - known.stragglers)


def simulate(gpus: int, days: float, seeds: int, known: Assumptions) -> dict[str, float]:
    """Mode -> median goodput."""
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(seeds):
        failures = plan_failures(gpus, days, known, random.Random(seed))
        for mode in MODES:
            run = replicas_job if mode in ("allranks replicas", "torchft") else whole_job
            found[mode].append(run(gpus, days * 86400, failures, mode, known))
    return {mode: statistics.median(values) for mode, values in found.items()}


COLOURS = ("#2e9e5b", "#3f8fb5", "#e0a13a", "#cf4136")
LEFT, TOP, WIDE, HIGH = 60.0, 30.0, 560.0, 280.0


def draw(curves: dict[int, dict[str, float]], days: float, failures: dict[int, int]) -> str:
    """The curves as a picture: GPUs (logarithmic) against the share of useful time."""
    low = min(0.9, int(min(value for row in curves.values() for value in row.values()) * 20) / 20)
    least, most = math.log(min(curves)), math.log(max(curves))

    def x(gpus: int) -> float:
        return round(LEFT + WIDE * (math.log(gpus) - least) / max(most - least, 1e-9), 1)

    def y(share: float) -> float:
        return round(TOP + HIGH * (1 - share) / (1 - low), 1)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 370" font-family="sans-serif" font-size="12" role="img">',
        f"<title>Share of useful time in {days:g} simulated days</title>",
        '<rect width="800" height="370" fill="#fff"/>',
    ]
    for step in range(5):
        share = low + (1 - low) * step / 4
        parts.append(f'<path d="M{LEFT} {y(share)}h{WIDE}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(share) + 4}" text-anchor="end">{share:.1%}</text>')
    for gpus in curves:
        parts.append(f'<text x="{x(gpus)}" y="{TOP + HIGH + 18}" text-anchor="middle">{gpus:,}</text>')
        note = count(failures[gpus], "failure")
        parts.append(
            f'<text x="{x(gpus)}" y="{TOP + HIGH + 33}" text-anchor="middle" fill="#888" font-size="9">{note}</text>'
        )
    parts.append(f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 50}" text-anchor="middle">GPUs</text>')
    last = max(curves)
    ends = sorted((y(curves[last][mode]), mode) for mode in MODES)
    places: list[float] = []
    for at, _ in ends:
        places.append(max(at, places[-1] + 15) if places else at)
    for colour, mode in zip(COLOURS, MODES, strict=True):
        line = " ".join(f"{x(gpus)},{y(row[mode])}" for gpus, row in curves.items())
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        at = next(place for place, (_, name) in zip(places, ends, strict=True) if name == mode)
        text = f"{mode} {curves[last][mode]:.1%}"
        parts.append(f'<text x="{LEFT + WIDE + 8}" y="{at + 4}" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[100, 1000, 4096, 16384, 32768, 100_000])
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--start-s", type=float, default=Assumptions.start_s)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    known = replace(Assumptions(), start_s=args.start_s)
    print(f"{'GPUs':>8} {'failures':>9} " + " ".join(f"{mode:>18}" for mode in MODES))
    numbers: dict[str, object] = {"assumptions": asdict(known), "days": args.days}
    curves: dict[int, dict[str, float]] = {}
    failures: dict[int, int] = {}
    for gpus in args.gpus:
        number = failures[gpus] = len(plan_failures(gpus, args.days, known, random.Random(0)))
        found = curves[gpus] = simulate(gpus, args.days, args.seeds, known)
        print(f"{gpus:>8,} {number:>9,} " + " ".join(f"{found[mode]:>18.2%}" for mode in MODES), flush=True)
        numbers[f"gpus_{gpus}"] = {mode.replace(" ", "_"): round(value, 5) for mode, value in found.items()}
    print(
        "\nAssumed or measured: " + ", ".join(f"{name} {value:.4g}" for name, value in asdict(known).items())
    )
    if args.svg is not None:
        args.svg.write_text(draw(curves, args.days, failures))
    if args.json is not None:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        body = {
            "command": "benchmarks/scale.py",
            "version": "0.3.0",
            "date": day,
            "name": "scale",
            "numbers": numbers,
        }
        args.json.write_text(
            json.dumps({**body, "machine": {"python": platform.python_version()}}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
