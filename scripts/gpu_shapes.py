"""Training programs of many shapes on NCCL, each trained cold, killed, rejoined, and compared bit by bit at the end.

    gpu_shapes.py OUT [--cpu] [--only SHAPE,SHAPE]

Three replicas share one GPU (two replicas of two ranks for the sharded shapes). No shape warms anything up: kernels are
loaded, compiled and tuned inside the first step, as real programs do. Prints PASS or FAIL per shape and writes
OUT/gpu_shapes.json. `--cpu` rehearses the same over gloo.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_replicas import LighthouseProcess, Replica, say

CPU = "--cpu" in sys.argv
TWO_RANKS = {"hsdp", "tensor_parallel"}
EXCHANGES = {"local_sgd", "diloco"}
SHAPES = [
    "ddp_accumulate_scaler", "compiled", "activation_checkpointing", "hsdp", "tensor_parallel", "local_sgd", "diloco",
    "warm_up_backward", "frozen_and_tied", "many_small_tensors", "state_of_4_gb",
]  # fmt: skip


class Program:
    """What a shape trains: `step()` runs one step and says whether it was committed."""

    def __init__(self, shape: str) -> None:
        import torch

        self.shape = shape
        self.device = torch.device("cpu" if CPU else "cuda:0")
        if not CPU:
            torch.cuda.set_device(0)
        torch.manual_seed(int(hashlib.sha256(os.environ["ALLRANKS_REPLICA"].encode()).hexdigest()[:6], 16))
        self.state: dict[str, Any] = {}
        self.step: Callable[[], bool] = getattr(self, f"_{shape}")()

    def manager(self, **more: Any) -> Any:
        from allranks.torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        group = ProcessGroupGloo(30) if CPU else ProcessGroupNCCL(30, device=self.device)

        def load(state: dict[str, Any]) -> None:
            for key, part in self.state.items():
                part.load_state_dict(state[key])
            say("healed")

        save = lambda: {key: part.state_dict() for key, part in self.state.items()}  # noqa: E731
        self.managed = Manager(group, load, save, min_replica_size=1, timeout=60, quorum_timeout=60, **more)
        return self.managed

    def transformer(self, layers: int = 4, width: int = 256) -> Any:
        from torch import nn

        if CPU:
            layers, width = 2, 32
        block = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)  # noqa: E731
        body = nn.Sequential(*[block() for _ in range(layers)])
        return nn.Sequential(nn.Embedding(1000, width), body, nn.Linear(width, 1000)).to(self.device)

    def tokens(self) -> Any:
        import torch

        return torch.randint(0, 1000, (4, 64), device=self.device)

    @staticmethod
    def loss(logits: Any, tokens: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def plain(
        self, model: Any, forward: Any = None, warm_up: bool = False, inner: Any = None
    ) -> Callable[[], bool]:
        """DDP and AdamW, one backward per step."""
        import torch

        from allranks.torchft import DistributedDataParallel, Optimizer

        trained = [p for p in model.parameters() if p.requires_grad]
        inner = inner or torch.optim.AdamW(trained, lr=1e-4)
        self.state = {"model": model, "optimizer": inner}
        manager = self.manager()
        ddp, optimizer = DistributedDataParallel(manager, forward or model), Optimizer(manager, inner)
        if warm_up:  # as people do to compile and to load kernels
            x = self.tokens()
            self.loss(ddp(x), x).backward()
            for p in model.parameters():
                p.grad = None

        def step() -> bool:
            x = self.tokens()
            optimizer.zero_grad()
            self.loss(ddp(x), x).backward()
            return bool(optimizer.step())

        return step

    def _ddp_accumulate_scaler(self) -> Callable[[], bool]:
        import torch

        from allranks.torchft import DistributedDataParallel, Optimizer

        model = self.transformer()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda n: 1 / (1 + n))
        scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0, growth_interval=5)
        self.state = {"model": model, "optimizer": inner, "scheduler": scheduler, "scaler": scaler}
        manager = self.manager()
        ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)

        def step() -> bool:
            before = manager.current_step()
            optimizer.zero_grad()
            with ddp.no_sync():
                self._scaled(ddp, scaler)
            self._scaled(ddp, scaler)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if manager.current_step() == before:
                return False
            scheduler.step()
            return True

        return step

    def _scaled(self, ddp: Any, scaler: Any) -> None:
        import torch

        x = self.tokens()
        with torch.autocast(self.device.type, torch.float16, enabled=not CPU):
            loss = self.loss(ddp(x), x) / 2
        scaler.scale(loss).backward()

    def _compiled(self) -> Callable[[], bool]:
        import torch

        model = self.transformer(2)
        return self.plain(model, torch.compile(model))

    def _activation_checkpointing(self) -> Callable[[], bool]:
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Any) -> Any:
                return checkpoint(self.inner, x, use_reentrant=False)

        model = self.transformer()
        body = model[1]
        model[1] = nn.Sequential(*[Checkpointed(block) for block in body])
        return self.plain(model)

    def _inside(self) -> None:
        """The ranks of this replica as a process group of their own."""
        import torch.distributed as dist

        dist.init_process_group("gloo" if CPU else "nccl")

    def _hsdp(self) -> Callable[[], bool]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from allranks.torchft import Optimizer, replicate

        self._inside()
        mesh = init_device_mesh(self.device.type, (2,))
        model = self.transformer()
        for block in model[1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.state = {"model": model, "optimizer": inner}
        manager = self.manager()
        replicate(manager, model)
        optimizer = Optimizer(manager, inner)

        def step() -> bool:
            x = self.tokens()
            optimizer.zero_grad()
            self.loss(model(x), x).backward()
            return bool(optimizer.step())

        return step

    def _tensor_parallel(self) -> Callable[[], bool]:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from allranks.torchft import DistributedDataParallel, Optimizer

        self._inside()
        mesh = init_device_mesh(self.device.type, (2,))
        width = 32 if CPU else 512
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(
            self.device
        )
        for p in model.parameters():  # the ranks of one replica hold one model
            torch.distributed.broadcast(p.data, 0)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        self.state = {"model": model, "optimizer": inner}
        manager = self.manager()
        ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
        data = torch.Generator(device=self.device).manual_seed(torch.initial_seed())

        def step() -> bool:
            x = torch.randn(16, width, device=self.device, generator=data)
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            return bool(optimizer.step())

        return step

    def _local_sgd(self) -> Callable[[], bool]:
        import torch

        from allranks.torchft import LocalSGD

        model = self.transformer(2)
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.state = {"optimizer": inner}
        manager = self.manager(use_async_quorum=False)
        outer = LocalSGD(manager, model, inner, sync_every=4)
        outer.__enter__()
        self.state = {"optimizer": inner}
        self.compared = model
        return self._local_steps(model, inner, manager)

    def _diloco(self) -> Callable[[], bool]:
        import torch

        from allranks.torchft import DiLoCo

        model = self.transformer(2)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.state = {"optimizer": inner}
        manager = self.manager(use_async_quorum=False)
        DiLoCo(manager, [model], inner, outer, sync_every=4).__enter__()
        self.compared = model
        return self._local_steps(model, inner, manager)

    def _local_steps(self, model: Any, inner: Any, manager: Any) -> Callable[[], bool]:
        def step() -> bool:
            """Local steps up to the next exchange that was committed."""
            before = manager.current_step()
            while manager.current_step() == before:
                x = self.tokens()
                inner.zero_grad()
                self.loss(model(x), x).backward()
                inner.step()
            return True

        return step

    def _warm_up_backward(self) -> Callable[[], bool]:
        return self.plain(self.transformer(), warm_up=True)

    def _frozen_and_tied(self) -> Callable[[], bool]:
        model = self.transformer()
        model[2].weight = model[0].weight
        for p in model[1][0].parameters():
            p.requires_grad_(False)
        return self.plain(model)

    def _many_small_tensors(self) -> Callable[[], bool]:
        import torch
        from torch import nn

        class Scales(nn.Module):
            def __init__(self, width: int, count: int) -> None:
                super().__init__()
                self.embed = nn.Embedding(1000, width)
                self.parts = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(count)])
                self.head = nn.Linear(width, 1000)

            def forward(self, x: Any) -> Any:
                hidden = self.embed(x)
                for scale in self.parts:
                    hidden = hidden + 0.001 * hidden * scale
                return self.head(hidden)

        return self.plain(Scales(32, 100 if CPU else 2000).to(self.device))

    def _state_of_4_gb(self) -> Callable[[], bool]:
        import torch
        from torch import nn

        # 20 x 67 MB of parameters, three times that with AdamW
        width, layers = (64, 2) if CPU else (4096, 20)
        body = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        model = nn.Sequential(nn.Embedding(1000, width), *body, nn.Linear(width, 1000)).to(self.device)
        return self.plain(model, inner=torch.optim.AdamW(model.parameters(), lr=1e-5))

    def digest(self) -> str:
        """Of everything that must be equal in all replicas."""
        import torch

        found = hashlib.sha256()
        parts = [self.compared] if self.shape in EXCHANGES else list(self.state.values())

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                found.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(value, dict):
                for key in value:
                    found.update(str(key).encode())
                    add(value[key])
            elif isinstance(value, (list, tuple)):
                for one in value:
                    add(one)
            else:
                found.update(repr(value).encode())

        for part in parts:
            add(part.state_dict())
        return found.hexdigest()[:16]


def worker(shape: str, out: Path) -> None:
    import logging

    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)
    program = Program(shape)
    manager = program.managed
    say("ready")
    until = out / "until"
    goal = 10**9
    while manager.current_step() < goal:
        say("commit" if program.step() else "retry", manager.current_step(), manager.num_participants())
        if goal == 10**9 and until.exists():
            goal = int(until.read_text())
    say("done", manager.current_step(), 0, program.digest())
    manager.shutdown()
    say("closed")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_shape(shape: str, out: Path) -> dict[str, Any]:
    """Cold start, kill -9, rejoin, end: numbers and whether everything held."""
    out.mkdir(parents=True)
    ranks = 2 if shape in TWO_RANKS else 1
    names = [f"r{n}" for n in range(2 if ranks == 2 else 3)]
    command = [sys.executable, __file__, "worker", shape, str(out), *(["--cpu"] if CPU else [])]
    lighthouse = LighthouseProcess(out)
    start = lambda name: Replica(name, command, lighthouse.address, out, ranks, free_port())  # noqa: E731
    replicas = {name: start(name) for name in names}
    result: dict[str, Any] = {"pass": False}
    try:
        ready = max(one.wait("ready", limit_s=60) for one in replicas.values())
        together = max(one.wait("commit", participants=len(names), limit_s=60) for one in replicas.values())
        result["first_common_step_s"] = round(together - ready, 3)
        time.sleep(1.0)
        victim = replicas.pop("r1")
        at = time.monotonic()
        victim.kill()
        result["kill_to_commit_s"] = round(
            max(one.wait("commit", at, len(names) - 1) for one in replicas.values()) - at, 3
        )
        replicas["r1"] = start("r1")
        ready = replicas["r1"].wait("ready", limit_s=60)
        back = replicas["r1"].wait("commit", ready, len(names), limit_s=60)
        result["ready_to_common_step_s"] = round(back - ready, 3)
        time.sleep(0.5)
        around = [when for when in replicas["r0"].commits() if ready - 2.0 < when <= back + 1.0]
        gaps = sorted(b - a for a, b in itertools.pairwise(around))
        result["step_s"], result["longest_gap_s"] = round(gaps[len(gaps) // 2], 3), round(gaps[-1], 3)
        (out / "until").write_text(str(int(replicas["r0"].events()[-1][2]) + 15))
        for one in replicas.values():
            one.wait("done", limit_s=60)
        finished = time.monotonic()
        for one in replicas.values():
            for process in one.processes:
                process.wait(30)
        result["done_to_exit_s"] = round(time.monotonic() - finished, 3)
        ends = [event for one in replicas.values() for event in one.events() if event[1] == "done"]
        result["steps"] = int(ends[0][2])
        result["equal_bits"] = len({(event[2], event[4]) for event in ends}) == 1
        codes = [process.returncode for one in replicas.values() for process in one.processes]
        result["exit_codes"] = codes
        result["pass"] = result["equal_bits"] and set(codes) == {0}
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        result["error"] = str(error)[-3000:]
        for one in replicas.values():
            result.setdefault("stacks", []).append(one.stacks()[-12000:])
    finally:
        for one in replicas.values():
            one.kill()
        lighthouse.close()
    return result


def main() -> int:
    out = Path(next((word for word in sys.argv[1:] if not word.startswith("--")), "."))
    only = [word.split("=", 1)[1].split(",") for word in sys.argv if word.startswith("--only=")]
    results = {}
    for shape in only[0] if only else SHAPES:
        results[shape] = result = run_shape(
            shape, Path(os.environ.get("TMPDIR", "/tmp")) / f"shapes-{os.getpid()}" / shape
        )
        shown = {key: value for key, value in result.items() if key not in {"pass", "stacks"}}
        print(f"{'PASS' if result['pass'] else 'FAIL'}  {shape}  {json.dumps(shown)}", flush=True)
        (out / "gpu_shapes.json").write_text(json.dumps(results, indent=1))
    return 0 if all(result["pass"] for result in results.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
