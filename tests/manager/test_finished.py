"""A finished training stays finished: what comes later trains nothing, and an exception is not a finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from allranks.drill.ranks import Ranks
from allranks.errors import TrainingFinished
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.held import HeldState
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer
from allranks.manager.training import TrainingState

from .cluster import LIMIT_S, LighthouseProcess, batch

STEPS = 5


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as running:
        yield running


def _shut_down(manager: Manager) -> None:
    manager.shutdown()


def _finish(manager: Manager) -> None:
    manager.finish()


def _leave_the_block(manager: Manager) -> None:
    with manager:
        pass


def _shut_down_after_an_error(manager: Manager) -> None:
    try:
        raise ValueError("the data is bad")
    except ValueError:
        manager.shutdown()


def _fail_in_the_block(manager: Manager) -> None:
    try:
        with manager:
            raise ValueError("the data is bad")
    except ValueError:
        pass


def _leave_for_a_reason(manager: Manager) -> None:
    manager.shutdown(reason="preempted")


def _script(
    rank: int, world: int, address: str, end: Callable[[Manager], None], saved: Path, name: str
) -> int:
    """The common loop, without a line about late replicas; it saves its result after it."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, lighthouse_addr=address,
        replica_id=name or f"r{rank}", rank=0, world_size=1, timeout=30, quorum_timeout=30,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    steps = 0
    try:
        while manager.current_step() < STEPS:
            optimizer.zero_grad()
            ddp(batch(manager.current_step(), 8)).square().mean().backward()
            optimizer.step()
            steps += 1
    except TrainingFinished as finished:
        assert finished.code == 0  # uncaught it ends the process with this exit code
        return -steps - 1
    saved.write_text(f"{manager.replica_id()} {manager.current_step()}")
    end(manager)
    return steps


def run(lighthouse: LighthouseProcess, end: Callable[[Manager], None], saved: Path, name: str = "") -> int:
    with Ranks(_script, 1, args=(lighthouse.address, end, saved, name), backend=None) as ranks:
        return int(ranks.values(LIMIT_S)[0])


def test_a_replica_that_comes_after_the_end_trains_and_saves_nothing(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    """Another replica has finished. When that one starts again, it is a new training."""
    assert run(lighthouse, _shut_down, tmp_path / "first", "r0") == STEPS
    assert run(lighthouse, _shut_down, tmp_path / "late", "r1") == -1
    assert not (tmp_path / "late").exists()
    assert run(lighthouse, _shut_down, tmp_path / "again", "r0") == STEPS


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (_shut_down, "finished"),
        (_finish, "finished"),
        (_leave_the_block, "finished"),
        (_shut_down_after_an_error, "left"),
        (_fail_in_the_block, "left"),
        (_leave_for_a_reason, "left"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_end_of_the_loop_is_a_finish_and_an_exception_is_none(
    lighthouse: LighthouseProcess, tmp_path: Path, end: Callable[[Manager], None], state: str
) -> None:
    """Without an extra line in the common loop."""
    assert run(lighthouse, end, tmp_path / "x") == STEPS
    with Client(ClientOptions(addresses=(lighthouse.address,), role="observer")) as client:
        rows = client.status()["replicas"]
    assert [row["state"] for row in rows if row["replica"] == "r0"] == [state]


def test_the_last_step_counts_although_the_first_to_finish_has_left_while_the_others_asked() -> None:
    """Its notice says what it committed; the lighthouse has no quorum any more for those who vote a moment later."""
    training = TrainingState(
        held=HeldState(step=11, claimed=True), failure=TrainingFinished("r0 finished at step 12")
    )
    training.heard.add((3, 12))
    assert training.passed(SimpleNamespace(plan=SimpleNamespace(term=3)), limit_s=LIMIT_S)  # type: ignore[arg-type]
    assert training.step == 12
