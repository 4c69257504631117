"""The tables of numbers in README.md and docs, from benchmarks/results/*.json (scripts/measure.py and the soak write those).

A table after `<!-- numbers: KIND -->` is written anew by scripts/docs.py; KINDS lists the kinds.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- numbers: (\w+) -->\n)((?:\|.*\n)*)")
Text = Callable[[Any], str]  # makes a cell from the numbers of a result


@dataclass(frozen=True)
class Row:
    """One line of the tables. `short` is what README calls it; "": it is not there."""

    result: str
    what: str
    ours: Text
    peer: Text
    short: str = ""


TORCHS_RING = "added by torch's own recorder"


def _torchft(name: str, unit: str) -> str:
    """torchft cannot be installed on every machine: one kept result stands beside ours."""
    found = _read("torchft")
    return f"torchft {found['numbers'][name]:g} {unit}" if found else "–"


def _best_dcp(numbers: Any, what: str) -> float:
    saves = numbers["2048mb"]["saves"]
    return min(entry[what] for name, entry in saves.items() if name.startswith("dcp"))


def _torchfrtrace(world: Any) -> str:
    peer = f"torchfrtrace {world['torchfrtrace']['cpu_s']:.1f} s, " if "torchfrtrace" in world else ""
    return f"{peer}unpickling alone {world['floor_cpu_s']:.1f} s"


def _verdict(ranks: str) -> Row:
    what = f"verdict on {int(ranks):,} ranks × 2,000 calls, CPU: pickles / black boxes"
    return Row(
        "diagnose",
        what,
        lambda n: (
            f"{n['ranks'][ranks]['pickles']['cpu_s']:.1f} / {n['ranks'][ranks]['boxes']['cpu_s']:.2f} s"
        ),
        lambda n: _torchfrtrace(n["ranks"][ranks]),
        short=what if ranks == "256" else "",
    )


ROWS = (
    Row(
        "recovery",
        "kill -9 of a replica until the next committed step (worst round)",
        lambda n: f"{n['allranks_kill_s']:.3f} s ({n['allranks_kill_worst_s']:.3f})",
        lambda n: _torchft("kill_s", "s"),
        short="kill -9 of a replica until the next committed step",
    ),
    Row(
        "recovery",
        "clean exit of a replica until the next committed step",
        lambda n: f"{n['allranks_leave_s']:.3f} s",
        lambda n: _torchft("leave_s", "s"),
    ),
    Row(
        "recovery",
        "a step in replica mode: time added to plain DDP",
        lambda n: f"{n['step_allranks_ms'] - n['step_plain_ms']:.2f} ms of {n['step_plain_ms']:.2f}",
        lambda n: _torchft("step_over_plain_ms", "ms"),
    ),
    Row(
        "record_overhead",
        "recording one gloo all_reduce, without / with 8-frame stacks",
        lambda n: f"{n['added by ours']:.1f} / {n['added by ours with stacks']:.1f} µs",
        lambda n: f"torch's own ring {n[TORCHS_RING]:.1f} µs, lost with the process",
        short="recording one collective, without / with stacks",
    ),
    Row(
        "agent_cost",
        "CPU of agent and lighthouse, of the ranks' CPU: whole job / replicas",
        lambda n: f"{n['whole_job_percent']:.2f} / {n['replicas_percent']:.2f} %",
        lambda n: f"torchrun alone {n['torchrun_percent']:.2f} %",
    ),
    _verdict("256"),
    _verdict("1024"),
    Row(
        "checkpoint",
        "2 GB checkpoint: training time lost / until durable",
        lambda n: (
            f"{n['2048mb']['saves']['allranks']['lost_s']:.2f} / {n['2048mb']['saves']['allranks']['total_s']:.1f} s"
        ),
        lambda n: (
            f"DCP async_save at its best {_best_dcp(n, 'lost_s'):.2f} / {_best_dcp(n, 'total_s'):.1f} s, "
            f"raw write + fsync {n['2048mb']['raw_write_fsync_s']:.1f} s"
        ),
        short="2 GB checkpoint: training time lost / until durable",
    ),
    Row(
        "elastic",
        "rank killed until training continues, whole-job mode",
        lambda n: f"{n['kill_to_training_s']:.1f} s",
        lambda n: f"torchrun + torch.save {n['torchrun_kill_to_training_s']:.1f} s",
    ),
    Row(
        "unmodified",
        "eight unmodified programs that hang: noticed / verdict (median)",
        lambda n: (
            f"{statistics.median(n['noticed_s'].values()):.1f} / {statistics.median(n['verdict_s'].values()):.1f} s"
        ),
        lambda n: "torch's timeout 600 s",
    ),
    Row(
        "lighthouse",
        "kill -9 of a replica until every survivor is notified",
        lambda n: f"{n['kill_told_s'] * 1000:.0f} ms",
        lambda n: f"torchft {n['torchft_kill_told_s']:.2f} s",
    ),
    Row(
        "lighthouse",
        "quorum of 1,000 replicas",
        lambda n: f"{n['quorum_1000_s']:.2f} s",
        lambda n: f"torchft {n['torchft_quorum_1000_s']:.1f} s",
    ),
    Row(
        "unknown_clients",
        "lighthouse under 5,000 unauthenticated connections: memory / answer to members, p99",
        lambda n: f"{n['memory_mb']} MB / {n['answer_p99_ms']:.1f} ms",
        lambda n: f"without them {n['answer_p99_without_ms']:.1f} ms",
    ),
    Row(
        "startup",
        "`allranks --help`, best / median",
        lambda n: f"{n['help']['best_s'] * 1000:.0f} / {n['help']['median_s'] * 1000:.0f} ms",
        lambda n: (
            f"`python -c pass` {n['python']['best_s'] * 1000:.0f} / {n['python']['median_s'] * 1000:.0f} ms"
        ),
    ),
    Row(
        "job_page",
        "lighthouse CPU for one refresh of the job page, 1,024 ranks / replicas",
        lambda n: (
            f"{n['whole_refresh_ms']:.1f} / {n['replicas_refresh_ms']:.1f} ms, {n['replicas_bytes'] / 1000:.1f} kB"
        ),
        lambda n: "–",
    ),
    Row(
        "trace_size",
        "Perfetto trace of 256 ranks × 2,000 calls",
        lambda n: f"{n['perfetto_mb']:.1f} MB",
        lambda n: "–",
    ),
)


def with_numbers(text: str) -> str:
    """The text of a page with its tables of numbers written anew. A line whose benchmark has no kept result stays."""
    return TABLE.sub(lambda match: match[1] + "\n".join(KINDS[match[2]](match[3])) + "\n", text)


def _readme(before: str) -> Iterator[str]:
    yield from ("| | allranks | peer |", "|---|---|---|")
    for row in ROWS:
        if row.short and (result := _read(row.result)):
            ours = row.ours(result["numbers"]).partition(" (")[0]
            yield f"| {row.short} | {ours} | {row.peer(result['numbers'])} |"
        elif row.short:
            yield from (line for line in before.splitlines() if line.startswith(f"| {row.short} |"))


def _measured(before: str) -> Iterator[str]:
    yield from ("| what | allranks | for comparison | script | date |", "|---|---|---|---|---|")
    for row in ROWS:
        if result := _read(row.result):
            command = result["command"].removeprefix("benchmarks/").split(" ")[0]
            cells = (row.ours(result["numbers"]), row.peer(result["numbers"]), f"`{command}`", result["date"])
            yield f"| {' | '.join((row.what, *cells))} |"


def _gpu(before: str) -> Iterator[str]:
    """What scripts/gpu.sh measured on one GPU."""
    found = _read("gpu")
    first, date = found["first_contact"]["numbers"], found["first_contact"]["machine"]["date"]
    ours, peer = first["allranks"], first["torchft"]
    call, added, _ = next(iter(found["record"]["numbers"].values())).split(" / ")
    compiled = found["shapes"]["numbers"]["compiled"]
    saved = found["checkpoint"]["numbers"]

    def typical(name: str) -> str:
        return f"{statistics.median(ours[name]):.2f} s (worst {max(ours[name]):.2f})"

    yield from ("| what | allranks | for comparison | date |", "|---|---|---|---|")
    yield f"| kill -9 of one of three GPT-2 replicas until the next commit | {typical('kill_to_commit_s')} | torchft {peer['kill_to_commit_s'][0]:.0f} s | {date} |"
    yield f"| longest gap of the others when it returns | {typical('rejoin_gap_s')} | torchft {peer['rejoin_gap_s'][0]:.1f} s | {date} |"
    later = _read("gpu_torch215")
    kills = later["kills"]
    yield f"| torch 2.15 (nccl2), {kills['kills']} kills of one of four replicas: longest gap between commits | {kills['median_s']:.2f} s (worst {kills['worst_s']:.2f}) | equal bits, those of a training alone up to rounding | {kills['date']} |"
    storm = later["storm"]
    yield f"| torch 2.15 (nccl2), {storm['kills']} kills of five replicas at random moments in {storm['seconds'] / 60:.0f} minutes: longest gap | {max(storm['median_gaps_s']):.2f} s (worst {storm['longest_gaps_s'][0]:.2f}) | equal bits, no survivor ended | {later['date']} |"
    hangs = later["hangs"]["boxes"]
    yield f"| torch 2.15 (nccl2), {hangs['jobs']} hangs with calls queued on the GPU, by black boxes | rank {hangs['rank']}, cause {hangs['cause']}, line {hangs['line']} right | – | {later['date']} |"
    yield f"| recording one NCCL all_reduce: CPU added to the call | {added} µs | the call itself {call} µs | {date} |"
    yield f"| `torch.compile`d replicas: kill -9 until the next commit | {compiled['kill_to_commit_s']:.2f} s | equal bits after {compiled['steps']} steps | {date} |"
    yield f"| saving {saved['state_gb']} GB to disk every interval: time added to a step | {float(saved['nvme_lost_percent']):.1f} % | steps of {saved['nvme_step_ms']} ms | {found['checkpoint']['machine']['date']} |"


def _calibration(before: str) -> Iterator[str]:
    """How often a verdict of a stated confidence is right."""
    found = _read("verdicts")
    yield from ("| stated confidence | verdicts | right |", "|---|---|---|")
    for key, right in reversed(found["ratios"].items()):
        if span := re.fullmatch(r"right at (\d+)% to (\d+)%", key):
            low, high = span.groups()
            name = "90 % and more" if high == "100" else f"{low} to {high} %"
            name = 'below 40 % ("unclear")' if low == "0" else name
            yield f"| {name} | {found['numbers'][f'verdicts at {low}% to {high}%']:,} | {right:.1%} |"


def _reliability(before: str) -> Iterator[str]:
    """The last long runs, one line each."""
    soak, fuzz, healthy = _read("soak"), _read("fuzz"), _read("healthy")
    loop, runs = _read("loop_matrix")["numbers"], soak["numbers"]
    yield from ("| run | result | script | date |", "|---|---|---|---|")
    steps = runs["steps_of_replicas"] + runs["steps_of_whole_job"]
    yield (
        f"| soak: {runs['faults']:,} faults in {runs['minutes']} minutes and {steps:,} steps of real jobs | "
        f"{runs['violations']} promises broken; members changed within {runs['steps_with_changes']} steps | `make soak` | {soak['date']} |"
    )
    for name, where in (("gloo", "CPU"), ("nccl", "one H200")):
        one = loop[name]
        yield (
            f"| {one['cells']} injected hangs and deaths, {name}, {where} | right rank {one['right_rank']}, right cause "
            f"{one['right_cause']}, {one['false_alarms']} false alarms | `loop.py --matrix` | {_read('loop_matrix')['date']} |"
        )
    one = healthy["numbers"]
    yield f"| {one['jobs']} healthy jobs under load, {one['minutes']} minutes | {one['alarms']} alarms, {one['actions']} actions | `healthy.py` | {healthy['date']} |"
    pauses = _read("pauses")
    one = pauses["numbers"]
    yield (
        f"| {one['hangs']} hangs of 20 kinds, both modes | {one['named']} named, rank right in {one['rank_right']}, line in {one['rank_and_line_right']}; "
        f"after {one['certain_median_s']:.0f} s where it is certain, {one['by_time_median_s']:.0f} s by time | `pauses.py` | {pauses['date']} |"
    )
    yield f"| {one['pauses']} healthy pauses of 11 to 90 s, the same kinds | {one['pauses'] - one['pauses_right']} called a hang | `pauses.py` | {pauses['date']} |"
    readers = fuzz["numbers"].values()
    failed = sum(bool(reader["failed"]) for reader in readers)
    yield (
        f"| fuzzing: {len(readers)} readers, {max(reader['inputs'] for reader in readers):,} changed inputs each | {failed} failures, at most "
        f"{max(reader['memory_mb'] for reader in readers)} MB | `python -m tests.soak.fuzz` | {fuzz['date']} |"
    )


def _read(name: str) -> Any:
    """The result of a benchmark; None before it was measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


KINDS = {
    "readme": _readme,
    "measured": _measured,
    "gpu": _gpu,
    "calibration": _calibration,
    "reliability": _reliability,
}
