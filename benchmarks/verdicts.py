"""How often verdicts are right, by the confidence they state: kinds of hang x variants of ranks, files, rings and recorders.

    python benchmarks/verdicts.py [--quick] [--json] [--recorded FOLDER]

Kinds: every script of examples/hangs as a real gloo job, and jobs of many groups with a planted fault (tests/diagnose/histories.py).
The black boxes of the scripts are those of tests/diagnose/recorded; with --recorded the scripts run, and FOLDER keeps what they leave. Variants of each: ranks renumbered, files in another order,
short rings, other clocks, times unknown, what torch's recorder keeps, no stacks, no step marks, files of guilty or innocent
ranks missing. A verdict is right when it names the
guilty ranks and a cause of the truth; where the file of a guilty rank is missing, the ranks count. A healthy job is right when
nobody is blamed. `benchmarks/verdicts.txt` is the output that docs/understand/verdicts.md quotes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import RankNow
from allranks.model.trace import Progress, RankTrace

ROOT = Path(__file__).resolve().parents[1]
BUCKETS = (0.0, 0.4, 0.6, 0.8, 0.9, 1.01)
#: How long a recorded hang has lasted when it is judged.
LATER_NS = 20 * 10**9
#: Kinds of the gallery that a quick run records.
QUICK = (
    *("stuck_before_all_reduce", "nan_skip", "fsdp_skipped_module", "async_save_beside_ddp", "message_tags"),
    *("wrong_peer", "reduce_sizes", "group_left_out", "same_call_on_rank_0", "ok_training"),
)


@dataclass(frozen=True)
class Case:
    """One job with its truth."""

    kind: str
    traces: list[RankTrace]
    causes: tuple[str, ...]
    ranks: tuple[int, ...]
    now_ns: int = 0
    ended: bool = False
    seen: tuple[RankNow, ...] = ()
    any_cause: bool = False


def archived(quick: bool) -> Iterator[Case]:
    """The scripts of the gallery, as the tests have them."""
    sys.path.insert(0, str(ROOT))
    tests = importlib.import_module("tests.diagnose.test_recorded")
    for name in tests.NAMES:
        if not quick or name in QUICK:
            facts, traces = tests._read(name)
            yield _of_boxes(name, tests.TRUTH[name], list(traces), facts)


def _of_boxes(name: str, case: Any, traces: list[RankTrace], facts: dict[str, Any]) -> Case:
    seen = tuple(RankNow(rank, "gone", "", "its process is gone") for rank in facts["gone"])
    later = facts["now_ns"] + LATER_NS if facts["now_ns"] else 0  # nothing moves any more
    return Case(name, traces, case.causes, case.ranks, later, not later, seen)


def recorded(folder: Path, quick: bool) -> Iterator[Case]:
    """The scripts of the gallery, run once."""
    sys.path.insert(0, str(ROOT / "examples" / "hangs"))
    gallery = importlib.import_module("gallery")
    loaded = False
    for name, case in gallery.truth().items():
        if quick and name not in QUICK:
            continue
        boxes, note = folder / name, folder / f"{name}.json"
        if not note.exists():
            if not loaded:
                gallery.preload()
                loaded = True
            with tempfile.TemporaryDirectory(prefix="allranks-verdicts-") as live:
                outcome = gallery.run_hang(case, Path(live, name), boxes)
            note.write_text(
                json.dumps({"now_ns": outcome.now_ns, "gone": [now.rank for now in outcome.seen]})
            )
        yield _of_boxes(name, case, load_paths([str(boxes)]).traces, json.loads(note.read_text()))


def generated(quick: bool) -> Iterator[Case]:
    """Jobs of several groups with one planted fault, as three recorders see them."""
    sys.path.insert(0, str(ROOT))
    properties = importlib.import_module("tests.diagnose.test_properties")
    histories = importlib.import_module("tests.diagnose.histories")
    for kind in properties.PLANTS:
        for seed in range(4 if quick else 12):
            world, answer = properties.plant(kind, random.Random(f"verdicts {kind} {seed}"))
            flavour = f"{world.flavour.backend}{'_ahead' if world.flavour.ahead else ''}"
            causes, ranks = ((answer[0],), answer[1]) if answer else ((), ())
            yield Case(f"planted_{kind}_{flavour}", histories.on_shared_tables(world.traces()), causes, ranks)


def variants(case: Case, rng: random.Random) -> Iterator[tuple[str, Case]]:
    """The case itself, and what else its files might have looked like."""
    yield "as it is", case
    for _ in range(3):
        yield "renumbered", _renumbered(case, rng)
        shuffled = rng.sample(case.traces, len(case.traces))
        yield "other order", replace(case, traces=shuffled)
    for length in (4, 8, 16):
        yield f"ring of {length}", replace(case, traces=[_cut(trace, length) for trace in case.traces])
        uneven = [_cut(trace, length + rng.randrange(8)) for trace in case.traces]
        yield "uneven rings", replace(case, traces=uneven)
    yield (
        "clocks differ",
        replace(case, traces=[_moved(trace, rng.uniform(-0.5, 0.5)) for trace in case.traces]),
    )
    yield "time unknown", replace(case, now_ns=0, ended=False)
    yield (
        "as a Flight Recorder dump",
        replace(case, traces=[_as_dump(trace) for trace in case.traces], now_ns=0),
    )
    yield "no stacks", replace(case, traces=[_without(trace, "stack") for trace in case.traces])
    yield "no step marks", replace(case, traces=[_unmarked(trace) for trace in case.traces])
    innocent = [t.header.rank for t in case.traces if t.header.rank not in case.ranks]
    for rank in innocent[:2]:
        yield "an innocent's file is missing", _lost(case, rank)
    if len(innocent) > 2:
        yield "two innocents' files are missing", _lost(_lost(case, innocent[0]), innocent[1])
    for rank in case.ranks[:1] if len(case.traces) > 2 else ():
        yield "a guilty rank's file is missing", replace(_lost(case, rank), any_cause=True)


def _cut(trace: RankTrace, length: int) -> RankTrace:
    dropped = max(0, len(trace.calls) - length)
    header = replace(trace.header, dropped=trace.header.dropped + dropped)
    return replace(trace, calls=trace.calls[dropped:], header=header)


def _without(trace: RankTrace, column: str) -> RankTrace:
    calls = trace.calls.copy()
    calls[column] = 0
    return replace(trace, calls=calls)


def _moved(trace: RankTrace, by_s: float) -> RankTrace:
    """The trace of a rank whose clock differs."""
    calls = trace.calls.copy()
    for column in ("created_ns", "started_ns", "completed_ns"):
        calls[column][calls[column] > 0] += int(by_s * 1e9)
    return replace(trace, calls=calls)


def _as_dump(trace: RankTrace) -> RankTrace:
    """What torch's own recorder would have kept: no roots, reduce operations, tags, splits, steps, and no progress."""
    calls = trace.calls.copy()
    for column, unknown in (("root", -1), ("tag", -1), ("step", -1), ("reduce_op", 0), ("label", 0)):
        calls[column] = unknown
    shapes = tuple(replace(each, input_splits=(), output_splits=()) for each in trace.shapes)
    header = replace(trace.header, written_ns=0)
    return replace(
        trace,
        calls=calls,
        shapes=shapes,
        header=header,
        progress=Progress(),
        destroyed={},
        kind="torch pickle 2.10",
    )


def _unmarked(trace: RankTrace) -> RankTrace:
    calls = trace.calls.copy()
    calls["step"] = -1
    return replace(trace, calls=calls)


def _lost(case: Case, rank: int | None) -> Case:
    return replace(
        case,
        traces=[t for t in case.traces if t.header.rank != rank],
        seen=tuple(n for n in case.seen if n.rank != rank),
    )


def _renumbered(case: Case, rng: random.Random) -> Case:
    world = max(
        [(t.header.world_size or 0) for t in case.traces] + [(t.header.rank or 0) + 1 for t in case.traces]
    )
    new = rng.sample(range(world), world)
    table = np.array([*new, -1], np.int32)  # index -1: none
    traces = []
    for trace in case.traces:
        calls = trace.calls.copy()
        for column in ("peer", "root"):
            known = np.where((calls[column] >= 0) & (calls[column] < world), calls[column], -1)
            calls[column] = table[known]
        groups = tuple(replace(group, ranks=tuple(new[r] for r in group.ranks)) for group in trace.groups)
        header = replace(trace.header, rank=new[trace.header.rank or 0])
        closed = re.sub(r"(?<=ank )\d+", lambda found: str(new[int(found[0])]), trace.progress.closed)
        progress = replace(trace.progress, closed=closed)
        traces.append(replace(trace, calls=calls, groups=groups, header=header, progress=progress))
    seen = tuple(replace(now, rank=new[now.rank]) for now in case.seen)
    return replace(case, traces=traces, ranks=tuple(sorted(new[r] for r in case.ranks)), seen=seen)


def judge(case: Case) -> tuple[float, bool, str]:
    """(stated confidence, whether it is right, what was said); confidence -1: nothing was said."""
    options = DiagnoseOptions(now_ns=case.now_ns, ended=case.ended)
    result = diagnose(case.traces, (), stacks=case.seen, options=options)
    verdict = result.verdict
    if verdict is None:
        return -1.0, not case.causes, "nothing wrong"
    if not case.causes:
        return verdict.confidence, False, verdict.sentence
    right = verdict.ranks == case.ranks and (case.any_cause or verdict.cause in case.causes)
    return verdict.confidence, right, f"{verdict.cause} {verdict.ranks} {verdict.sentence}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ten recorded kinds and fewer generated jobs")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument(
        "--recorded", type=Path, metavar="FOLDER", help="run the scripts, and keep their black boxes here"
    )
    parser.add_argument("--wrong", action="store_true", help="also list every wrong verdict")
    args = parser.parse_args()
    if args.recorded:
        args.recorded.mkdir(parents=True, exist_ok=True)
    scripts = recorded(args.recorded, args.quick) if args.recorded else archived(args.quick)
    cases = [*scripts, *generated(args.quick)]
    held: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    rng = random.Random(7)
    for case in cases:
        for variant, changed in variants(case, rng):
            confidence, right, said = judge(changed)
            held[variant].append((confidence, right))
            if args.wrong and not right:
                print(
                    f"{case.kind} ({variant}): {confidence} {said}   truth {changed.causes} {changed.ranks}"
                )
    return report(held, len({case.kind for case in cases}), args.json)


def report(held: dict[str, list[tuple[float, bool]]], kinds: int, as_json: bool) -> int:
    """The two tables: by variant, and by stated confidence."""
    every = [one for found in held.values() for one in found]
    print(f"{kinds} kinds, {len(every):,} verdicts")
    print(f"{'variant':34} {'verdicts':>9} {'right':>7} {'silent':>7}")
    for variant, found in held.items():
        right, silent = sum(r for _, r in found), sum(c < 0 and not r for c, r in found)
        print(f"{variant:34} {len(found):9,} {right / len(found):7.1%} {silent / len(found):7.1%}")
    print(f"{'stated confidence':34} {'verdicts':>9} {'right':>7}")
    numbers: dict[str, Any] = {"kinds": kinds, "verdicts": len(every)}
    ratios: dict[str, float] = {}
    for low, high in itertools.pairwise(BUCKETS):
        inside = [right for confidence, right in every if low <= confidence < high]
        if inside:
            name = f"{low:.0%} to {min(high, 1):.0%}"
            print(f"{name:34} {len(inside):9,} {sum(inside) / len(inside):7.1%}")
            ratios[f"right at {name}"] = round(sum(inside) / len(inside), 4)
            numbers[f"verdicts at {name}"] = len(inside)
    whole = [right for _, right in held["as it is"]]
    ratios["right with all files"] = round(sum(whole) / len(whole), 4)
    if as_json:
        machine = {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
        print(json.dumps({"name": "verdicts", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
