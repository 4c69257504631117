"""What the recorder itself costs for each form of a call: around functions that do nothing, in one process, with warm caches.

    benchmarks/record_forms.py [--json]

Microseconds of CPU per call (per start and end of a batch) with stacks: the least of 15 blocks of 3,000, each beside a block
without the recorder; read in C, and in Python, as calls in an unusual form are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

CALLS_IN_BLOCK, BLOCKS = 3000, 15


def nothing(*args: object) -> None:
    """Stands for torch."""


def block_us(calls: list[Callable[..., object]], args: tuple[Any, ...]) -> float:
    """CPU of one pass over the calls."""
    begin = time.thread_time_ns()
    for _ in range(CALLS_IN_BLOCK):
        for call in calls:
            call(*args)
    return (time.thread_time_ns() - begin) / CALLS_IN_BLOCK / 1000


def cost_us(calls: list[Callable[..., object]], *args: Any) -> float:
    plain: list[Callable[..., object]] = [nothing] * len(calls)
    return min(block_us(calls, args) - block_us(plain, args) for _ in range(BLOCKS))


def measure() -> dict[str, dict[str, float]]:
    """form -> {"C", "Python"}"""
    import allranks
    from allranks.recording import _fast
    from allranks.recording import torch_internals as internals

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, tensor, halves = dist.group.WORLD, torch.ones(1), [torch.ones(1), torch.ones(1)]
    hook = allranks.record(stack_depth=8)._hook
    assert hook is not None
    dist.all_reduce(tensor)  # the group is known from now on
    forms: dict[str, tuple[str, tuple[Any, ...]]] = {
        "all_reduce": ("allreduce", ([tensor], c10d.AllreduceOptions())),
        "all_gather of two tensors in a list": ("allgather", ([halves], [tensor], c10d.AllgatherOptions())),
    }
    found = {}
    form_of = internals.form_of
    for name, (method, args) in forms.items():
        costs = {}
        for kind, found_form in (("C", form_of), ("Python", lambda _: internals.READ_IN_PYTHON)):
            internals.form_of = found_form
            costs[kind] = cost_us([hook._collective(nothing, method)], group, *args)
        found[name] = costs
    pair = [
        _fast.Method(hook._recording, nothing, kind, 1) for kind in (_fast.BATCH_BEGIN, _fast.BATCH_CLOSE)
    ]
    found["start and end of a batch"] = {"C": cost_us(pair, group)}
    return found


def main() -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ALLRANKS_DIR"] = folder
        found = measure()
        dist.destroy_process_group()
    if args.json:
        print(json.dumps({"name": "record_forms", "numbers": found}))
        return 0
    for name, kinds in found.items():
        print(f"{name:<40}{', '.join(f'{us:.2f} us in {where}' for where, us in kinds.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
