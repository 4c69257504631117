"""torchft's own examples from its source distribution ($TORCHFT_SOURCE), as they are: a healthy run, and one with kills.

Made smaller for two cores, nothing else: a layer of 1 GB that serves no purpose, the number of steps, and random images instead
of a download. Each replica takes a GPU of its own by its number: where there are fewer than two, all use the CPU.
`import torchft` means allranks.torchft by `python -m allranks.integrations.torchtitan`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.replicas import DIES

SOURCE = Path(os.environ.get("TORCHFT_SOURCE", "/nonexistent"))
#: example -> what is made smaller
SMALLER = {
    "train_ddp.py": [("1_000_000_000", "400_000"), (">= 10000", ">= 300"), ("% 100 ==", "% 20 ==")],
    "train_diloco.py": [("500 * (1 << 20)", "1 << 18"), ("% 100 ==", "% 1 ==")],
}
IMAGES = """
import torchvision
torchvision.datasets.CIFAR10 = lambda root, train, download, transform: torchvision.datasets.FakeData(
    2000, (3, 32, 32), 10, transform)
"""
ON_CPU = """
import torch
if torch.cuda.device_count() < 2:
    torch.cuda.is_available = lambda: False
"""
KILLED_AT_COMMITS = """
from allranks.torchft import Manager
commit = Manager.should_commit
def should_commit(self, *words, **named):
    done = commit(self, *words, **named)
    lives(self)
    return done
Manager.should_commit = should_commit
"""
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        not SOURCE.exists(), reason="TORCHFT_SOURCE names no unpacked source distribution of torchft"
    ),
]


def run(name: str, folder: Path, kills: int) -> str:
    """The output of the example as two replicas under `allranks run`, after it has ended well."""
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    text = (SOURCE / name).read_text()
    for old, new in SMALLER[name]:
        assert old in text, f"{name} has no {old} any more"
        text = text.replace(old, new)
    (folder / name).write_text(text)
    if "torchvision" in text:
        pytest.importorskip("torchvision", reason="torchvision is not installed")
    around = DIES + ON_CPU + KILLED_AT_COMMITS + (IMAGES if "torchvision" in text else "")
    (folder / "around.py").write_text(around)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ALLRANKS_DIR": str(folder / "boxes"), "PYTHONPATH": str(folder),
           "ALLRANKS_PRELOAD": "around", "FOLDER": str(folder), "KILLS": str(kills)}  # fmt: skip
    words = [
        sys.executable,
        "-m",
        "allranks",
        "run",
        "--replicas",
        "2",
        "--incidents",
        str(folder / "incidents"),
    ]
    words += ["-m", "allranks.integrations.torchtitan", name]
    with open(folder / "output.log", "w") as output:
        ran = subprocess.run(
            words, env=env, cwd=folder, timeout=270, check=False, stdout=output, stderr=subprocess.STDOUT
        )
    said = (folder / "output.log").read_text(errors="replace")
    assert ran.returncode == 0, said[-5000:]
    return said


@pytest.mark.parametrize("name", SMALLER)
def test_it_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """Both replicas come to the last step, and nothing is taken for a hang."""
    said = run(name, tmp_path, 0)
    assert "loss" in said and not list(tmp_path.glob("incidents/*/incident.json")), said[-3000:]


@pytest.mark.parametrize("name, kills", [("train_ddp.py", 10), ("train_diloco.py", 2)])
def test_replicas_that_are_killed_in_turn_come_back_and_it_ends_well(
    name: str, kills: int, tmp_path: Path
) -> None:
    """kill -9 of a process that knows nothing of it; the other one continues meanwhile."""
    run(name, tmp_path, kills)
    assert len(list(tmp_path.glob("kill-*"))) == kills
