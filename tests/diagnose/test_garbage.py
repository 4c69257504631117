"""Rows of random numbers: whatever a damaged ring holds, there is an answer and a report."""

from __future__ import annotations

import random

import numpy as np

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.model.trace import CALL, Frame, Group, RankTrace, Shapes, TraceHeader
from allranks.report import as_json, html, perfetto, text

NAMES = (
    "",
    "all_reduce",
    "send",
    "recv",
    "coalesced",
    "all_to_all",
    "_all_gather_base",
    "broadcast",
    "odd\x00name",
)
SHAPES = (
    Shapes(),
    Shapes(((4,),), ((4,),), ("Float",), ("Float",)),
    Shapes(((2, -3),), (), ("?",)),
    Shapes(((1 << 40,),), ((0,),)),
)
STACKS = ((), (Frame("f", "a.py", 1),), (Frame("", "", -5), Frame("g", "<string>", 1 << 40)))
SMALL_EXTREMES = (0, 1, 2, -1, -(1 << 31), (1 << 31) - 1)
EXTREMES = (0, 1, 2, 3, 5, -1, -(1 << 62), (1 << 62), 10**18, 10**18 + 5)


def garbage(rng: random.Random, rank: int, world: int) -> RankTrace:
    """A trace whose references are valid, as the loader guarantees, and whose numbers are not."""
    rows = np.zeros(rng.randint(0, 12), CALL)
    for row in rows:
        for column in (
            "created_ns",
            "started_ns",
            "completed_ns",
            "seq",
            "p2p_seq",
            "op_id",
            "in_numel",
            "out_numel",
            "step",
        ):
            row[column] = rng.choice(EXTREMES)
        row["timeout_ms"], row["tag"] = rng.choice(SMALL_EXTREMES), rng.choice(SMALL_EXTREMES)
        row["seq"] = rng.choice((1, 2, 3, 4, 5, -1, 1 << 62)) if rng.random() < 0.9 else rng.choice(EXTREMES)
        row["begin"] = row["end"] = rng.choice((1, 2, 77))
        row["group"], row["op"] = rng.randrange(3), rng.randrange(len(NAMES))
        row["shapes"], row["stack"] = rng.randrange(len(SHAPES)), rng.randrange(len(STACKS))
        row["peer"], row["root"] = rng.choice((-1, 0, 1, 5, 1 << 30)), rng.choice((-1, 0, 1, 1 << 30))
        row["state"], row["flags"], row["reduce_op"] = rng.randrange(8), rng.randrange(128), rng.randrange(40)
    groups = (
        Group(""),
        Group("0", "default_pg", tuple(range(world)) if rng.random() < 0.7 else ()),
        Group("", "x", (0, 1, 1 << 20)[: rng.randint(0, 3)]),
    )
    header = TraceHeader(
        rank=rank,
        world_size=rng.choice((None, world)),
        dropped=rng.choice((0, 9)),
        written_ns=rng.choice((0, 10**18)),
    )
    return RankTrace(
        header, rows, groups, NAMES, SHAPES, STACKS, kind=rng.choice(("black box 1", "torch pickle 2.10"))
    )


def test_random_rows_never_break_diagnosis_or_report() -> None:
    """No exception, and every rendering comes to its end."""
    for seed in range(250):
        rng = random.Random(seed)
        world = rng.randint(1, 5)
        traces = [garbage(rng, rank, world) for rank in range(world) if rng.random() < 0.9]
        result = diagnose(traces, options=DiagnoseOptions(now_ns=rng.choice((0, 10**18 + 10**10))))
        list(text.render(result, text.TextOptions(verbose=True, full_stacks=True)))
        as_json.render(result)
        list(text.render_entries(traces, with_stacks=True))
        list(perfetto.render(result, traces))
        if seed % 5 == 0:
            list(html.render(result, traces))
