"""A change of the world is one flow: it goes through all phases, says how long each took, or says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.drill.ranks import Ranks, signal
from allranks.elastic.data import ElasticDataLoader, ResumableDataset
from allranks.elastic.data.order import Order
from allranks.elastic.index import BuildRequest, build_index
from allranks.elastic.metrics import TrainingMetrics
from allranks.elastic.scaling import ElasticScalingManager, GradAccumulationConfig, ScalingConfig
from allranks.elastic.topology import ElasticJob, Limits, decide
from allranks.errors import DataLoadingError, TopologyChangeError

LENGTH = 8


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("topology")
    (folder / "d.txt").write_bytes(bytes(97 + (i * i) % 23 for i in range(LENGTH * 400 + 1)))
    build_index(BuildRequest((str(folder / "d.txt"),), str(folder / "d.index")))
    return folder / "d.index"


@pytest.mark.parametrize(
    ("old", "new", "limits", "go", "reason"),
    [
        (4, 1, Limits(2, 4), False, "World size below min_nodes"),
        (4, 0, Limits(), False, "World size below min_nodes"),
        (4, 9, Limits(1, 4, ranks_per_node=2), False, "World size above max_nodes"),
        (4, 8, Limits(1, 4, ranks_per_node=2), True, "4 -> 8 ranks, more than before"),
        (8, 3, Limits(2, 4, ranks_per_node=2), True, "8 -> 3 ranks, fewer than before"),
        (3, 3, Limits(), True, "3 ranks as before"),
    ],
)
def test_limits_are_enforced_in_nodes(old: int, new: int, limits: Limits, go: bool, reason: str) -> None:
    """The decision comes with its sentence."""
    decision = decide(old, new, limits)
    assert (decision.go, decision.reason) == (go, reason)


def test_too_small_a_world_is_refused_in_the_documented_words() -> None:
    """Message, sizes and hint."""
    with pytest.raises(TopologyChangeError) as caught:
        ElasticJob(limits=Limits(2, 4)).on_topology_change(4, 1, rank=0)
    assert str(caught.value) == "Topology change (4 -> 1 workers) failed: World size below min_nodes"
    assert (caught.value.old_world_size, caught.value.new_world_size) == (4, 1)
    assert "elastic.min_nodes requires 2" in caught.value.hint


def test_a_change_without_any_checkpoint_is_refused_but_a_first_start_is_fresh() -> None:
    """Nothing to recover from: an error in the middle of training, step 1 at its beginning."""
    with pytest.raises(
        TopologyChangeError, match=r"\(4 -> 3 workers\) failed: No checkpoint available for recovery"
    ):
        ElasticJob().on_topology_change(4, 3, rank=0)
    event = ElasticJob().start(4, 0)
    assert (event.step, event.restored) == (1, "fresh")


def _job(index: Path, folder: Path | None, rank: int, world: int, target: int = 12) -> ElasticJob:
    from allranks.checkpoint import CheckpointConfig, CheckpointManager

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 6), torch.nn.Linear(6, 128)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaling = ElasticScalingManager(
        ScalingConfig(0.5, 4, 3, max_lr=1.0), GradAccumulationConfig(target, 4, 3, "exact"), optimizer, rank=rank, world_size=world
    )  # fmt: skip
    loader = ElasticDataLoader(
        ResumableDataset(index, LENGTH, seed=5), plan=scaling.accum_manager.plan, rank=rank  # type: ignore[union-attr]
    )  # fmt: skip
    manager = None
    if folder is not None:
        config = CheckpointConfig(
            checkpoint_interval=2, memory_snapshot_interval=0, nvme_path=folder, async_save=False, save_on_close=False
        )  # fmt: skip
        manager = CheckpointManager(config)
    return ElasticJob(
        model, optimizer, scaling=scaling, loader=loader, checkpoint=manager, limits=Limits(1, 5), metrics=TrainingMetrics()
    )  # fmt: skip


def _train(
    job: ElasticJob, first: int, last: int, tell: Callable[[int, list[int], float], None] = lambda *_: None
) -> tuple[list[list[int]], list[float]]:
    """Trains steps first..last as data-parallel ranks do; returns this rank's samples and the global losses.

    `tell` hears of a step before it can be saved.
    """
    import torch.distributed as dist

    samples: list[list[int]] = []
    losses = []
    batches = iter(job.loader)
    for step in range(first, last + 1):
        mine: list[int] = []
        total = torch.zeros(1, dtype=torch.float64)
        while True:
            batch = next(batches)
            mine += job.loader.last_samples.tolist()
            logits = job.model(batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            (loss * job.loader.weight).backward()
            assert job.loader.weight == pytest.approx(1 / job.scaling.loss_scale_factor)
            total += loss.detach() * job.loader.weight
            if job.scaling.should_step():
                break
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            dist.all_reduce(total)
        job.optimizer.step()
        job.optimizer.zero_grad()
        samples.append(mine)
        losses.append(float(total) / world)
        tell(step, mine, losses[-1])
        job.save(step)
    return samples, losses


def _segment(rank: int, world: int, index: Path, folder: Path, steps: int) -> dict[str, Any]:
    """One life of a rank: start (from a checkpoint if there is one), train, be gone."""
    torch.set_num_threads(1)
    job = _job(index, folder, rank, world)
    event = job.start(world, rank)
    samples, losses = _train(job, event.step, event.step + steps - 1)
    job.checkpoint.close()
    return {
        "event": event.to_dict(),
        "samples": samples,
        "losses": losses,
        "recoveries": job.metrics.recovery.total_events,
    }


def _alone(rank: int, world: int, index: Path) -> list[float]:
    torch.set_num_threads(1)
    job = _job(index, None, 0, 1)
    job.start(1, 0)
    return _train(job, 1, 14)[1]


@pytest.mark.usefixtures("imported")
def test_worlds_of_three_two_and_five_ranks_train_as_one_undisturbed_rank(
    index: Path, tmp_path: Path
) -> None:
    """Real ranks, real checkpoints: the same losses, every sample once, lost steps done again."""
    results = []
    for world, steps in ((3, 5), (2, 4), (5, 6)):  # saved at even steps: each life loses its last, odd step
        with Ranks(_segment, world_size=world, args=(index, tmp_path / "ckpt", steps)) as ranks:
            results.append(ranks.values(timeout_s=100))
    with Ranks(_alone, world_size=1, args=(index,), backend=None) as ranks:
        undisturbed = ranks.values(timeout_s=100)[0]
    starts = [values[0]["event"]["step"] for values in results]
    assert starts == [1, 5, 9]
    losses: dict[int, float] = {}
    samples: dict[int, list[int]] = {}
    for values in results:
        first = values[0]["event"]["step"]
        for i in range(len(values[0]["losses"])):
            losses[first + i] = values[0]["losses"][i]
            samples[first + i] = [n for value in values for n in value["samples"][i]]
    assert [losses[step] for step in range(1, 15)] == pytest.approx(undisturbed, rel=1e-9)
    taken = [n for step in range(1, 15) for n in samples[step]]
    assert taken == Order(400, 5).ids(0, 14 * 12).tolist()
    event = results[1][0]["event"]
    assert (event["old_world_size"], event["new_world_size"], event["restored"]) == (3, 2, "checkpoint")
    assert event["global_batch_size"] == 12 and event["data_position"] == 4 * 12
    assert event["took_s"] > 0
    assert results[2][4]["recoveries"] == 1 and results[2][4]["event"]["old_world_size"] == 2


def test_a_live_change_keeps_the_state_and_moves_the_data(index: Path) -> None:
    """Replica mode: nothing is restored, the step in flight is dropped, an event tells the parts."""
    job = _job(index, None, 0, 3)
    job.start(3, 0)
    batches = iter(job.loader)
    for _ in range(5):  # one micro-batch per step and rank
        next(batches)
    job.scaling.on_topology_change(3)
    parameter = next(job.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    event = job.on_topology_change(3, 2, rank=1, live_step=4)
    assert parameter.grad is None
    assert (event.step, event.restored, event.data_position, event.accumulation_steps) == (5, "live", 48, 2)
    assert event.reason == "3 -> 2 ranks, fewer than before"
    next(iter(job.loader))
    assert job.loader.last_samples.tolist() == Order(400, 5).ids(48 + 6, 3).tolist()
    json.dumps(event.to_dict())
    assert job.metrics.recovery.worker_failures == 1


def test_a_world_that_the_batch_cannot_feed_is_refused_with_the_phase(index: Path) -> None:
    """Thirteen ranks for twelve samples: the flow stops at rescale and says so."""
    job = _job(index, None, 0, 3)
    job.limits = Limits()
    with pytest.raises(
        TopologyChangeError, match=r"3 -> 13 workers\) failed: rescale: .*would have no sample"
    ):
        job.on_topology_change(3, 13, rank=0, live_step=2)


def test_a_restore_that_fails_names_the_phase_and_keeps_the_cause(index: Path) -> None:
    """Whatever the checkpoint says is in the text, and the original error is the cause."""

    class Broken:
        def restore(self, *_: Any) -> None:
            raise DataLoadingError("disk on fire", hint="call the fire brigade")

    job = _job(index, None, 0, 3)
    job.checkpoint = Broken()
    with pytest.raises(TopologyChangeError, match="restore: disk on fire") as caught:
        job.on_topology_change(3, 2, rank=0)
    assert "fire brigade" in caught.value.hint
    assert isinstance(caught.value.__cause__, DataLoadingError)


def test_parts_are_made_from_a_configuration(index: Path, tmp_path: Path) -> None:
    """One file to a running job's parts; the checkpoint section is CheckpointConfig's own defaults."""
    from allranks.checkpoint import CheckpointConfig
    from allranks.elastic.config import load_config
    from allranks.elastic.parts import make_checkpoint_config, make_limits, make_loader, make_scaling
    from allranks.errors import ConfigurationError

    config = load_config(
        {
            "training": {"lr": 0.1, "batch_size": 4},
            "scaling": {"strategy": "constant_batch", "target_global_batch_size": 10, "max_lr": 1.0},
            "data": {"index": str(index), "seq_length": LENGTH, "num_workers": 0, "seed": 5},
            "checkpoint": {"nvme_path": str(tmp_path)},
            "elastic": {"min_nodes": 2, "max_nodes": 3},
        }
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scaling = make_scaling(config, optimizer, 3, 2)
    loader = make_loader(config, scaling, 3, 2)
    next(iter(loader))
    assert loader.last_samples.tolist() == Order(400, 5).ids(7, 3).tolist()
    assert make_limits(config) == Limits(2, 3)
    assert make_checkpoint_config(load_config({})) == CheckpointConfig()
    assert make_checkpoint_config(config).nvme_path == str(tmp_path)
    with pytest.raises(ConfigurationError, match=r"data\.index"):
        make_loader(load_config({}), None, 1, 0)


def _life(rank: int, world: int, index: Path, folder: Path, log: Path, until: int) -> None:
    """Trains and writes what it does, a line per step; dies when it is told to, or with its peers."""
    torch.set_num_threads(1)
    job = _job(index, folder, rank, world)
    event = job.start()

    def tell(step: int, samples: list[int], loss: float) -> None:
        with log.open("a") as file:
            file.write(json.dumps([step, rank, samples, loss]) + "\n")
        if step == event.step + 4:
            signal("deep")

    _train(job, event.step, until, tell)
    job.checkpoint.close()


@pytest.mark.usefixtures("imported")
def test_ranks_killed_in_the_middle_cost_no_sample_and_bend_no_loss(index: Path, tmp_path: Path) -> None:
    """3 -> 2 -> 3 ranks with kill -9, rank 0 among the killed: union exactly once, losses of an undisturbed run."""
    lives = [(3, 0), (2, 1), (3, None)]
    steps: dict[int, dict[int, tuple[list[int], float]]] = {}
    for number, (world, victim) in enumerate(lives):
        log = tmp_path / f"life{number}.jsonl"
        until = 10_000 if victim is not None else max(steps) + 3
        with Ranks(
            _life, world_size=world, args=(index, tmp_path / "ckpt", log, until), timeout_s=30
        ) as ranks:
            if victim is not None:
                ranks.wait_for("deep", timeout_s=90)
                ranks.kill(victim)
                outcomes = ranks.join(timeout_s=90)
                assert outcomes[victim].exit_code == -9
                assert all(outcome.exit_code != 0 for outcome in outcomes.values())
            else:
                ranks.values(timeout_s=90)
        done: dict[int, dict[int, tuple[list[int], float]]] = {}
        for line in log.read_text().splitlines():
            step, rank, samples, loss = json.loads(line)
            done.setdefault(step, {})[rank] = (samples, loss)
        whole = {step: ranks_of for step, ranks_of in done.items() if len(ranks_of) == world}
        assert min(whole) <= 1 + max(steps, default=0)
        steps = {**{step: value for step, value in steps.items() if step < min(whole)}, **whole}
    last = max(steps)
    assert sorted(steps) == list(range(1, last + 1)) and last >= 10
    taken = [n for step in range(1, last + 1) for rank in sorted(steps[step]) for n in steps[step][rank][0]]
    assert taken == Order(400, 5).ids(0, last * 12).tolist()
    with Ranks(_undisturbed, world_size=1, args=(index, last), backend=None) as ranks:
        wanted = ranks.values(timeout_s=90)[0]
    assert [steps[step][0][1] for step in range(1, last + 1)] == pytest.approx(wanted, rel=1e-9)


def _undisturbed(rank: int, world: int, index: Path, last: int) -> list[float]:
    torch.set_num_threads(1)
    job = _job(index, None, 0, 1)
    job.start(1, 0)
    return _train(job, 1, last)[1]


def test_saves_and_rate_changes_are_counted(index: Path, tmp_path: Path) -> None:
    """The flow feeds the metrics: stalls of saves are lost time, rate changes are remembered."""

    class Manager:
        def step(self, *_: Any, **__: Any) -> tuple[str, ...]:
            return ("memory", "nvme")

    job = _job(index, None, 0, 3)
    job.checkpoint = Manager()
    assert job.save(5) == ("memory", "nvme")
    assert job.metrics.checkpoint.total_saves == 2
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    metrics = TrainingMetrics()
    scaling = ElasticScalingManager(
        ScalingConfig(0.1, 4, 4, max_lr=1.0), None, optimizer, strategy="variable_batch"
    )
    ElasticJob(optimizer=optimizer, scaling=scaling, metrics=metrics).on_topology_change(
        4, 2, rank=0, live_step=1
    )
    assert [(old, new) for _, old, new, _ in metrics.lr.adjustments] == [(0.1, 0.05)]


def test_every_public_name_of_elastic_exists() -> None:
    """The lazy table tells the truth."""
    import allranks.elastic

    for name in allranks.elastic.__all__:
        assert getattr(allranks.elastic, name) is not None


def _scheduled(rank: int, world: int, folder: Path) -> tuple[list[float], list[float]]:
    """A cosine schedule under variable batches: four ranks' worth, saved, and two go on."""
    from allranks.checkpoint import CheckpointConfig, CheckpointManager

    def job(world_size: int) -> ElasticJob:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = ElasticScalingManager(
            ScalingConfig(0.1, 4, 4, warmup_steps=3, max_lr=1.0), None, optimizer, strategy="variable_batch"
        )
        schedule = scaling.lr_manager.wrap(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))
        config = CheckpointConfig(
            checkpoint_interval=5, memory_snapshot_interval=0, nvme_path=folder, async_save=False
        )
        made = ElasticJob(model, optimizer, schedule, scaling, checkpoint=CheckpointManager(config))
        made.start(world_size, 0)
        return made

    def train(one: ElasticJob, first: int, last: int) -> list[float]:
        rates = []
        for step in range(first, last + 1):
            one.optimizer.step()
            one.lr_scheduler.step()
            one.scaling.step_lr()
            rates.append(one.optimizer.param_groups[0]["lr"])
            one.save(step)
        one.checkpoint.close()
        return rates

    before = train(job(4), 1, 5)
    return before, train(job(2), 6, 12)


@pytest.mark.usefixtures("imported")
def test_a_schedule_and_a_ramp_go_on_through_a_restart_in_another_world(tmp_path: Path) -> None:
    """rate = cosine(step) * factor, where the factor ramps from 1 to a half within three steps."""
    import math

    with Ranks(_scheduled, world_size=1, args=(tmp_path / "ckpt",), backend=None) as ranks:
        before, after = ranks.values(timeout_s=90)[0]
    cosine = [0.05 * (1 + math.cos(math.pi * step / 20)) for step in range(1, 13)]
    factors = [1.0] * 5 + [5 / 6, 4 / 6, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert before + after == pytest.approx([a * b for a, b in zip(cosine, factors, strict=True)])
