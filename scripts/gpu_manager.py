"""Three replicas that share a GPU: gpu_manager.py OUT. `--cpu` runs the same over gloo, to try the script without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_replicas import LighthouseProcess, Replica, say

CPU = "--cpu" in sys.argv
OUT = Path(next((word for word in sys.argv[1:] if not word.startswith("--")), "."))
REPLICAS = 3
INPUTS = 16
ALIKE = 1e-3  # of the way that the weights moved: rounding; a single wrong gradient is more
WIDTH, LAYERS = (256, 4) if CPU else (int(os.environ.get("GPU_WIDTH", "2048")), 12)  # 201 MB of parameters


def make_training(device: Any) -> tuple[Any, Any]:
    """Model and optimizer, the same in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss_of(model: Any, step: int, device: Any) -> Any:
    """Depends on the weights and the number of the step: the average over any replicas is the gradient of one."""
    import torch

    x = torch.randn(INPUTS, WIDTH, device=device, generator=torch.Generator(device).manual_seed(step))
    return (model(x) - x).square().sum(1).mean()


def movement_beside_alone(path: Path) -> tuple[int, float]:
    """How far the weights that a replica wrote at its end are from those of a training alone, as a share of their way."""
    import torch

    device = torch.device("cpu" if CPU else "cuda:0")
    end = torch.load(path)
    model, optimizer = make_training(device)
    first = [p.detach().clone() for p in model.parameters()]
    for step in range(end["step"]):
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        optimizer.step()
    norm = lambda parts: float(sum(part.double().square().sum() for part in parts)) ** 0.5  # noqa: E731
    moved = norm([p.detach() - a for p, a in zip(model.parameters(), first, strict=True)])
    apart = norm([p.detach() - b.to(device) for p, b in zip(model.parameters(), end["weights"], strict=True)])
    return end["step"], apart / moved


def forget(out: Path) -> None:
    """What an earlier run wrote for its replicas."""
    for name in ("stop", "begun", "end.pt"):
        (out / name).unlink(missing_ok=True)


def worker(name: str, ready_to_join: Callable[[], None] = lambda: None) -> None:
    """Trains until `stop` appears; one line per event: time kind step participants extra."""
    import hashlib
    import logging
    import threading

    import torch

    from allranks.torchft import (
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
        ProcessGroupNCCL,
    )

    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(message)s")
    device = torch.device("cpu" if CPU else "cuda:0")
    group = ProcessGroupGloo(30) if CPU else ProcessGroupNCCL(30, device=device)
    model, inner = make_training(device)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        say("healed", extra=threading.current_thread().name)

    manager = Manager(
        group, load, lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1, rank=0, world_size=1, replica_id=name, timeout=60, quorum_timeout=60,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    loss_of(model, 0, device).item()  # loads kernels before anybody waits for us
    ready_to_join()
    if (OUT / "begun").exists():  # gradients of these weights must not count
        torch.manual_seed(os.getpid())
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
    manager.start()
    say("ready")
    flag = torch.zeros(1, device=device)
    if not CPU and name != "r0":  # on a stream of its own: healing must not count on the default one
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.Stream(device))
    while flag.item() == 0:
        optimizer.zero_grad()
        before = manager.current_step()
        loss_of(ddp, before, device).backward()
        flag.fill_(float((OUT / "stop").exists()))
        manager.allreduce(flag).wait()
        if optimizer.step():
            say("commit", manager.current_step(), manager.num_participants())
        else:
            flag.zero_()
            say("retry", before)
    digest = hashlib.sha256()
    for p in [*model.parameters(), *[s["momentum_buffer"] for s in inner.state.values()]]:
        digest.update(p.detach().cpu().contiguous().numpy().tobytes())
    if name.endswith("0"):
        weights = [p.detach().cpu() for p in model.parameters()]
        torch.save({"step": manager.current_step(), "weights": weights}, OUT / "end.pt")
    say("done", manager.current_step(), 0, digest.hexdigest()[:16])
    manager.shutdown()


def command(name: str) -> list[str]:
    return [sys.executable, __file__, "worker", name, str(OUT), *(["--cpu"] if CPU else [])]


def main() -> int:
    results: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    forget(OUT)
    lighthouse = LighthouseProcess(OUT)
    start = lambda name: Replica(name, command(name), lighthouse.address, OUT)  # noqa: E731
    replicas = {name: start(name) for name in [f"r{n}" for n in range(REPLICAS)]}
    try:
        for replica in replicas.values():
            replica.wait("commit", participants=REPLICAS, limit_s=90)
        (OUT / "begun").touch()
        verdicts[f"{REPLICAS} replicas train together"] = True
        for number in range(2):
            victim = replicas.pop("r1")
            at = time.monotonic()
            victim.process.send_signal(signal.SIGKILL)
            times = [one.wait("commit", at, REPLICAS - 1) - at for one in replicas.values()]
            results[f"kill_{number}_s"] = [round(value, 3) for value in times]
            verdicts[f"survivors of kill {number} go on in place"] = all(
                one.process.poll() is None for one in replicas.values()
            )
            replicas["r1"] = start("r1")
            ready = replicas["r1"].wait("ready")
            results[f"ready_to_healed_{number}_s"] = round(replicas["r1"].wait("healed") - ready, 3)
            back = replicas["r1"].wait("commit", ready, REPLICAS)
            results[f"ready_to_common_step_{number}_s"] = round(back - ready, 3)
            around = [at for at in replicas["r0"].commits() if ready - 1.0 < at <= back + 1.0]
            results[f"stall_of_the_others_{number}_s"] = round(
                max(b - a for a, b in itertools.pairwise(around)), 3
            )
            threads = [event[4] for event in replicas["r1"].events() if event[1] == "healed"]
            # autograd's thread for a device, in which DDP's hooks run, is unknown to Python
            inside = len(threads) == 1 and threads[0].startswith(("MainThread", "Dummy"))
            verdicts["a joining replica loads its state inside of its step"] = inside
        results["killed_while_joining_s"] = []
        # The communicator with it is being made, or it heals, or its first step has just begun.
        for delay_s in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
            replicas.pop("r1").process.kill()
            joining = start("r1")
            joining.wait("ready")
            time.sleep(delay_s)
            at = time.monotonic()
            joining.process.send_signal(signal.SIGKILL)
            times = [one.wait("commit", at, REPLICAS - 1) - at for one in replicas.values()]
            results["killed_while_joining_s"].append([round(value, 3) for value in times])
            replicas["r1"] = start("r1")
            replicas["r1"].wait("commit", at, REPLICAS)
        verdicts["a replica killed while it joins does not stop the others"] = True
        frozen = replicas.pop("r2")
        at = time.monotonic()
        frozen.process.send_signal(signal.SIGSTOP)
        gone = [one.wait("commit", at, REPLICAS - 1) - at for one in replicas.values()]
        results["freeze_s (heartbeat timeout 2 s)"] = [round(value, 3) for value in gone]
        verdicts["a frozen replica does not stop the others"] = True
        frozen.process.kill()
        (OUT / "stop").touch()
        for one in replicas.values():
            one.process.wait(60)
        ends = {
            tuple(event[2::2]) for one in replicas.values() for event in one.events() if event[1] == "done"
        }
        verdicts["equal bits at the end"] = len(ends) == 1
        steps_alone, apart = movement_beside_alone(OUT / "end.pt")
        results["away_from_training_alone"] = apart
        verdicts[f"the weights of a training alone after {steps_alone} steps"] = apart < ALIKE
        codes = {name: one.process.returncode for name, one in replicas.items()}
        verdicts["clean exits"] = set(codes.values()) == {0}
        results["exit_codes"] = codes
        said = [path for path in OUT.glob("r*.err") if "frame #" in path.read_text()]
        verdicts["no C++ stack trace is printed at the user"] = not said
        steps = replicas["r0"].commits()
        results["step_s"] = round(sorted(b - a for a, b in itertools.pairwise(steps))[len(steps) // 2], 4)
        results["retried_steps"] = sum(event[1] == "retry" for event in replicas["r0"].events())
    except (RuntimeError, TimeoutError) as error:
        verdicts[f"no error: {error}"] = False
        for one in replicas.values():
            print(one.stacks())
    finally:
        for one in replicas.values():
            if one.process.poll() is None:
                one.process.kill()
        lighthouse.close()
    for claim, holds in verdicts.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    print(json.dumps(results, indent=1))
    (OUT / "gpu_manager.json").write_text(json.dumps({"verdicts": verdicts, "numbers": results}, indent=1))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        OUT = Path(sys.argv[3])
        worker(sys.argv[2])
    else:
        sys.exit(main())
