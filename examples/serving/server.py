"""Processes that behave like an sglang or vLLM server of two GPUs, on CPU: to see what a hang looks like.

    python examples/serving/server.py sglang hang      # the scheduler of TP rank 1 hangs while it loads an adapter
    python examples/serving/server.py vllm hang        # the same in a worker; the engine waits for it
    python examples/serving/server.py sglang idle      # nothing to do: no hang

Titles are what the real processes show in `ps`. Then, in another terminal: allranks stacks
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist


def set_title(title: str) -> None:
    """What the servers do with setproctitle."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        sys.exit("this example needs setproctitle: pip install setproctitle")
    setproctitle(title)


def recv_requests(requests: multiprocessing.Queue[int]) -> int:
    return requests.get()


def load_adapter(rank: int, how: str) -> None:
    if how == "hang" and rank == 1:
        time.sleep(10_000)


def forward(batch: int) -> torch.Tensor:
    hidden = torch.full((4,), float(batch))
    dist.all_reduce(hidden)
    return hidden


def event_loop(rank: int, how: str, requests: multiprocessing.Queue[int]) -> None:
    """Takes requests, and runs each through the layers of all ranks."""
    while True:
        batch = recv_requests(requests)
        if batch == 3:
            load_adapter(rank, how)
        forward(batch)


def serve(title: str, rank: int, how: str, meeting: str, requests: multiprocessing.Queue[int]) -> None:
    set_title(title)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    event_loop(rank, how, requests)


def wait_idle(title: str) -> None:
    set_title(title)
    queue.Queue[int]().get()


TITLES = {
    "sglang": (["sglang::scheduler_TP0", "sglang::scheduler_TP1"], ["sglang::detokenizer", "sglang::router"]),
    "vllm": (["VLLM::Worker_TP0", "VLLM::Worker_TP1"], ["VLLM::APIServer"]),
}


def main(kind: str, how: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the children end with it
    ranks, others = TITLES[kind]
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in ranks]
    started = [context.Process(target=wait_idle, args=(title,), daemon=True) for title in others]
    for rank, title in enumerate(ranks):
        started.append(
            context.Process(target=serve, args=(title, rank, how, meeting, queues[rank]), daemon=True)
        )
    for process in started:
        process.start()
    for batch in range(4 if how == "hang" else 3):
        for each in queues:
            each.put(batch)
    print("serving", *(process.pid for process in started[len(others) :]), flush=True)
    for process in started:
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:3])
