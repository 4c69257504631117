"""A training script with planted losses, for benchmarks/goodput.py and tests/goodput. Each rank prints what it planted:
`PLANTED rank state seconds`. With REPLICA_GROUP_ID set it trains with a Manager, else with one all_reduce per step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import allranks


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("steps", 40),
        ("step-s", 0.1),
        ("first-s", 0.0),
        ("slow-rank", -1),
        ("slow-s", 0.0),
        ("slow-at", 0),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name, default in (
        ("save-every", 0),
        ("save-s", 0.0),
        ("eval-at", -1),
        ("eval-s", 0.0),
        ("start-s", 0.0),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name, default in (
        ("kill-at", -1),
        ("kill-rank", 0),
        ("hang-at", -1),
        ("hang-s", 0.0),
        ("hang-rank", 0),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--state", default="", help="file of the last saved step")
    parser.add_argument(
        "--hang-if", default="", help="folder: hangs for good when it has a file named like its process"
    )
    parser.add_argument("--until", default="", help="file: the job ends when it is there (without replicas)")
    args = parser.parse_args()
    time.sleep(args.start_s)
    (train_replica if "REPLICA_GROUP_ID" in os.environ else train_whole)(args)


def planted(rank: int, state: str, seconds: float) -> None:
    print(f"PLANTED {rank} {state} {seconds:.4f} {time.time():.4f}", flush=True)


def one_step(args: argparse.Namespace, rank: int, step: int, began: int, attempt: int) -> None:
    """What a step does besides communicating."""
    if step == began and args.first_s:
        time.sleep(args.first_s)
    time.sleep(args.step_s)
    if rank == args.slow_rank and step >= args.slow_at and not (args.slow_at and attempt):
        time.sleep(args.slow_s)
    if attempt == 0 and step == args.kill_at and rank == args.kill_rank:
        planted(rank, "kill", 0.0)
        os.kill(os.getpid(), 9)
    if attempt == 0 and step == args.hang_at and rank == args.hang_rank:
        planted(rank, "hang", args.hang_s)
        time.sleep(args.hang_s)
    if args.hang_if and os.path.exists(os.path.join(args.hang_if, str(os.getpid()))):
        planted(rank, "hang", 1e6)
        time.sleep(1e6)


def after_step(args: argparse.Namespace, rank: int, step: int) -> None:
    if args.save_every and (step + 1) % args.save_every == 0:
        begin = time.time()
        with allranks.expect("save", up_to_s=60):
            time.sleep(args.save_s)
            if rank == 0 and args.state:
                with open(args.state + ".new", "w") as file:
                    file.write(str(step + 1))
                os.replace(args.state + ".new", args.state)
        planted(rank, "saving", time.time() - begin)
    if step == args.eval_at:
        begin = time.time()
        with allranks.expect("evaluate", up_to_s=60):
            time.sleep(args.eval_s)
        planted(rank, "evaluation", time.time() - begin)


def train_whole(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    began = int(Path(args.state).read_text()) if args.state and os.path.exists(args.state) else 0
    enough = torch.zeros(16)
    for step in range(began, args.steps):
        allranks.step(step)
        one_step(args, rank, step, began, attempt)
        enough.fill_(float(bool(args.until) and os.path.exists(args.until)))
        dist.all_reduce(enough)
        after_step(args, rank, step)
        if enough[0] > 0:
            break
    dist.destroy_process_group()


def train_replica(args: argparse.Namespace) -> None:
    rank = int(os.environ["REPLICA_GROUP_ID"])
    attempt = int(os.environ.get("ALLRANKS_ATTEMPT", "0"))
    weight = torch.zeros(16)
    with allranks.Manager(
        state_dict=lambda: {"w": weight}, load_state_dict=lambda s: weight.copy_(s["w"])
    ) as manager:
        manager.start_quorum()
        began = manager.current_step()
        while manager.current_step() < args.steps:
            step = manager.current_step()
            if step != began:
                manager.start_quorum()
                step = manager.current_step()
            one_step(args, rank, step, began, attempt)
            manager.allreduce(torch.ones(16)).wait()
            began = -1
            if manager.should_commit():
                after_step(args, rank, step)


if __name__ == "__main__":
    main()
