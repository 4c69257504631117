"""Several real ranks: sharded saves, loads at other world sizes, and agreement on what to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier, create_checkpoint_state
from allranks.checkpoint.restore.candidates import choose
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.save import plan
from allranks.checkpoint.stores.file_store import FileStore
from allranks.drill.ranks import Ranks
from allranks.errors import CheckpointLoadError

from .jobs import flip, make_job, make_state, same, train_step

#: 10 rows over 4, 3 and 2 ranks: uneven shards, and an empty one where 4 ranks share 3 rows.
WIDTH = 10


def _model(kind: str, world_size: int, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    inner = 12 if kind == "tp" else 3  # tensor parallel layers must divide evenly
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, inner),
        torch.nn.ReLU(),
        torch.nn.Linear(inner, WIDTH),
        torch.nn.LayerNorm(WIDTH),
    )
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (world_size,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _whole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


def _content(model: Any, optimizer: Any) -> Any:
    state = create_checkpoint_state(0, model, optimizer)
    return _plain(_whole({"model": state.model_state_dict, "optimizer": state.optimizer_state_dict}))


def _plain(value: Any) -> Any:
    """Tensors as (dtype, bytes): what a test compares must travel through a pipe cheaply."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _save(rank: int, world_size: int, kind: str, folder: str) -> Any:
    model, optimizer = _model(kind, world_size, seed=1)
    config = CheckpointConfig(nvme_path=folder, checkpoint_interval=1, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        for step in (1, 2):
            model(torch.randn(4, WIDTH)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert manager.step(step, model, optimizer, dataset_state={"rank": rank}) == (
                CheckpointTier.NVME,
            )
            assert manager.wait_for_pending_saves(60)
    return _content(model, optimizer)


def _load(rank: int, world_size: int, kind: str, folder: str) -> Any:
    model, optimizer = _model(kind, world_size, seed=2)
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        state = manager.restore(model, optimizer)
        assert state is not None and state.step == 2 and state.dataset_state == {"rank": rank}
        assert sorted(state.rank_states) == [0, 1, 2, 3]
        whole = manager.load_checkpoint()
        assert whole is not None
        content = _content(model, optimizer)
        assert _plain(whole.model_state_dict) == content["model"]
        return content


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "tp"])
def test_what_four_ranks_save_two_and_three_ranks_load_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Model and optimizer are equal as whole tensors, whatever the sharding was and is."""
    with Ranks(_save, 4, (kind, str(tmp_path))) as ranks:
        saved = ranks.values(timeout_s=90)
    for world_size in (2, 3):
        with Ranks(_load, world_size, (kind, str(tmp_path))) as ranks:
            loaded = ranks.values(timeout_s=90)
        assert all(content == saved[0] for content in loaded)


def test_replicated_tensors_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four DDP ranks share the work: no tensor twice, and no rank writes everything."""
    monkeypatch.setattr(plan, "_SMALL_BYTES", 0)
    with Ranks(_save, 4, ("ddp", str(tmp_path))) as ranks:
        ranks.values(timeout_s=90)
    with opened(FileStore(tmp_path), "checkpoint_step_00000002") as checkpoint:
        names = [s.shard.name for _, s in checkpoint.shards() if not s.shard.name.startswith("rank0")]
        writers = {index.rank for index, s in checkpoint.shards() if not s.shard.name.startswith("rank0")}
    assert len(names) == len(set(names)) > 10
    assert writers == {0, 1, 2, 3}


def _save_statistics(rank: int, world_size: int, folder: str) -> list[float]:
    """DDP gives the buffers of rank 0 to all at each forward; after it they are of each rank's own batch."""
    model = torch.nn.Sequential(*[torch.nn.BatchNorm1d(4) for _ in range(3)])
    for buffer in model.buffers():
        buffer.fill_(10 * rank + 1)
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        manager.save_checkpoint(create_checkpoint_state(1, model, None))
        assert manager.wait_for_pending_saves(60)
        assert manager.restore(model, tier=CheckpointTier.NVME) is not None
    return [float(buffer.float().mean()) for buffer in model.buffers()]


def test_buffers_that_differ_between_ranks_are_all_those_of_the_first(tmp_path: Path) -> None:
    """Never the mean of one rank's batch with the variance of another's."""
    with Ranks(_save_statistics, 2, args=(str(tmp_path),)) as ranks:
        assert ranks.values(60) == [[1.0] * 9] * 2


def test_plain_dcp_reads_and_reshards_our_folder(tmp_path: Path) -> None:
    """torch's own HuggingFaceStorageReader needs nothing of ours."""
    with Ranks(_save, 4, ("fsdp2", str(tmp_path))) as ranks:
        saved = ranks.values(timeout_s=90)[0]
    target = {"model_state_dict.2.weight": torch.zeros(WIDTH, 3)}
    dcp.load(
        target,
        storage_reader=HuggingFaceStorageReader(str(tmp_path / "checkpoint_step_00000002")),
        no_dist=True,
    )
    assert _plain(target["model_state_dict.2.weight"]) == saved["model"]["2.weight"]


def _save_apart(rank: int, world_size: int, base: str) -> Any:
    """Each pair of ranks has a disk of its own, like two nodes."""
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=f"{base}/node{rank // 2}", memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(create_checkpoint_state(5, model, optimizer))
        assert manager.wait_for_pending_saves(60)
        assert manager.places.sharers(CheckpointTier.NVME) == ((0, 1) if rank < 2 else (2, 3))
        if rank == 3:  # this node loses a newer one that the other still has
            FileStore(Path(f"{base}/node1")).remove("checkpoint_step_00000005")
    with CheckpointManager(config) as manager:
        manager.group.gather("everybody is here")
        with pytest.raises(CheckpointLoadError, match="step 5 is complete on 2 of 4 ranks only"):
            manager.load_checkpoint()


def test_nodes_with_disks_of_their_own_each_keep_everything_and_agree_on_what_to_load(tmp_path: Path) -> None:
    """DDP state is whole on each node's disk; a step that one node lacks is loaded by nobody, and all ranks report it."""
    with Ranks(_save_apart, 4, (str(tmp_path),)) as ranks:
        assert ranks.values(timeout_s=90) == [None, None, None, None]
    with opened(FileStore(tmp_path / "node0"), "checkpoint_step_00000005") as checkpoint:
        names = {s.shard.name for _, s in checkpoint.shards()}
        assert checkpoint.manifest.ranks == (0, 1) and checkpoint.manifest.world_size == 4
    assert "model_state_dict.0.weight" in names and "model_state_dict.1.weight" in names


def _one_sees_damage(rank: int, world_size: int, folder: str) -> Any:
    model, optimizer = make_job(seed=1)
    config = CheckpointConfig(nvme_path=f"{folder}/{rank}", memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        for step in (1, 2):
            manager.save_checkpoint(create_checkpoint_state(step, model, optimizer))
            train_step(model, optimizer, step)
        manager.wait_for_pending_saves(60)
        if rank == 1:
            flip(Path(folder) / "1" / "checkpoint_step_00000002" / "rank-00001.safetensors", -1)
        manager.group.gather("the damage is done")
        state = manager.restore(model, optimizer)
        assert state is not None
        bad = sorted(path.name for path in (Path(folder) / str(rank)).glob("quarantine/*"))
        return state.step, len(bad), same(model.state_dict(), make_job(seed=1)[0].state_dict())


def test_damage_seen_by_one_rank_makes_all_ranks_take_the_older_one(tmp_path: Path) -> None:
    """Nobody trains on with another step than the others; only the damaged copy goes to quarantine."""
    with Ranks(_one_sees_damage, 2, (str(tmp_path),)) as ranks:
        assert ranks.values(timeout_s=90) == [(1, 0, True), (1, 1, True)]


def _only_one_is_whole(rank: int, world_size: int, folder: str) -> Any:
    model, optimizer = make_job(seed=1)
    config = CheckpointConfig(nvme_path=f"{folder}/{rank}", memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(create_checkpoint_state(1, model, optimizer))
        manager.wait_for_pending_saves(60)
        if rank == 1:
            flip(Path(folder) / "1" / "checkpoint_step_00000001" / "rank-00001.safetensors", -1)
        train_step(model, optimizer, 2)
        manager.group.gather("the damage is done")
        with pytest.raises(CheckpointLoadError) as caught:
            manager.restore(model, optimizer)
        return str(caught.value)


def test_all_ranks_are_told_when_another_ranks_only_copy_is_damaged(tmp_path: Path) -> None:
    """The rank whose bytes were all right must not train on with another step than the others."""
    with Ranks(_only_one_is_whole, 2, (str(tmp_path),)) as ranks:
        for said in ranks.values(timeout_s=90):
            assert "no checkpoint could be loaded" in said and "THE MODEL HOLDS PARTS OF STEP 1" in said


def _disagree(rank: int, world_size: int, folder: str) -> str:
    with CheckpointManager(CheckpointConfig(nvme_path=folder)) as manager:
        state = make_state(rank + 1)
        if world_size == 3 and rank == 1:
            state.step, state.dataset_state = 1, {"bad": object()}
        if world_size == 3:
            state.step = 1
        try:
            manager.save_checkpoint(state)
        except Exception as error:
            return str(error)
    return "saved"


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    """No rank hangs: all get the same sentence."""
    with Ranks(_disagree, 2, (str(tmp_path),)) as ranks:
        texts = ranks.values(timeout_s=60)
    assert all("ranks disagree on the step: [1, 2]" in text for text in texts)


def test_a_state_that_one_rank_cannot_store_fails_on_all_ranks(tmp_path: Path) -> None:
    """The others do not wait for a part that never comes."""
    with Ranks(_disagree, 3, (str(tmp_path),)) as ranks:
        texts = ranks.values(timeout_s=60)
    assert all("cannot store a value of type builtins.object" in text for text in texts)
    assert FileStore(tmp_path).names() == []


def test_the_newest_step_that_everybody_has_is_chosen() -> None:
    """Ties go to the faster tier; steps that only some ranks have are named in the reason."""
    views = [
        {"MEMORY": [("9", 9)], "NVME": [("a", 5), ("b", 7)], "S3": [("b", 7)]},
        {"MEMORY": [], "NVME": [("a", 5), ("b", 7)], "S3": [("b", 7)]},
    ]
    choice = choose(views)
    assert [(c.tier, c.step) for c in choice.candidates] == [("NVME", 7), ("S3", 7), ("NVME", 5)]
    assert choice.reason == (
        "step 7 in NVME is the newest complete one on all 2 ranks; step 9 is complete on 1 of 2 ranks only"
    )
    assert choose([{}, {}]).candidates == ()


def _save_with_metrics(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0)) as manager:
        state = create_checkpoint_state(1, model, optimizer, metrics={"loss": float(rank)})
        manager.save_checkpoint(state)
        assert manager.wait_for_pending_saves(60)


def test_ranks_that_are_alike_share_one_skeleton_and_a_single_process_reads_it(tmp_path: Path) -> None:
    """Only the first rank writes what is the same for all; every rank's own part is there."""
    with Ranks(_save_with_metrics, 2, (str(tmp_path),)) as ranks:
        ranks.values(timeout_s=90)
    with opened(FileStore(tmp_path), "checkpoint_step_00000001") as checkpoint:
        assert [index.common is not None for index in checkpoint.indexes] == [True, False]
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.metrics == {"loss": 0.0} and state.world_size == 2
    assert [state.rank_states[rank]["metrics"] for rank in (0, 1)] == [{"loss": 0.0}, {"loss": 1.0}]


def _save_too_much(rank: int, world_size: int, folder: str) -> tuple[bool, str]:
    state = make_state(1)
    state.dataset_state = {"history": torch.zeros(1 << 20 if rank == 1 else 1)}  # only rank 1 needs 4 MB
    with CheckpointManager(CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0)) as manager:
        manager.save_checkpoint(state)
        return manager.wait_for_pending_saves(60), str(manager.saves.failures[0])


@pytest.mark.needs_root
def test_a_disk_that_one_rank_finds_full_fails_the_save_for_all_at_once(small_disk: Path) -> None:
    """The first rank does not wait for a part that cannot come, and says whose it is."""
    with Ranks(_save_too_much, 2, (str(small_disk),)) as ranks:
        (first, first_text), (second, second_text) = ranks.values(timeout_s=90)
    assert first is False and second is False
    assert "rank 1 could not write its part" in first_text and "No space left on device" in first_text
    assert "No space left on device" in second_text
    assert FileStore(small_disk).names() == []


def _lives_on(rank: int, world_size: int, folder: str) -> Any:
    model, optimizer = make_job(seed=1)
    said: list[Any] = []
    with CheckpointManager(CheckpointConfig(nvme_path=folder, checkpoint_interval=1)) as manager:
        manager.step(1, model, optimizer)
        manager.wait_for_pending_saves(60)
        dist.destroy_process_group()
        if rank == 0:
            return said
        dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank - 1, world_size=2)
        manager.step(2, model, optimizer)
        said.append(manager.wait_for_pending_saves(60))
        state = manager.restore(model, optimizer, tier=CheckpointTier.NVME)
        assert state is not None
        return [*said, state.step, state.world_size, sorted(state.rank_states)]


def test_a_manager_lives_on_in_another_process_group(tmp_path: Path) -> None:
    """As an elastic job's does: it used the group of before, and its next save ended the training."""
    with Ranks(_lives_on, 3, (str(tmp_path / "run"),)) as ranks:
        assert ranks.values(timeout_s=90) == [[], *[[True, 2, 2, [0, 1]]] * 2]
