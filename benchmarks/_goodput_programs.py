"""Small real training programs for benchmarks/goodput.py: DDP, FSDP2, pipeline, tensor and expert parallel, on CPU with gloo.

Computing is a sleep, so that many jobs share a few cores. Four ranks. `--cause` plants a delay: one slow rank, a data loader
that stalls ranks at random, garbage collection, inputs of different length, a heavy pipeline stage. With `--noise`,
`--eval-every`, `--save-every` and `--inputs` the job is as uneven as healthy ones are. Rank 0 prints `STEP_S seconds steps`.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import allranks

WIDTH, LAYERS, MICROBATCHES = 16, 2, 4


class Pace:
    """How long this rank computes in the current step; a fixed part of it in each piece of work."""

    step_s = 0.0
    pieces = 1

    @classmethod
    def work(cls) -> None:
        time.sleep(cls.step_s / cls.pieces)


class Work(torch.autograd.Function):
    """Computes (sleeps) in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        Pace.work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        Pace.work()
        return grads[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Work.apply(self.second(torch.relu(self.first(x))))
        return found


Step = Callable[[float], None]  # with the relative length of this rank's input


def ddp() -> Step:
    Pace.pieces = 2 * LAYERS
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(Layer() for _ in range(LAYERS))), bucket_cap_mb=1
    )
    return _trainer(model)


def fsdp() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    Pace.pieces = 2 * LAYERS
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trainer(model)


def tensor() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    Pace.pieces = 2 * LAYERS
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    styles = {"first": ColwiseParallel, "second": RowwiseParallel}
    plan = {f"{n}.{part}": style() for n in range(LAYERS) for part, style in styles.items()}
    parallelize_module(model, mesh["tensor"], plan)
    data = mesh.get_group("data")

    def reduce() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.to_local(), group=data)  # type: ignore[attr-defined]

    return _trainer(model, reduce)


def _trainer(model: nn.Module, reduce: Callable[[], None] = lambda: None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(length: float) -> None:
        model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()

    return step


def expert() -> Step:
    """Attention, tokens to their experts, experts, tokens back, gradients of all."""
    Pace.pieces = 4
    world = dist.get_world_size()
    gradients = torch.ones(WIDTH)

    def exchange(rows: int) -> None:
        mine = [rows // world] * world
        sizes = torch.tensor(mine), torch.zeros(world, dtype=torch.int64)
        dist.all_to_all_single(sizes[1], sizes[0])
        out = torch.ones(int(sizes[1].sum()), WIDTH)
        dist.all_to_all_single(out, torch.ones(sum(mine), WIDTH), sizes[1].tolist(), mine)

    def step(length: float) -> None:
        rows = int(64 * length) * world
        Pace.work()
        Pace.work()
        exchange(rows)
        Pace.work()
        exchange(rows)
        Pace.work()
        dist.all_reduce(gradients)

    return step


def pipeline() -> Step:
    """Two stages of two ranks each: data parallel inside a stage."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    Pace.pieces = 2 * MICROBATCHES
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    group, data = mesh.get_group("stage"), mesh.get_group("data")
    number = dist.get_rank(group)
    layer = Layer()
    stage = PipelineStage(layer, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean())
    batch = torch.ones(2 * MICROBATCHES, WIDTH)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)

    def step(length: float) -> None:
        if number == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=data)
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = {"ddp": ddp, "fsdp": fsdp, "pipeline": pipeline, "tensor": tensor, "expert": expert}


class Junk:
    def __init__(self) -> None:
        self.me = self


class Costly(Junk):
    """Garbage that only a full collection frees, and that takes long to free."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __del__(self) -> None:
        time.sleep(self.seconds)


def plant(args: argparse.Namespace, rank: int, step: int, chance: random.Random) -> tuple[float, float]:
    """Seconds of work of this rank in this step, and the relative length of its input. Also does what is not work."""
    own, length = args.step_s, 1.0
    if args.noise:
        own *= max(0.5, chance.gauss(1.0, args.noise))
    if args.inputs:  # of all ranks alike, from step to step
        own *= random.Random(f"{args.seed} {step // 40}").choice((1.0, 1.0, 1.25, 0.8))
    slow = args.cause in ("slow", "stage") and step >= args.slow_at
    if slow and (rank == args.slow_rank or (args.cause == "stage" and rank // 2 == args.slow_rank // 2)):
        own *= 1 + args.share
    if args.cause == "loader" and chance.random() < 0.15:
        time.sleep(args.step_s * args.share)
    if args.cause == "gc" and (step + 3 * rank) % 8 == 0:
        Costly(args.step_s * args.share)
        gc.collect()
    if args.cause == "input":
        length = chance.uniform(1 - args.share, 1 + args.share)
        own *= length
    return own, length


def around(args: argparse.Namespace, rank: int, step: int) -> None:
    if args.eval_every and step % args.eval_every == args.eval_every - 1:
        with allranks.expect("evaluate", up_to_s=60):
            time.sleep(8 * args.step_s)
    if args.save_every and step % args.save_every == args.save_every - 1:
        with allranks.expect("save", up_to_s=60):
            time.sleep((2 if rank == 0 else 1) * args.step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--cause", choices=("none", "slow", "loader", "gc", "input", "stage"), default="none")
    for name, default in (
        ("steps", 100), ("step-s", 0.2), ("share", 0.5), ("slow-at", 0), ("slow-rank", 1), ("seed", 0), ("noise", 0.0),
        ("eval-every", 0), ("save-every", 0), ("inputs", 0), ("seconds", 0.0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    chance = random.Random(f"{args.seed} {rank}")
    train = KINDS[args.kind]()
    junk = [Junk() for _ in range(300_000)] if args.cause == "gc" else []
    begin, took, last, step = time.monotonic(), [], 0.0, 0
    over = torch.zeros(1)
    while step < args.steps:
        allranks.step(step)
        Pace.step_s, length = plant(args, rank, step, chance)
        train(length)
        now = time.monotonic()
        took.append(now - last)
        around(args, rank, step)
        last = time.monotonic()
        step += 1
        if args.seconds and step % 20 == 0:
            over[0] = now - begin > args.seconds
            dist.all_reduce(over)
            if over[0]:
                break
    dist.barrier()
    if rank == 0:
        kept = sorted(took[5:])[: max(1, -(-len(took[5:]) * 95 // 100))]
        print(f"STEP_S {sum(kept) / len(kept):.6f} {step} {len(junk)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
