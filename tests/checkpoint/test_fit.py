"""A restore into a model that is not the saved one, or that makes its state_dict for the occasion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier
from allranks.drill.ranks import Ranks
from allranks.errors import CheckpointLoadError, CheckpointValidationError

from .jobs import same

TIERS = [CheckpointTier.MEMORY, CheckpointTier.NVME]


class Remembering(torch.nn.Linear):
    """Keeps numbers as extra state, in a tensor that its state_dict() makes anew, as Transformer Engine does."""

    def __init__(self, history: list[int]) -> None:
        super().__init__(4, 4)
        self.history = history

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.history, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.history = state.tolist()


class Doubled(torch.nn.Linear):
    """Its state_dict() holds copies in another type."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.double() for name, value in super().state_dict(*args, **kwargs).items()}


def _manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(nvme_path=folder, save_on_close=False))


def _saved(manager: CheckpointManager, tier: CheckpointTier, model: Any) -> None:
    config = {CheckpointTier.MEMORY: 50, CheckpointTier.NVME: 500}
    manager.step(config[tier], model)
    assert manager.wait_for_pending_saves(60)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("size", [(4, 3), (4, 5), (1, 1)])
def test_a_model_of_another_size_is_refused_before_it_is_touched(
    tmp_path: Path, tier: CheckpointTier, size: tuple[int, int]
) -> None:
    """A smaller one took the first rows of each tensor, without a word."""
    model = torch.nn.Linear(*size)
    before = [parameter.clone() for parameter in model.parameters()]
    with _manager(tmp_path) as manager:
        _saved(manager, tier, torch.nn.Linear(4, 4))
        for strict in (True, False):
            with pytest.raises(
                CheckpointValidationError, match=r"was saved with shape \(4, 4\), but the model has shape"
            ):
                manager.restore(model, tier=tier, strict=strict)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_with_other_names_is_refused(tmp_path: Path, tier: CheckpointTier) -> None:
    """Its snapshot in memory left it as it was, and was called restored."""
    with _manager(tmp_path) as manager:
        _saved(manager, tier, torch.nn.Linear(4, 4))
        with pytest.raises(CheckpointValidationError, match="do not match"):
            manager.restore(torch.nn.Sequential(torch.nn.Linear(4, 4)), tier=tier)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("history", [[], [7, 7, 7], [1]])
def test_extra_state_in_a_tensor_is_given_back(
    tmp_path: Path, tier: CheckpointTier, history: list[int]
) -> None:
    """Of whatever length the new model's is."""
    model, fresh = Remembering([1, 2, 3]), Remembering(history)
    with _manager(tmp_path) as manager:
        _saved(manager, tier, model)
        manager.restore(fresh, tier=tier)
    assert fresh.history == [1, 2, 3] and torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_whose_state_dict_holds_copies_is_restored(tmp_path: Path, tier: CheckpointTier) -> None:
    """Its copies were filled, and thrown away."""
    model, fresh = Doubled(4, 4), Doubled(4, 4)
    with _manager(tmp_path) as manager:
        _saved(manager, tier, model)
        manager.restore(fresh, tier=tier)
    assert torch.equal(fresh.weight, model.weight) and torch.equal(fresh.bias, model.bias)


class Headed(torch.nn.Module):
    """No wrapper, for all that a part of it has the name of one."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)


def _averaged() -> torch.nn.Module:
    model = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 4))
    model.update_parameters(torch.nn.Linear(4, 4))
    return model


@pytest.mark.parametrize("make", [Headed, _averaged])
@pytest.mark.parametrize("tier", TIERS)
def test_what_a_model_has_beside_its_module_is_kept(tmp_path: Path, tier: CheckpointTier, make: Any) -> None:
    """Only the part named `module` was saved: a head was lost, and an average began anew."""
    model, fresh = make(), make()
    with torch.no_grad():
        for value in fresh.state_dict().values():
            value.zero_()
    with _manager(tmp_path) as manager:
        _saved(manager, tier, model)
        manager.restore(fresh, tier=tier)
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("tier", TIERS)
def test_an_optimizer_that_was_not_saved_is_told(
    tmp_path: Path, tier: CheckpointTier, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps what it has; weights that were imported are restored like this."""
    model = torch.nn.Linear(4, 4)
    with _manager(tmp_path) as manager:
        _saved(manager, tier, model)
        manager.restore(model, torch.optim.AdamW(model.parameters()), tier=tier)
    assert "was saved without optimizer: not restored" in caplog.text


def test_a_model_on_the_meta_device_is_not_called_restored(tmp_path: Path) -> None:
    """Nothing can be written into it."""
    with _manager(tmp_path) as manager:
        _saved(manager, CheckpointTier.NVME, torch.nn.Linear(4, 4))
        with pytest.raises(CheckpointLoadError, match="meta device"):
            manager.restore(torch.nn.Linear(4, 4, device="meta"), tier=CheckpointTier.NVME)


def _sharded(ranks: list[int], first: int) -> torch.nn.Module:
    model = torch.nn.Linear(4, 4, bias=False)
    whole = torch.arange(first, first + 16.0).view(4, 4)
    model.weight = torch.nn.Parameter(distribute_tensor(whole, DeviceMesh("cpu", ranks), [Shard(0)]))
    return model


def _renumbered(rank: int, world_size: int, folder: str) -> Any:
    with _manager(Path(folder)) as manager:
        manager.step(500, _sharded([0, 1], 0))
        assert manager.wait_for_pending_saves(60)
        other: Any = _sharded([1, 0], 100)
        state = manager.restore(other)
        assert state is not None and manager.restored_from is not None
        return manager.restored_from.name, other.weight.to_local()[:, 0].tolist()


def test_snapshots_of_another_order_of_ranks_are_left_to_the_disk(tmp_path: Path) -> None:
    """Each process keeps its chunks in memory: for ranks that were numbered anew they are those of others."""
    with Ranks(_renumbered, 2, (str(tmp_path),)) as ranks:
        assert ranks.values(timeout_s=90) == [("NVME", [8.0, 12.0]), ("NVME", [0.0, 4.0])]
