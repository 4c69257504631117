"""A real job of two ranks with torch's debug server, which knows nothing of allranks: stacks, dump, diagnose, and our page."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.debug")
for library in ("jinja2", "tabulate"):
    pytest.importorskip(library, reason="torch's debug server needs it")

PROGRAM = """
import sys, threading, torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server
from torch.distributed.debug._debug_handlers import default_handlers
from allranks.api.debug_server import VerdictHandler

port = int(sys.argv[1])
dist.init_process_group("gloo")
start_debug_server(
    port=port, dump_dir=sys.argv[2], dump_interval=1, enabled_dumps={"stacks", "allranks"},
    handlers=[*default_handlers(), VerdictHandler(port)],
)

def load_batch():
    threading.Event().wait()

for _ in range(5):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    load_batch()
dist.all_reduce(torch.ones(4))
"""
LINE = "program.py:15 in load_batch"


def free_port() -> int:
    with socket.socket(socket.AF_INET6) as one:
        one.bind(("::", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(the address of the server, the folder of its periodic dumps) of a job that hangs."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "program.py").write_text(PROGRAM)
    port, store = free_port(), free_port()
    command = [sys.executable, str(folder / "program.py"), str(port), str(folder / "dumps")]
    common = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(store), "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not _waits_in_call(folder / "dumps"):
            assert all(rank.poll() is None for rank in ranks)
            assert time.monotonic() < deadline, "the job does not hang where it should"
            time.sleep(0.2)
        yield f"http://localhost:{port}", folder / "dumps"
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()


def _waits_in_call(folder: Path) -> bool:
    """Whether two of the server's own dumps show the hang."""
    texts = [path.read_text() for path in folder.glob("stacks_*.txt")]
    return sum("in load_batch" in text and "in all_reduce" in text for text in texts) > 1


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_stacks_are_read_from_the_server(job: tuple[str, Path]) -> None:
    done = run("stacks", job[0])
    assert LINE in done.stdout, done


def test_a_dump_of_the_server_is_diagnosed(job: tuple[str, Path], tmp_path: Path) -> None:
    """Recorded calls and stacks together: rank, line and cause."""
    done = run("dump", job[0], "-o", str(tmp_path / "taken"))
    assert done.returncode == 0, done
    assert {"rank_0.json", "rank_1.json", "rank0.faulthandler.txt"} <= set(os.listdir(tmp_path / "taken"))
    first = run("diagnose", str(tmp_path / "taken")).stdout.splitlines()[0]
    assert "rank 1 never entered all_reduce #6" in first
    assert LINE in first


def test_the_folder_of_periodic_dumps_is_a_source(job: tuple[str, Path]) -> None:
    """All ranks are in one file; the time in its name is not a rank."""
    done = run("diagnose", str(job[1]))
    assert "rank 1 " in done.stdout.splitlines()[0] and LINE in done.stdout, done
    assert "stacks of ranks 0, 1" in done.stdout


def test_the_verdict_is_a_page_of_the_server(job: tuple[str, Path]) -> None:
    with urllib.request.urlopen(f"{job[0]}/allranks", timeout=120) as answer:
        page = answer.read().decode()
    assert "rank 1 never entered all_reduce #6" in page
    with urllib.request.urlopen(f"{job[0]}/", timeout=60) as answer:
        assert 'href="/allranks"' in answer.read().decode()


def test_an_address_without_a_server_is_an_error() -> None:
    done = run("dump", f"http://localhost:{free_port()}")
    assert done.returncode == 2 and "no rank answered" in done.stderr
