"""The copy that runs beside forward and backward: exactly one step's state, or none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from allranks.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointTier,
    create_checkpoint_state,
)
from allranks.checkpoint.manager import finish_copies
from allranks.checkpoint.save import snapshot
from allranks.checkpoint.state import CheckpointState
from allranks.checkpoint.tensors import memory_of

from .jobs import make_job, same, same_state, train_step


class SlowCopy:
    """Holds every background copy at its first tensor until `go` is set, and says that it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = snapshot._copy_one

        def copy_one(source: torch.Tensor, target: torch.Tensor) -> None:
            if threading.current_thread().name == "allranks-checkpoint-copy":
                self.begun.set()
                assert self.go.wait(30)
            real(source, target)

        monkeypatch.setattr(snapshot, "_copy_one", copy_one)


@contextmanager
def copying(
    folder: Path,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, CheckpointManager, CheckpointState]]:
    """A job whose first checkpoint is being copied, and the state that it must have."""
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=folder, checkpoint_interval=1, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        expected = create_checkpoint_state(1, model, optimizer).cpu_copy()
        manager.step(1, model, optimizer)
        yield model, optimizer, manager, expected


def test_the_optimizer_waits_for_the_copy_and_the_forward_pass_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward run while the copy hangs; step() continues only when it is done; nothing is torn."""
    slow = SlowCopy(monkeypatch)
    with copying(tmp_path) as (model, optimizer, manager, expected):
        assert slow.begun.wait(30)
        model(torch.randn(8, 16)).pow(2).mean().backward()  # changes BatchNorm's buffers, too
        entered, stepped = threading.Event(), threading.Event()

        def step() -> None:
            entered.set()
            optimizer.step()
            stepped.set()

        thread = threading.Thread(target=step)
        thread.start()
        assert entered.wait(30)
        assert not stepped.wait(0.2)
        slow.go.set()
        thread.join(30)
        assert stepped.is_set() and manager.wait_for_pending_saves(60)
        loaded = manager.load_checkpoint()
        assert loaded is not None and same_state(loaded, expected)


def test_a_state_that_is_to_be_replaced_is_copied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healing writes behind torch's back, where no version counter tells of it: it waits for the copy."""
    slow = SlowCopy(monkeypatch)
    with copying(tmp_path) as (model, _, manager, expected):
        assert slow.begun.wait(30)

        def heal() -> None:
            finish_copies()
            for p in model.parameters():
                memory_of(p.detach())[:] = bytes(p.nbytes)

        thread = threading.Thread(target=heal)
        thread.start()
        thread.join(0.2)
        slow.go.set()
        thread.join(30)
        assert manager.wait_for_pending_saves(60)
        loaded = manager.load_checkpoint()
        assert loaded is not None and same_state(loaded, expected)


def test_a_tensor_changed_behind_our_back_voids_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter changed during the copy by something else than the optimizer: no checkpoint rather than a torn one."""
    slow = SlowCopy(monkeypatch)
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=tmp_path, checkpoint_interval=1, memory_snapshot_interval=1)
    with CheckpointManager(config) as manager, caplog.at_level(logging.WARNING):
        manager.step(1, model, optimizer)
        assert slow.begun.wait(30)
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        slow.go.set()
        assert manager.wait_for_pending_saves(60) is False
        assert manager.load_checkpoint() is None
        assert manager.memory_backend.num_snapshots == 0
    assert "changed during the copy" in caplog.text


def test_every_save_of_a_running_job_is_the_state_of_its_step(tmp_path: Path) -> None:
    """Thirty steps with a save each, overlapped: every checkpoint equals a replay of the job to that step."""
    config = CheckpointConfig(
        nvme_path=tmp_path,
        checkpoint_interval=1,
        memory_snapshot_interval=0,
        keep_last_n=0,
        busy_policy="queue",
    )
    model, optimizer = make_job(width=64)
    with CheckpointManager(config) as manager:
        for step in range(1, 31):
            train_step(model, optimizer, step)
            manager.step(step, model, optimizer)
        assert manager.wait_for_pending_saves(60)
        assert manager.nvme_backend is not None
        names = manager.nvme_backend.list_checkpoints()
        assert len(names) == 30
        replay, replay_optimizer = make_job(width=64)
        for step, name in enumerate(names, start=1):
            train_step(replay, replay_optimizer, step)
            loaded = manager.nvme_backend.load(name)
            assert same_state(loaded, create_checkpoint_state(step, replay, replay_optimizer)), step


def test_without_an_optimizer_nothing_is_left_for_later(tmp_path: Path) -> None:
    """save_checkpoint without an attached optimizer copies before it returns."""
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        state = create_checkpoint_state(1, model, optimizer)
        expected = state.cpu_copy()
        manager.save_checkpoint(state, CheckpointTier.MEMORY)
        train_step(model, optimizer, 5)
        loaded = manager.load_checkpoint()
        assert loaded is not None and same_state(loaded, expected)
        assert not same(expected.model_state_dict, dict(model.state_dict()))


def test_odd_tensors_survive(tmp_path: Path) -> None:
    """Non-contiguous, channels-last, zero-size, scalar, bool, bfloat16, float8 and complex tensors come back equal."""
    tensors = {
        "transposed": torch.randn(5, 7).t(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(3).bfloat16(),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex128),
        "int64": torch.tensor([1 << 40]),
    }
    from allranks.checkpoint import CheckpointState, NVMeBackend

    backend = NVMeBackend(tmp_path)
    backend.save(CheckpointState(step=1, model_state_dict=dict(tensors)), "odd")
    loaded = backend.load("odd").model_state_dict
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else loaded[name],
                           tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor)  # fmt: skip
