"""How an NCCL communicator is made when a member dies meanwhile. NCCL itself needs a GPU: a class stands for torch's backend."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.drill.ranks import Ranks
from allranks.errors import GroupAborted
from allranks.lighthouse.options import Options
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.groups import nccl
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.groups.native_calls import AbandonableCall, abandoned
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer

from .cluster import LIMIT_S, LighthouseProcess, batch, fingerprint

MAKING = "allranks-making"


class Backend:
    """torch's ProcessGroupNCCL: connecting fails, or never ends, as NCCL's does for a member that is gone."""

    Options = type("Options", (), {})
    made: list[Backend] = []
    launched: list[Backend] = []
    how = ""
    release = threading.Event()

    def __init__(self, store: dist.Store, rank: int, size: int, options: object) -> None:
        self.aborted = threading.Event()
        Backend.made.append(self)

    def eager_connect_single_device(self, device: object) -> None:
        if Backend.how == "fails":
            raise RuntimeError("remote process exited")
        if Backend.how == "never ends" and len(Backend.made) == 1:
            Backend.release.wait(LIMIT_S)

    def abort(self) -> None:
        if Backend.how == "aborts slowly":
            Backend.release.wait(LIMIT_S)
        self.aborted.set()

    @staticmethod
    def launch(group: ProcessGroupNCCL, made: Backend) -> Backend:
        Backend.launched.append(made)
        return made


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroupNCCL]:
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "0")  # which a group would set for good
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(nccl.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ProcessGroupNCCL, "_launch", Backend.launch)
    Backend.made, Backend.launched, Backend.how, Backend.release = [], [], "", threading.Event()
    made = ProcessGroupNCCL(5.0, device="cuda:0")
    yield made
    Backend.release.set()
    made.shutdown()
    wait_until(lambda: all(thread.name != MAKING for thread in threading.enumerate()))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


def test_nobody_connects_before_all_members_are_there_and_a_group_that_is_called_off_leaves_no_thread(
    group: ProcessGroupNCCL,
) -> None:
    """Inside NCCL the wait for a member that never comes could not be ended."""
    store = dist.HashStore()
    meeting = GroupSpec(store, 0, 2, number=1, limit_s=LIMIT_S)
    caller = threading.Thread(target=_meet, args=(group, meeting))
    caller.start()
    wait_until(lambda: store.check(["here/0"]))
    group.abort("r1 is gone")
    caller.join(LIMIT_S)
    assert not caller.is_alive()
    wait_until(lambda: all(thread.name != MAKING for thread in threading.enumerate()))
    assert not Backend.made


def _meet(group: ProcessGroupNCCL, meeting: GroupSpec) -> None:
    with contextlib.suppress(GroupAborted):
        group.reconfigure(meeting)


def test_a_communicator_that_fails_to_connect_is_aborted_so_that_the_other_members_notice(
    group: ProcessGroupNCCL,
) -> None:
    Backend.how = "fails"
    with pytest.raises(RuntimeError, match="remote process exited"):
        group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=1))
    (backend,) = Backend.made
    assert backend.aborted.wait(LIMIT_S)


def test_a_connect_that_never_returns_does_not_delay_the_next_group(group: ProcessGroupNCCL) -> None:
    Backend.how = "never ends"
    stuck = threading.Thread(target=_meet, args=(group, GroupSpec(dist.HashStore(), 0, 1, number=1)))
    stuck.start()
    wait_until(lambda: len(Backend.made) == 1)
    group.abort("r1 is gone")
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=2))
    assert group._backend is Backend.made[1]
    assert not Backend.release.is_set()
    stuck.join(LIMIT_S)
    assert not stuck.is_alive()
    Backend.release.set()
    assert Backend.made[0].aborted.wait(LIMIT_S)  # late, and unwanted
    assert Backend.launched == [Backend.made[1]]  # an operation with a dead member would keep the device


def test_no_group_gets_its_first_operation_while_another_communicator_is_being_ended(
    group: ProcessGroupNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the end of one waits for the other's operation, and that for a member that dies meanwhile."""
    monkeypatch.setattr(nccl, "_ENDED_S", LIMIT_S)
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=1))
    Backend.how = "aborts slowly"
    group.abort("r1 is gone")
    next_one = threading.Thread(target=_meet, args=(group, GroupSpec(dist.HashStore(), 0, 1, number=2)))
    next_one.start()
    wait_until(lambda: len(Backend.made) == 2)
    after_commit = threading.Thread(target=group.drop_retired)  # the next step's operations follow it
    after_commit.start()
    assert Backend.launched == Backend.made[:1]
    assert after_commit.is_alive()
    Backend.release.set()
    next_one.join(LIMIT_S)
    after_commit.join(LIMIT_S)
    assert not after_commit.is_alive()
    assert Backend.launched == Backend.made


class Library:
    """NCCL's own functions that end a communicator's kernels and keep its memory."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.quiet = threading.Event()

    def ncclCommRevoke(self, communicator: ctypes.c_void_p, flags: int) -> int:
        return 4 if self.refuses else nccl._IN_PROGRESS

    def ncclCommGetAsyncError(self, communicator: ctypes.c_void_p, state: Any) -> int:
        state._obj.value = nccl._SUCCESS if self.quiet.is_set() else nccl._IN_PROGRESS
        return nccl._SUCCESS


@pytest.mark.parametrize("how", ["revoked", "refused", "shut down"])
def test_a_communicator_with_a_dead_member_is_revoked_and_ended_when_the_next_group_works(
    group: ProcessGroupNCCL, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where NCCL cannot revoke it, or the group is shut down, it is aborted at once."""
    library = Library(refuses=how == "refused")
    monkeypatch.setattr(nccl, "find_revoking_nccl", lambda: library)
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=1))
    (old,) = Backend.made
    group._communicators[id(old)] = 1
    if how == "shut down":
        group.shutdown()
    else:
        group.abort("r1 is gone")
    if how != "revoked":
        assert old.aborted.wait(LIMIT_S)
        return
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=2))
    assert Backend.launched == Backend.made  # although the old one is not quiet yet
    library.quiet.set()
    wait_until(lambda: bool(group._revoked))
    for _ in range(nccl._IDLE_STEPS - 1):
        group.drop_retired()
    assert not old.aborted.is_set()
    group.drop_retired()
    assert old.aborted.is_set()  # the next step begins after it


def test_an_idle_communicator_is_revoked_before_it_is_ended_so_that_no_step_waits_for_it(
    group: ProcessGroupNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(nccl, "find_revoking_nccl", lambda: library)
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=1))
    (old,) = Backend.made
    group._communicators[id(old)] = 1
    group.retire("r1 joins")
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number=2))
    for _ in range(nccl._IDLE_STEPS):
        group.drop_retired()
    assert not group._retired and not group._revoked  # it is being revoked
    library.quiet.set()
    wait_until(lambda: bool(group._revoked))
    for _ in range(nccl._IDLE_STEPS):
        group.drop_retired()
    assert old.aborted.is_set()


def test_a_call_knows_that_it_was_abandoned() -> None:
    begun, seen = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        wait_until(abandoned)
        seen.set()

    call = AbandonableCall(work)
    ending = threading.Thread(target=lambda: (begun.wait(LIMIT_S), call.abandon(GroupAborted("lost"))))
    ending.start()
    with pytest.raises(GroupAborted, match="lost"):
        call.result()
    assert seen.wait(LIMIT_S)
    assert not abandoned()
    ending.join()


# ---- a real job over gloo, whose groups are made as NCCL makes them when a member dies ----


class StuckGroup(ProcessGroupGloo):
    """The making of a group of three never returns: its newcomer dies in it, once the others are there."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(30.0)
        self.place, self.folder = rank, folder

    def _make(self, meeting: GroupSpec) -> object:
        if meeting.world_size < 3:
            return super()._make(meeting)
        (self.folder / f"making-{self.place}").touch()
        if self.place == 2:
            wait_until(lambda: all((self.folder / f"making-{rank}").exists() for rank in range(2)))
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
        raise AssertionError("it never returns")


def _train(rank: int, world: int, address: str, folder_name: str) -> tuple[str, int, int]:
    folder = Path(folder_name)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Linear(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 2:
        wait_until((folder / "go").exists)
    manager = Manager(
        StuckGroup(rank, folder), state=[model, inner], lighthouse_addr=address, replica_id=f"r{rank}",
        rank=0, world_size=1, timeout=30, quorum_timeout=30,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    after = 0  # steps since the newcomer has died
    while after < 3:
        optimizer.zero_grad()
        ddp(batch(manager.current_step(), 8)).square().mean().backward()
        count = manager.num_participants()
        if optimizer.step() and count == 2:
            (folder / "go").touch()
            after += (folder / f"making-{rank}").exists()
    left = sum(thread.name == MAKING for thread in threading.enumerate())
    state = fingerprint(model, inner)
    manager.shutdown()
    return state, left, manager.current_step()


def test_the_others_train_on_while_the_making_of_a_group_with_a_dead_member_never_returns(
    tmp_path: Path,
) -> None:
    with (
        LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as lighthouse,
        Ranks(_train, 3, args=(lighthouse.address, str(tmp_path)), backend=None) as ranks,
    ):
        first, second, dead = ranks.join(LIMIT_S).values()
    assert dead.exit_code == -signal.SIGKILL
    assert first.exit_code == second.exit_code == 0, (first.error, second.error)
    assert first.value[0] == second.value[0]
    assert first.value[1] == second.value[1] == 1  # the thread is still in it
