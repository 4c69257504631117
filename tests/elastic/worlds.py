"""Worlds that come and go over one small index: every rank's loader in one process."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from allranks.elastic.data import ElasticDataLoader, Order, ResumableDataset
from allranks.elastic.index import BuildRequest, TokenIndexFile, build_index
from allranks.elastic.scaling import batch_plan

LENGTH = 8
Worlds = list[tuple[int, int, int, bool, int]]  # (ranks, batch, steps, exact, steps lost) of each world


def sequence_index(folder: Path, samples: int, name: str = "d") -> Path:
    """An index of exactly `samples` sequences."""
    path = folder / f"{name}.txt"
    path.write_bytes(bytes(97 + i % 26 for i in range(samples * LENGTH + 1)))
    build_index(BuildRequest((str(path),), str(folder / f"{name}.index")))
    return folder / f"{name}.index"


def loaders_of(opened: Any, world: int, batch: int, exact: bool, **options: Any) -> list[ElasticDataLoader]:
    """One loader per rank of a world, all in this process."""
    plan = batch_plan(max(batch, world), world, 2) if exact else None
    return [
        ElasticDataLoader(
            ResumableDataset(opened, LENGTH, **options), batch, plan=plan, rank=rank, world_size=world
        )
        for rank in range(world)
    ]


def run_steps(ranks: list[ElasticDataLoader], steps: int) -> dict[int, list[int]]:
    """Lets every rank train some steps; step -> the samples of all ranks, in rank order."""
    seen: dict[int, list[int]] = {}
    end = ranks[0].step + steps
    for loader in ranks:
        batches = iter(loader)
        while loader.step < end:
            step = loader.step
            batch = next(batches)
            assert len(batch["input_ids"]) == len(loader.last_samples)
            seen.setdefault(step, []).extend(loader.last_samples.tolist())
    return seen


worlds = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(1, 12), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


def assert_nothing_lost_or_repeated(index: Path, plan: Worlds, seed: int, shuffle: bool) -> None:
    """Worlds change in the middle of epochs by restart with a state, after some steps were lost and redone."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    state: Any = None
    for world, batch, steps, exact, lost in plan:
        ranks = loaders_of(opened, world, batch, exact, seed=seed, shuffle=shuffle)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        kept.update(run_steps(ranks, steps))
        states = [loader.state_dict() for loader in ranks]
        assert all(one == states[0] for one in states)
        state = states[0]
        run_steps(ranks, lost)  # trained after the checkpoint, then the world broke
    taken = [number for step in sorted(kept) for number in kept[step]]
    assert taken == Order(203, seed, shuffle).ids(0, len(taken)).tolist()
    counts = Counter(taken)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(203)) <= 1
