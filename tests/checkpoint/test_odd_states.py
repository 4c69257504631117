"""States that are unusual: what can be kept comes back as it was, the rest is refused before anything waits for it."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, NVMeBackend
from allranks.checkpoint.manifest import Index
from allranks.checkpoint.save import snapshot, writer
from allranks.checkpoint.stores import Attempt
from allranks.checkpoint.stores.file_store import FileStore
from allranks.drill.ranks import Ranks
from allranks.errors import CheckpointSaveError

_CYCLE: dict[str, Any] = {}
_CYCLE["itself"] = _CYCLE


class Wrapper(torch.Tensor):
    """Made of other tensors, with no memory of its own: as quantized optimizer states are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def _config(folder: Path, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(nvme_path=folder, save_on_close=False, **more)


def _there_and_back(folder: Path, state: Any) -> Any:
    with CheckpointManager(_config(folder)) as manager:
        manager.save_checkpoint(CheckpointState(step=1, dataset_state={"it": state}))
        found = manager.load_checkpoint()
    assert found is not None
    return found.dataset_state["it"]


REFUSED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.qint8), "quantized"),
    "meta": (lambda: torch.empty(4, device="meta"), "meta device"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), "Wrapper"),
    "long double": (lambda: np.longdouble(1) / 3, "longdouble"),
    "a tensor as a key": (lambda: {torch.ones(1): 5}, "Tensor"),
    "a cycle": (lambda: _CYCLE, "RecursionError"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_kept_is_refused_and_the_next_save_succeeds(tmp_path: Path, kind: str) -> None:
    """A crash, zeros, or a checkpoint that no restore could read came of it; or the end waited for its save."""
    make, text = REFUSED[kind]
    with CheckpointManager(_config(tmp_path)) as manager:
        with pytest.raises(CheckpointSaveError, match=text):
            manager.save_checkpoint(CheckpointState(step=1, dataset_state={"it": make()}))
        manager.save_checkpoint(CheckpointState(step=2))
        assert manager.wait_for_pending_saves(60)
        found = manager.load_checkpoint()
    assert found is not None and found.step == 2


@pytest.mark.parametrize(("field", "value"), [("epoch", -1), ("step", -5)])
def test_a_number_that_no_manifest_may_hold_is_refused(tmp_path: Path, field: str, value: int) -> None:
    """Every checkpoint of such a job was damaged at its restore."""
    state = CheckpointState(**{"step": 1, field: value})
    with (
        CheckpointManager(_config(tmp_path)) as manager,
        pytest.raises(CheckpointSaveError, match=f"{field} is {value}"),
    ):
        manager.save_checkpoint(state)
    with pytest.raises(CheckpointSaveError, match=f"{field} is {value}"):
        NVMeBackend(tmp_path).save(state, "one")


def test_arrays_of_the_other_byte_order_and_counters_come_back(tmp_path: Path) -> None:
    """Equal in value; a Counter is a Counter."""
    back = _there_and_back(tmp_path, [np.arange(3, dtype=">i4"), Counter("aab"), Counter({1: 2})])
    assert back[0].tolist() == [0, 1, 2]
    assert back[1:] == [Counter("aab"), Counter({1: 2})] and type(back[1]) is Counter is type(back[2])


def test_a_schedule_with_milestones_goes_on_after_them(tmp_path: Path) -> None:
    """MultiStepLR keeps them in a Counter, whose `elements` it calls when a SequentialLR comes to it."""

    def make() -> tuple[Any, Any, Any]:
        model = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        parts = [LinearLR(sgd, 0.1, total_iters=3), MultiStepLR(sgd, [2, 4])]
        return model, sgd, SequentialLR(sgd, parts, milestones=[3])

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = make()
    rates(optimizer, scheduler, 2)
    with CheckpointManager(_config(tmp_path, checkpoint_interval=2)) as manager:
        manager.step(2, model, optimizer, scheduler)
        fresh, fresh_optimizer, fresh_scheduler = make()
        manager.restore(fresh, fresh_optimizer, fresh_scheduler)
    assert rates(fresh_optimizer, fresh_scheduler, 8) == rates(optimizer, scheduler, 8)


def test_a_conjugated_tensor_is_filled_with_what_was_saved(tmp_path: Path) -> None:
    """Its bytes are those of the other one: reading into them would conjugate what is saved."""
    model, fresh = torch.nn.Module(), torch.nn.Module()
    saved = torch.tensor([1 + 2j, 3 - 4j])
    model.register_buffer("it", saved.clone())
    fresh.register_buffer("it", torch.zeros(2, dtype=torch.complex64).conj())
    with CheckpointManager(_config(tmp_path, checkpoint_interval=1)) as manager:
        manager.step(1, model)
        manager.wait_for_pending_saves()
        manager.restore(fresh)
    assert torch.equal(fresh.it.resolve_conj(), saved)


def test_a_state_that_is_too_large_for_its_index_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore reads no index beyond the limit."""
    monkeypatch.setattr(writer, "MAX_JSON_BYTES", 1000)
    index = Index(0, "crc32", (), (), {"seen": list(range(1000))}, {})
    with pytest.raises(OSError, match="the limit is 1000") as caught:
        writer.write_index(FileStore(tmp_path), Attempt("one", "a" * 12), index)
    assert caught.value.errno == errno.EFBIG


def test_the_helper_forgets_the_layouts_of_states_that_change(tmp_path: Path) -> None:
    """A tensor of another length at each save: 1 MB per save stayed in the helper of a large model."""
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(1000))
    used = []
    with CheckpointManager(_config(tmp_path, checkpoint_interval=1, memory_snapshot_interval=0)) as manager:
        for step in range(1, 33):
            manager.step(step, model, dataset_state={"left": torch.arange(step)})
            assert manager.wait_for_pending_saves(60)
            status = Path(f"/proc/{manager.saves.helper.pid}/status").read_text()
            used.append(int(status.split("VmRSS:")[1].split()[0]) / 1024)
    assert max(used[20:]) < max(used[8:20]) + 4.0, used


def test_failed_saves_are_not_kept_for_ever(tmp_path: Path) -> None:
    """A store that is down for weeks fails thousands of saves."""
    (tmp_path / "file").touch()
    with CheckpointManager(_config(tmp_path / "file", checkpoint_interval=1)) as manager:
        for step in range(1, 6):
            manager.step(step, torch.nn.Linear(2, 2))
            manager.saves.wait_for("NVME", "", 60)
        assert len(manager.saves._pending) == 1 and not manager.wait_for_pending_saves(60)


def test_no_memory_for_a_copy_fails_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As any other failed save."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        CheckpointManager(_config(tmp_path, checkpoint_interval=1)) as manager,
        caplog.at_level(logging.WARNING),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            manager.step(1, torch.nn.Linear(2, 2))
        assert "Too many open files" in caplog.text and not manager.wait_for_pending_saves(60)
        manager.step(2, torch.nn.Linear(2, 2))
        assert manager.wait_for_pending_saves(60)


def test_a_copy_that_fails_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waited ten minutes for it."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no copy")

    with CheckpointManager(_config(tmp_path, checkpoint_interval=1)) as manager:
        monkeypatch.setattr(snapshot, "_copy_one", refuse)
        manager.step(1, torch.nn.Linear(2, 2))
        assert not manager.wait_for_pending_saves(5)


def _stages(rank: int, world_size: int, folder: str) -> str:
    config = CheckpointConfig(nvme_path=folder, save_on_close=False, checkpoint_interval=1)
    with CheckpointManager(config) as manager, pytest.raises(CheckpointSaveError) as caught:
        manager.step(1, torch.nn.Linear(2, 2 + rank))
    return str(caught.value)


def test_two_tensors_of_one_name_on_two_ranks_are_refused(tmp_path: Path) -> None:
    """Stages of a pipeline that count their layers alike: only one of the two would have been kept."""
    with Ranks(_stages, 2, (str(tmp_path),)) as ranks:
        for said in ranks.values(timeout_s=90):
            assert "ranks have different tensors named model_state_dict." in said


def _one_cannot(rank: int, world_size: int, folder: str) -> str:
    state = CheckpointState(step=1, dataset_state=_CYCLE if rank else {})
    with (
        CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager,
        pytest.raises(CheckpointSaveError) as caught,
    ):
        manager.save_checkpoint(state)
    return str(caught.value)


def test_whatever_one_rank_cannot_keep_all_ranks_are_told(tmp_path: Path) -> None:
    """The others waited for it."""
    with Ranks(_one_cannot, 2, (str(tmp_path),)) as ranks:
        for said in ranks.values(timeout_s=90):
            assert "rank 1: RecursionError" in said
