"""What users of Flight Recorder and of hang backtraces expect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.stacktraces import CollectOptions, collect
from allranks.stacktraces.find import targets_of

pytestmark = pytest.mark.usefixtures("forks")

CRASH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    dist.all_reduce(torch.ones(10))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1000))
dist.all_reduce(torch.ones(100_000))
"""


def test_a_size_mismatch_that_gloo_aborts_is_told_with_both_lines(tmp_path: Path) -> None:
    """One rank makes a call too many, and gloo ends the job on the different sizes: the black boxes name both call sites."""
    (tmp_path / "crash.py").write_text(CRASH)
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*words, "-m", "allranks.recording", "crash.py"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert ran.returncode != 0
    asked = [sys.executable, "-m", "allranks", "diagnose", str(tmp_path / "boxes")]
    verdict = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert "crash.py:7" in verdict.stdout and "crash.py:8" in verdict.stdout, verdict.stdout


def test_a_cuda_gdb_that_fails_leaves_a_file_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name that scripts know, cudagdb_HOST_PID.txt; the stacks of the process are still there."""
    tool = tmp_path / "cuda-gdb"
    tool.write_text("#!/bin/sh\necho 'cannot attach' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"], stdout=subprocess.PIPE
    )
    try:
        assert victim.stdout is not None
        victim.stdout.readline()
        folder = tmp_path / "captured"
        collect(targets_of({0: victim.pid}), CollectOptions(rounds=1, cuda_gdb=True, raw_folder=folder))
    finally:
        victim.kill()
        victim.wait()
    (said,) = folder.glob(f"cudagdb_*_{victim.pid}.txt")
    assert "cuda-gdb failed" in said.read_text() and "cannot attach" in said.read_text()
    assert list(folder.glob(f"pyspy_*_{victim.pid}.txt"))
