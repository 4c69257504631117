"""The whole loop in real processes: a hang is noticed, explained, repaired and reported."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.drill import demo_train
from allranks.drill.run import read_marks

pytestmark = pytest.mark.usefixtures("forks")

PLAN = {"faults": [{"kind": "hang", "rank": 1, "at_step": 30}, {"kind": "kill", "rank": 0, "at_step": 45}]}


def test_a_hung_and_a_killed_replica_are_named_replaced_and_healed(tmp_path: Path) -> None:
    """Three replicas train; one hangs in its data code, another is killed while it comes back; the drill judges."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    out = tmp_path / "out"
    out.mkdir()
    command = [
        sys.executable, "-m", "allranks", "drill", "--plan", str(tmp_path / "plan.json"), "--folder", str(tmp_path / "drill"),
        "--timeout", "300", "--json", "--", "allranks", "run", "--replicas", "3", "--notice-s", "3",
        demo_train.__file__, "--steps", "5000", "--pace-s", "0.05", "--out", str(out),
    ]  # fmt: skip
    drill = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _end_when_both_are_back(drill, tmp_path / "drill", out)
        stdout, stderr = drill.communicate(timeout=350)
    finally:
        drill.kill()
    log = (tmp_path / "drill" / "output.log").read_text(errors="replace")
    assert drill.returncode == 0, stdout + stderr + log[-6000:]
    result = json.loads(stdout)
    hang, kill = result["faults"]
    assert hang["fired"] and kill["fired"]
    assert hang["verdict_right"] and hang["verdict"]["ranks"] == [1]
    assert "load_batch_from_slow_storage" in hang["verdict"]["where"]
    assert kill["verdict_right"]
    assert hang["recovered_s"] is not None and kill["recovered_s"] is not None
    assert result["identical_replicas"] is not False
    assert (result["lost_steps"], result["false_alarms"], result["false_evictions"]) == (0, 0, 0)
    folder = tmp_path / "drill" / "incidents" / hang["incident"]
    for name in ("boxes", "stacks", "diagnosis.json", "story.html", "incident.json"):
        assert (folder / name).exists()
    story = json.loads((folder / "incident.json").read_text())
    assert story["action"]["kind"] == "evict" and story["action"]["done"]
    names = [moment["name"] for moment in story["timeline"]]
    assert names.index("evidence") < names.index("verdict") < names.index("action") < names.index("recovered")


def _end_when_both_are_back(drill: subprocess.Popen[str], folder: Path, out: Path) -> None:
    """Training ends 40 steps after both culprits report from their second life (or with the drill's own limit)."""
    while drill.poll() is None:
        marks = read_marks(folder)
        lives = {rank: {mark["pid"] for mark in marks.get(rank, ()) if "digest" in mark} for rank in (0, 1)}
        if all(len(pids) > 1 for pids in lives.values()):
            newest = max(mark["at_step"] for mark in marks[2] if "digest" in mark)
            (out / "stop_at").write_text(str(newest + 40))
            return
        time.sleep(0.2)
