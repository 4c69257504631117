"""Batches, worker processes and states: what a rank gets, and what it can go on from."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allranks.drill.ranks import Ranks
from allranks.elastic.data import ElasticDataLoader, Order, ResumableDataset
from allranks.elastic.data.dataset import DatasetState
from allranks.elastic.index import TokenIndexFile
from allranks.elastic.scaling import batch_plan
from allranks.errors import DataLoadingError

from .worlds import (
    LENGTH,
    sequence_index,
)


def test_batches_hold_the_tokens_of_their_samples_and_the_next_as_labels(index: Path) -> None:
    """input_ids is the sequence, labels the same moved by one."""
    opened = TokenIndexFile(index)
    loader = ElasticDataLoader(ResumableDataset(opened, LENGTH, seed=2), 5, rank=0, world_size=1)
    batch = next(iter(loader))
    for row, number in enumerate(loader.last_samples.tolist()):
        wanted = opened.tokens[number * LENGTH : number * LENGTH + LENGTH + 1].astype(np.int64)
        assert batch["input_ids"][row].tolist() == wanted[:-1].tolist()
        assert batch["labels"][row].tolist() == wanted[1:].tolist()
    assert batch["input_ids"].dtype == torch.int64
    one = loader.dataset[7]
    assert one["input_ids"].tolist() == opened.tokens[56:64].tolist()
    with pytest.raises(IndexError, match="sample 203 of 203"):
        loader.dataset[203]


def test_a_state_inside_a_step_resumes_at_its_beginning(index: Path) -> None:
    """Partial gradients are gone with the process, so the whole step is done again."""
    dataset = ResumableDataset(index, LENGTH, seed=1)
    loader = ElasticDataLoader(dataset, plan=batch_plan(12, 1, 4), rank=0)
    batches = iter(loader)
    first = [next(batches)["input_ids"] for _ in range(4)]  # three of step 0, one of step 1
    state = loader.state_dict()
    assert state["step"] == 1
    again = ElasticDataLoader(ResumableDataset(index, LENGTH, seed=9), plan=batch_plan(12, 1, 4), rank=0)
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["input_ids"], first[3])
    assert again.dataset.seed == 1  # the order is the state's


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_draws_no_random_numbers_of_the_training(index: Path, workers: int) -> None:
    """A restored training starts one more: its dropout masks are to be those that it would have had."""
    before = torch.get_rng_state()
    loader = ElasticDataLoader(ResumableDataset(index, LENGTH), 4, rank=0, world_size=1, num_workers=workers)
    next(iter(loader))
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_other_data_is_refused(index: Path, tmp_path: Path) -> None:
    """Another index or sequence length would lose or repeat samples."""
    state = ResumableDataset(index, LENGTH).state_dict()
    with pytest.raises(DataLoadingError, match="the state belongs to other data"):
        ResumableDataset(sequence_index(tmp_path, 50), LENGTH).load_state_dict(state)
    with pytest.raises(DataLoadingError, match="another sequence length"):
        ResumableDataset(index, LENGTH * 2).load_state_dict({**state})


def test_an_index_that_is_too_short_or_missing_is_refused(tmp_path: Path) -> None:
    """The error names the file and, if missing, the command."""
    with pytest.raises(DataLoadingError, match="a sample needs 1025"):
        ResumableDataset(sequence_index(tmp_path, 3), 1024)
    with pytest.raises(DataLoadingError, match="Token index file not found"):
        ResumableDataset(tmp_path / "none")
    with pytest.raises(DataLoadingError) as caught:
        ResumableDataset(data_files=["data/train.jsonl"], index_file="data/train.index")
    assert str(caught.value) == "Failed to load data from 'data/train.jsonl': Token index file not found"
    assert "allranks index build data/train.jsonl -o data/train.index" in caught.value.hint


def test_the_known_harness_signature_and_states_are_accepted(index: Path) -> None:
    """data_files, index_file, tokenizer, seq_length; its states give the position."""
    opened = TokenIndexFile(index)
    dataset = ResumableDataset(
        data_files=["d.txt"], index_file=opened, tokenizer=object(), seq_length=LENGTH, rank=0, world_size=1
    )
    assert dataset.total_tokens == opened.total_tokens
    assert {"total_tokens_processed", "world_size", "epoch"} <= set(dataset.state_dict())
    dataset.load_state_dict({"total_tokens_processed": 10 * LENGTH, "world_size": 4})
    assert dataset.position == 10
    dataset.set_epoch(3)
    assert dataset.epoch == 3
    state = DatasetState(total_tokens_processed=5, current_file_index=2, epoch=3)
    assert DatasetState.from_dict(state.to_dict()) == state


def test_a_plain_loop_over_the_dataset_counts_steps_when_they_are_complete(index: Path) -> None:
    """Iterating the dataset itself gives this rank's samples and an exact state."""
    dataset = ResumableDataset(index, LENGTH, batch_size=2, rank=1, world_size=3)
    samples = iter(dataset)
    wanted = Order(203).ids(0, 12).tolist()
    got = [next(samples)["input_ids"].tolist() for _ in range(4)]
    assert got == [dataset[n]["input_ids"].tolist() for n in (wanted[2], wanted[3], wanted[8], wanted[9])]
    assert dataset.step == 2


def test_a_mixture_of_indexes_reads_from_each(tmp_path: Path) -> None:
    """Weights across files; ids lead to the right file."""
    a, b = sequence_index(tmp_path, 40, "a"), sequence_index(tmp_path, 25, "b")
    dataset = ResumableDataset([a, b], LENGTH, weights=[1.0, 3.0], seed=2, rank=0, world_size=1)
    loader = ElasticDataLoader(dataset, 32, rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(20):
        batch = next(batches)
        for row, number in enumerate(loader.last_samples.tolist()):
            source = dataset.sources[0 if number < 40 else 1].index
            start = (number if number < 40 else number - 40) * LENGTH
            assert batch["input_ids"][row].tolist() == source.tokens[start : start + LENGTH].tolist()


def _with_workers(rank: int, world_size: int, index: Path) -> dict[str, Any]:
    """Runs in a forked process: real worker processes, a change of the world in the middle, exact states."""
    torch.set_num_threads(1)
    dataset = ResumableDataset(index, LENGTH, seed=3)
    loader = ElasticDataLoader(dataset, 4, rank=0, world_size=2, num_workers=2, prefetch_factor=3)
    seen: list[list[int]] = []
    states = []
    same = True
    for batch in loader:
        seen.append(loader.last_samples.tolist())
        same &= torch.equal(batch["input_ids"], dataset.fetch(loader.last_samples)["input_ids"])
        states.append(loader.state_dict()["position"])
        if len(seen) == 5:
            loader.on_topology_change(world_size=1, rank=0, plan=batch_plan(8, 1, 8))
        if len(seen) == 8:
            loader.on_topology_change(world_size=4, rank=3)
        if len(seen) == 11:
            loader.seek(2)
        if len(seen) == 13:
            break
    pids = [w.pid for w in loader._loader._iterator._workers]
    loader.close()
    return {"seen": seen, "states": states, "same": same, "workers": len(set(pids))}


def test_worker_processes_prefetch_without_bending_the_state(index: Path) -> None:
    """What was prefetched for the old world is forgotten; the state counts what was given out."""
    with Ranks(_with_workers, world_size=1, args=(index,), backend=None) as ranks:
        result = ranks.values(timeout_s=60)[0]
    order = Order(203, 3)
    expected = [order.ids(8 * step, 4).tolist() for step in range(5)]
    expected += [order.ids(40 + 8 * step, 8).tolist() for step in range(3)]
    expected += [order.ids(64 + 16 * step + 12, 4).tolist() for step in range(3)]
    expected += [order.ids(16 + 16 * step + 12, 4).tolist() for step in range(2)]
    assert result["seen"] == expected
    assert result["states"] == [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 32, 48]
    assert result["same"] and result["workers"] == 2


def _rank_reads(rank: int, world_size: int, index: Path) -> list[list[int]]:
    """A real rank: rank and world come from the process group."""
    loader = ElasticDataLoader(ResumableDataset(index, LENGTH, seed=6), 3)
    batches = iter(loader)
    found = []
    for _ in range(4):
        next(batches)
        found.append(loader.last_samples.tolist())
    return found


def test_real_ranks_share_the_order_without_being_told_their_number(index: Path) -> None:
    """Three gloo ranks: together the first positions of the order, each once."""
    with Ranks(_rank_reads, world_size=3, args=(index,)) as ranks:
        values = ranks.values(timeout_s=60)
    together = [n for step in range(4) for rank in range(3) for n in values[rank][step]]
    assert together == Order(203, 6).ids(0, 36).tolist()


def _killed_worker(rank: int, world_size: int, index: Path) -> dict[str, Any]:
    """A loader's worker is killed: one clear error, then the loader continues from where it was."""
    torch.set_num_threads(1)
    loader = ElasticDataLoader(
        ResumableDataset(index, LENGTH, seed=3), 4, rank=0, world_size=1, num_workers=2
    )
    seen: list[int] = []
    said = hint = ""
    try:
        for _ in loader:
            seen += loader.last_samples.tolist()
            if len(seen) == 12:
                os.kill(loader._loader._iterator._workers[0].pid, signal.SIGKILL)
            if len(seen) > 4000:
                break
    except DataLoadingError as error:
        said, hint = str(error), error.hint
    for _ in loader:
        seen += loader.last_samples.tolist()
        if len(seen) >= 4100:
            break
    loader.close()
    return {"seen": seen, "said": said, "hint": hint, "waited": loader.waited_s, "own": _error_of_a_worker()}


class _Refusing:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> int:
        raise ValueError("no such thing")


def _error_of_a_worker() -> str:
    """What an error of the user's own dataset, raised in a worker, comes out as."""
    loader = ElasticDataLoader(ResumableDataset(_Refusing()), 1, rank=0, world_size=1, num_workers=1)
    try:
        next(iter(loader))
    except Exception as error:
        return type(error).__name__
    finally:
        loader.close()
    return "nothing"


def test_a_killed_worker_process_costs_no_sample(index: Path) -> None:
    """The error names the worker and the fix; iterating again loses and repeats nothing."""
    with Ranks(_killed_worker, world_size=1, args=(index,), backend=None) as ranks:
        result = ranks.values(timeout_s=240)[0]  # for hanging only: a thousand batches on a busy machine
    assert "DataLoader worker" in result["said"] and "position is kept" in result["said"]
    assert "num_workers" in result["hint"] and result["waited"] > 0
    assert result["own"] == "ValueError"
    assert result["seen"] == Order(203, 3).ids(0, len(result["seen"])).tolist()


def test_any_dataset_with_a_length_can_be_shared(index: Path) -> None:
    """Items of the user's own, collated as torch does, with the same exactness; mixtures too."""

    class Squares:
        def __len__(self) -> int:
            return 50

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"x": torch.tensor([number, number * number]), "y": number}

    dataset = ResumableDataset(Squares(), seed=2, rank=0, world_size=1)
    loader = ElasticDataLoader(dataset, 6, rank=1, world_size=2)
    batches = iter(loader)
    batch = next(batches)
    wanted = Order(50, 2).ids(6, 6).tolist()
    assert batch["y"].tolist() == wanted and batch["x"][:, 1].tolist() == [n * n for n in wanted]
    state = json.loads(json.dumps(loader.state_dict()))
    again = ElasticDataLoader(
        ResumableDataset(Squares(), seed=2, rank=0, world_size=1), 6, rank=0, world_size=1
    )
    again.load_state_dict(state)
    assert next(iter(again))["y"].tolist() == Order(50, 2).ids(12, 6).tolist()
    both = ResumableDataset([Squares(), Squares()], weights=[1, 1], rank=0, world_size=1)
    assert both[50 + 7]["y"] == 7
    with pytest.raises(DataLoadingError, match="the dataset is empty"):
        ResumableDataset(torch.utils.data.TensorDataset(torch.zeros(0)))
