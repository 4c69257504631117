"""`allranks run --fresh` for real: from scratch at the first start, and from its own checkpoint after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allranks.checkpoint import NVMeBackend, create_checkpoint_state

pytestmark = pytest.mark.usefixtures("forks")

SCRIPT = """
import os, pathlib, sys
import torch
from allranks.checkpoint import CheckpointConfig, CheckpointManager

folder = pathlib.Path(sys.argv[1])
model = torch.nn.Linear(2, 2)
config = CheckpointConfig(nvme_path=folder / "store", checkpoint_interval=1, memory_snapshot_interval=0)
with CheckpointManager(config) as manager:
    state = manager.restore(model)
    with open(folder / "starts", "a") as starts:
        starts.write(f"{0 if state is None else state.step}\\n")
    first = state is None
    for step in range(1 if first else state.step + 1, 4):
        manager.step(step, model)
        assert manager.wait_for_pending_saves(60)
        if first and step == 2:
            os._exit(1)
"""


def _run(folder: Path, *flags: str) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ALLRANKS_")}
    command = [
        sys.executable,
        "-m",
        "allranks",
        "run",
        "--no-lighthouse",
        "--no-watch",
        "--no-spares",
        "--no-record",
        *flags,
    ]
    done = subprocess.run(
        [*command, "--standalone", "--nproc-per-node", "1", "--max-restarts", "2", "train.py", str(folder)],
        cwd=folder, env={**environment, "ALLRANKS_DIR": str(folder / "box")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return (folder / "starts").read_text().split()


def test_a_fresh_run_starts_from_scratch_once(tmp_path: Path) -> None:
    """Checkpoints of an earlier run are there, and the flag; the restart of this run continues from step 2."""
    earlier = NVMeBackend(tmp_path / "store")
    state = create_checkpoint_state(7, torch.nn.Linear(2, 2), None)
    earlier.save(state, "checkpoint_step_00000007")
    assert _run(tmp_path, "--fresh") == ["0", "2"]
    (aside,) = (tmp_path / "store").glob("set-aside-*")
    assert [path.name for path in aside.iterdir()] == ["checkpoint_step_00000007"]
    assert earlier.list_checkpoints() == [f"checkpoint_step_0000000{step}" for step in (1, 2, 3)]
