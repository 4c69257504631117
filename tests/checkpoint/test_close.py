"""The end of a training: close() saves the last step if no tier has it yet."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend
from allranks.checkpoint.stores.file_store import FileStore
from allranks.drill.ranks import Ranks

from .jobs import make_job, same, train_step


def _config(folder: Path | str, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(nvme_path=folder, checkpoint_interval=10, memory_snapshot_interval=5, **more)


def _train(manager: CheckpointManager, steps: int) -> Any:
    model, optimizer = make_job()
    for step in range(1, steps + 1):
        train_step(model, optimizer, step)
        manager.step(
            step, model, optimizer, metrics={"loss": 1.0 / step}, dataset_state=lambda: {"position": 7}
        )
    return model, optimizer


def test_the_last_step_of_the_documented_loop_is_on_the_disk(tmp_path: Path) -> None:
    """Whatever the interval."""
    with CheckpointManager(_config(tmp_path)) as manager:
        model, _ = _train(manager, 13)
    state = NVMeBackend(tmp_path).load("checkpoint_step_00000013")
    assert same(state.model_state_dict, dict(model.state_dict())) and state.dataset_state == {"position": 7}


def test_the_data_of_the_last_step_are_those_of_the_step(tmp_path: Path) -> None:
    """A loop that ends when it has fetched one batch more: that batch would never have been trained."""
    model, optimizer = make_job()
    data = {"fetched": 0}
    with CheckpointManager(_config(tmp_path)) as manager:
        for step in range(1, 5):
            data["fetched"] += 1
            if step == 4:
                break
            train_step(model, optimizer, step)
            manager.step(step, model, optimizer, dataset_state=lambda: dict(data))
    assert NVMeBackend(tmp_path).load("checkpoint_step_00000003").dataset_state == {"fetched": 3}


def test_a_last_step_that_was_skipped_as_busy_is_saved_at_the_end(tmp_path: Path) -> None:
    """The helper hangs on step 1 until the training is over."""
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=tmp_path, checkpoint_interval=1, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        manager.saves.helper.start()
        pid = manager.saves.helper.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert manager.step(1, model, optimizer) != () and manager.step(2, model, optimizer) == ()
        os.kill(pid, signal.SIGCONT)
    assert FileStore(tmp_path).names() == ["checkpoint_step_00000001", "checkpoint_step_00000002"]


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    """Nor does a second close do anything."""
    with CheckpointManager(_config(tmp_path)) as manager:
        _train(manager, 10)
        assert manager.wait_for_pending_saves()
        before = (tmp_path / "checkpoint_step_00000010").stat().st_ino
        manager.close()
    assert (tmp_path / "checkpoint_step_00000010").stat().st_ino == before


def test_a_store_that_died_before_the_end_is_the_last_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder has become a file. One that has everything says nothing."""
    with CheckpointManager(_config(tmp_path / "whole")) as manager:
        _train(manager, 13)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with CheckpointManager(_config(tmp_path / "store")) as manager:
        model, optimizer = _train(manager, 10)
        assert manager.wait_for_pending_saves()
        (tmp_path / "store").rename(tmp_path / "gone")
        (tmp_path / "store").touch()
        for step in range(11, 14):
            train_step(model, optimizer, step)
            manager.step(step, model, optimizer)
    last = caplog.records[-1]
    assert last.levelname == "ERROR"
    assert last.getMessage() == "[NVME] step 13 was not saved: step 10 is the newest saved"


def test_nothing_is_saved_after_an_error(tmp_path: Path) -> None:
    """Half a step may have been made, and the other ranks may be gone."""
    with pytest.raises(ZeroDivisionError), CheckpointManager(_config(tmp_path)) as manager:
        _train(manager, 13)
        raise ZeroDivisionError
    assert FileStore(tmp_path).names() == ["checkpoint_step_00000010"]


def test_a_state_that_has_moved_on_is_not_saved_under_the_last_steps_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps were made without a word to the manager."""
    with caplog.at_level(logging.WARNING), CheckpointManager(_config(tmp_path)) as manager:
        model, optimizer = _train(manager, 13)
        train_step(model, optimizer, 14)
    assert FileStore(tmp_path).names() == ["checkpoint_step_00000010"]
    assert "step 13 not saved: the optimizer has stepped since" in caplog.text


def test_a_state_that_went_back_is_not_saved_under_the_last_steps_number(tmp_path: Path) -> None:
    """A restore of step 10 after step 13."""
    with CheckpointManager(_config(tmp_path)) as manager:
        model, optimizer = _train(manager, 13)
        state = manager.restore(model, optimizer)
        assert state is not None and state.step == 10
    assert FileStore(tmp_path).names() == ["checkpoint_step_00000010"]


def test_saving_at_the_end_can_be_switched_off(tmp_path: Path) -> None:
    """For jobs that save by hand."""
    with CheckpointManager(_config(tmp_path, save_on_close=False)) as manager:
        _train(manager, 13)
    assert FileStore(tmp_path).names() == ["checkpoint_step_00000010"]


def _train_together(rank: int, world_size: int, folder: str) -> int:
    with CheckpointManager(_config(folder)) as manager:
        _train(manager, 3)
    return FileStore(Path(folder)).names() == ["checkpoint_step_00000003"]


def test_all_ranks_save_the_last_step_together(tmp_path: Path) -> None:
    """One checkpoint with a part of each."""
    with Ranks(_train_together, 2, (str(tmp_path),)) as ranks:
        assert ranks.values(timeout_s=60) == [True, True]
