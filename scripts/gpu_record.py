"""What the recorder claims about NCCL, checked on 4 ranks that share one GPU.

NCCL refuses two ranks on one device of one host; giving each rank its own NCCL_HOSTID makes it believe in four
hosts. With BACKEND=gloo the same program runs on CPU, so that it can be rehearsed anywhere.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import allranks
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.model.trace import Flag, RankTrace, State

BACKEND = os.environ.get("BACKEND", "nccl")
OUT = Path(sys.argv[1])
WORLD = 4
COST_ROUNDS = int(os.environ.get("COST_ROUNDS", "20"))
# ranks that share a GPU take milliseconds for a call
COST_LIMIT_S = int(os.environ.get("COST_LIMIT_S", "90"))
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"
failures = 0


def check(what: str, true: bool, detail: object = "") -> None:
    """One line per claim."""
    global failures
    failures += not true
    print(f"{'PASS' if true else 'FAIL'}  {what}" + ("" if true else f"  ({detail})"), flush=True)


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def rank_main(rank: int, world: int, function: Callable[..., Any], *args: Any) -> Any:
    """What every rank does first: its own host id, its device, its group."""
    warnings.simplefilter("ignore")
    os.environ.update(
        NCCL_HOSTID=f"host{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1",
        NCCL_SOCKET_IFNAME="lo", TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )  # fmt: skip
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKEND, rank=rank, world_size=world)
    return function(rank, world, *args)


def run(function: Callable[..., Any], place: str, *args: Any, world: int = WORLD) -> dict[int, RankTrace]:
    folder = OUT / place
    with Ranks(rank_main, world, (function, *args), backend=None, env={"ALLRANKS_DIR": str(folder)}) as ranks:
        for outcome in ranks.join(timeout_s=90).values():
            if outcome.exit_code != 0:
                print(outcome.error)
                check(f"{place}: rank {outcome.rank} ended well", False, outcome.exit_code)
    return traces(folder)


def traces(folder: Path) -> dict[int, RankTrace]:
    return {int(t.header.rank or 0): t for t in map(read_trace, find_boxes(folder))}


def ops(trace: RankTrace) -> list[str]:
    return [trace.names[int(row["op"])] for row in trace.calls]


# -- what is seen --------------------------------------------------------------------------------------------------


def everything(rank: int, world: int) -> None:
    recorder = allranks.record()
    t = torch.ones(1 << 16, device=DEVICE)
    dist.all_reduce(t)
    dist.all_reduce(t, async_op=True).wait()
    dist.broadcast(t, 1)
    dist.all_gather_into_tensor(torch.empty(world << 16, device=DEVICE), t)
    dist.reduce_scatter_tensor(torch.empty(1 << 14, device=DEVICE), t)
    dist.barrier()
    p2p = [
        dist.P2POp(dist.isend, t, (rank + 1) % world),
        dist.P2POp(dist.irecv, torch.empty_like(t), (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(p2p):
        work.wait()
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(t, group=group)
    settle()
    time.sleep(0.5)  # one round of the side thread
    recorder.close()


def models(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    recorder = allranks.record()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).to(DEVICE))
    for step in range(3):
        allranks.step(step)
        ddp(torch.ones(8, 512, device=DEVICE)).sum().backward()
    sharded = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(DEVICE)
    fully_shard(sharded, mesh=init_device_mesh(DEVICE, (world,)))
    for step in range(3, 6):
        allranks.step(step)
        sharded(torch.ones(8, 512, device=DEVICE)).sum().backward()
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(torch.ones(64, device=DEVICE), "sum", dist.group.WORLD) + 1
    settle()
    time.sleep(0.5)
    recorder.close()


def captured(rank: int, world: int) -> None:
    recorder = allranks.record()
    t = torch.ones(64, device=DEVICE)
    dist.all_reduce(t)
    settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(t)
    for _ in range(3):
        graph.replay()
    settle()
    dist.all_reduce(t)
    settle()
    time.sleep(0.5)
    recorder.close()


def hangs(rank: int, world: int) -> None:
    allranks.record()
    t = torch.ones(1 << 10, device=DEVICE)
    for step in range(5):
        allranks.step(step)
        dist.all_reduce(t)
    settle()
    time.sleep(0.5)
    reached("trained")
    if rank != 2:
        dist.all_reduce(t, async_op=True)
        reached("hanging")
        settle()
    time.sleep(100)


def _moves() -> dict[str, Callable[[], object]]:
    """Small calls of the kinds that training makes most, each as its program makes it."""
    t, parts = torch.ones(1, device=DEVICE), torch.ones(2, device=DEVICE)
    halves, peer = [torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)], 1 - dist.get_rank()

    def exchange() -> None:
        pair = [dist.P2POp(dist.isend, t, peer), dist.P2POp(dist.irecv, halves[0], peer)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def several() -> None:
        works = [dist.all_reduce(part, async_op=True) for part in halves]
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(t),
        "all_reduce, async": lambda: dist.all_reduce(t, async_op=True).wait(),
        "all_reduce, 2 async": several,
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(parts, t),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t, parts),
        "broadcast": lambda: dist.broadcast(t, 0),
        "reduce": lambda: dist.reduce(t, 0),
        "all_gather": lambda: dist.all_gather(halves, t),
        "reduce_scatter": lambda: dist.reduce_scatter(t, halves),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(parts), parts),
        "barrier, async": lambda: dist.barrier(async_op=True),  # its wait spins for milliseconds
        "batch_isend_irecv of 2": exchange,
    }


#: Calls that one of the moves above makes and records; 1 where it is not here.
CALLS = {"all_reduce, 2 async": 2, "batch_isend_irecv of 2": 3}  # the batch: two parts and its end


KINDS = (("with stacks", 8), ("without stacks", 0))


def costs(rank: int, world: int) -> None:
    """CPU microseconds of the calling thread per call, by op and kind of recording. Rank 0 writes what it has to a file
    after each op: ranks that share a GPU are slow, and time may run out."""
    found: dict[str, dict[str, float]] = {}
    wanted = os.environ.get("COST_OPS", "").split(",")
    moves = {name: move for name, move in _moves().items() if name in wanted or wanted == [""]}
    for kind, depth in KINDS:
        recorder = allranks.record(stack_depth=depth)
        assert recorder._hook is not None
        replaced = list(recorder._hook._replaced)
        for name, move in moves.items():
            plain, added = _in_turns(replaced, move)
            calls = CALLS.get(name, 1)
            numbers = found.setdefault(name, {})
            numbers["none"] = plain / calls
            numbers[kind] = added / calls
            if rank == 0:
                (OUT / "costs.json").write_text(json.dumps(found))
        settle()
        recorder.close()


def _in_turns(replaced: list[Any], move: Callable[[], object]) -> tuple[float, float]:
    """(microseconds of a call without the recorder, what it adds): medians over rounds of four blocks (without, with, with,
    without), so that what drifts or disturbs for longer than a round is in both."""
    plain, added = [], []
    for _ in range(COST_ROUNDS):
        without, first, second, again = (_block(replaced, move, on) for on in (False, True, True, False))
        plain += [without, again]
        added.append((first + second - without - again) / 2)
    for owner, name, wrapper, _ in replaced:
        setattr(owner, name, wrapper)
    return statistics.median(plain), statistics.median(added)


def _block(replaced: list[Any], move: Callable[[], object], with_recorder: bool) -> float:
    """CPU microseconds of a call: the median of some that are made one after the other."""
    for owner, name, wrapper, original in replaced:
        setattr(owner, name, wrapper if with_recorder else original)
    move()  # fills Python's caches
    took = []
    for _ in range(5):
        begin = time.thread_time_ns()
        move()
        took.append((time.thread_time_ns() - begin) / 1000)
    settle()  # a queue that is full would be waited for in a call
    return statistics.median(took)


# -- the claims ----------------------------------------------------------------------------------------------------


def check_everything() -> None:
    found = run(everything, "everything")
    check("every rank left a box", sorted(found) == list(range(WORLD)), sorted(found))
    wanted = [
        "all_reduce",
        "all_reduce",
        "broadcast",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "barrier",
    ]
    for rank, trace in found.items():
        seen = ops(trace)
        check(f"rank {rank}: each collective once, in order", seen[:6] == wanted, seen)
        check(f"rank {rank}: send and recv of the batch", {"send", "recv"} <= set(seen), seen)
        states = {State(int(row["state"])).name for row in trace.calls}
        check(
            f"rank {rank}: all of them completed",
            states == {"COMPLETED"},
            [(o, int(s)) for o, s in zip(seen, trace.calls["state"], strict=True)],
        )
        took = [int(row["completed_ns"] - row["created_ns"]) / 1e3 for row in trace.calls]
        check(f"rank {rank}: completed after created", min(took) >= 0, took)
    if BACKEND == "nccl":
        check("a batch has one end that stands for it", "coalesced" in ops(found[0]), ops(found[0]))


def check_models() -> None:
    for rank, trace in run(models, "models").items():
        seen = ops(trace)
        buckets = [
            row
            for row in trace.calls
            if trace.names[int(row["op"])] == "all_reduce" and 0 <= int(row["step"]) < 3
        ]
        check(f"rank {rank}: DDP's C++ reducer is recorded, once per step", len(buckets) == 3, seen)
        names = [frame.name for row in buckets for frame in trace.stacks[int(row["stack"])]]
        check(f"rank {rank}: its calls know the line of backward()", "models" in names, names)
        check(f"rank {rank}: FSDP2", {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(seen), seen)
        check(f"rank {rank}: functional collective", int(trace.calls[-1]["in_numel"]) == 64, seen[-3:])
        unfinished = [o for o, s in zip(seen, trace.calls["state"], strict=True) if s != State.COMPLETED]
        check(f"rank {rank}: all completed", not unfinished, unfinished)


def check_captured() -> None:
    for rank, trace in run(captured, "captured").items():
        flags = [bool(int(row["flags"]) & Flag.CAPTURED) for row in trace.calls]
        states = [State(int(row["state"])).name for row in trace.calls]
        check(
            f"rank {rank}: the captured call is marked, the others completed",
            flags == [False, True, False] and states == ["COMPLETED", "SCHEDULED", "COMPLETED"],
            (flags, states),
        )


def check_hang() -> None:
    folder = OUT / "hang"
    with Ranks(rank_main, WORLD, (hangs,), backend=None, env={"ALLRANKS_DIR": str(folder)}) as ranks:
        ranks.wait_for("trained", timeout_s=90)
        ranks.wait_for("hanging", [0, 1, 3], timeout_s=60)
        time.sleep(1.0)
        alive = traces(folder)
        for rank in range(WORLD):
            ranks.kill(rank, signal.SIGKILL)
        codes = {outcome.exit_code for outcome in ranks.join().values()}
    check("all ranks were killed by SIGKILL", codes == {-9}, codes)
    for when, found in (("while it hangs", alive), ("after kill -9", traces(folder))):
        done = {rank: [int(s) for s in trace.calls["state"]] for rank, trace in found.items()}
        waiting = all(
            done[rank][:5] == [2] * 5 and len(done[rank]) == 6 and done[rank][5] < 2 for rank in (0, 1, 3)
        )
        check(f"{when}: three ranks wait in call 6, not completed", waiting, done)
        check(f"{when}: rank 2 never entered it", done.get(2) == [2] * 5, done.get(2))
        check(f"{when}: nothing torn", all(trace.torn == 0 for trace in found.values()))


def check_costs() -> None:
    folder = OUT / "costs"
    with Ranks(rank_main, 2, (costs,), backend=None, env={"ALLRANKS_DIR": str(folder)}) as ranks:
        late = any(outcome.exit_code != 0 for outcome in ranks.join(timeout_s=COST_LIMIT_S).values())
    if late:
        print(f"      (not all rounds within {COST_LIMIT_S} s)")
    best: dict[str, dict[str, float]] = json.loads((OUT / "costs.json").read_text())
    for name, kinds in best.items():
        added = {kind: kinds.get(kind, math.nan) for kind, _ in KINDS}
        print(
            f"      {name}: {kinds['none']:.2f} us CPU, recording adds {added['without stacks']:.2f}, "
            f"with stacks {added['with stacks']:.2f}"
        )
        check(f"adds at most 6 us per call with stacks: {name}", added["with stacks"] <= 6.0, added)


def main() -> int:
    # Nothing here may touch CUDA: the ranks are forked, and a parent that has initialised it cannot be.
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, backend {BACKEND}")
    steps = [check_everything, check_models, check_hang, check_costs]
    if os.environ.get("ONLY_COSTS"):
        steps = [check_costs]
    elif DEVICE == "cuda":
        steps.insert(2, check_captured)
    for step in steps:
        begin = time.monotonic()
        try:
            step()
        except Exception:  # the other claims are checked all the same
            traceback.print_exc()
            check(step.__name__, False, "see above")
        print(f"      {step.__name__} took {time.monotonic() - begin:.1f} s", flush=True)
    print("ALL PASS" if failures == 0 else f"{failures} FAILED")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
