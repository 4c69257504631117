"""Replicas whose states differ: found, named with the tensor, and healed from the majority."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from allranks.drill.ranks import Ranks
from allranks.errors import ConfigurationError, GroupAborted, StateDiffers
from allranks.lighthouse.options import Options
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.diloco import DiLoCo, LocalSGD
from allranks.manager.drift import (
    StateSums,
    find_difference,
    first_difference,
    sum_bits,
)
from allranks.manager.groups import generation
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer
from allranks.manager.registered_state import missing_parts, named_parts
from allranks.manager.vote_mesh import Tally

from .cluster import LIMIT_S, LighthouseProcess, batch, fingerprint

EVERY = 4


def test_every_single_bit_of_a_tensor_changes_its_sum() -> None:
    """Also at an odd length, where the last bytes are no whole word, and in half precision."""
    for tensor in (torch.randn(5), torch.randn(3, 3).to(torch.bfloat16), torch.randn(4, 4).t()):
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        before = int(sum_bits([tensor]))
        for bit in range(8 * flat.numel()):
            flipped = flat.clone()
            flipped[bit // 8] ^= 1 << bit % 8
            assert int(sum_bits([flipped])) != before


@pytest.mark.parametrize("copied_bytes", [1 << 14, 1 << 18, 64 << 20])
def test_tensors_that_are_summed_together_have_the_sum_of_all(copied_bytes: int) -> None:
    """Equal sizes and others, empty, single numbers, halves, too large to be copied, not at a whole word of memory."""
    sizes = (64, 512, 20_000, 64, 1, 0, 64, 5, 512, 20_000, 40_000, 40_001, 1, 16_384)
    tensors = [torch.randn(n) for n in sizes]
    tensors += [torch.randn(40_000)[1:], torch.randn(7).to(torch.bfloat16), torch.tensor(3.0)]
    assert int(sum_bits(tensors, copied_bytes)) == _signed(sum(map(_words, tensors)))


def _words(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes as the largest words that it can be cut into."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    size = next(n for n in (8, 4, 2, 1) if (flat.numel() | flat.storage_offset()) % n == 0)
    data = bytes(flat.tolist())
    return sum(
        int.from_bytes(data[at : at + size], "little", signed=size > 1) for at in range(0, len(data), size)
    )


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def test_many_small_tensors_are_summed_with_few_kernels() -> None:
    """Launching is what a checksum costs: 600 tensors of a model and its optimizer, in three copies and four sums."""
    tensors = [torch.randn(n) for n in (768, 768 * 16, 768 * 768 // 16, 1) * 150]
    with torch.profiler.profile() as profile:
        sum_bits(tensors)
    calls = Counter(event.name for event in profile.events())
    assert calls["aten::sum"] <= 4 and calls["aten::cat"] <= 3 + 1  # the sums are stacked


def test_tensors_that_take_the_place_of_others_are_summed() -> None:
    """Where the tensors lie is kept from sum to sum: not when a checkpoint or the program replaces them."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    sums = StateSums(modules=[model], optimizers=[optimizer])
    digests = [sums.finish(), sums.finish()]
    model.weight.data = model.weight.detach() + 1  # another place in memory
    digests.append(sums.finish())
    state = optimizer.state_dict()
    state["state"][0] = {**state["state"][0], "exp_avg": state["state"][0]["exp_avg"] + 1}
    optimizer.load_state_dict(state)
    digests.append(sums.finish())
    model.weight.data = torch.randn(8, 8).t()  # not contiguous: summed from a copy, every time
    digests.append(sums.finish())
    with torch.no_grad():
        model.weight[0, 0] += 1
    digests.append(sums.finish())
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 5


@pytest.mark.parametrize(
    ("values", "groups", "expected"),
    [
        ([7, 7, 7], [[0, 1, 2]], None),
        ([7, 8, 7], [[0, 1, 2]], ((1,), (0, 2))),
        ([7, 8], [[0, 1]], ((0, 1), ())),
        ([7, 8, 9], [[0, 1, 2]], ((0, 1, 2), ())),
        ([7, 0, 7], [[0, 1, 2]], None),  # one has not computed it
        ([7, 8, 7, 8, 7, 9], [[0, 2, 4], [1, 3, 5]], ((5,), (1, 3))),  # two ranks in each replica
    ],
)
def test_the_minority_differs_and_without_a_majority_all_do(
    values: list[int], groups: list[list[int]], expected: Any
) -> None:
    """Ranks are compared with those of equal number in the other replicas."""
    found = find_difference(values, groups)
    assert (found and (found.places, found.majority)) == expected


def test_the_first_tensor_that_differs_is_named_by_its_parameter() -> None:
    """Parameters come first, then the optimizer's state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    sums = StateSums(modules=[model], optimizers=[optimizer])
    digest, before = sums.finish(), sums.of_each()
    assert (sums.finish(), sums.of_each()) == (digest, before)
    state = optimizer.state[model[1].weight]["exp_avg"]
    state.view(torch.int32)[1, 2] ^= 1 << 20
    assert sums.finish() != digest
    assert first_difference(sums.of_each(), before, sums.names) == "exp_avg of 1.weight"


def test_parts_of_the_state_get_names_and_must_have_a_state() -> None:
    """Class names, numbered; a mapping keeps its own."""
    model, generator = nn.Linear(2, 2), torch.Generator()
    assert list(named_parts([model, nn.Linear(1, 1), generator])) == ["linear", "linear2", "generator"]
    assert list(named_parts({"net": model})) == ["net"]
    with pytest.raises(ConfigurationError, match="has no state_dict"):
        named_parts([object()])


def test_a_scheduler_or_scaler_that_no_state_carries_is_named() -> None:
    """By looking into the state functions' results too: they may carry it."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"optimizer": optimizer.state_dict()}
    assert missing_parts([optimizer], True, [state]) == ["the learning rate scheduler", "the GradScaler"]
    assert missing_parts([optimizer], False, [{**state, "schedule": scheduler.state_dict()}]) == []


class Lines(logging.Handler):
    """Errors and warnings of the manager."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=2, heartbeat_timeout_s=5.0)) as running:
        yield running


def _train(
    rank: int, world: int, address: str, steps: int, options: dict[str, Any], schedules: bool = True
) -> tuple[str, list[str], float]:
    """The last replica's memory loses one bit of a parameter at step 5."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    lines = Lines()
    logging.getLogger("allranks.manager").addHandler(lines)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda n: 1 / (1 + n))
    manager = Manager(
        state=[model, inner, scheduler] if schedules else [model, inner], min_replica_size=world,
        lighthouse_addr=address, replica_id=f"r{rank}", rank=0, world_size=1, timeout=30, quorum_timeout=30,
        check_every=EVERY, **options,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    flipped = False
    while manager.current_step() < steps:
        optimizer.zero_grad()
        ddp(batch(manager.current_step(), 8)).square().mean().backward()
        if optimizer.step() and (schedules or rank):
            scheduler.step()
        if manager.current_step() == 5 and rank == world - 1 and not flipped and schedules:
            model[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 22
            flipped = True
    manager.shutdown()
    return fingerprint(model, inner), lines.lines, inner.param_groups[0]["lr"]


def test_one_of_three_replicas_with_a_flipped_bit_is_named_and_healed(lighthouse: LighthouseProcess) -> None:
    """Found at the next comparison, in every member's log; from there on all hold the majority's bits."""
    with Ranks(_train, 3, args=(lighthouse.address, 3 * EVERY, {}), backend=None) as ranks:
        found = ranks.values(LIMIT_S)
    assert len({state for state, _, _ in found}) == 1
    sentence = "step 8: the state of r2 differs from that of the other replicas, first in 2.weight"
    assert all(lines.count(sentence) == 1 for _, lines, _ in found), found
    assert not [line for _, lines, _ in found for line in lines if "step 12" in line]


def test_of_two_replicas_a_difference_is_reported(lighthouse: LighthouseProcess) -> None:
    """Nobody can tell which is right: they train on, and the log says so."""
    with Ranks(_train, 2, args=(lighthouse.address, EVERY * 2 + 2, {}), backend=None) as ranks:
        found = ranks.values(LIMIT_S)
    assert len({state for state, _, _ in found}) == 2
    sentence = "step 8: the states of r0 and r1 differ, first in 2.weight; there is no majority"
    assert all(sentence in lines for _, lines, _ in found), found


def test_a_difference_is_reported_although_a_member_has_left_after_its_vote(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was its last step: which tensor differs can no longer be told, that the states do can."""

    class Left:
        counterparts = ((0, 1),)

        @property
        def votes(self) -> Left:
            return self

        def replica_of(self, place: int) -> str:
            return f"r{place}"

        def exchange_sums(self, *_: object) -> list[list[int]]:
            raise GroupAborted("r0 is gone: finished")

    tally = Tally(2, 2, 0, (1, 1), (7, 8))
    with pytest.raises(GroupAborted):
        StateSums().compare(cast(generation.Generation, Left()), tally, 8)
    assert "step 8: the states of r0 and r1 differ; there is no majority" in caplog.text


def test_a_difference_ends_the_training_if_that_was_chosen(lighthouse: LighthouseProcess) -> None:
    """on_difference="stop": every member raises the sentence."""
    args = (lighthouse.address, 3 * EVERY, {"on_difference": "stop"})
    with Ranks(_train, 3, args=args, backend=None) as ranks:
        outcomes = ranks.join(LIMIT_S)
    for outcome in outcomes.values():
        assert outcome.exit_code == 1 and StateDiffers.__name__ in outcome.error, outcome


def test_learning_rates_that_part_are_reported_in_the_same_step(lighthouse: LighthouseProcess) -> None:
    """A scheduler that only one replica steps, and that nobody registered, which is warned about too."""
    with Ranks(_train, 2, args=(lighthouse.address, 4, {}, False), backend=None) as ranks:
        found = ranks.values(LIMIT_S)
    assert len({rate for _, _, rate in found}) == 2
    for _, lines, _ in found:
        assert any("learning rate, loss scale or the like of r0 and r1 differ" in line for line in lines), (
            lines
        )
        assert any("the learning rate scheduler is not part of the state" in line for line in lines), lines


def test_a_registered_state_comes_over_as_a_whole(lighthouse: LighthouseProcess, tmp_path: Path) -> None:
    """Scheduler and generator of a replica that joins are those of the others."""
    with Ranks(_join, 2, args=(lighthouse.address,), backend=None) as ranks:
        first, second = ranks.values(LIMIT_S)
    assert first == second


def _join(rank: int, world: int, address: str) -> tuple[list[float], list[int]]:
    torch.manual_seed(rank)
    model = nn.Linear(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    data = torch.Generator().manual_seed(rank)
    for _ in range(rank):  # they do not start equal
        inner.step()
        scheduler.step()
    manager = Manager(
        state={"model": model, "optimizer": inner, "scheduler": scheduler, "data": data}, min_replica_size=2,
        lighthouse_addr=address, replica_id=f"r{rank}", rank=0, world_size=1, timeout=30, quorum_timeout=30,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while manager.current_step() < 3:
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        if optimizer.step():
            scheduler.step()
    manager.shutdown()
    return scheduler.get_last_lr(), data.get_state().tolist()


@pytest.fixture
def three() -> Iterator[LighthouseProcess]:
    """Begins with three replicas and continues with two."""
    options = Options(min_replicas=2, expect_replicas=3, heartbeat_timeout_s=5.0, join_timeout_s=LIMIT_S)
    with LighthouseProcess(options) as running:
        yield running


def _flip(tensor: torch.Tensor) -> None:
    tensor.data.view(torch.int32).flatten()[3] ^= 1 << 22


def _compare_every_step(
    rank: int, world: int, address: str, flip_at: tuple[int, ...]
) -> tuple[dict[int, float], list[str]]:
    """Losses of 12 steps and the errors logged; the last replica's memory loses bits at the given steps."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    lines = Lines()
    logging.getLogger("allranks.manager").addHandler(lines)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = Manager(
        state=[model, inner], lighthouse_addr=address, replica_id=f"r{rank}", timeout=30, quorum_timeout=30,
        rank=0, world_size=1, min_replica_size=2, check_every=1,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    losses: dict[int, float] = {}
    flips = list(flip_at) if rank == world - 1 else []
    while manager.current_step() < 12:
        if flips and manager.current_step() == flips[0]:
            _flip(model[2].weight)
            flips.pop(0)
        optimizer.zero_grad()
        step = manager.current_step()
        loss = ddp(batch(step, 8)).square().mean()
        loss.backward()
        counted = manager.is_participating()  # else it heals beside this step, and its loss means nothing
        if optimizer.step() and counted:
            losses[step] = loss.item()
    manager.shutdown()
    return losses, lines.lines


def test_a_flipped_bit_leaves_no_trace_in_the_losses_when_every_step_is_compared(
    three: LighthouseProcess,
) -> None:
    """Found in the vote of the same step: no damaged gradient is ever applied."""
    curves = []
    for flip_at in ((), (5,)):
        args = (three.address, flip_at)
        with Ranks(_compare_every_step, 3, args=args, backend=None) as ranks:
            curves.append(ranks.values(LIMIT_S))
    undisturbed, disturbed = curves
    sentence = "step 5: the state of r2 differs from that of the other replicas, first in 2.weight"
    for (losses, _), (healed, lines) in zip(undisturbed, disturbed, strict=True):
        assert healed == pytest.approx({step: losses[step] for step in healed}, abs=1e-6)
        assert lines.count(sentence) == 1, lines
    assert [len(healed) for healed, _ in disturbed] == [12, 12, 11]


def test_a_replica_whose_state_is_damaged_twice_is_evicted(three: LighthouseProcess) -> None:
    """Its machine is not to be trusted; the other two train to the end."""
    args = (three.address, (3, 6))
    with Ranks(_compare_every_step, 3, args=args, backend=None) as ranks:
        first, second, evicted = ranks.join(LIMIT_S).values()
    assert first.exit_code == second.exit_code == 0, (first.error, second.error)
    assert evicted.exit_code == 1
    assert "differed from the majority's at steps 3 and 6" in evicted.error
    assert first.value[0] == second.value[0]


def _exchange(rank: int, world: int, address: str, kind: str) -> tuple[str, list[str]]:
    """The last replica's copy of what the last exchange left loses a bit after the second one."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    lines = Lines()
    logging.getLogger("allranks.manager").addHandler(lines)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = Manager(
        state={"inner": inner}, lighthouse_addr=address, replica_id=f"r{rank}", timeout=30, quorum_timeout=30,
        rank=0, world_size=1, min_replica_size=3, check_every=1, use_async_quorum=False,
    )  # fmt: skip
    exchange: LocalSGD | DiLoCo
    if kind == "LocalSGD":
        exchange = LocalSGD(manager, model, inner, sync_every=2)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        exchange = DiLoCo(manager, model, inner, outer, sync_every=2)
    flipped, local = rank != world - 1, 0
    with exchange:
        while manager.current_step() < 6:
            inner.zero_grad()
            model(batch(100 * rank + local, 8)).square().mean().backward()
            inner.step()
            local += 1
            if not flipped and manager.current_step() == 2:
                flipped = True
                _flip(next(iter(manager.sums.kept[0]().values())))
    found = {name: value.tolist() for name, value in manager.sums.kept[0]().items()}
    manager.shutdown()
    return json.dumps(found), lines.lines


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_what_the_last_exchange_left_is_compared_too(lighthouse: LighthouseProcess, kind: str) -> None:
    """Local parameters may differ; what was exchanged may not."""
    with Ranks(_exchange, 3, args=(lighthouse.address, kind), backend=None) as ranks:
        found = ranks.values(LIMIT_S)
    assert len({state for state, _ in found}) == 1
    sentence = "step 2: the state of r2 differs from that of the other replicas, first in 0.weight"
    assert all(lines.count(sentence) == 1 for _, lines in found), found
