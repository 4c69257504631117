"""`allranks watch` on jobs that know nothing of us: a plain torchrun job, and a server of scheduler and workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from allranks.model.debug_options import DebugOptions
from allranks.stacktraces.debuggers import find_pyspy
from allranks.watch.sidecar import Sidecar

pytestmark = [
    pytest.mark.usefixtures("forks"),
    pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed"),
]

PLAIN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
def load_batch(step):
    if dist.get_rank() == 1 and step == 20:
        time.sleep(1e6)
for step in range(100_000):
    load_batch(step)
    dist.all_reduce(torch.ones(10))
    time.sleep(0.01)
"""

# A scheduler and its workers, as vLLM and sglang have them: requests over sockets that are polled with a timeout.
WORKER = """
import os, select, socket, sys, time
rank, port = int(sys.argv[1]), int(sys.argv[2])
def execute_model():
    server = os.getppid()
    while os.getppid() == server:
        time.sleep(5)
def wait_for_work(sock):
    while not select.select([sock], [], [], 0.5)[0]:
        pass
    return sock.recv(100)
with socket.create_connection(("127.0.0.1", port)) as sock:
    for count in range(10**9):
        wait_for_work(sock)
        if rank == 1 and count == 50:
            execute_model()
        sock.send(b"done")
"""
SERVER = """
import os, select, socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
port = str(listener.getsockname()[1])
for rank in range(2):
    title = f"VLLM::Worker_TP{rank}"
    subprocess.Popen(["bash", "-c", 'exec -a "$0" "$@"', title, sys.executable, sys.argv[1], str(rank), port])
workers = [listener.accept()[0] for _ in range(2)]  # they end with our connections
while True:
    for sock in workers: sock.send(b"step")
    for sock in workers:
        while not select.select([sock], [], [], 0.5)[0]: pass
        sock.recv(100)
    time.sleep(0.01)
"""


def watch(folder: Path, command: list[str]) -> tuple[dict[str, object], list[str]]:
    """The first collection as JSON, and what was said before it."""
    words = [sys.executable, "-m", "allranks", "watch", "--no-progress", "6", "--wait", "0", "--json"]
    words += ["--interval", "1", "-o", str(folder / "out"), "--", *command]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("{"):
                return json.loads(line), lines
        raise AssertionError(lines)
    finally:
        process.terminate()  # passed on: the launcher ends its ranks
        process.communicate(timeout=300)


def test_a_hang_of_a_plain_torchrun_job_is_noticed_with_rank_and_line(tmp_path: Path) -> None:
    """The script does not import allranks; ranks 0 and 2 wait for rank 1, which sleeps."""
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    found, lines = watch(tmp_path, [*torchrun, str(script)])
    assert (found["hung"], found["culprits"]) == (True, [1]), found
    assert "load_batch" in str(found["sentence"])
    assert any("have no black box" in line and "is not noticed" in line for line in lines), lines


def test_a_stuck_worker_of_a_server_is_noticed_and_unclear_is_not_healthy(tmp_path: Path) -> None:
    """Worker 1 hangs in a request; worker 0 and the scheduler poll."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "server.py").write_text(SERVER)
    found, _ = watch(tmp_path, [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "worker.py")])
    assert found["hung"] is not False
    assert "execute_model" in str(found["sentence"]), found


RAS = """RAS status
  #0-0 (0123456789abcdef) MISMATCH
    1 ranks have launched up to operation 41
    Rank 1 -- GPU 0 managed by process {pid} on node 0
    1 ranks have launched up to operation {other}
"""


@pytest.mark.parametrize("moves", [False, True])
def test_ranks_that_burn_cpu_in_nccl_are_told_by_its_operation_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moves: bool
) -> None:
    """A server at the RAS port answers with counts that differ and stay the same, or move."""
    asked = 0
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        nonlocal asked
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1000)
                asked += 1
                connection.sendall(RAS.format(pid=os.getpid(), other=42 + asked * moves).encode())

    server = threading.Thread(target=serve)
    server.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    from allranks.stacktraces import ras

    monkeypatch.setattr(ras.ask, "__defaults__", (address,))
    sidecar = Sidecar(DebugOptions(), tmp_path)
    stalled = []
    try:
        for _ in range(3):
            sidecar._ask_others([])
            stalled.append(sidecar._stalled())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join()
    assert asked == 3
    assert stalled == ([False] * 3 if moves else [False, True, True]), time.time()
