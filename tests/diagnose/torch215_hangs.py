"""Hangs for torch's own recorder: each is run for real on gloo, and every rank dumps its ring from a side thread.

    python tests/diagnose/torch215_hangs.py FOLDER [NAME…]    # writes FOLDER/NAME.tar.gz, the dumps of all ranks

`HANGS` holds the truth: the guilty ranks and the causes that are right. A rank that dies leaves no dump.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

WORLD = 3
Program = Callable[[int], None]


@dataclass(frozen=True)
class Hang:
    program: Program
    ranks: tuple[int, ...]  # guilty; () for healthy programs and those where nobody is
    causes: tuple[str, ...]  # right answers; () healthy
    line: str = ""  # a text of the line that the verdict has to name


def _loop(steps: int = 8) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(steps):
        dist.all_reduce(torch.ones(16))


def _forever() -> None:
    signal.pause()


def _reduce(size: int = 16, group: object = None) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(size), group=group)  # type: ignore[arg-type]


def healthy(rank: int) -> None:
    _loop()


def healthy_groups(rank: int) -> None:
    import torch.distributed as dist

    pair = dist.new_group([0, 1])
    for _ in range(4):
        _reduce()
        if rank < 2:
            _reduce(group=pair)
    dist.barrier()


def healthy_messages(rank: int) -> None:
    """Sends and receives, which gloo does not record, move its counters."""
    import torch
    import torch.distributed as dist

    for _ in range(4):
        _reduce()
        if rank == 0:
            dist.send(torch.ones(4), 1)
        elif rank == 1:
            dist.recv(torch.ones(4), 0)


def sleeps_before(rank: int) -> None:
    _loop()
    if rank == 1:
        _forever()
    _reduce()


def sleeps_before_first(rank: int) -> None:
    if rank == 2:
        _forever()
    _reduce()


def leaves_loop_early(rank: int) -> None:
    _loop(8 if rank != 0 else 7)
    _forever() if rank == 0 else None


def extra_call(rank: int) -> None:
    _loop()
    if rank == 2:
        _reduce(4)
    _forever()


def killed(rank: int) -> None:
    _loop()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _reduce()


def different_operations(rank: int) -> None:
    import torch
    import torch.distributed as dist

    _loop()
    if rank == 1:
        dist.all_gather([torch.ones(16) for _ in range(WORLD)], torch.ones(16))
    else:
        _reduce()


def barrier_on_one(rank: int) -> None:
    import torch.distributed as dist

    _loop()
    if rank == 0:
        dist.barrier()
    _forever()


def barrier_without_one(rank: int) -> None:
    import torch.distributed as dist

    _loop()
    if rank == 2:
        _forever()
    dist.barrier()


def broadcast_skipped(rank: int) -> None:
    import torch
    import torch.distributed as dist

    _loop()
    if rank == 1:
        _forever()
    dist.broadcast(torch.ones(8), 0)
    _reduce()


def subgroup_absent(rank: int) -> None:
    import torch.distributed as dist

    pair = dist.new_group([0, 2])
    _loop()
    if rank == 2:
        _forever()
    if rank == 0:
        _reduce(group=pair)
    _reduce()


def subgroup_then_world(rank: int) -> None:
    """Rank 0 waits in the pair for rank 1, rank 2 waits in the world for both."""
    import torch.distributed as dist

    pair = dist.new_group([0, 1])
    _loop()
    if rank == 0:
        _reduce(group=pair)
    if rank == 1:
        _forever()
    _reduce()


def groups_crossed(rank: int) -> None:
    import torch.distributed as dist

    pair = dist.new_group([0, 1])
    _loop()
    if rank == 0:
        _reduce(group=pair)
        _reduce()
    else:
        _reduce()
        _reduce(group=pair) if rank == 1 else None


def groups_crossed_after_work(rank: int) -> None:
    import torch.distributed as dist

    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    _loop()
    for group in (first, second) if rank == 0 else (second, first):
        _reduce(group=group) if rank < 2 else None
    _reduce()


def reads_data(rank: int) -> None:
    for step in range(8):
        if rank == 1 and step == 5:
            time.sleep(1000)
        _reduce()


def gather_objects_skipped(rank: int) -> None:
    import torch.distributed as dist

    _loop()
    if rank == 0:
        _forever()
    dist.all_gather_object([None] * WORLD, {"rank": rank})


def scatter_absent(rank: int) -> None:
    import torch
    import torch.distributed as dist

    _loop()
    if rank == 2:
        _forever()
    parts = [torch.ones(4) for _ in range(WORLD)] if rank == 0 else None
    dist.scatter(torch.ones(4), parts, 0)
    _reduce()


def reduce_scatter_absent(rank: int) -> None:
    import torch
    import torch.distributed as dist

    _loop()
    if rank == 1:
        _forever()
    dist.reduce_scatter_tensor(torch.ones(4), torch.ones(12))


def all_to_all_absent(rank: int) -> None:
    import torch
    import torch.distributed as dist

    _loop()
    if rank == 2:
        _forever()
    dist.all_to_all_single(torch.ones(6), torch.ones(6))


def ddp_unused_batch(rank: int) -> None:
    """One rank has a batch less: its DDP makes one backward less."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3 if rank == 2 else 4):
        model(torch.ones(1, 4)).sum().backward()
    _forever()


def async_never_joined(rank: int) -> None:
    import torch
    import torch.distributed as dist

    _loop()
    if rank == 1:
        _forever()
    work = dist.all_reduce(torch.ones(16), async_op=True)
    time.sleep(0.2)
    work.wait()  # type: ignore[union-attr]


def validation_on_rank_0(rank: int) -> None:
    for step in range(6):
        _reduce()
        if step == 4 and rank == 0:
            validate()
    _forever()


def validate() -> None:
    _reduce()


MISSING = ("missing_rank", "not_started", "stuck_before_collective")
HANGS: dict[str, Hang] = {
    "healthy": Hang(healthy, (), ()),
    "healthy_groups": Hang(healthy_groups, (), ()),
    "healthy_messages": Hang(healthy_messages, (), ()),
    "sleeps_before": Hang(sleeps_before, (1,), MISSING),
    "sleeps_before_first": Hang(sleeps_before_first, (2,), MISSING),
    "leaves_loop_early": Hang(leaves_loop_early, (0,), MISSING),
    "extra_call": Hang(extra_call, (2,), ("extra_collective", "missing_rank")),
    "killed": Hang(killed, (1,), ("rank_died",)),
    "different_operations": Hang(different_operations, (1,), ("type_mismatch",)),
    "barrier_on_one": Hang(barrier_on_one, (0,), ("extra_collective", "missing_rank")),
    "barrier_without_one": Hang(barrier_without_one, (2,), MISSING),
    "broadcast_skipped": Hang(broadcast_skipped, (1,), MISSING),
    "subgroup_absent": Hang(subgroup_absent, (2,), MISSING),
    "subgroup_then_world": Hang(subgroup_then_world, (1,), MISSING),
    "groups_crossed": Hang(groups_crossed, (0, 1), ("order_inversion",)),
    "groups_crossed_after_work": Hang(groups_crossed_after_work, (0, 1), ("order_inversion",)),
    "reads_data": Hang(reads_data, (1,), MISSING),
    "gather_objects_skipped": Hang(gather_objects_skipped, (0,), MISSING),
    "scatter_absent": Hang(scatter_absent, (2,), MISSING),
    "reduce_scatter_absent": Hang(reduce_scatter_absent, (1,), MISSING),
    "all_to_all_absent": Hang(all_to_all_absent, (2,), MISSING),
    "ddp_unused_batch": Hang(ddp_unused_batch, (2,), MISSING),
    "async_never_joined": Hang(async_never_joined, (1,), MISSING),
    "validation_on_rank_0": Hang(validation_on_rank_0, (0,), ("extra_collective", "missing_rank")),
}
#: From the first rank in the program to the dump, and the limit of a call, which is never reached.
DUMP_AFTER_S, TIMEOUT_S = 4.0, 600


def run(name: str) -> dict[str, bytes]:
    """File name → dump, of all ranks that were there to write one."""
    import torch
    import torch._dynamo  # DistributedDataParallel imports it, for seconds
    import torch.distributed

    vars(torch).setdefault("_inductor", type(sys)("_inductor"))  # else the first dump imports it, for seconds
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                _rank(HANGS[name].program, rank, out)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        return {path.name: path.read_bytes() for path in sorted(out.glob("trace_*"))}


def _rank(program: Program, rank: int, out: Path) -> None:
    """One rank, from its start to its end."""
    import torch.distributed as dist

    where, limit = f"file://{out}/store", timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD, timeout=limit)
        dist.barrier()
        threading.Thread(target=_dump, args=(out / f"trace_{rank}",), daemon=True).start()
        program(rank)
    finally:
        _forever()  # until the dump is written


def _dump(path: Path) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace

    time.sleep(DUMP_AFTER_S)
    data = _compact(_dump_fr_trace(True, True, False))
    path.with_name(f".{path.name}").write_bytes(data)
    os.replace(path.with_name(f".{path.name}"), path)
    time.sleep(1.0)  # until the others have dumped: a rank that goes ends the calls of its peers
    os._exit(0)


def _compact(data: bytes) -> bytes:
    """The dump without this machine's paths."""
    dump = pickle.loads(data)
    for entry in dump.get("entries", ()):
        for frame in entry.get("frames", ()):
            frame["filename"] = frame["filename"].rpartition("/site-packages/")[2].rpartition("/tests/")[2]
    return pickle.dumps(dump, protocol=2)


def main() -> None:
    target, names = Path(sys.argv[1]), sys.argv[2:] or list(HANGS)
    for name in names:
        with tarfile.open(target / f"{name}.tar.gz", "w:gz") as archive:
            for file, data in run(name).items():
                member = tarfile.TarInfo(f"{name}/{file}")
                member.size, member.mtime = len(data), int(time.time())
                archive.addfile(member, io.BytesIO(data))
        print(name, flush=True)


if __name__ == "__main__":
    main()
