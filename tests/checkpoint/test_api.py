"""The names and behaviour people know from the elastic harness, kept or bettered."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allranks.checkpoint import (
    CheckpointConfig,
    CheckpointLoadConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    MemorySnapshotBackend,
    NVMeBackend,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from allranks.errors import (
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
    ConfigurationError,
    MemoryLimitExceeded,
)

from .jobs import contents, make_job, make_state, same, same_state, train_step


def test_a_state_goes_through_a_dict_and_back() -> None:
    """to_dict has the ten known keys, from_dict takes them."""
    state = make_state(7)
    again = CheckpointState.from_dict(state.to_dict())
    assert len(state.to_dict()) == 10 and same_state(state, again)


def test_a_cpu_copy_shares_no_memory() -> None:
    """Changing the model afterwards does not change the copy."""
    model, optimizer = make_job()
    state = create_checkpoint_state(1, model, optimizer)
    copied = state.cpu_copy()
    with torch.no_grad():
        next(model.parameters()).fill_(9.0)
    assert not same(state.model_state_dict, copied.model_state_dict)


def test_a_wrapped_model_is_saved_without_its_wrapper() -> None:
    """DDP, or anything with `.module`, leaves no prefix in the names."""
    model, optimizer = make_job()

    class Wrapper:
        module = model

    assert "0.weight" in create_checkpoint_state(1, Wrapper(), optimizer).model_state_dict


def test_memory_snapshots_are_a_ring_of_the_newest() -> None:
    """The third snapshot of two pushes the first one out."""
    backend = MemorySnapshotBackend(max_snapshots=2)
    assert backend.load() is None and backend.latest_step is None
    for step in (1, 2, 3):
        backend.save(make_state(step, seed=step))
    assert backend.num_snapshots == 2 and backend.latest_step == 3 and backend.steps() == [2, 3]
    loaded = backend.load_by_step(2)
    assert loaded is not None and same_state(loaded, make_state(2, seed=2))
    assert backend.load_by_step(1) is None
    assert backend.memory_usage_bytes() > 0 and backend.get_stats()["num_snapshots"] == 2
    backend.clear()
    assert backend.num_snapshots == 0


def test_a_snapshot_beyond_the_memory_bound_is_refused_in_the_known_words() -> None:
    """The text names what was wanted and what there was; older snapshots stay."""
    backend = MemorySnapshotBackend(max_memory_mb=0.5)
    backend.save(make_state(1))
    with pytest.raises(
        MemoryLimitExceeded, match=r"Cannot save snapshot: [\d.]+MB required, but only 0\.5MB available"
    ):
        backend.save(CheckpointState(step=2, model_state_dict={"w": torch.zeros(1 << 20)}))
    assert backend.latest_step == 1


def test_the_disk_backend_saves_lists_loads_and_deletes_by_name(tmp_path: Path) -> None:
    """The names given are the names found, newest step last."""
    backend = NVMeBackend(tmp_path)
    assert not backend.exists("a.pt") and backend.get_latest_checkpoint() is None
    for step in (3, 1, 2):
        backend.save(make_state(step, seed=step), f"checkpoint_{step}.pt")
    assert backend.list_checkpoints() == ["checkpoint_1.pt", "checkpoint_2.pt", "checkpoint_3.pt"]
    assert backend.get_latest_checkpoint() == "checkpoint_3.pt"
    assert same_state(backend.load("checkpoint_2.pt"), make_state(2, seed=2))
    assert backend.cleanup_old_checkpoints(keep_last=2) == ["checkpoint_1.pt"]
    backend.delete("checkpoint_2.pt")
    assert not backend.exists("checkpoint_2.pt")
    assert contents(tmp_path) == ["checkpoint_3.pt"]


def test_an_empty_state_can_be_saved(tmp_path: Path) -> None:
    """No tensors is a checkpoint too."""
    backend = NVMeBackend(tmp_path)
    backend.save(CheckpointState(step=5), "empty")
    assert backend.load("empty").step == 5


def test_an_asynchronous_backend_save_ends_in_its_future(tmp_path: Path) -> None:
    """save_async copies at once: later changes do not reach the file."""
    backend = NVMeBackend(tmp_path)
    state = make_state(4)
    expected = state.cpu_copy()
    future = backend.save_async(state, "later")
    state.model_state_dict["0.weight"].fill_(0.0)
    future.result(timeout=30)
    assert same_state(backend.load("later"), expected)


def test_the_manager_saves_to_memory_and_disk_and_loads_the_newest(tmp_path: Path) -> None:
    """Memory returns no path; the disk's path exists when asked for; the newest step wins."""
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        path = manager.save_checkpoint(make_state(50, seed=5), CheckpointTier.NVME)
        assert path is not None and manager.nvme_backend is not None and manager.nvme_backend.exists(path)
        assert manager.save_checkpoint(make_state(100, seed=9), CheckpointTier.MEMORY) is None
        newest = manager.load_checkpoint()
        disk = manager.load_checkpoint(tier=CheckpointTier.NVME)
        named = manager.load_checkpoint(path=path)
        assert newest is not None and same_state(newest, make_state(100, seed=9))
        assert disk is not None and same_state(disk, make_state(50, seed=5))
        assert named is not None and same_state(named, disk)
        manager.clear_memory_snapshots()
        assert manager.memory_backend.num_snapshots == 0


def test_a_newer_checkpoint_on_disk_wins_over_an_older_one_in_memory(tmp_path: Path) -> None:
    """The fastest tier is only taken when it has the newest step."""
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        manager.save_checkpoint(make_state(50), CheckpointTier.MEMORY)
        manager.save_checkpoint(make_state(100), CheckpointTier.NVME)
        loaded = manager.load_checkpoint()
        assert loaded is not None and loaded.step == 100


def test_intervals_say_when_a_tier_is_due(tmp_path: Path) -> None:
    """Multiples of the interval; never step 0; an interval of 0 switches memory snapshots off."""
    manager = CheckpointManager(
        CheckpointConfig(nvme_path=tmp_path, checkpoint_interval=100, memory_snapshot_interval=10)
    )
    memory, disk = CheckpointTier.MEMORY, CheckpointTier.NVME
    assert [manager.should_checkpoint(step, memory) for step in (0, 10, 15)] == [False, True, False]
    assert [manager.should_checkpoint(step, disk) for step in (0, 50, 100)] == [False, False, True]
    off = CheckpointManager(CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0))
    assert not off.should_checkpoint(50, memory)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"checkpoint_interval": 0}, r"checkpoint_interval \(0\) must be positive"),
        ({"memory_snapshot_interval": -1}, r"memory_snapshot_interval \(-1\) must not be negative"),
        ({"async_save_policy": "shrug"}, r"Valid options: \['warn', 'fail', 'retry'\]"),
        ({"peers": ("a:1",)}, "peers need a peer_token"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, object], text: str) -> None:
    """At construction, with the value and the choices."""
    with pytest.raises(ConfigurationError, match=text):
        CheckpointConfig(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [np.int64(2), torch.tensor(2)])
def test_steps_may_be_counted_by_numpy_and_torch(tmp_path: Path, step: Any) -> None:
    """Loops that count in arrays and tensors."""
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path, checkpoint_interval=1)) as manager:
        manager.step(step, model, optimizer, epoch=step)
        assert manager.wait_for_pending_saves(60)
    assert contents(tmp_path) == ["checkpoint_step_00000002"]
    with pytest.raises(TypeError, match=r"step must be a whole number, not 2\.5"):
        CheckpointState(step=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "hint"), [("", "is empty"), ("s3://bucket/run", "s3_bucket"), ("$SCRATCH/run", "expandvars")]
)
def test_a_path_that_would_become_a_folder_of_an_odd_name_is_refused(path: str, hint: str) -> None:
    """Checkpoints in ./$SCRATCH/run of some node are as good as lost."""
    with pytest.raises(ConfigurationError, match="nvme_path") as caught:
        CheckpointConfig(nvme_path=path)
    assert hint in (caught.value.hint or "")
    assert CheckpointConfig(nvme_path="~/run").nvme_path == Path.home() / "run"
    with pytest.raises(ConfigurationError, match="names no bucket"):
        CheckpointConfig(s3_bucket="s3://")


def test_one_line_per_step_saves_at_the_intervals_and_restores_everything(tmp_path: Path) -> None:
    """step() and restore(): model, optimizer, scheduler, data position and random generators come back."""
    config = CheckpointConfig(
        nvme_path=tmp_path, checkpoint_interval=4, memory_snapshot_interval=2, keep_last_n=1
    )
    model, optimizer = make_job()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with CheckpointManager(config) as manager:
        assert manager.restore(model, optimizer, scheduler) is None
        done = {}
        for step in range(1, 9):
            train_step(model, optimizer, step)
            scheduler.step()
            done[step] = manager.step(step, model, optimizer, scheduler, dataset_state={"position": step})
            manager.wait_for_pending_saves()
        expected = create_checkpoint_state(8, model, optimizer, scheduler).cpu_copy()
        following = torch.rand(3)
    assert done[2] == (CheckpointTier.MEMORY,) and done[3] == ()
    assert done[8] == (CheckpointTier.MEMORY, CheckpointTier.NVME)
    assert contents(tmp_path) == ["checkpoint_step_00000008"]
    fresh, fresh_optimizer = make_job(seed=99)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    fresh_scheduler = torch.optim.lr_scheduler.StepLR(fresh_optimizer, 3)
    with CheckpointManager(config) as manager:
        state = manager.restore(fresh, fresh_optimizer, fresh_scheduler)
        assert state is not None and state.step == 8 and state.dataset_state == {"position": 8}
        assert torch.equal(torch.rand(3), following)
    assert same_state(create_checkpoint_state(8, fresh, fresh_optimizer, fresh_scheduler), expected)
    train_step(model, optimizer, 9)
    train_step(fresh, fresh_optimizer, 9)
    assert same(model.state_dict(), fresh.state_dict())


def test_a_state_is_put_into_model_and_optimizer(tmp_path: Path) -> None:
    """load_checkpoint_to_model restores what was loaded as whole tensors."""
    model, optimizer = make_job(seed=1)
    NVMeBackend(tmp_path).save(create_checkpoint_state(1, model, optimizer), "one")
    other, other_optimizer = make_job(seed=2)
    load_checkpoint_to_model(NVMeBackend(tmp_path).load("one"), other, other_optimizer)
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), other_optimizer.state_dict())


def test_a_model_that_does_not_fit_is_refused_before_it_is_touched() -> None:
    """The error names the missing and the unexpected keys."""
    other, _ = make_job(layers=3)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointValidationError) as caught:
        load_checkpoint_to_model(make_state(1), other)
    assert "3.running_mean" in caught.value.missing_keys
    assert same(dict(other.state_dict()), before)
    load_checkpoint_to_model(
        CheckpointState(model_state_dict={"0.bias": torch.ones(16)}), other, strict=False
    )
    assert torch.equal(other.state_dict()["0.bias"], torch.ones(16))


def test_what_cannot_be_stored_without_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    """The error says which value, and nothing is left on the disk."""
    state = CheckpointState(step=1, dataset_state={"reader": object()})
    with pytest.raises(CheckpointSaveError, match=r"builtins\.object at 'rank00000\.dataset_state\.reader'"):
        NVMeBackend(tmp_path).save(state, "bad")
    assert list(tmp_path.iterdir()) == []


def test_legacy_files_load_with_tensors_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plain .pt loads safely; one with code is refused with the warning, and runs only when trusted."""
    state = make_state(3)
    torch.save(state.to_dict(), tmp_path / "plain.pt")
    backend = NVMeBackend(tmp_path)
    assert same_state(backend.load("plain.pt"), state)  # with numpy's random state: an array of numbers
    assert same_state(backend.load("plain.pt", CheckpointLoadConfig(trusted_source=True)), state)

    marker = tmp_path / "ran"
    torch.save(
        {"step": 1, "model_state_dict": {}, "optimizer_state_dict": {}, "x": Evil(marker)},
        tmp_path / "evil.pt",
    )
    with pytest.raises(CheckpointLoadError, match="holds more than tensors"):
        backend.load("evil.pt")
    assert not marker.exists()
    assert (
        "SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution" in caplog.text
    )
    backend.load("evil.pt", CheckpointLoadConfig(trusted_source=True))
    assert marker.exists()


class Evil:
    """Unpickling it touches a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return Path.touch, (self.marker,)


def test_a_legacy_file_without_its_keys_says_which(tmp_path: Path) -> None:
    """The text is the one of the harness guide."""
    torch.save({"step": 1, "optimizer_state_dict": {}}, tmp_path / "half.pt")
    with pytest.raises(
        CheckpointLoadError,
        match=r"\[NVME\] Failed to load checkpoint from '.*half\.pt': Missing required keys: \{'model_state_dict'\}",
    ):
        NVMeBackend(tmp_path).load("half.pt")


def test_the_helper_process_never_imports_torch() -> None:
    """It must start in a blink and weigh little."""
    code = "import sys, allranks.checkpoint.save.helper; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_a_save_that_still_runs_makes_the_next_one_be_skipped_or_queued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """busy_policy decides, and a skipped save is said."""
    model, optimizer = make_job()
    for policy, kept in (("skip", [1]), ("queue", [1, 2])):
        folder = tmp_path / policy
        config = CheckpointConfig(
            nvme_path=folder, checkpoint_interval=1, memory_snapshot_interval=0, busy_policy=policy, save_on_close=False
        )  # fmt: skip
        with CheckpointManager(config) as manager, caplog.at_level(logging.WARNING):
            manager.saves.helper.start()
            pid = manager.saves.helper.pid
            assert pid is not None
            import os
            import signal

            os.kill(pid, signal.SIGSTOP)  # the helper hangs: the first save cannot end
            manager.step(1, model, optimizer)
            second = manager.step(2, model, optimizer)
            os.kill(pid, signal.SIGCONT)
            assert (second != ()) is (policy == "queue")
            assert manager.wait_for_pending_saves(30)
        assert [int(name[-8:]) for name in contents(folder)] == kept
    assert (
        "step 2 is not saved to NVME: the save of step 1 is still running (busy_policy=skip)" in caplog.text
    )


def test_a_snapshot_that_does_not_fit_never_stops_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk tier of the same step is saved all the same; asked for by name, the limit is an error."""
    model, optimizer = make_job()
    config = CheckpointConfig(
        nvme_path=tmp_path, checkpoint_interval=1, memory_snapshot_interval=1, max_memory_mb=0.001
    )
    with CheckpointManager(config) as manager:
        assert manager.step(1, model, optimizer) == (CheckpointTier.NVME,)
        assert manager.wait_for_pending_saves(60)
        with pytest.raises(MemoryLimitExceeded):
            manager.save_checkpoint(make_state(2), CheckpointTier.MEMORY)
    assert "[MEMORY] step 1 is not kept: Cannot save snapshot" in caplog.text


def test_a_tier_that_is_not_configured_says_what_to_set(tmp_path: Path) -> None:
    """Not a KeyError in the middle of a run."""
    with (
        CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager,
        pytest.raises(ConfigurationError, match="tier S3 is not configured") as caught,
    ):
        manager.save_checkpoint(make_state(1), CheckpointTier.S3)
    assert "s3_bucket" in caught.value.hint


def test_a_synchronous_save_is_durable_when_it_returns(tmp_path: Path) -> None:
    """async_save=False: no waiting afterwards."""
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path, async_save=False)) as manager:
        path = manager.save_checkpoint(make_state(1))
        assert path is not None and (Path(path) / "manifest.json").is_file()


def test_a_synchronous_save_that_failed_is_told_by_the_next_wait(tmp_path: Path) -> None:
    """Once: after a save that succeeded, all is well."""
    blocked = tmp_path / "file"
    blocked.touch()
    config = CheckpointConfig(nvme_path=blocked, async_save=False)
    with CheckpointManager(config) as manager:
        assert manager.save_checkpoint(make_state(1)) is None
        assert manager.wait_for_pending_saves() is False
        blocked.unlink()
        assert manager.save_checkpoint(make_state(2)) is not None
        assert manager.wait_for_pending_saves() is True


def test_a_queue_of_saves_holds_two_buffers_at_most(tmp_path: Path) -> None:
    """A disk that cannot keep up slows training down before it eats the memory."""
    import signal
    import threading

    model, optimizer = make_job()
    config = CheckpointConfig(
        nvme_path=tmp_path,
        checkpoint_interval=1,
        memory_snapshot_interval=0,
        busy_policy="queue",
        keep_last_n=0,
    )
    with CheckpointManager(config) as manager:
        manager.saves.helper.start()
        pid = manager.saves.helper.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        for step in range(1, 7):
            manager.step(step, model, optimizer)
            assert len({one.step for one in manager.saves.busy({"NVME"})}) <= 2
        assert manager.wait_for_pending_saves(60)
        assert len(contents(tmp_path)) == 6
        assert len(manager.memory_backend.pool._free) <= 2


def test_a_manager_that_nobody_closes_leaves_no_process(tmp_path: Path) -> None:
    """The helper ends with the object; what was handed to it is finished first."""
    manager = CheckpointManager(CheckpointConfig(nvme_path=tmp_path))
    manager.save_checkpoint(make_state(1))
    assert manager.wait_for_pending_saves(60)
    pid = manager.saves.helper.pid
    assert pid is not None and Path(f"/proc/{pid}").exists()
    del manager
    # the leak check of every test fails if the process stays
