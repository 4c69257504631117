"""Real jobs of which one rank starts or ends oddly: what the last line of `allranks run` says, and what the boxes alone say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.load import load_paths

pytestmark = pytest.mark.usefixtures("forks")

HEAD = """
import datetime, os, sys
import torch, torch.distributed as dist
rank, LIMIT = int(os.environ["RANK"]), datetime.timedelta(seconds=5)
"""
JOIN = 'dist.init_process_group("gloo", timeout=LIMIT)\ndist.barrier()\n'
PORT = 'if rank == 1: os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) ^ 1)\n'

GATHER = """
for step in range(6):
    try:
        dist.all_gather([torch.ones(2) for _ in range(1 if (rank, step) == (1, 3) else 2)], torch.ones(2))
    except Exception:
        pass
    dist.all_reduce(torch.ones(1))
"""
SKIP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(8):
    loss = model(torch.ones(2, 4)).sum()
    if (rank, step) == (1, 4): continue
    loss.backward()
dist.barrier()
"""

#: (the program, what its boxes alone say, what the last line of `allranks run` says if it is not the same)
CASES = {
    "port": (PORT + JOIN, "rank 1 called init_process_group with address ", ""),
    "world_size": (
        'if rank == 1: os.environ["WORLD_SIZE"] = "3"\n' + JOIN,
        "rank 1 called init_process_group with world size 3 (train.py:6), rank 0 with world size 2",
        "",
    ),
    "returned": (
        "if rank == 0:\n    " + JOIN.replace("\n", "\n    "),
        "rank 1 ended with exit code 0 before it called init_process_group",
        "",
    ),
    "exit_code": (
        JOIN + "if rank == 1: sys.exit(3)\ndist.barrier()\n",
        "exit code 3 (sys.exit at train.py:7)",
        "rank 1 exited with code 3 (sys.exit) at train.py:7; story: ",
    ),
    "survived": (JOIN + GATHER, " on rank 1 at train.py:10, and its program went on, to all_reduce #", ""),
    "skipped": (
        JOIN + SKIP,
        " called barrier #14 of group default_pg at train.py:13, where rank 0 called all_reduce",
        "",
    ),
}


#: In every run one that never joins and one that ends; the others' verdicts are also held by recordings (tests/diagnose).
ALWAYS = ("returned", "exit_code")


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.everything) for name in CASES],
)
def test_an_odd_start_or_end_of_one_rank_is_told(name: str, tmp_path: Path) -> None:
    body, alone, last = CASES[name]
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    command = [
        sys.executable, "-m", "allranks", "run", "--standalone", "--nproc-per-node", "2", "--no-lighthouse",
        "--incidents", str(tmp_path / "incidents"), str(script),
    ]  # fmt: skip
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    output = (ended.stdout + ended.stderr).splitlines()
    assert ended.returncode != 0 and output[-1].startswith("[allranks] "), output[-40:]
    assert (last or alone)[1:] in _without_host(output[-1]), output[-40:]
    loaded = load_paths([str(tmp_path / "boxes")])
    verdict = diagnose(loaded.traces, loaded.files, options=DiagnoseOptions(ended=True)).verdict
    assert verdict is not None and verdict.ranks == (1,), verdict
    assert alone in _without_host(verdict.sentence), verdict.sentence


def _without_host(sentence: str) -> str:
    return sentence.replace(f" ({os.uname().nodename})", "")
