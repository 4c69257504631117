"""Ray Train on a local cluster, as it comes from the registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="ray is not installed")

TRAIN = """
import os, pathlib, sys, time, torch, ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from allranks.integrations.ray import RayWatch, TorchTrainer
FOLDER = pathlib.Path(sys.argv[1])
def load_batch(step):
    if step == 60 and ray.train.get_context().get_world_rank() == 1 and not (FOLDER / "hung").exists():
        (FOLDER / "hung").touch()
        time.sleep(10_000)  # the culprit's line
    return torch.randn(4, 8)
def loop():
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    for step in range(80):
        model(load_batch(step)).sum().backward()
    ray.train.report({"step": step})
    (FOLDER / f"finished-{ray.train.get_context().get_world_rank()}").write_text(str(os.getpid()))
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
    trainer = TorchTrainer(
        loop, scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name=sys.argv[3], storage_path=str(FOLDER / "out"), failure_config=FailureConfig(max_failures=1)),
        watch=RayWatch(incidents=FOLDER / "incidents", notice_s=3.0))
    print("RESULT", trainer.fit().error)
"""


@pytest.mark.timeout(300)
def test_a_worker_that_hangs_is_named_with_its_line_and_replaced(tmp_path: Path) -> None:
    """One changed import: the hang is diagnosed in the training thread, the training ends without an error, and the
    black boxes of the workers that ended well say that nothing is wrong."""
    script, job = tmp_path / "train.py", f"test-{tmp_path.name}-{os.getpid()}"
    script.write_text(TRAIN)
    session = Path("/tmp") / f"ray-{os.getpid()}"  # socket paths must be short
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path), str(session), job],
            env=env, text=True, timeout=280, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        ended = [path.read_text() for path in tmp_path.glob("finished-*")]
        boxes = [
            shutil.copy(path, tmp_path)
            for path in Path("/dev/shm").glob(f"allranks-{os.getuid()}/{job}-*/*.box")
            if any(f"p{pid}." in path.name for pid in ended)
        ]
    finally:
        shutil.rmtree(session, ignore_errors=True)
        for folder in Path("/dev/shm").glob(f"allranks-{os.getuid()}/{job}-*"):
            shutil.rmtree(folder)
    assert done.returncode == 0 and "RESULT None" in done.stdout, done.stdout[-6000:]
    assert {path.name for path in tmp_path.glob("finished-*")} == {"finished-0", "finished-1"}
    incidents = [json.loads(path.read_text()) for path in tmp_path.glob("incidents/*/incident.json")]
    assert [(one["kind"], one["action"]["ranks"]) for one in incidents] == [("hang", [1])], done.stdout[
        -6000:
    ]
    assert incidents[0]["verdict"]["cause"] == "stuck_before_collective"
    line = 1 + TRAIN.splitlines().index("        time.sleep(10_000)  # the culprit's line")
    assert f"train.py:{line} in load_batch" in incidents[0]["verdict"]["sentence"]
    assert len(boxes) == 2
    asked = [sys.executable, "-m", "allranks", "diagnose", *map(str, boxes)]
    verdict = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
