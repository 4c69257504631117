"""No sample lost, none seen twice, whatever the world does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.elastic.data import ElasticDataLoader, Order, ResumableDataset, WorldHistory
from allranks.elastic.index import TokenIndexFile
from allranks.elastic.scaling import batch_plan

from .worlds import (
    LENGTH,
    Worlds,
    assert_nothing_lost_or_repeated,
    loaders_of,
    run_steps,
    sequence_index,
    worlds,
)


@settings(max_examples=150)
@given(worlds, st.integers(0, 5), st.booleans())
def test_no_history_of_worlds_loses_or_repeats_a_sample(
    index: Path, plan: Worlds, seed: int, shuffle: bool
) -> None:
    """Any worlds of any sizes and batches, in any sequence."""
    assert_nothing_lost_or_repeated(index, plan, seed, shuffle)


@settings(max_examples=100)
@given(worlds, st.integers(0, 5))
def test_a_world_that_changes_in_place_loses_nothing_either(index: Path, plan: Worlds, seed: int) -> None:
    """Survivors keep their loaders: old and new ranks agree on every sample, also after a rollback."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    ranks: list[ElasticDataLoader] = []
    for world, batch, steps, exact, lost in plan:
        new = loaders_of(opened, world, batch, exact, seed=seed)
        if ranks:
            step = max(0, ranks[0].step - lost)  # the last step that all committed
            state = ranks[0].state_dict()
            for rank, loader in enumerate(new):
                if rank < len(ranks):
                    loader_plan = loader.plan
                    loader = new[rank] = ranks[rank]
                    loader.on_topology_change(world, rank, loader_plan, step=step)
                else:
                    loader.load_state_dict(state)
                    loader.seek(step)
        ranks = new
        kept.update(run_steps(ranks, steps))
        assert len({json.dumps(loader.state_dict()) for loader in ranks}) == 1
    taken = [number for step in range(ranks[0].step) for number in kept[step]]
    assert taken == Order(203, seed).ids(0, len(taken)).tolist()


def test_the_case_that_the_known_harness_gets_wrong(tmp_path: Path) -> None:
    """1200 samples, 4 ranks took 100 each, 2 go on: exactly the other 800 follow."""
    opened = TokenIndexFile(sequence_index(tmp_path, 1200))
    four = loaders_of(opened, 4, 10, False)
    first = run_steps(four, 10)
    two = loaders_of(opened, 2, 10, False)
    for loader in two:
        loader.load_state_dict(four[0].state_dict())
    second = run_steps(two, 40)
    done = [n for part in first.values() for n in part]
    rest = [n for part in second.values() for n in part]
    assert (len(done), len(rest)) == (400, 800)
    assert set(done) | set(rest) == set(range(1200))


def test_a_step_is_a_pure_function_of_seed_step_and_history(index: Path) -> None:
    """Any step's samples can be asked for at any time, of any rank."""
    dataset = ResumableDataset(index, LENGTH, seed=4, batch_size=3, rank=0, world_size=2)
    dataset.history = WorldHistory().change(0, (3, 3)).change(5, (4, 4, 3)).change(9, (6,))
    assert dataset.history.position(9) == 5 * 6 + 4 * 11
    assert dataset.samples(6, 2).tolist() == Order(203, 4).ids(30 + 11 + 8, 3).tolist()
    assert dataset.samples(6).tolist() == [n for r in range(3) for n in dataset.samples(6, r).tolist()]
    assert WorldHistory.from_list(json.loads(json.dumps(dataset.history.to_list()))) == dataset.history


def test_constant_batch_gives_every_world_the_same_global_batches(index: Path) -> None:
    """With exact plans the samples of a step do not depend on the number of ranks at all."""
    opened = TokenIndexFile(index)
    results = []
    for world in (1, 2, 3, 5):
        ranks = [
            ElasticDataLoader(
                ResumableDataset(opened, LENGTH, seed=1), plan=batch_plan(16, world, 4), rank=rank
            )
            for rank in range(world)
        ]
        results.append(run_steps(ranks, 6))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("world", "steps"), [(1, 26), (2, 26), (3, 26), (5, 26), (7, 25), (16, 25)])
def test_a_finite_run_sees_every_sample_once_per_epoch_and_then_ends(
    index: Path, world: int, steps: int
) -> None:
    """406 samples by 16: the last step has 6, or the one before has 22; all ranks have as many micro-batches."""
    opened = TokenIndexFile(index)
    seen: list[int] = []
    weights: dict[int, float] = {}
    calls: list[list[int]] = []
    for rank in range(world):
        dataset = ResumableDataset(opened, LENGTH, epochs=2)
        loader = ElasticDataLoader(dataset, plan=batch_plan(16, world, 4), rank=rank)
        at = 0
        calls.append([])
        for batch in loader:
            seen += loader.last_samples.tolist()
            assert len(batch["input_ids"]) == max(1, len(loader.last_samples))
            calls[rank].append(at)
            weights[at] = weights.get(at, 0.0) + loader.weight / world
            at += loader.step_done
        assert at == loader.step == steps and dataset.finished and dataset.position == 406
        assert list(loader) == []
    assert Counter(seen) == Counter(list(range(203)) * 2)
    assert all(one == calls[0] for one in calls), "a rank with more calls would wait for ever"
    assert all(weight == pytest.approx(1.0) for weight in weights.values())


@settings(max_examples=100)
@given(worlds, st.integers(1, 2))
def test_a_finite_run_through_any_worlds_sees_every_sample_once(
    index: Path, plan: Worlds, epochs: int
) -> None:
    """Worlds change until the data ends: the last one reads to the end, nothing is left or doubled."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    state: Any = None
    for number, (world, batch, steps, exact, _) in enumerate(plan):
        ranks = loaders_of(opened, world, batch, exact, seed=1, epochs=epochs)
        end = None if number == len(plan) - 1 else (state["step"] if state else 0) + steps
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
            at = loader.step
            for _ in loader:
                kept.setdefault(at, []).extend(loader.last_samples.tolist())
                at += loader.step_done
                if at == end:
                    break
        assert len({loader.step for loader in ranks}) == 1
        state = ranks[0].state_dict()
    assert Counter(n for part in kept.values() for n in part) == Counter(list(range(203)) * epochs)


@pytest.mark.soak
@settings(max_examples=5000)
@given(worlds, st.integers(0, 10**6), st.booleans())
def test_thousands_of_histories_lose_and_repeat_nothing(
    index: Path, plan: Worlds, seed: int, shuffle: bool
) -> None:
    """The property of above, long enough to find what a short run does not."""
    assert_nothing_lost_or_repeated(index, plan, seed, shuffle)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_for_which_no_sample_is_left_computes_one_that_counts_nowhere(workers: int) -> None:
    """Its step is a collective, too; the mean of an empty batch, not a number, would go into every rank's gradients."""
    samples = torch.arange(7.0)
    total = 0.0
    for rank in range(4):
        dataset = ResumableDataset(samples, seed=1, epochs=1, rank=rank % 2, world_size=2)
        loader = ElasticDataLoader(dataset, 2, rank=rank % 2, world_size=2, num_workers=workers)
        next(iter(loader))  # 4 of 7: three are left when the world grows to 4 ranks
        loader.on_topology_change(4, rank)
        found = [(len(loader.last_samples), batch.mean().item() * loader.weight) for batch in loader]
        loader.close()
        assert [count for count, _ in found] == [0 if rank == 3 else 1]
        total += found[0][1] / 4
    order = Order(7, 1).ids(4, 3).tolist()
    assert total == pytest.approx(sum(order) / 3)
