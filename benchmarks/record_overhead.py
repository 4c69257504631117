"""What recording costs: per collective and per DDP step, against torch's own recorder and none; and what reading costs.

    python benchmarks/record_overhead.py [--quick] [--json]

Two gloo ranks reduce 4 bytes; short blocks with and without a recorder alternate in the same process, and the
cheapest block of each kind counts: the one that nothing else disturbed. Cost is CPU time of the calling thread, which other load on the machine disturbs least;
process CPU time stands beside it. The same over torch's fake backend shows the recorder alone: on a busy machine
gloo's own cost varies by more than the recorder adds. torch's own recorder cannot be switched in a running process: it is measured in
ranks of its own, against the same ranks' baseline without it. What recording adds to a call
that DDP's C++ reducer makes is measured on a tiny model and set against the step of a real one. Reading compares one load of N black boxes with unpickling the same records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once here, not once in every forked rank
import torch.distributed as dist
from torch import nn

import allranks
from allranks.model.blackbox import Item
from allranks.model.torch_dump import to_torch_pickle
from allranks.record.box import Box
from allranks.record.read import read_trace
from allranks.record.ring import make_ring
from allranks.testing.ranks import Ranks

KINDS = ("none", "ours", "ours with stacks")
DEPTH = 8  # user frames on the stack of every call


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="within a minute")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="allranks-bench-", dir=_memory()) as folder:
        os.environ["ALLRANKS_DIR"] = folder
        numbers = measure(args.quick, Path(folder))
    result = {"name": "record_overhead", "ratios": ratios(numbers), "numbers": numbers, "machine": machine()}
    show(result)
    if args.json:
        print(json.dumps(result))
    return 0


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """Every number, in microseconds of CPU unless its name says otherwise."""
    rounds, calls = (60, 100) if quick else (600, 100)
    numbers: dict[str, float] = {}
    for engine in ("c", "python"):
        found = _in_ranks(all_reduces, (rounds, calls), engine=engine, native=False)
        if engine == "c":
            numbers |= {f"all_reduce {kind}": cost["thread"] for kind, cost in found.items()}
            numbers |= {f"all_reduce {kind} (process)": cost["process"] for kind, cost in found.items()}
        suffix = "" if engine == "c" else " (pure Python)"
        for kind in KINDS[1:]:
            numbers[f"added by {kind}{suffix}"] = found[kind]["thread"] - found["none"]["thread"]
    alone = _in_ranks(alone_all_reduces, (rounds, calls), engine="c", native=False, backend=None)
    for kind in KINDS[1:]:
        numbers[f"added by {kind}, no communication"] = alone[kind]["thread"] - alone["none"]["thread"]
    native = _in_ranks(all_reduces, (rounds, calls, ("none",)), engine="c", native=True)
    off = _in_ranks(all_reduces, (rounds, calls, ("none",)), engine="c", native=False)
    numbers["added by torch's own recorder"] = native["none"]["thread"] - off["none"]["thread"]
    numbers["added by torch's own recorder (process)"] = native["none"]["process"] - off["none"]["process"]
    numbers |= _in_ranks(ddp_steps, (25 if quick else 200,), engine="c", native=False)
    numbers |= reading(150 if quick else 1000, folder)
    return numbers


def ratios(numbers: dict[str, float]) -> dict[str, float]:
    """What a goal can be held against; below 1 is within the goal for the first three."""
    found = {
        "added without stacks / 3 us": numbers["added by ours"] / 3.0,
        "added with 8-frame stacks / 6 us": numbers["added by ours with stacks"] / 6.0,
        "added without stacks, no communication / 3 us": numbers["added by ours, no communication"] / 3.0,
        "added with 8-frame stacks, no communication / 6 us": (
            numbers["added by ours with stacks, no communication"] / 6.0
        ),
        "share of a DDP step / 1 %": numbers["share of a DDP step (%)"] / 1.0,
        "reading: unpickling / black box": numbers["unpickle one rank"]
        / numbers["read one rank's black box"],
    }
    native = numbers["added by torch's own recorder"]
    if native > 0:
        found["ours with stacks / torch's own"] = numbers["added by ours with stacks"] / native
    return {name: round(value, 3) for name, value in found.items()}


# -- in a rank ------------------------------------------------------------------------------------------------------


def _in_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    engine: str,
    native: bool,
    backend: str | None = "gloo",
) -> dict[str, Any]:
    env = {
        "TORCH_FR_BUFFER_SIZE": "2000" if native else "0",
        "ALLRANKS_BUFFER_SIZE": "2000",
        "ALLRANKS_PURE_PYTHON": "1" if engine == "python" else "0",
        "OMP_NUM_THREADS": "1",
    }
    with Ranks(function, 2, args, backend=backend, env=env, timeout_s=120) as ranks:
        found: dict[str, Any] = ranks.values(timeout_s=600)[0]
        return found


def all_reduces(
    rank: int, world: int, rounds: int, calls: int, kinds: tuple[str, ...] = KINDS
) -> dict[str, Any]:
    """The smallest cost of a call over all rounds, by kind of recording."""
    warnings.simplefilter("ignore")
    tensor = torch.ones(1)
    best = {kind: {"thread": float("inf"), "process": float("inf")} for kind in kinds}
    for number in range(rounds):
        for kind in kinds if number % 2 else reversed(kinds):
            recorder = None if kind == "none" else allranks.record(stack_depth=8 if "stacks" in kind else 0)
            _deep(DEPTH, tensor, 20)
            thread, process = time.thread_time_ns(), time.process_time_ns()
            _deep(DEPTH, tensor, calls)
            thread, process = time.thread_time_ns() - thread, time.process_time_ns() - process
            if recorder is not None:
                path = recorder.path
                recorder.close()
                with contextlib.suppress(OSError):
                    os.unlink(path or "")
            dist.barrier()
            best[kind]["thread"] = min(best[kind]["thread"], thread / calls / 1000)
            best[kind]["process"] = min(best[kind]["process"], process / calls / 1000)
    return best


def alone_all_reduces(rank: int, world: int, rounds: int, calls: int) -> dict[str, Any]:
    """The same over torch's fake backend, which communicates nothing: what is left is the recorder."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    return all_reduces(rank, world, rounds, calls)


def _deep(depth: int, tensor: torch.Tensor, calls: int) -> None:
    """Calls from the bottom of a stack of `depth` user frames."""
    if depth > 1:
        _deep(depth - 1, tensor, calls)
        return
    for _ in range(calls):
        dist.all_reduce(tensor)


class Block(nn.Module):
    """A small transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def ddp_steps(rank: int, world: int, steps: int) -> dict[str, float]:
    """What recording adds to a call that DDP's C++ reducer makes, and what share of a real model's step that is.

    A step of a real model is a thousand times longer than what recording adds, so the difference of two such steps
    is mostly noise. The cost of a call is therefore measured on a model so small that it shows, in many short blocks;
    the share follows from the calls that a step of the real model makes. The direct difference stands beside it.
    """
    torch.set_num_threads(1)
    plain, plain_tiny = _model(), _tiny()
    recorder = allranks.record()
    recorded, recorded_tiny = _model(), _tiny()
    assert recorder.writer is not None
    counted = recorder.writer.box.get
    row = torch.ones(1, 8)
    tiny = _compare(plain_tiny, recorded_tiny, row, blocks=4 * steps, steps=10, pick=min)
    before = counted("next_id")
    recorded_tiny(row).sum().backward()
    added = (tiny["recorded"] - tiny["plain"]) / (counted("next_id") - before)
    data = torch.randn(8, 64, 128)
    before = counted("next_id")
    real = _compare(plain, recorded, data, blocks=steps, steps=1, pick=statistics.median)
    calls = (counted("next_id") - before) / steps
    return {
        "DDP step": real["plain"],
        "calls per DDP step": calls,
        "added by ours with stacks to a call of DDP": added,
        "share of a DDP step (%)": 100 * added * calls / real["plain"],
        "difference of two DDP steps (%), noisy": 100 * (real["recorded"] / real["plain"] - 1),
    }


def _compare(
    plain: nn.Module,
    recorded: nn.Module,
    data: torch.Tensor,
    *,
    blocks: int,
    steps: int,
    pick: Callable[..., float],
) -> dict[str, float]:
    """CPU microseconds of a step of each, in turn."""
    took: dict[str, list[float]] = {"plain": [], "recorded": []}
    for number in range(blocks):
        for name, model in (("plain", plain), ("recorded", recorded))[:: 1 if number % 2 else -1]:
            begin = time.process_time_ns()
            for _ in range(steps):
                model(data).square().mean().backward()
            took[name].append((time.process_time_ns() - begin) / steps / 1000)
    return {name: pick(values) for name, values in took.items()}


def _tiny() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(8, 1, bias=False))


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(*[Block(128) for _ in range(4)])
    return nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)


# -- reading --------------------------------------------------------------------------------------------------------


def reading(ranks: int, folder: Path) -> dict[str, float]:
    """CPU microseconds per rank: one load of all boxes, against unpickling the same records from files."""
    from allranks.load import load_paths

    boxes, pickles = folder / "boxes", folder / "pickles"
    pickles.mkdir()
    for rank in range(ranks):
        path = _fill(boxes / f"job.a0.r{rank}.p{rank + 1}.box", rank, ranks)
        if rank == 0:
            data = to_torch_pickle(read_trace(path))
        if rank < 40:
            (pickles / f"trace_{rank}").write_bytes(data)
    box_us = _best(lambda: load_paths([str(boxes)]), 3) / ranks
    some = range(min(ranks, 40))  # one rank's pickle costs as much as another's
    pickle_us = _best(lambda: [_unpickle(pickles / f"trace_{rank}") for rank in some], 3) / len(some)
    return {"read one rank's black box": box_us, "unpickle one rank": pickle_us, "ranks read": float(ranks)}


def _unpickle(path: Path) -> int:
    with path.open("rb") as file:
        return len(pickle.load(file)["entries"])


def _fill(path: Path, rank: int, world: int) -> Path:
    """A full ring of 2,000 records: 4 groups, 3 ops, 19 sizes, 40 stacks of 8 frames."""
    box = Box(path, 2000, 1 << 18)
    box.open()
    box.set(rank=rank, world_size=world, pid=rank + 1, start_ns=time.time_ns())
    box.append(Item.META, {"host": "node", "job": "job", "backend": "nccl", "versions": {}, "argv": []})
    for group in range(4):
        box.append(Item.GROUP, [str(group), f"mesh_{group}", list(range(64)), "nccl"])
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    ops = [box.intern(Item.NAME, name) for name in names]
    sizes = [
        (
            box.intern(Item.SHAPES, [[[n, 4096]], [[n, 4096]], ["BFloat16"], ["BFloat16"], [], []]),
            n * 4096,
            n * 4096,
        )
        for n in range(1, 20)
    ]
    stacks = [
        box.intern(
            Item.STACK,
            [[f"function_{k}_{i}", f"/project/package/module_{i}.py", 10 * k + i] for i in range(8)],
        )
        for k in range(40)
    ]
    ring = make_ring(box, True)
    for n in range(2300):
        number = ring.begin(
            n % 4 + 1, ops[n % 3], sizes[n % 19], stacks[n % 40], n // 4, 0, n, 600_000, 1, -1, -1, 0
        )
        ring.started(number)
        ring.finish(number, 2)
    ring.release()
    box.say_goodbye("exit", time.time_ns())
    box.close()
    return path


def _best(do: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        begin = time.process_time_ns()
        do()
        best = min(best, (time.process_time_ns() - begin) / 1000)
    return best


# -- telling --------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    for name, value in result["numbers"].items():
        print(f"{name:48} {value:12.2f}")
    print()
    for name, value in result["ratios"].items():
        print(f"{name:48} {value:12.3f}")


def machine() -> dict[str, Any]:
    try:
        from allranks.record import _fast  # noqa: F401

        engine = "c"
    except ImportError:
        engine = "python"
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "engine": engine,
    }


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    raise SystemExit(main())
