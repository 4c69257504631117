"""Rates and batches stay right through any sequence of changes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.elastic.scaling import (
    ElasticScalingManager,
    GradAccumulationConfig,
    GradientAccumulationManager,
    LRScalingManager,
    ScalingConfig,
    ScalingRule,
    WarmupScheduler,
    batch_plan,
    create_lr_scheduler_with_warmup,
)
from allranks.errors import ConfigurationError


def _optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in rates or (1e-4,)]
    return torch.optim.SGD(groups, lr=1.0)


def _config(**changes: object) -> ScalingConfig:
    return ScalingConfig(**{"base_lr": 1e-4, "base_batch_size": 8, "base_world_size": 4, **changes})  # type: ignore[arg-type]


def test_linear_sqrt_and_none_rules_scale_as_documented() -> None:
    """Twice the batch: twice, sqrt(2) times, once the rate."""
    manager = LRScalingManager(_config(), _optimizer())
    assert manager.get_scaled_lr(1e-4, old_effective_batch=32, new_effective_batch=64) == 2e-4
    manager = LRScalingManager(_config(scaling_rule=ScalingRule.SQRT), _optimizer())
    assert manager.get_scaled_lr(1e-4, 32, 128) == pytest.approx(2e-4)
    manager = LRScalingManager(_config(scaling_rule="none"), _optimizer())
    assert manager.get_scaled_lr(1e-4, 32, 128) == 1e-4


def test_a_change_ramps_to_the_new_rate_and_reaches_it() -> None:
    """The target is returned at once, the optimizer follows step by step."""
    optimizer = _optimizer()
    manager = LRScalingManager(_config(warmup_steps=10), optimizer)
    assert manager.on_topology_change(new_world_size=2) == 5e-5
    assert manager.is_warming_up and manager.current_lr == 1e-4
    rates = [manager.step() for _ in range(10)]
    assert rates == sorted(rates, reverse=True) and rates[-1] == 5e-5
    assert not manager.is_warming_up and optimizer.param_groups[0]["lr"] == 5e-5
    assert manager.step() == 5e-5


def test_a_second_change_in_the_middle_of_a_ramp_ends_at_the_right_rate() -> None:
    """4 → 2 → 4 interrupted half-way ends at the base rate (the known harness: 1.5e-4)."""
    manager = LRScalingManager(_config(warmup_steps=100), _optimizer())
    manager.on_topology_change(2)
    for _ in range(50):
        manager.step()
    assert manager.current_lr == pytest.approx(7.5e-5)
    assert manager.on_topology_change(4) == 1e-4
    for _ in range(100):
        manager.step()
    assert manager.current_lr == 1e-4


def test_a_clamped_rate_comes_back_when_the_world_does() -> None:
    """Clamp, then return, gives the base rate again (the known harness: half of it)."""
    manager = LRScalingManager(_config(base_lr=1e-3, max_lr=2e-3, warmup_steps=0), _optimizer(1e-3))
    assert manager.on_topology_change(16) == 2e-3
    assert manager.on_topology_change(4) == 1e-3


def test_a_restart_in_the_middle_of_a_ramp_goes_on_with_it() -> None:
    """The ramp is part of the state (the known harness freezes at 7.5e-5)."""
    manager = LRScalingManager(_config(warmup_steps=100), _optimizer())
    manager.on_topology_change(2)
    for _ in range(50):
        manager.step()
    state = json.loads(json.dumps(manager.state_dict()))
    optimizer = _optimizer()
    again = LRScalingManager(_config(warmup_steps=100), optimizer)
    again.load_state_dict(state)
    assert again.is_warming_up and optimizer.param_groups[0]["lr"] == manager.current_lr
    assert [again.step() for _ in range(50)] == [manager.step() for _ in range(50)]
    assert again.current_lr == 5e-5


def test_a_first_start_in_another_world_than_the_base_is_scaled() -> None:
    """Starting with 2 of 4 ranks has half the rate from the first step."""
    optimizer = _optimizer()
    LRScalingManager(_config(), optimizer, world_size=2)
    assert optimizer.param_groups[0]["lr"] == 5e-5


def test_parameter_groups_keep_their_proportions() -> None:
    """A group with a tenth of the rate keeps a tenth."""
    optimizer = _optimizer(1e-4, 1e-5)
    manager = LRScalingManager(_config(warmup_steps=0), optimizer)
    manager.on_topology_change(8)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([2e-4, 2e-5])


def test_the_minimal_state_of_the_known_harness_loads() -> None:
    """Four keys are enough."""
    manager = LRScalingManager(_config(), _optimizer())
    manager.load_state_dict(
        {"current_lr": 5e-5, "current_world_size": 2, "current_batch_size": 8, "warmup_step": 0}
    )
    assert manager.current_lr == 5e-5 and manager.current_world_size == 2


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 30)), max_size=8),
    st.sampled_from(list(ScalingRule)),
)
def test_any_history_that_ends_in_the_same_world_ends_in_the_same_rate(
    history: list[tuple[int, int]], rule: ScalingRule
) -> None:
    """The rate is a function of the world, not of the way there, with saves and loads on the way."""
    config = _config(scaling_rule=rule, warmup_steps=20)
    manager = LRScalingManager(config, _optimizer())
    for world, steps in history:
        manager.on_topology_change(world)
        for _ in range(steps):
            manager.step()
        state, manager = manager.state_dict(), LRScalingManager(config, _optimizer())
        manager.load_state_dict(state)
    manager.on_topology_change(3)
    for _ in range(20):
        manager.step()
    direct = LRScalingManager(config, _optimizer(), world_size=3)
    assert manager.current_lr == direct.current_lr


@pytest.mark.parametrize("kind", ["lambda", "cosine", "exponential", "step", "one_cycle"])
def test_a_user_schedule_composes_with_scaling(kind: str) -> None:
    """rate = schedule(step) * factor, for schedulers that multiply and for those that compute afresh."""

    def build(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        schedulers = torch.optim.lr_scheduler
        if kind == "lambda":
            return create_lr_scheduler_with_warmup(optimizer, 5, 40)  # type: ignore[no-any-return]
        if kind == "cosine":
            return schedulers.CosineAnnealingLR(optimizer, 40)
        if kind == "exponential":
            return schedulers.ExponentialLR(optimizer, 0.9)
        if kind == "one_cycle":
            return schedulers.OneCycleLR(optimizer, max_lr=1e-3, total_steps=41, cycle_momentum=False)
        return schedulers.StepLR(optimizer, 7)

    plain = _optimizer(1e-4)
    alone = build(plain)
    scaled = _optimizer(1e-4)
    manager = LRScalingManager(_config(warmup_steps=4), scaled)
    schedule = manager.wrap(build(scaled))
    for step in range(30):
        if step == 10:
            manager.on_topology_change(2)
        if step == 12:
            manager.on_topology_change(8)
        plain.step()
        scaled.step()
        alone.step()
        schedule.step()
        manager.step()
        expected = plain.param_groups[0]["lr"] * manager.factor
        assert scaled.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9)
    assert manager.factor == 2.0
    state = schedule.state_dict()
    other = _optimizer(1e-4)
    fresh_manager = LRScalingManager(_config(), other)
    fresh = fresh_manager.wrap(build(other))
    fresh_manager.load_state_dict(manager.state_dict())
    fresh.load_state_dict(state)
    assert fresh.get_last_lr() == pytest.approx(schedule.get_last_lr())


def test_warmup_is_a_straight_ramp() -> None:
    """Start, middle, end, beyond."""
    ramp = WarmupScheduler(start_lr=0.0, target_lr=1.0, warmup_steps=100)
    assert [ramp.get_lr(step) for step in (0, 50, 100, 150)] == [0.0, 0.5, 1.0, 1.0]
    assert WarmupScheduler(0.5, 1.0, 0).get_lr(0) == 1.0


def test_the_schedule_warms_up_decays_and_stops_at_its_floor() -> None:
    """1/warmup at the first step, the base rate at the end of warm-up, min_lr at the end."""
    optimizer = _optimizer(1e-2)
    scheduler = create_lr_scheduler_with_warmup(optimizer, 10, 100, min_lr=1e-3)
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(120):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates[0] == pytest.approx(1e-3) and max(rates) == pytest.approx(1e-2)
    assert rates[100] == pytest.approx(1e-3) and rates[120] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("mode", "steps", "batch"), [("ceil", 11, 1056), ("floor", 10, 960), ("nearest", 11, 1056)]
)
def test_rounding_modes_round_as_documented(mode: str, steps: int, batch: int) -> None:
    """1024 / (32 * 3) = 10.67, and the batch that really comes out is said."""
    config = GradAccumulationConfig(1024, 32, 4, rounding_mode=mode)  # type: ignore[arg-type]
    manager = GradientAccumulationManager(config)
    assert (manager.accumulation_steps, manager.effective_batch_size) == (8, 1024)
    assert manager.on_topology_change(3) == steps
    assert (manager.effective_batch_size, manager.loss_scale_factor) == (batch, float(steps))


def test_exact_mode_keeps_the_global_batch() -> None:
    """1024 over 3 ranks: 342 + 341 + 341, in 11 micro-batches of at most 32."""
    manager = GradientAccumulationManager(GradAccumulationConfig(1024, 32, 4, "exact"))  # type: ignore[arg-type]
    assert manager.on_topology_change(3) == 11
    assert manager.effective_batch_size == 1024
    assert manager.plan.shares == (342, 341, 341)


def test_the_initial_number_of_steps_rounds_like_a_later_change() -> None:
    """Start with 3 or change to 3: the same (the known harness: 10 and 11)."""
    config = GradAccumulationConfig(1000, 32, 3)
    manager = GradientAccumulationManager(config)
    assert manager.accumulation_steps == manager.on_topology_change(3) == 11


@settings(max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 97), st.integers(1, 64))
def test_an_exact_plan_deals_every_sample_once_with_weights_that_sum_to_one(
    total: int, world: int, local: int
) -> None:
    """Sizes bounded and positive, sum exact, Σ weight / W = 1, shares differ by at most one."""
    if total < world:
        with pytest.raises(ConfigurationError, match="would have no sample"):
            batch_plan(total, world, local)
        return
    plan = batch_plan(total, world, local)
    assert plan.global_batch == total
    sizes = [size for rank in plan.micro for size in rank]
    assert min(sizes) >= 1 and max(sizes) <= local
    assert max(plan.shares) - min(plan.shares) <= 1
    weights = [plan.weight(rank, i) for rank in range(world) for i in range(len(plan.micro[rank]))]
    assert math.isclose(sum(weights) / world, 1.0, rel_tol=1e-12)
    if min(plan.shares) >= -(-max(plan.shares) // local):
        assert plan.uniform


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_the_gradient_of_an_uneven_plan_is_that_of_the_whole_batch(world: int) -> None:
    """Averaged over ranks as data parallelism does, it equals one backward over all samples."""
    torch.manual_seed(0)
    data, target = torch.randn(22, 6, dtype=torch.float64), torch.randn(22, dtype=torch.float64)
    weight = torch.randn(6, dtype=torch.float64)

    def gradient(rows: slice, scale: float) -> torch.Tensor:
        leaf = weight.clone().requires_grad_()
        loss = ((data[rows] @ leaf - target[rows]) ** 2).mean()
        (loss / scale).backward()
        assert leaf.grad is not None
        return leaf.grad

    whole = gradient(slice(0, 22), 1.0)
    total, start = torch.zeros(6, dtype=torch.float64), 0
    for rank in range(world):
        config = GradAccumulationConfig(22, 4, 4, "exact")  # type: ignore[arg-type]
        manager = GradientAccumulationManager(config, rank=rank, world_size=world)
        while True:
            size = manager.micro_batch_size
            total += gradient(slice(start, start + size), manager.loss_scale_factor) / world
            start += size
            if manager.should_step():
                break
    assert start == 22
    assert torch.allclose(total, whole, rtol=1e-12, atol=1e-14)


def test_a_state_taken_inside_a_window_starts_the_window_anew() -> None:
    """Partial gradients are not saved, so no micro-batch is counted as done."""
    manager = GradientAccumulationManager(GradAccumulationConfig(64, 8, 2))
    manager.should_step()
    again = GradientAccumulationManager(GradAccumulationConfig(64, 8, 2))
    again.load_state_dict(manager.state_dict())
    assert [again.should_step() for _ in range(4)] == [False, False, False, True]


def test_constant_batch_keeps_the_rate_and_changes_accumulation() -> None:
    """The documented result of the combined manager."""
    accum = GradAccumulationConfig(1024, 32, 4)
    manager = ElasticScalingManager(_config(), accum, _optimizer(), strategy="constant_batch")
    assert manager.on_topology_change(new_world_size=3) == {"lr": 1e-4, "accumulation_steps": 11}
    assert sum(manager.should_step() for _ in range(22)) == 2
    assert manager.step_lr() == 1e-4


def test_variable_batch_scales_the_rate_and_steps_every_time() -> None:
    """No accumulation; shares follow the world."""
    manager = ElasticScalingManager(_config(warmup_steps=0), None, _optimizer(), strategy="variable_batch")
    assert manager.on_topology_change(2) == {"lr": 5e-5, "accumulation_steps": 1}
    assert manager.should_step() and manager.shares == (8, 8) and manager.effective_batch_size == 16
    state = json.loads(json.dumps(manager.state_dict()))
    other = ElasticScalingManager(_config(), None, _optimizer(), strategy="variable_batch")
    other.load_state_dict(state)
    assert (other.current_lr, other.world_size) == (5e-5, 2)


def test_wrong_strategies_and_sizes_are_refused_with_the_documented_words() -> None:
    """Every constructor checks what it is given."""
    with pytest.raises(ConfigurationError, match="Unknown scaling strategy 'invalid'"):
        ElasticScalingManager(_config(), None, _optimizer(), strategy="invalid")
    with pytest.raises(ConfigurationError, match="target_global_batch_size is required"):
        ElasticScalingManager(_config(), None, _optimizer())
    with pytest.raises(ConfigurationError, match=r"base_lr \(0\) must be positive"):
        _config(base_lr=0)
    with pytest.raises(ValueError, match="bogus"):
        _config(scaling_rule="bogus")
