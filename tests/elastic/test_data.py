"""No sample lost, none seen twice, whatever the world does; the same order on every machine for ever."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.elastic.data import ElasticDataLoader, History, Mixture, Order, Permutation, ResumableDataset
from allranks.elastic.data.dataset import DatasetState
from allranks.elastic.index import BuildRequest, TokenIndexFile, build_index
from allranks.elastic.scaling import exact_plan
from allranks.errors import ConfigurationError, DataLoadingError
from allranks.testing.ranks import Ranks

pytestmark = pytest.mark.timeout(300)  # for hanging only: machines are shared

LENGTH = 8


def _index(folder: Path, samples: int, name: str = "d") -> Path:
    """An index of exactly `samples` sequences; token i is i mod 251, so a sequence tells where it stands."""
    path = folder / f"{name}.txt"
    path.write_bytes(bytes(97 + i % 26 for i in range(samples * LENGTH + 1)))
    build_index(BuildRequest((str(path),), str(folder / f"{name}.index")))
    return folder / f"{name}.index"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _index(tmp_path_factory.mktemp("data"), 203)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_a_shuffle_is_a_bijection(size: int, key: int) -> None:
    """Every sample once, for any size and key."""
    found = Permutation(size, key)(np.arange(size, dtype=np.int64))
    assert np.array_equal(np.sort(found), np.arange(size))


def test_a_shuffle_of_a_trillion_needs_no_memory_and_spreads() -> None:
    """Neighbours land far apart, evenly over the range, and differently in each epoch."""
    size = 10**12 + 39
    order = Order(size, seed=7)
    first, second = order.ids(0, 20_000), order.ids(size, 20_000)
    assert len(set(first.tolist())) == 20_000 and first.min() >= 0 and first.max() < size
    buckets = np.bincount(first * 20 // size, minlength=20)
    assert buckets.min() > 800 and buckets.max() < 1200  # 1000 expected, 6 standard deviations
    steps = np.abs(np.diff(first)) / size
    assert 0.31 < steps.mean() < 0.36  # a third for independent places
    assert (first == second).mean() < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    """Golden values: a change here would silently reshuffle every running job."""
    assert Order(1000, seed=3).ids(0, 8).tolist() == GOLDEN_ORDER
    assert Mixture((100, 50), (3.0, 1.0), seed=3).ids(0, 8).tolist() == GOLDEN_MIXTURE


GOLDEN_ORDER = [219, 988, 962, 494, 132, 87, 368, 229]
GOLDEN_MIXTURE = [83, 39, 12, 62, 52, 113, 131, 53]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 50), st.integers(0, 40_000), st.integers(0, 9000))
def test_any_window_of_the_order_equals_its_parts(size: int, seed: int, start: int, count: int) -> None:
    """Random access gives what a walk from the beginning gives, across blocks and epochs."""
    window = Order(size, seed).ids(start, count)
    direct = Order(size, seed).at(np.arange(start, start + count, dtype=np.int64))
    assert np.array_equal(window, direct)


def test_without_shuffle_the_order_is_that_of_the_files() -> None:
    """0, 1, 2, ... and again."""
    assert Order(3, shuffle=False).ids(0, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_mixture_meets_its_weights_in_every_block_and_sees_each_source_once_per_pass() -> None:
    """3 to 1 exactly; each source's own epochs are complete before they repeat."""
    mixture = Mixture((9000, 1000), (0.75, 0.25), seed=5)
    ids = mixture.ids(0, 8192 * 3)
    for block in range(3):
        part = ids[block * 8192 : (block + 1) * 8192]
        assert (part < 9000).sum() == 6144
    big = ids[ids < 9000]
    assert len(set(big[:9000].tolist())) == 9000 and len(set(big[9000:18_000].tolist())) == 9000
    small = ids[ids >= 9000] - 9000
    for turn in range(6):
        assert len(set(small[turn * 1000 : (turn + 1) * 1000].tolist())) == 1000
    assert mixture.passes(8192 * 3) == [2, 6]
    assert np.array_equal(mixture.ids(5000, 9000), ids[5000:14_000])


def test_wrong_weights_are_refused() -> None:
    """Counts and signs are checked."""
    with pytest.raises(ConfigurationError, match="2 sources but 1 weights"):
        Mixture((1, 2), (1.0,))
    with pytest.raises(ConfigurationError, match="must be positive"):
        Mixture((1, 2), (1.0, 0.0))


def _ranks(opened: Any, world: int, batch: int, exact: bool, **options: Any) -> list[ElasticDataLoader]:
    """One loader per rank of a world, all in this process."""
    plan = exact_plan(max(batch, world), world, 2) if exact else None
    return [
        ElasticDataLoader(
            ResumableDataset(opened, LENGTH, **options), batch, plan=plan, rank=rank, world_size=world
        )
        for rank in range(world)
    ]


def _run(ranks: list[ElasticDataLoader], steps: int) -> dict[int, list[int]]:
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


@settings(max_examples=150, deadline=None)
@given(worlds, st.integers(0, 5), st.booleans())
def test_no_history_of_worlds_loses_or_repeats_a_sample(
    index: Path, plan: list[tuple[int, int, int, bool, int]], seed: int, shuffle: bool
) -> None:
    """Worlds change in the middle of epochs by restart with a state, after some steps were lost and redone."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    state: Any = None
    for world, batch, steps, exact, lost in plan:
        ranks = _ranks(opened, world, batch, exact, seed=seed, shuffle=shuffle)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        kept.update(_run(ranks, steps))
        states = [loader.state_dict() for loader in ranks]
        assert all(one == states[0] for one in states)
        state = states[0]
        _run(ranks, lost)  # trained after the checkpoint, then the world broke
    taken = [number for step in sorted(kept) for number in kept[step]]
    assert taken == Order(203, seed, shuffle).ids(0, len(taken)).tolist()
    counts = Counter(taken)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(203)) <= 1


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(0, 5))
def test_a_world_that_changes_in_place_loses_nothing_either(
    index: Path, plan: list[tuple[int, int, int, bool, int]], seed: int
) -> None:
    """Survivors keep their loaders: old and new ranks agree on every sample, also after a rollback."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    ranks: list[ElasticDataLoader] = []
    for world, batch, steps, exact, lost in plan:
        new = _ranks(opened, world, batch, exact, seed=seed)
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
        kept.update(_run(ranks, steps))
        assert len({json.dumps(loader.state_dict()) for loader in ranks}) == 1
    taken = [number for step in range(ranks[0].step) for number in kept[step]]
    assert taken == Order(203, seed).ids(0, len(taken)).tolist()


def test_the_case_that_the_known_harness_gets_wrong(tmp_path: Path) -> None:
    """1200 samples, 4 ranks took 100 each, 2 go on: exactly the other 800 follow."""
    opened = TokenIndexFile(_index(tmp_path, 1200))
    four = _ranks(opened, 4, 10, False)
    first = _run(four, 10)
    two = _ranks(opened, 2, 10, False)
    for loader in two:
        loader.load_state_dict(four[0].state_dict())
    second = _run(two, 40)
    done = [n for part in first.values() for n in part]
    rest = [n for part in second.values() for n in part]
    assert (len(done), len(rest)) == (400, 800)
    assert set(done) | set(rest) == set(range(1200))


def test_a_step_is_a_pure_function_of_seed_step_and_history(index: Path) -> None:
    """Any step's samples can be asked for at any time, of any rank."""
    dataset = ResumableDataset(index, LENGTH, seed=4, batch_size=3, rank=0, world_size=2)
    dataset.history = History().change(0, (3, 3)).change(5, (4, 4, 3)).change(9, (6,))
    assert dataset.history.position(9) == 5 * 6 + 4 * 11
    assert dataset.samples(6, 2).tolist() == Order(203, 4).ids(30 + 11 + 8, 3).tolist()
    assert dataset.samples(6).tolist() == [n for r in range(3) for n in dataset.samples(6, r).tolist()]
    assert History.from_list(json.loads(json.dumps(dataset.history.to_list()))) == dataset.history


def test_constant_batch_gives_every_world_the_same_global_batches(index: Path) -> None:
    """With exact plans the samples of a step do not depend on the number of ranks at all."""
    opened = TokenIndexFile(index)
    results = []
    for world in (1, 2, 3, 5):
        ranks = [
            ElasticDataLoader(
                ResumableDataset(opened, LENGTH, seed=1), plan=exact_plan(16, world, 4), rank=rank
            )
            for rank in range(world)
        ]
        results.append(_run(ranks, 6))
    assert all(result == results[0] for result in results)


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


@pytest.mark.parametrize(("world", "steps"), [(1, 26), (2, 26), (3, 26), (5, 26), (7, 25), (16, 25)])
def test_a_finite_run_sees_every_sample_once_per_epoch_and_then_ends(
    index: Path, world: int, steps: int
) -> None:
    """406 samples by 16: the last step has 6, or the one before has 22; no rank is ever left without."""
    opened = TokenIndexFile(index)
    seen: list[int] = []
    weights: dict[int, float] = {}
    for rank in range(world):
        dataset = ResumableDataset(opened, LENGTH, epochs=2)
        loader = ElasticDataLoader(dataset, plan=exact_plan(16, world, 4), rank=rank)
        at = 0
        for _ in loader:
            seen += loader.last_samples.tolist()
            assert len(loader.last_samples)
            weights[at] = weights.get(at, 0.0) + loader.weight / world
            at += loader.step_done
        assert at == loader.step == steps and dataset.finished and dataset.position == 406
        assert list(loader) == []
    assert Counter(seen) == Counter(list(range(203)) * 2)
    assert all(weight == pytest.approx(1.0) for weight in weights.values())


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(1, 2))
def test_a_finite_run_through_any_worlds_sees_every_sample_once(
    index: Path, plan: list[tuple[int, int, int, bool, int]], epochs: int
) -> None:
    """Worlds change until the data ends: the last one reads to the end, nothing is left or doubled."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    state: Any = None
    for number, (world, batch, steps, exact, _) in enumerate(plan):
        ranks = _ranks(opened, world, batch, exact, seed=1, epochs=epochs)
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


def test_a_state_inside_a_step_resumes_at_its_beginning(index: Path) -> None:
    """Partial gradients are gone with the process, so the whole step is done again."""
    dataset = ResumableDataset(index, LENGTH, seed=1)
    loader = ElasticDataLoader(dataset, plan=exact_plan(12, 1, 4), rank=0)
    batches = iter(loader)
    first = [next(batches)["input_ids"] for _ in range(4)]  # three of step 0, one of step 1
    state = loader.state_dict()
    assert state["step"] == 1
    again = ElasticDataLoader(ResumableDataset(index, LENGTH, seed=9), plan=exact_plan(12, 1, 4), rank=0)
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["input_ids"], first[3])
    assert again.dataset.seed == 1  # the order is the state's


def test_a_state_of_other_data_is_refused(index: Path, tmp_path: Path) -> None:
    """Another index or sequence length would lose or repeat samples."""
    state = ResumableDataset(index, LENGTH).state_dict()
    with pytest.raises(DataLoadingError, match="the state is of other data"):
        ResumableDataset(_index(tmp_path, 50), LENGTH).load_state_dict(state)
    with pytest.raises(DataLoadingError, match="another sequence length"):
        ResumableDataset(index, LENGTH * 2).load_state_dict({**state})


def test_an_index_that_is_too_short_or_missing_is_refused(tmp_path: Path) -> None:
    """The error names the file and, if missing, the command."""
    with pytest.raises(DataLoadingError, match="a sample needs 1025"):
        ResumableDataset(_index(tmp_path, 3), 1024)
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
    a, b = _index(tmp_path, 40, "a"), _index(tmp_path, 25, "b")
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
            loader.on_topology_change(world_size=1, rank=0, plan=exact_plan(8, 1, 8))
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
    """A loader's worker is killed: one clear error, then the loader goes on from where it was."""
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
    """The error names the worker and the cure; iterating again loses and repeats nothing."""
    with Ranks(_killed_worker, world_size=1, args=(index,), backend=None) as ranks:
        result = ranks.values(timeout_s=60)[0]
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


@pytest.mark.soak
@settings(max_examples=5000, deadline=None)
@given(worlds, st.integers(0, 10**6), st.booleans())
def test_thousands_of_histories_lose_and_repeat_nothing(
    index: Path, plan: list[tuple[int, int, int, bool, int]], seed: int, shuffle: bool
) -> None:
    """The property of above, long enough to find what a short run does not."""
    opened = TokenIndexFile(index)
    kept: dict[int, list[int]] = {}
    state: Any = None
    for world, batch, steps, exact, lost in plan:
        ranks = _ranks(opened, world, batch, exact, seed=seed, shuffle=shuffle)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        kept.update(_run(ranks, steps))
        state = ranks[0].state_dict()
        _run(ranks, lost)
    taken = [number for step in sorted(kept) for number in kept[step]]
    assert taken == Order(203, seed, shuffle).ids(0, len(taken)).tolist()
