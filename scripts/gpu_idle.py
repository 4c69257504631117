"""What an idle NCCL communicator holds, and how long its end takes: three ranks share one GPU.

    gpu_idle.py OUT

Memory of a communicator of one and of three; abort() and shutdown() on a quiet GPU and beside collectives of 160 MB, with a
peer that calls it late, and with one that is dead. Each rank writes OUT/idle.RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_replicas import SHARED_GPU

from allranks.channel.frames import HeldPort
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.groups.nccl import ProcessGroupNCCL

RANKS = 3


def timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return round(time.monotonic() - began, 3)


class Rank:
    """One of three; all go through the same measurements."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        self.group = ProcessGroupNCCL(30, device=torch.device("cuda:0"))
        self.tensor = torch.ones(40_000_000, device="cuda")
        self.matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.meetings = 0

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.meetings += 1
        self.store.set(f"{self.meetings}/{self.rank}", "1")
        self.store.wait([f"{self.meetings}/{rank}" for rank in range(RANKS)])

    def free_mb(self) -> int:
        self.meet()
        found = torch.cuda.mem_get_info()[0] >> 20
        self.meet()
        return found

    def make(self, name: str, alone: bool = False) -> Any:
        if alone:
            return self.group._make(GroupSpec(dist.HashStore(), 0, 1, name=name))
        made: Any = self.group._make(
            GroupSpec(dist.PrefixStore(name, self.store), self.rank, RANKS, name=name)
        )
        made.allreduce([self.tensor], dist.AllreduceOptions())
        self.meet()
        return made

    def step(self, used: Any) -> float:
        def run() -> None:
            for _ in range(10):
                self.matrix @ self.matrix
            used.allreduce([self.tensor], dist.AllreduceOptions()).wait()
            torch.cuda.synchronize()

        return timed(run)

    def beside(self, used: Any, end: Callable[[], object]) -> tuple[float, float]:
        """(seconds of the end, longest step meanwhile)"""
        took: list[float] = []
        thread = threading.Thread(target=lambda: took.append(timed(end)))
        self.meet()
        thread.start()
        steps = [self.step(used) for _ in range(10)]
        thread.join()
        return took[0], max(steps)

    def measure(self) -> dict[str, object]:
        found: dict[str, object] = {}
        before = self.free_mb()
        one = self.make("one", alone=True)
        with_one = self.free_mb()
        found["shutdown of one"] = timed(one.shutdown)
        del one
        found["MB of one, all ranks"] = self.free_mb() - with_one
        found["MB with NCCL's kernels, all ranks"] = before - with_one
        left = self.free_mb()
        used = self.make("used")
        found["MB of three, all ranks"] = left - self.free_mb()
        found["step"] = min(self.step(used) for _ in range(8))
        for how in ("abort", "shutdown"):
            found[f"{how}, quiet"] = [timed(getattr(self.make(f"{how}{n}"), how)) for n in range(3)]
            found[f"{how}, beside"] = self.beside(used, getattr(self.make(f"{how} beside"), how))
        late = self.make("late")
        time.sleep(3.0 if self.rank == 0 else 0.0)
        found["shutdown, rank 0 comes 3 s later"] = timed(late.shutdown)
        self.meet()
        dead = self.make("dead")
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        found["shutdown, rank 2 is dead"] = timed(dead.shutdown)
        return found


def main() -> int:
    out = Path(sys.argv[1])
    if len(sys.argv) > 2:
        rank = int(sys.argv[2])
        found = Rank(rank, int(sys.argv[3])).measure()
        (out / f"idle.{rank}.json").write_text(json.dumps(found, indent=1))
        os._exit(0)  # the dead rank's group would be waited for
    held = HeldPort()
    words = [sys.executable, __file__, str(out)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(held.number)],
            env={**os.environ, **SHARED_GPU, "NCCL_HOSTID": f"rank-{rank}"},
        )
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.wait(90)
    print((out / "idle.0.json").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
