"""The example in the repository works as its own words say."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import main
from allranks.drill.ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(rank: int, world: int, folder: Path) -> None:
    os.chdir(folder)
    _load("elastic_train").main("job.yaml")


@pytest.mark.usefixtures("imported")
def test_the_example_goes_on_in_another_world(tmp_path: Path) -> None:
    """Two ranks, then three: the second run starts where the first one saved, with the next unseen sample."""
    _load("elastic_corpus").main(str(tmp_path / "corpus.jsonl"), 400)
    job = (
        (EXAMPLES / "job.yaml")
        .read_text()
        .replace("checkpoint_interval: 50", "async_save: false\n  checkpoint_interval: 10")
    )
    (tmp_path / "job.yaml").write_text(
        job.replace("max_steps: 200", "max_steps: 20").replace("max_nodes: 1", "max_nodes: 3")
    )
    assert main(["config", "check", str(tmp_path / "job.yaml")]) == 0
    assert main(["index", "build", str(tmp_path / "corpus.jsonl"), "-o", str(tmp_path / "corpus.index")]) == 0
    with Ranks(_train, world_size=2, args=(tmp_path,), backend=None) as ranks:
        ranks.values(timeout_s=100)
    shutil.move(tmp_path / "metrics.jsonl", tmp_path / "first.jsonl")
    (tmp_path / "job.yaml").write_text(
        (tmp_path / "job.yaml").read_text().replace("max_steps: 20", "max_steps: 30")
    )
    with Ranks(_train, world_size=3, args=(tmp_path,), backend=None) as ranks:
        ranks.values(timeout_s=100)
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("first.jsonl", "metrics.jsonl"))
    tokens = 48 * 64
    assert (first["training"]["current_step"], first["training"]["total_tokens"]) == (20, 20 * tokens)
    assert (second["training"]["current_step"], second["training"]["total_tokens"]) == (30, 10 * tokens)
    assert second["recovery"]["worker_joins"] == 1
    assert second["training"]["loss"] < first["training"]["loss"]
