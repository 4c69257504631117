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

KILLED = """
import hashlib, os, pathlib, signal, sys, tempfile, torch, ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from allranks.integrations.ray import RayWatch, TorchTrainer
FOLDER = pathlib.Path(sys.argv[1])
def loop(config):
    rank, place = ray.train.get_context().get_world_rank(), FOLDER / config["name"]
    torch.manual_seed(7)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 4))
    adam, first = torch.optim.AdamW(model.parameters(), lr=0.01), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(pathlib.Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        first = state["step"] + 1
    for step in range(first, 35):
        seed = torch.Generator().manual_seed(2 * step + rank)
        adam.zero_grad()
        model(torch.randn(4, 8, generator=seed)).square().mean().backward()
        adam.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "step": step}, pathlib.Path(folder, "state.pt"))
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
        kills = len(list(place.glob("kill-*")))
        if rank == 1 and kills < config["kills"] and step >= 3 * (kills + 1):
            (place / f"kill-{kills}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    bits = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    (place / f"bits-{rank}").write_text(hashlib.sha256(bits).hexdigest())
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
    for name, kills in (("clean", 0), ("killed", 10)):
        (FOLDER / name).mkdir()
        trainer = TorchTrainer(
            loop, train_loop_config={"name": name, "kills": kills}, scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"), watch=RayWatch(incidents=FOLDER / "incidents"),
            run_config=RunConfig(name=sys.argv[3] + name, storage_path=str(FOLDER / "out"), failure_config=FailureConfig(max_failures=20)))
        print("RESULT", trainer.fit().error)
"""


def ray_job(text: str, folder: Path, limit_s: int) -> tuple[str, list[str]]:
    """What the script said, and the black boxes of the workers that ended well."""
    script, job = folder / "train.py", f"test-{folder.name}-{os.getpid()}"
    script.write_text(text)
    session = Path("/tmp") / f"ray-{os.getpid()}"  # socket paths must be short
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
           "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}  # of Ray's controller; every report waits for its next look, 2 s otherwise  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(folder), str(session), job],
            env=env, text=True, timeout=limit_s, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        ended = [path.read_text() for path in folder.glob("finished-*")]
        boxes = [
            shutil.copy(path, folder)
            for path in Path("/dev/shm").glob(f"allranks-{os.getuid()}/{job}*/*.box")
            if any(f"p{pid}." in path.name for pid in ended)
        ]
    finally:
        shutil.rmtree(session, ignore_errors=True)
        for left in Path("/dev/shm").glob(f"allranks-{os.getuid()}/{job}*"):
            shutil.rmtree(left)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout, boxes


@pytest.mark.soak
@pytest.mark.timeout(920)
def test_a_worker_that_is_killed_ten_times_comes_back_with_equal_bits(tmp_path: Path) -> None:
    """Ray restarts the workers from the reported checkpoint, recorded and watched as they are."""
    said, _ = ray_job(KILLED, tmp_path, 900)  # 25 s per restart on two busy cores
    assert said.count("RESULT None") == 2, said[-6000:]
    assert len(list(tmp_path.glob("killed/kill-*"))) == 10
    bits = [path.read_text() for path in tmp_path.glob("*/bits-*")]
    assert len(bits) == 4 and len(set(bits)) == 1, bits


def test_a_worker_that_hangs_is_named_with_its_line_and_replaced(tmp_path: Path) -> None:
    """One changed import: the hang is diagnosed in the training thread, the training ends without an error, and the
    black boxes of the workers that ended well say that nothing is wrong."""
    said, boxes = ray_job(TRAIN, tmp_path, 280)
    assert "RESULT None" in said, said[-6000:]
    assert {path.name for path in tmp_path.glob("finished-*")} == {"finished-0", "finished-1"}
    incidents = [json.loads(path.read_text()) for path in tmp_path.glob("incidents/*/incident.json")]
    assert [(one["kind"], one["action"]["ranks"]) for one in incidents] == [("hang", [1])], said[-6000:]
    assert incidents[0]["verdict"]["cause"] == "stuck_before_collective"
    line = 1 + TRAIN.splitlines().index("        time.sleep(10_000)  # the culprit's line")
    assert f"train.py:{line} in load_batch" in incidents[0]["verdict"]["sentence"]
    assert len(boxes) == 2
    asked = [sys.executable, "-m", "allranks", "diagnose", *map(str, boxes)]
    verdict = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
