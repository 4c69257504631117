"""GPT-2 of `transformers` in replicas on one GPU, with nothing warmed up: allranks, and torchft where its wheel is given.

    gpu_first_contact.py OUT [--cold=3] [--kills=10] [--torchft=FOLDER] [--cpu]

1. `--cold` times: `allranks run --replicas 3` of a plain script; all three replicas must train from the first step on.
2. Three replicas by hand: first common step, `--kills` times kill -9 and rejoin, shutdown, an exception.
3. The same with torchft (one kill: its survivors need its timeout, and did not survive a second one), for the ratios.
Prints PASS or FAIL per claim and writes OUT/gpu_first_contact.json. `--cpu` rehearses it over gloo.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_replicas import SHARED_GPU, LighthouseProcess, Replica, say

CPU = "--cpu" in sys.argv
NAMES = ("r0", "r1", "r2")


def option(name: str, default: str) -> str:
    found = [word.split("=", 1)[1] for word in sys.argv if word.startswith(f"--{name}=")]
    return found[-1] if found else default


def make_model() -> tuple[Any, Any, Any]:
    """A small GPT-2 as a user would make it, its optimizer, and a function that makes a batch."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    device = torch.device("cpu" if CPU else "cuda:0")
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2) if CPU else GPT2Config(n_layer=6)
    model = GPT2LMHeadModel(config).to(device)
    model = model if CPU else model.bfloat16()
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        lambda: torch.randint(0, 50257, (2, 32 if CPU else 256), device=device),
    )


def make_manager(library: str, load: Any, save: Any) -> tuple[Any, Any, Any]:
    """(manager, DistributedDataParallel, Optimizer) of either library."""
    from datetime import timedelta

    import torch

    if library == "allranks":
        from allranks.torchft import (
            DistributedDataParallel,
            Manager,
            Optimizer,
            ProcessGroupGloo,
            ProcessGroupNCCL,
        )

        group = ProcessGroupGloo(30) if CPU else ProcessGroupNCCL(30, device=torch.device("cuda:0"))
        return Manager(group, load, save, min_replica_size=1), DistributedDataParallel, Optimizer
    from torch.distributed import TCPStore

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=30)
    manager = Manager(
        pg=(ProcessGroupGloo if CPU else ProcessGroupNCCL)(timeout=limit),
        load_state_dict=load, state_dict=save, min_replica_size=1, rank=0, world_size=1, timeout=limit,
        replica_id=os.environ["ALLRANKS_REPLICA"], store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
    )  # fmt: skip
    manager.keep_store = store
    return manager, DistributedDataParallel, Optimizer


def worker(library: str, out: Path, steps: int) -> None:
    """One replica; trains to `steps`, or until `out/stop` names a step. `out/raise` makes it fail like a user's bug."""
    import logging

    os.environ.setdefault(
        "NCCL_HOSTID", os.environ["ALLRANKS_REPLICA"]
    )  # else NCCL refuses two ranks on one GPU
    import torch

    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")
    for noisy in ("torch", "transformers", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    model, inner, batch = make_model()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        say("healed")

    save = lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}  # noqa: E731
    manager, parallel, wrapper = make_manager(library, load, save)
    ddp, optimizer = parallel(manager, model), wrapper(manager, inner)
    say("ready")
    while manager.current_step() < steps:
        x, before = batch(), manager.current_step()
        optimizer.zero_grad()
        ddp(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        if not CPU:
            torch.cuda.synchronize()
        after = manager.current_step()
        say("commit" if after > before else "retry", after, manager.num_participants())
        if (out / f"raise-{os.environ['ALLRANKS_REPLICA']}").exists():
            say("raised")
            raise ValueError("a bug of the user")
        if steps == 10**9 and (out / "stop").exists():
            steps = int((out / "stop").read_text())
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    say("done", manager.current_step(), manager.num_participants(), repr(total))
    manager.shutdown()
    if library == "torchft":
        os._exit(0)


def cold_runs(out: Path, count: int) -> dict[str, Any]:
    """`allranks run --replicas 3`, unwarmed: how many of the runs trained with three members from the first step on."""
    good, seconds = 0, []
    for number in range(count):
        log = out / f"cold-{number}.log"
        words = [
            sys.executable,
            "-m",
            "allranks",
            "run",
            "--replicas",
            "3",
            __file__,
            "worker",
            "allranks",
            str(out),
            "40",
        ]
        began = time.monotonic()
        with open(log, "w") as file:
            done = subprocess.run(
                ["timeout", "120", *words, *(["--cpu"] if CPU else [])], stdout=file, stderr=subprocess.STDOUT, check=False,
                env={**os.environ, **SHARED_GPU},
            )  # fmt: skip
        seconds.append(round(time.monotonic() - began, 1))
        commits = [line.split()[-3:-1] for line in log.read_text().splitlines() if " commit " in line]
        ends = {line.split()[-1] for line in log.read_text().splitlines() if " done " in line}
        good += (
            done.returncode == 0 and len(ends) == 1 and all(step != "1" or n == "3" for step, n in commits)
        )
    return {"runs": count, "good": good, "seconds": seconds}


def by_hand(library: str, out: Path, kills: int) -> dict[str, Any]:
    """First common step, kills and rejoins, the end."""
    out.mkdir(parents=True)
    result: dict[str, Any] = {}
    lighthouse: Any
    if library == "allranks":
        lighthouse = LighthouseProcess(out)
        address = lighthouse.address
    else:
        address = "http://127.0.0.1:29719"
        os.environ["TORCHFT_LIGHTHOUSE"] = address
        code = "import torchft.coordination as c, sys; c.lighthouse_main()"
        lighthouse = subprocess.Popen(
            [sys.executable, "-c", code, "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "3000", "--bind", "127.0.0.1:29719"]
        )  # fmt: skip
        time.sleep(3)
    command = [sys.executable, __file__, "worker", library, str(out), str(10**9), *(["--cpu"] if CPU else [])]
    start = lambda name: Replica(name, command, address, out)  # noqa: E731
    replicas = {name: start(name) for name in NAMES}
    try:
        ready = max(one.wait("ready", limit_s=90) for one in replicas.values())
        together = max(one.wait("commit", participants=3, limit_s=90) for one in replicas.values())
        result["first_common_step_s"] = round(together - ready, 3)
        time.sleep(3)
        commits = replicas["r0"].commits()[-12:]
        result["step_s"] = round(statistics.median(b - a for a, b in itertools.pairwise(commits)), 3)
        for _ in range(kills):
            victim = replicas.pop("r1")
            at = time.monotonic()
            victim.kill()
            after = [one.wait("commit", at, 2, 90) - at for one in replicas.values()]
            result.setdefault("kill_to_commit_s", []).append(round(max(after), 3))
            replicas["r1"] = start("r1")
            ready = replicas["r1"].wait("ready", limit_s=60)
            back = replicas["r1"].wait("commit", ready, 3, 60)
            result.setdefault("ready_to_common_step_s", []).append(round(back - ready, 3))
            time.sleep(0.5)
            around = [when for when in replicas["r0"].commits() if ready - 1 < when <= back + 1]
            result.setdefault("rejoin_gap_s", []).append(
                round(max(b - a for a, b in itertools.pairwise(around)), 3)
            )
        if library == "allranks":
            (out / "raise-r1").touch()
            raised = replicas["r1"].wait("raised")
            replicas["r1"].process.wait(60)
            result["exception_to_exit_s"] = round(time.monotonic() - raised, 3)
            replicas.pop("r1")
        last = int([e for e in replicas["r0"].events() if e[1] == "commit"][-1][2])
        (out / "stop").write_text(str(last + 10))
        ends = []
        for one in replicas.values():
            done = one.wait("done", limit_s=60)
            one.process.wait(60)
            ends.append(round(time.monotonic() - done, 3))
        result["done_to_exit_s"] = max(ends)
        results = {event[4] for one in replicas.values() for event in one.events() if event[1] == "done"}
        result["equal"] = len(results) == 1
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        result["error"] = str(error)[-2500:]
        result["stacks"] = [one.stacks()[-8000:] for one in replicas.values()]
    finally:
        for one in replicas.values():
            one.kill()
        lighthouse.close() if library == "allranks" else lighthouse.kill()
    return result


def claims(found: dict[str, Any]) -> dict[str, bool]:
    """What must hold, from the numbers."""
    ours, cold = found["allranks"], found["cold"]
    step = ours.get("step_s", 0.0)
    held = {
        f"cold: {cold['runs']} of {cold['runs']} runs train with three members from the first step": cold[
            "good"
        ]
        == cold["runs"],
        "no survivor crashed or hung": "error" not in ours,
    }
    if "error" in ours:
        return held
    held |= {
        "kill -9 -> next commit, median at most 2 steps + 0.1 s": statistics.median(ours["kill_to_commit_s"])
        <= 2 * step + 0.1,
        "rejoin: longest gap of the others, median at most 1 step + 0.3 s": statistics.median(
            ours["rejoin_gap_s"]
        )
        <= step + 0.3,
        "shutdown -> exit at most 3 s": ours["done_to_exit_s"] <= 3.0,
        "exception -> exit at most 3 s": ours["exception_to_exit_s"] <= 3.0,
        "equal parameters at the end": ours["equal"],
    }
    peer = found.get("torchft", {})
    if "first_common_step_s" in peer:
        held["first common step at most torchft's"] = (
            ours["first_common_step_s"] <= peer["first_common_step_s"]
        )
    if "rejoin_gap_s" in peer:
        gap = statistics.median(ours["rejoin_gap_s"])
        held["rejoin gap at most 0.3 x torchft's"] = gap <= 0.3 * statistics.median(peer["rejoin_gap_s"])
    return held


def main() -> int:
    out = Path(sys.argv[1])
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"first-contact-{os.getpid()}"
    found: dict[str, Any] = {"cold": cold_runs(out, int(option("cold", "3")))}
    print(f"cold {json.dumps(found['cold'])}", flush=True)
    found["allranks"] = by_hand("allranks", folder / "allranks", int(option("kills", "10")))
    print(f"allranks {json.dumps(found['allranks'])}", flush=True)
    if torchft := option("torchft", ""):
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{torchft}"
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "30"
        found["torchft"] = by_hand("torchft", folder / "torchft", 1)
        print(f"torchft {json.dumps(found['torchft'])}", flush=True)
    held = claims(found)
    for claim, holds in held.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    (out / "gpu_first_contact.json").write_text(json.dumps({"verdicts": held, "numbers": found}, indent=1))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
