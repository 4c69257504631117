"""Plain torch.distributed.checkpoint users: their calls write and read our format, and theirs read what we wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend, StorageReader, StorageWriter
from allranks.checkpoint.restore.opened_checkpoint import verify_checkpoint
from allranks.checkpoint.stores.file_store import FileStore
from allranks.drill.ranks import Ranks

from .jobs import make_job, make_state, same

NAME = "checkpoint_step_00000007"


def _state(seed: int) -> tuple[Any, dict[str, Any]]:
    model, optimizer = make_job(seed)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": seed,
        "tag": f"run {seed}",
    }
    return optimizer, state


def test_dcp_save_writes_our_format_and_dcp_load_reads_it_back_verified(tmp_path: Path) -> None:
    """Tensors and plain values alike, whether DCP, the manager or the command reads them."""
    _, saved = _state(seed=1)
    path = str(tmp_path / NAME)
    dcp.save(saved, storage_writer=StorageWriter(path), no_dist=True)
    verified = verify_checkpoint(FileStore(tmp_path), NAME)
    assert verified.problems == () and verified.step == 7 and verified.tensors > 10

    _, loaded = _state(seed=2)
    assert not same(loaded["model"], saved["model"])
    dcp.load(loaded, storage_reader=StorageReader(path), no_dist=True)
    assert same(loaded, saved)

    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.step == 7 and state.epoch == 1
    assert same(state.model_state_dict, dict(saved["model"]))


def test_torchs_own_reader_and_safetensors_read_what_dcp_save_wrote(tmp_path: Path) -> None:
    """Nothing of ours is needed to get the tensors out."""
    from safetensors.torch import load_file

    _, saved = _state(seed=1)
    dcp.save(saved, storage_writer=StorageWriter(str(tmp_path / NAME)), no_dist=True)
    target = {"model.0.weight": torch.zeros(16, 16)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / NAME)), no_dist=True)
    plain = load_file(str(tmp_path / NAME / "rank-00000.safetensors"))
    for found in (target["model.0.weight"], plain["model.0.weight"]):
        assert same(found, saved["model"]["0.weight"])


def test_dcp_load_gets_the_plain_values_of_a_checkpoint_of_the_manager(tmp_path: Path) -> None:
    """Learning rates and the like, by the names DCP gives them."""
    NVMeBackend(tmp_path).save(make_state(3, seed=3), NAME)
    wanted = make_state(3, seed=4)
    state = {"optimizer_state_dict": wanted.optimizer_state_dict, "step": 0}
    wanted.optimizer_state_dict["param_groups"][0]["lr"] = 123.0
    dcp.load(state, storage_reader=StorageReader(str(tmp_path / NAME)), no_dist=True)
    assert state["step"] == 3
    assert same(state["optimizer_state_dict"], make_state(3, seed=3).optimizer_state_dict)


def test_what_dcp_would_pickle_is_refused_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    """An object of a class of one's own has no place in a file that must not run code."""
    with pytest.raises(BaseException, match="cannot store a value of type"):
        dcp.save(
            {"w": torch.ones(2), "odd": Path.cwd}, storage_writer=StorageWriter(str(tmp_path / NAME)), no_dist=True
        )  # fmt: skip
    assert FileStore(tmp_path).names() == []


def _sharded(world_size: int, seed: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Linear(7, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return {"model": model.state_dict(), "epoch": seed}


def _content(state: dict[str, Any]) -> Any:
    whole = {name: value.full_tensor().tolist() for name, value in state["model"].items()}
    return whole, state["epoch"]


def _save_sharded(rank: int, world_size: int, path: str) -> Any:
    state = _sharded(world_size, seed=1)
    dcp.save(state, storage_writer=StorageWriter(path))
    return _content(state)


def _load_sharded(rank: int, world_size: int, path: str) -> Any:
    state = _sharded(world_size, seed=2)
    dcp.load(state, storage_reader=StorageReader(path))
    return _content(state)


def test_what_three_ranks_save_through_dcp_two_ranks_load(tmp_path: Path) -> None:
    """FSDP2 shards of uneven size, resharded by DCP's planner, equal bit for bit."""
    path = str(tmp_path / NAME)
    with Ranks(_save_sharded, 3, (path,)) as ranks:
        saved = ranks.values(timeout_s=90)
    assert verify_checkpoint(FileStore(tmp_path), NAME).problems == ()
    with Ranks(_load_sharded, 2, (path,)) as ranks:
        assert ranks.values(timeout_s=90) == [saved[0]] * 2
