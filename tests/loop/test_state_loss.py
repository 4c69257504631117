"""`allranks run` when every process that holds the state dies: said at the start, an incident, and obeyed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forks")

TRAIN = """
import os, sys, time
import torch
from allranks import DistributedDataParallel, Manager, Optimizer
folder, nvme = sys.argv[1:3]
if nvme:
    from allranks.checkpoint import CheckpointConfig, CheckpointManager
    checkpoints = CheckpointManager(CheckpointConfig(nvme_path=nvme, checkpoint_interval=10**9))
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
manager = Manager(state=[model, inner], min_replica_size=1)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
attempt = os.environ["ALLRANKS_ATTEMPT"]
while True:
    optimizer.zero_grad()
    ddp(torch.randn(2, 4)).sum().backward()
    time.sleep(0.02)
    if optimizer.step():
        step = manager.current_step()
        with open(f"{folder}/steps-{manager.replica_id().split(':')[0]}-{attempt}", "a") as out:
            out.write(f"{step} {os.getpid()}\\n")
        if attempt != "0" and step >= 5:
            break
manager.shutdown()
"""


def start(tmp_path: Path, nvme: str, *flags: str) -> subprocess.Popen[bytes]:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [
        sys.executable, "-m", "allranks", "run", "--replicas", "2", "--incidents", str(tmp_path / "incidents"),
        *flags, str(script), str(tmp_path), nvme,
    ]  # fmt: skip
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    with (tmp_path / "output").open("w") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)


def kill_all_at(folder: Path, process: subprocess.Popen[bytes], step: int) -> None:
    """Kills both replicas at once when the lighthouse knows that both have come to this step."""
    deadline, known = time.monotonic() + 120, 0
    while known < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
        for page in re.findall(r"page (http\S+)", (folder / "output").read_text())[:1]:
            with urllib.request.urlopen(page + "api/status", timeout=30) as reply:
                known = sum(row["step"] >= step for row in json.load(reply)["replicas"])
    pids = [int(path.read_text().split(maxsplit=2)[1]) for path in folder.glob("steps-*-0")]
    assert len(pids) == 2
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.mark.parametrize("stop", ["flag", "checkpoints", ""])
def test_losing_everything_is_an_incident_and_stops_where_it_should(tmp_path: Path, stop: str) -> None:
    """Both replicas are killed at once. By default a job without checkpoints starts over, and one with checkpoints stops."""
    nvme = str(tmp_path / "nvme") if stop == "checkpoints" else ""
    process = start(tmp_path, nvme, *(["--on-state-loss", "stop"] if stop == "flag" else []))
    kill_all_at(tmp_path, process, 10)
    process.wait(240)
    output = (tmp_path / "output").read_text()
    assert "protection: each of 2 replicas holds the whole state" in output, output
    assert "training starts over from step 0: all replicas that had reached step" in output, output
    reasons = [json.loads(p.read_text())["reason"] for p in (tmp_path / "incidents").glob("*/incident.json")]
    assert any("starts over from step 0" in reason for reason in reasons), reasons
    restarted = list(tmp_path.glob("steps-*-1"))
    assert (process.returncode, bool(restarted)) == ((1, False) if stop else (0, True)), output
    if stop:
        assert "StateLost" in output
    assert "nanobind: leaked" not in output, "objects of triton outlive the interpreter"


WHOLE_JOB = """
import os, signal, time
import allranks
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for step in range(1, 60 if again else 1000):
    allranks.step(step)
    time.sleep(0.05)
    if step == 100:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_whole_job_that_loses_its_state_says_so(tmp_path: Path) -> None:
    """Its only rank dies at step 100, and its script restores nothing."""
    script = tmp_path / "train.py"
    script.write_text(WHOLE_JOB)
    command = [
        sys.executable, "-m", "allranks", "run", "--nproc-per-node", "1", "--max-restarts", "1", "--incidents",
        str(tmp_path / "incidents"), str(script),
    ]  # fmt: skip
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    done = subprocess.run(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout
    assert done.returncode == 0, output
    assert "protection: no replicas, and no checkpoints in the job file" in output, output
    assert "training starts over from step 0 after a restart: it had reached step" in output, output
    reasons = [json.loads(p.read_text())["reason"] for p in (tmp_path / "incidents").glob("*/incident.json")]
    assert any("starts over from step 0" in reason for reason in reasons), reasons
