"""`allranks run --config job.yaml`: everything from one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli import main

pytestmark = pytest.mark.usefixtures("forks")

EXAMPLES = Path(__file__).parents[2] / "examples"

WAITS = """
import pathlib, sys, time
deadline = time.monotonic() + 150
while not list(pathlib.Path("stacks").glob("*/report.txt")):
    if time.monotonic() > deadline:
        sys.exit("no stacks")
    time.sleep(0.1)
"""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ALLRANKS_")}
    return subprocess.run(
        [sys.executable, "-m", "allranks", "run", *words], cwd=folder, capture_output=True, text=True, timeout=300,
        check=False, env={**environment, "ALLRANKS_DIR": str(folder / "box"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_example_job_runs_as_its_first_lines_say(tmp_path: Path) -> None:
    """Corpus, index, run: two ranks train to the last step."""
    for name in ("elastic_train.py", "elastic_corpus.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    text = (EXAMPLES / "job.yaml").read_text().replace("max_steps: 200", "max_steps: 20")
    (tmp_path / "job.yaml").write_text(text)
    subprocess.run(
        [sys.executable, "elastic_corpus.py", "corpus.jsonl"], cwd=tmp_path, check=True, timeout=300
    )
    assert main(["index", "build", str(tmp_path / "corpus.jsonl"), "-o", str(tmp_path / "corpus.index")]) == 0
    done = _run(tmp_path, "--config", "job.yaml", "elastic_train.py", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 20 loss" in done.stdout and "of 2 ranks" in done.stdout
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["training"]["current_step"] == 20


def test_stacks_are_collected_at_the_time_that_the_file_names(tmp_path: Path) -> None:
    """debug.wait_seconds and debug.output_dir; the script ends when the stacks are there."""
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "job.yaml").write_text(
        "elastic: {max_nodes: 1, nproc_per_node: 1}\n"
        "training: {script: waits.py}\n"
        "debug: {wait_seconds: 2, output_dir: stacks}\n"
    )
    done = _run(tmp_path, "--config", "job.yaml", "--no-lighthouse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "stacks").glob("*/report.txt")) and "collecting stacks" in done.stderr
