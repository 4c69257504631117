"""What recording costs: per collective and per DDP step, against torch's own recorder and none; and what reading costs.

    python benchmarks/record_overhead.py [--quick] [--json]

Two gloo ranks reduce 4 bytes. Short blocks of calls without a recorder, with ours and with ours and stacks alternate
in the same processes; the cost of a kind is the median over the rounds of its difference to the block without a
recorder of the same round, so that what else the machine does falls on both. It is CPU time of the calling thread;
that of the whole process stands beside it. The same over torch's fake backend shows the recorder alone, with warm
caches. torch's own recorder cannot be switched in a running process: it is measured in ranks of its own, against the
same ranks' baseline without it.

DDP steps of a small transformer are measured directly: two models whose reducer is recorded and two whose reducer is
not take turns, step by step, in several sets of models; the share is the median over the sets, with its 95 % interval,
and how far the two plain models of a set are apart says what the measurement is worth. An interval that is too wide to
tell is not made a ratio. Beside it stands the share that follows from the cost
of one call of the reducer, measured on a model so small that it shows, and the calls of a step.

Reading compares one load of N black boxes with unpickling the same records.
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
import threading
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
from allranks.blackbox.file_writer import Box
from allranks.blackbox.layout import Item
from allranks.blackbox.reader import read_trace
from allranks.drill.ranks import Ranks
from allranks.model.torch_dump import to_torch_pickle
from allranks.recording._fast import Counters
from allranks.recording.writer import make_ring

KINDS = ("none", "ours", "ours with stacks")
DEPTH = 8  # user frames on the stack of every call
WARM_UP = 3  # steps of every DDP model that are not counted
TELLING = 2.0  # percent: a wider interval of the measured share says nothing about 1 %, and is not a ratio
CPU_SHARE, WALL_SHARE = "share of a DDP step (% of CPU)", "share of a DDP step (% of wall time)"


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
        begin = time.monotonic()
        numbers = measure(args.quick, Path(folder))
        numbers["seconds taken"] = time.monotonic() - begin
    result = {"name": "record_overhead", "ratios": ratios(numbers), "numbers": numbers, "machine": machine()}
    show(result)
    if args.json:
        print(json.dumps(result))
    return 0


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """Every number, in microseconds of CPU unless its name says otherwise."""
    rounds, calls = (80, 100) if quick else (500, 100)
    numbers: dict[str, float] = {}
    found = _in_ranks(all_reduces, (rounds, calls), native=False)
    numbers["all_reduce without a recorder"] = found["none"]["thread"]
    for kind in KINDS[1:]:
        numbers[f"added by {kind}"] = found[kind]["thread added"]
        numbers[f"added by {kind}, process"] = found[kind]["process added"]
        numbers[f"added by {kind}, cheapest blocks"] = found[kind]["thread"] - found["none"]["thread"]
    alone = _in_ranks(alone_all_reduces, (rounds // 2, calls), native=False, backend=None)
    for kind in KINDS[1:]:
        numbers[f"added by {kind}, no communication"] = alone[kind]["thread added"]
    native = _in_ranks(all_reduces, (rounds, calls, ("none",)), native=True)
    off = _in_ranks(all_reduces, (rounds, calls, ("none",)), native=False)
    numbers["added by torch's own recorder"] = native["none"]["thread"] - off["none"]["thread"]
    numbers["added by torch's own recorder, process"] = native["none"]["process"] - off["none"]["process"]
    numbers |= _in_ranks(ddp_steps, (6, 8) if quick else (25, 20), native=False)
    numbers |= reading(150 if quick else 1000, folder)
    return numbers


def ratios(numbers: dict[str, float]) -> dict[str, float]:
    """What a goal can be held against; below 1 is within the goal, but for reading, whose goal is 50."""
    found = {
        "added without stacks / 3 us": numbers["added by ours"] / 3.0,
        "added with 8-frame stacks / 6 us": numbers["added by ours with stacks"] / 6.0,
        "added without stacks, no communication / 3 us": numbers["added by ours, no communication"] / 3.0,
        "added with 8-frame stacks, no communication / 6 us": (
            numbers["added by ours with stacks, no communication"] / 6.0
        ),
        "share of a DDP step, from its calls / 1 %": numbers["share of a DDP step, from its calls (%)"],
        "reading: unpickling / black box": numbers["unpickle one rank"]
        / numbers["read one rank's black box"],
    }
    if numbers[f"{CPU_SHARE}, 95 % to"] - numbers[f"{CPU_SHARE}, 95 % from"] < TELLING:
        found["share of a DDP step, measured / 1 %"] = numbers[CPU_SHARE]
    native = numbers["added by torch's own recorder"]
    if native > 0:
        found["ours with stacks / torch's own"] = numbers["added by ours with stacks"] / native
    return {name: round(value, 3) for name, value in found.items()}


# -- in a rank ------------------------------------------------------------------------------------------------------


def _in_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    native: bool,
    backend: str | None = "gloo",
) -> dict[str, Any]:
    env = {
        "TORCH_FR_BUFFER_SIZE": "2000" if native else "0",
        "ALLRANKS_BUFFER_SIZE": "2000",
        "OMP_NUM_THREADS": "1",
    }
    with Ranks(function, 2, args, backend=backend, env=env, timeout_s=120) as ranks:
        found: dict[str, Any] = ranks.values(timeout_s=600)[0]
        return found


def all_reduces(
    rank: int, world: int, rounds: int, calls: int, kinds: tuple[str, ...] = KINDS
) -> dict[str, Any]:
    """By kind of recording: the cheapest block's cost of a call, and the median of what it adds to "none"."""
    warnings.simplefilter("ignore")
    tensor = torch.ones(1)
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
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
            took[kind].append((thread / calls / 1000, process / calls / 1000))
    return {kind: _costs(took[kind], took["none"]) for kind in kinds}


def _costs(blocks: list[tuple[float, float]], none: list[tuple[float, float]]) -> dict[str, float]:
    found = {}
    for index, name in enumerate(("thread", "process")):
        found[name] = min(block[index] for block in blocks)
        added = [block[index] - other[index] for block, other in zip(blocks, none, strict=True)]
        found[f"{name} added"] = statistics.median(added)
    return found


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


def ddp_steps(rank: int, world: int, groups: int, rounds: int) -> dict[str, float]:
    """What recording adds to DDP steps: measured on the steps, and worked out from the cost of one call."""
    torch.set_num_threads(1)
    found = [_ddp_group(rounds) for _ in range(groups)]
    numbers = {name: statistics.median(one[name] for one in found) for name in found[0]}
    for name in (CPU_SHARE, WALL_SHARE):
        numbers[f"{name}, 95 % from"], numbers[f"{name}, 95 % to"] = _interval([one[name] for one in found])
    step, calls = numbers["DDP step"], numbers["calls per DDP step"]
    share = 100 * numbers["added by ours with stacks to a call of DDP"] * calls / step
    numbers["share of a DDP step, from its calls (%)"] = (
        share + numbers["recorder's side thread (% of a core)"]
    )
    return numbers


def _ddp_group(rounds: int) -> dict[str, float]:
    """One set of models: where they lie in memory makes as much of a difference as we look for, so there are many."""
    plain, plain_tiny = [_model(), _model()], _tiny()
    recorder = allranks.record()
    recorded, recorded_tiny = [_model(), _model()], _tiny()
    assert recorder.writer is not None
    counted = recorder.writer.box.get
    before, begin, side = counted("next_id"), time.monotonic(), _side_thread_s()
    steps = _take_turns([*plain, *recorded], torch.randn(8, 64, 128), rounds)
    calls = (counted("next_id") - before) / (len(recorded) * (rounds + WARM_UP))
    side_share = 100 * (_side_thread_s() - side) / (time.monotonic() - begin)
    tiny = _take_turns([plain_tiny, recorded_tiny], torch.ones(1, 8), 20 * rounds)
    recorder.close()
    return {
        "DDP step": statistics.median(min(turn[:2]) for turn in steps["cpu"]),
        "calls per DDP step": calls,
        "added by ours with stacks to a call of DDP": statistics.median(b - a for a, b in tiny["cpu"]),
        CPU_SHARE: statistics.median(100 * (sum(turn[2:]) / sum(turn[:2]) - 1) for turn in steps["cpu"]),
        WALL_SHARE: statistics.median(100 * (sum(turn[2:]) / sum(turn[:2]) - 1) for turn in steps["wall"]),
        "two plain DDP models differ by (% of CPU)": abs(
            statistics.median(100 * (turn[0] / turn[1] - 1) for turn in steps["cpu"])
        ),
        "recorder's side thread (% of a core)": side_share,
    }


def _take_turns(models: list[nn.Module], data: torch.Tensor, rounds: int) -> dict[str, list[list[float]]]:
    """Microseconds of one step of each model, round by round; who begins changes."""
    took: dict[str, list[list[float]]] = {"cpu": [], "wall": []}
    for number in range(-WARM_UP, rounds):
        cpu, wall = [0.0] * len(models), [0.0] * len(models)
        for turn in range(len(models)):
            index = (turn + number) % len(models) if number % 2 else (number - turn) % len(models)
            begin, begin_wall = time.process_time_ns(), time.perf_counter_ns()
            models[index](data).square().mean().backward()
            cpu[index] = (time.process_time_ns() - begin) / 1000
            wall[index] = (time.perf_counter_ns() - begin_wall) / 1000
        if number >= 0:
            took["cpu"].append(cpu)
            took["wall"].append(wall)
    return took


def _interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of their median, which assumes nothing about how the values are spread."""
    ordered = sorted(values)
    reach = 0.98 * len(ordered) ** 0.5
    low, high = int(len(ordered) / 2 - reach), int(len(ordered) / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def _side_thread_s() -> float:
    """CPU seconds of the recorder's side thread so far."""
    for thread in threading.enumerate():
        if thread.name == "allranks-recorder" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


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
    ring = make_ring(box)
    groups = [Counters(number, 600_000, True, (0, 1)) for number in range(1, 5)]
    for n in range(2300):
        number = ring.begin(groups[n % 4], ops[n % 3], sizes[n % 19], stacks[n % 40], False, 0, 1, -1, -1, -1)
        ring.started(number)
        ring.finish(number, 2)
    ring.release()
    box.mark_closed("exit", time.time_ns())
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
    if not any("measured" in name for name in result["ratios"]):
        print(
            "too much else runs here: steps of DDP differ by more than recording can add; see its 95 % interval"
        )
    for name, value in result["numbers"].items():
        print(f"{name:48} {value:12.2f}")
    print()
    for name, value in result["ratios"].items():
        print(f"{name:48} {value:12.3f}")


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    raise SystemExit(main())
