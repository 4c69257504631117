"""One replica of benchmarks/recovery.py, for allranks, torchft or plain DDP. Runs in either virtual environment.

A zygote: imports once, then forks a worker for every JSON line on stdin and answers with its pid. A worker
writes one line per event to its log: `time kind step participants`, time from CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist

LIBRARY = sys.argv[1]
if LIBRARY == "torchft":
    import torchft.manager

    import torchft
elif LIBRARY == "allranks":
    import allranks.torchft as torchft


class Log:
    """Events of one worker."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a", buffering=1)  # noqa: SIM115

    def __call__(self, kind: str, step: int = 0, participants: int = 0) -> None:
        self.file.write(f"{time.monotonic():.6f} {kind} {step} {participants}\n")


def build(width: int, layers: int) -> torch.nn.Module:
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts)


def repaired_hook(state, bucket):  # type: ignore[no-untyped-def]
    """torchft's hook without the assertion that kills the survivor (it waits there too, so nothing is lost)."""
    state.allreduce(bucket.buffer()).wait()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def make_manager(job: dict, load, save):  # type: ignore[no-untyped-def, type-arg]
    options = {"min_replica_size": 1, "rank": 0, "world_size": 1, "replica_id": job["name"],
               "lighthouse_addr": job["lighthouse"], "load_state_dict": load, "state_dict": save,
               "hostname": job.get("host", "127.0.0.1")}  # fmt: skip
    if job.get("asynchronous") is not None:
        options["use_async_quorum"] = job["asynchronous"]
    if LIBRARY == "allranks":
        return torchft.Manager(proactive_recovery=job.get("proactive", True), **options).start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options |= {"pg": torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)), "store_addr": "127.0.0.1",
                "store_port": store.port}  # fmt: skip
    manager = torchft.Manager(**options)
    manager.benchmark_store = store
    return manager


def train(job: dict) -> None:  # type: ignore[type-arg]
    """Trains until told to stop; reacts to SIGUSR1 (leave) and SIGUSR2 (hang)."""
    log = Log(job["log"])
    torch.set_num_threads(1)
    asked = {"leave": False, "hang": False}
    signal.signal(signal.SIGUSR1, lambda *_: asked.update(leave=True))
    signal.signal(signal.SIGUSR2, lambda *_: asked.update(hang=True))
    model = build(job["width"], job["layers"])
    for layer in list(model)[: 2 * job.get("frozen", 0)]:
        layer.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = torch.optim.SGD(trained, lr=0.001, momentum=job.get("momentum", 0.0))

    def load(state):  # type: ignore[no-untyped-def]
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        log("healed")

    manager = make_manager(job, load, lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()})
    if LIBRARY == "torchft":
        torchft.DistributedDataParallel._comm_hook = staticmethod(repaired_hook)
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    batch = torch.randn(job.get("rows", 8), job["width"])
    log("ready")
    while manager.current_step() < job["steps"]:
        if asked["leave"]:
            log("leave")
            manager.shutdown()
            os._exit(0)
        before = manager.current_step()
        optimizer.zero_grad()
        loss = wrapped(batch).square().mean()
        if job.get("compute_s"):
            time.sleep(job["compute_s"])
        if asked["hang"]:
            log("hang")
            time.sleep(3600)
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            log("commit", manager.current_step(), manager.num_participants())
        else:
            log("retry", before)
    log("done")
    manager.shutdown()


def plain(job: dict) -> None:  # type: ignore[type-arg]
    """torch's own DDP on the same model: what a step costs without anybody to survive for."""
    log = Log(job["log"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=job["rank"], world_size=2)
    model = build(job["width"], job["layers"])
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batch = torch.randn(8, job["width"])
    for step in range(job["steps"]):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        log("commit", step, 2)
    dist.destroy_process_group()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(os.open(job["log"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            os.dup2(null, 1)
            code = 1
            try:
                plain(job) if LIBRARY == "plain" else train(job)
                code = 0
            except BaseException as error:
                Log(job["log"])(f"crash:{type(error).__name__}")
                raise
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
