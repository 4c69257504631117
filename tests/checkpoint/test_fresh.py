"""`allranks run --fresh`: from scratch once per run, on all ranks alike, and nothing is deleted."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend
from allranks.checkpoint.group import FRESH_VARIABLE, MARK
from allranks.cli.parser import declare, read_flags
from allranks.cli.run_job import RunFlags, read_settings, with_job_file
from allranks.drill.ranks import Ranks
from allranks.errors import CheckpointUnreachable, InputError

from .jobs import make_job, make_state, same_state

run = importlib.import_module("allranks.cli.run")  # the package's `run` is the command


def _restored(folder: Path | str) -> int | None:
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0)) as manager:
        state = manager.restore(model, optimizer)
    return None if state is None else state.step


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's folder of a run that was started with --fresh."""
    folder = tmp_path / "box"
    folder.mkdir()
    monkeypatch.setenv("ALLRANKS_DIR", str(folder))
    monkeypatch.setenv(FRESH_VARIABLE, "1")
    return folder


def test_the_first_restore_starts_from_scratch_and_the_restart_does_not(box: Path, tmp_path: Path) -> None:
    """What was there is set aside, and loads by its path."""
    store = tmp_path / "store"
    NVMeBackend(store).save(make_state(7), "checkpoint_step_00000007")
    assert _restored(store) is None
    NVMeBackend(store).save(make_state(2), "checkpoint_step_00000002")
    assert _restored(store) == 2
    (aside,) = store.glob("set-aside-*")
    assert same_state(NVMeBackend(aside).load("checkpoint_step_00000007"), make_state(7))


def _two_restores(rank: int, world_size: int, store: str, boxes: list[str], fresh: list[str]) -> Any:
    import os

    os.environ.update({"ALLRANKS_DIR": boxes[rank], FRESH_VARIABLE: fresh[rank]})
    first = _restored(store)
    if rank == 0 and first is None:
        NVMeBackend(store).save(make_state(2), "checkpoint_step_00000002")
    return first, _restored(store)


@pytest.mark.parametrize(
    ("fresh", "marked", "expected"),
    [
        (["1", "1"], False, (None, 2)),
        (["1", "0"], False, (7, 7)),  # not every node was started with it
        (["1", "1"], True, (7, 7)),  # a node joins a run that has started before
    ],
)
def test_all_ranks_decide_alike(
    tmp_path: Path, fresh: list[str], marked: bool, expected: tuple[int | None, int]
) -> None:
    """Nodes have folders of their own."""
    boxes = [tmp_path / "a", tmp_path / "b"]
    for folder in boxes:
        folder.mkdir()
    if marked:
        (boxes[1] / MARK).touch()
    NVMeBackend(tmp_path / "store").save(make_state(7), "checkpoint_step_00000007")
    with Ranks(_two_restores, 2, (str(tmp_path / "store"), [str(one) for one in boxes], fresh)) as ranks:
        assert ranks.values(timeout_s=60) == [expected, expected]


def test_a_store_that_cannot_be_set_aside_stops_the_start(box: Path, tmp_path: Path) -> None:
    """It must not be half fresh."""
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(CheckpointUnreachable, match=r"--fresh: \[NVME\] .*store cannot be set aside"):
        _restored(tmp_path / "store")
    assert not (box / MARK).exists()


def test_the_variable_alone_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent nobody remembers, and every restart would start from scratch."""
    monkeypatch.delenv("ALLRANKS_DIR", raising=False)
    monkeypatch.setenv(FRESH_VARIABLE, "1")
    NVMeBackend(tmp_path).save(make_state(7), "checkpoint_step_00000007")
    assert _restored(tmp_path) == 7


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    declare(parser, run)
    return parser.parse_args(run.arrange_words(["run", *words])[1:])


def test_flag_and_job_file_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent forgets an earlier run's start, and tells the ranks."""
    monkeypatch.delenv(FRESH_VARIABLE, raising=False)
    (tmp_path / "job.yaml").write_text("checkpoint: {nvme_path: /nvme/run-1, fresh: true}\n")
    args = _arguments("train.py")
    options = read_flags(RunFlags, args)
    assert not options.fresh and read_flags(RunFlags, _arguments("--fresh", "train.py")).fresh
    options, _ = with_job_file(options, args, read_settings(tmp_path / "job.yaml"), ["train.py"])
    assert options.fresh
    (tmp_path / MARK).touch()
    run._start_fresh(options, tmp_path)
    import os

    assert os.environ[FRESH_VARIABLE] == "1" and not (tmp_path / MARK).exists()


def test_replicas_of_several_nodes_are_refused(tmp_path: Path) -> None:
    """The hint names what to do instead."""
    options = RunFlags(fresh=True, replicas=2, lighthouse="a:1")
    with pytest.raises(InputError, match="several nodes") as caught:
        run._start_fresh(options, tmp_path)
    assert "allranks checkpoint set-aside STORE" in caught.value.hint
