"""A replica joins a running group: the others train on until the newcomer and the next group are ready."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.drill.ranks import Ranks
from allranks.lighthouse.options import Options
from allranks.manager import prepared_group
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.groups.generation import Generation
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer
from allranks.manager.options import ManagerOptions
from allranks.manager.plan import Claim, ReplicaClaim, decide
from allranks.manager.prepared_group import Invitation, NextGroup, agreed, invitations, wait_for_invitation
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import VoteMesh
from allranks.model.cluster import Member, Quorum, QuorumWanted

from .cluster import LIMIT_S, LighthouseProcess, batch, fingerprint

FIRST, BESIDE = 3, 5  # steps before the newcomer starts, and while it is kept from joining
NEWCOMER = 2


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as running:
        yield running


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.005)


class SlowGroup(ProcessGroupGloo):
    """Its newcomer makes the group beside the running one as slowly, or as badly, as a test wants."""

    def __init__(self, rank: int, folder: Path, how: str) -> None:
        super().__init__(30.0)
        self.place, self.folder, self.how = rank, folder, how

    def make_next(self, meeting: GroupSpec) -> Any:
        if self.how == "slow group":
            (self.folder / "held").touch()
            wait_for(self.folder / "release")
        if self.how == "no group" and self.place == NEWCOMER:
            raise RuntimeError("no memory for another communicator")
        return super().make_next(meeting)


@dataclass
class Course:
    """What one replica saw."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)  # step, participants, quorum
    held_at: int = 0  # the step at which it saw that the newcomer was held back
    state: str = ""


def _train(rank: int, world: int, address: str, folder_name: str, how: str) -> Course:
    folder = Path(folder_name)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if rank == NEWCOMER:
        wait_for(folder / "go")
    manager = Manager(
        SlowGroup(rank, folder, how), state=[model, inner], lighthouse_addr=address, replica_id=f"r{rank}",
        rank=0, world_size=1, timeout=30, quorum_timeout=30,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    course, released = Course(), False
    while not _done(course, how, folder):
        optimizer.zero_grad()
        out = ddp(batch(manager.current_step(), 8))
        if rank == NEWCOMER and not course.steps and how != "slow group":
            _hold(folder, how)
        out.square().mean().backward()
        count = manager.num_participants()
        if optimizer.step():
            course.steps.append((manager.current_step(), count, manager.quorum_id()))
        if rank == 0 and manager.current_step() >= FIRST and count == 2:
            (folder / "go").touch()
        if rank < NEWCOMER and not released and (folder / "held").exists():
            if rank == 0 and not course.held_at:
                (folder / "end.new").write_text(str(manager.current_step() + 20))
                (folder / "end.new").rename(folder / "end")
            course.held_at = course.held_at or manager.current_step()
            if how == "member dies" and rank == 1:
                (folder / "release.new").write_text(str(manager.quorum_id()))
                (folder / "release.new").rename(folder / "release")
                os.kill(os.getpid(), signal.SIGKILL)
            released = how != "member dies" and manager.current_step() >= course.held_at + BESIDE
            if released:
                (folder / "release").touch()
        time.sleep(0.002)
    course.state = fingerprint(model, inner)
    manager.shutdown()
    return course


def _hold(folder: Path, how: str) -> None:
    """In the newcomer's first step, between its forward and its backward."""
    (folder / "held").touch()
    if how == "newcomer dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "no group":
        wait_for(folder / "release")


def _done(course: Course, how: str, folder: Path) -> bool:
    if how == "newcomer dies":
        return (folder / "end").exists() and course.steps[-1][0] >= int((folder / "end").read_text())
    counts = [count for _, count, _ in course.steps]
    if how == "member dies":
        last = int((folder / "release").read_text()) if (folder / "release").exists() else 10**9
        return [count for _, count, quorum in course.steps if quorum > last].count(2) >= 3
    return counts.count(3) >= 3


@pytest.mark.parametrize("how", ["slow forward", "slow group"])
def test_the_others_train_on_while_the_newcomer_computes_its_first_step_or_the_group_is_made(
    lighthouse: LighthouseProcess, tmp_path: Path, how: str
) -> None:
    """The newcomer is released by their progress: if they waited for it, nobody would ever move."""
    with Ranks(_train, 3, args=(lighthouse.address, str(tmp_path), how), backend=None) as ranks:
        first, second, newcomer = ranks.values(LIMIT_S)
    assert first.state == second.state == newcomer.state
    assert first.held_at > 0
    beside = [entry for entry in first.steps if first.held_at < entry[0] <= first.held_at + BESIDE]
    assert len(beside) == BESIDE
    assert len({quorum for _, _, quorum in beside}) == 1  # in the group that they had
    assert newcomer.steps[0][1] == 2  # gives nothing in its first step, counts from the second on
    assert newcomer.steps[1][1] == 3


def test_it_joins_without_a_prepared_group_when_that_cannot_be_made(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    with Ranks(_train, 3, args=(lighthouse.address, str(tmp_path), "no group"), backend=None) as ranks:
        first, second, newcomer = ranks.values(LIMIT_S)
    assert first.state == second.state == newcomer.state


def test_a_newcomer_that_dies_before_it_joins_costs_the_others_nothing(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    with Ranks(_train, 3, args=(lighthouse.address, str(tmp_path), "newcomer dies"), backend=None) as ranks:
        first, second, newcomer = ranks.join(LIMIT_S).values()
    assert newcomer.exit_code == -signal.SIGKILL
    assert first.exit_code == second.exit_code == 0, (first.error, second.error)
    assert first.value.state == second.value.state
    quorums = {quorum for step, _, quorum in first.value.steps if step > first.value.held_at}
    assert len(quorums) == 1


def test_a_member_that_dies_while_a_newcomer_prepares_is_replaced_by_it(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    with Ranks(_train, 3, args=(lighthouse.address, str(tmp_path), "member dies"), backend=None) as ranks:
        first, dead, newcomer = ranks.join(LIMIT_S).values()
    assert dead.exit_code == -signal.SIGKILL
    assert first.exit_code == newcomer.exit_code == 0, (first.error, newcomer.error)
    assert first.value.state == newcomer.value.state


# ---- a member of one, and newcomers whose stores are real ----


def member(name: str, session: str = "s", store: str = "", **claim: Any) -> Member:
    said = ReplicaClaim(ranks=(Claim(),), **claim)
    return Member(replica=name, session=session, store=store or f"{name}:1", data=said.encode())


class Newcomer:
    """A replica that waits to join: it has a store and nothing else."""

    def __init__(self, name: str) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = f"127.0.0.1:{self.store.port}"
        self.member = member(name, f"{name}1", address, prepares=True, beside=True)

    def invitation(self) -> Invitation:
        deadline = time.monotonic() + LIMIT_S
        found = wait_for_invitation(self.store, lambda: time.monotonic() < deadline, "")
        assert found is not None, "no invitation came"
        return found


@pytest.fixture
def next_group() -> Iterator[NextGroup]:
    """Of replica "a", which trains alone in quorum 1."""
    quorum = Quorum(1, 1, (member("a"),))
    group = ProcessGroupGloo(30.0)
    plan = decide([ReplicaClaim.decode(quorum.members[0].data)], 1)
    training = TrainingState(generation=Generation(quorum, plan, 0, 0, group, VoteMesh()))
    found = NextGroup(ManagerOptions("nowhere:1", "a"), training, group, "nowhere:1")
    yield found
    found.cancel()
    wait_until(lambda: all(thread.name != "allranks-prepare" for thread in threading.enumerate()))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


def waits(*newcomers: Newcomer) -> QuorumWanted:
    return QuorumWanted("somebody waits to join", 1, waiting=tuple(each.member for each in newcomers))


def test_an_invitation_that_is_held_up_does_not_replace_a_later_one(
    next_group: NextGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the newcomer would make a group that nobody wants, and the members wait for it without end."""
    b, c = Newcomer("b"), Newcomer("c")
    held, release, real = threading.Event(), threading.Event(), prepared_group.open_store

    def hold_first(address: str, limit_s: float) -> dist.Store:
        if not held.is_set():
            held.set()
            assert release.wait(LIMIT_S)
        return real(address, limit_s)

    monkeypatch.setattr(prepared_group, "open_store", hold_first)
    assert next_group.prepare(waits(b))
    assert held.wait(LIMIT_S)
    (late,) = (thread for thread in threading.enumerate() if thread.name == "allranks-prepare")
    assert next_group.prepare(waits(b, c))
    assert c.invitation().name == "1.1+b1,c1"
    release.set()
    late.join(LIMIT_S)
    assert not late.is_alive()
    assert b.invitation().name == "1.1+b1,c1"


def test_newcomers_that_do_not_answer_an_invitation_join_without_a_prepared_group(
    next_group: NextGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its invitation was lost, or it cannot reach the store where all meet."""
    monkeypatch.setattr(prepared_group, "_ANSWER_S", 0.05)
    assert next_group.prepare(waits(Newcomer("b")))
    wait_until(lambda: next_group.training.wanted == "somebody waits to join")


def test_those_who_still_wait_when_another_newcomer_has_gone_join_without_a_prepared_group(
    next_group: NextGroup,
) -> None:
    """The group of them alone was called off when the other came."""
    b, c = Newcomer("b"), Newcomer("c")
    assert next_group.prepare(waits(b))
    assert b.invitation().name == "1.1+b1"
    assert next_group.prepare(waits(b, c))
    assert next_group.prepare(waits(b, c))  # told twice: it is on its way
    assert not next_group.prepare(waits(b))


# ---- who is invited, and what is agreed: pure ----


def test_members_and_newcomers_are_invited_to_the_store_of_the_first_newcomer() -> None:
    quorum = Quorum(7, 2, (member("a"), member("c")))
    waiting = [member("d", "d1", prepares=True, beside=True), member("b", "b1", prepares=True, beside=True)]
    found = invitations(quorum, waiting)
    assert [(name, found[name].rank) for name in sorted(found)] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert {(one.name, one.store, one.world_size) for one in found.values()} == {("2.7+b1,d1", "b:1", 4)}


@pytest.mark.parametrize(
    "waiting",
    [
        [],
        [member("b", prepares=True)],  # heals before its first step: it must be in the group to do so
        [member("b", beside=True)],
        [member("a", prepares=True, beside=True)],  # a member's name
    ],
)
def test_nobody_is_invited_when_a_newcomer_cannot_prepare(waiting: list[Member]) -> None:
    assert invitations(Quorum(7, 2, (member("a"),)), waiting) == {}


def test_a_prepared_group_is_used_only_when_every_member_has_it() -> None:
    ready, other, without = (ReplicaClaim(ranks=(Claim(),), prepared=name) for name in ("x", "y", ""))
    newcomer = ReplicaClaim(ranks=(Claim(),), prepares=True)
    assert agreed([ready, ready, newcomer]) == "x"
    assert agreed([ready, other, newcomer]) == ""
    assert agreed([ready, without, newcomer]) == ""
    assert agreed([newcomer, newcomer]) == ""


@pytest.mark.parametrize("first_step_done", [True, False])
def test_no_group_is_made_beside_the_first_step_of_the_running_one(
    next_group: NextGroup, monkeypatch: pytest.MonkeyPatch, first_step_done: bool
) -> None:
    """On a GPU its collectives did not end then."""
    monkeypatch.setattr(prepared_group, "_FIRST_STEP_S", LIMIT_S)
    begun = threading.Event()
    monkeypatch.setattr(prepared_group.GroupPreparation, "make", lambda self: begun.set())
    quorum = Quorum(1, 1, (member("a"), member("c")))
    said = [ReplicaClaim.decode(one.data) for one in quorum.members]
    generation = Generation(quorum, decide(said, 1), 0, 0, next_group.group, VoteMesh())
    next_group.training.generation, generation.together = generation, first_step_done
    b = Newcomer("b")
    assert next_group.prepare(waits(b))
    assert b.invitation().world_size == 3  # it computes its first step meanwhile
    if not first_step_done:
        assert not begun.wait(3 * prepared_group._LOOK_S)
        generation.together = True
    assert begun.wait(LIMIT_S)
