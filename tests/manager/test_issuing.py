"""What is given to a backend while it is taken down or replaced; a stand-in plays NCCL, which needs a GPU."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from allranks import recording as record
from allranks.blackbox.file_writer import Box
from allranks.blackbox.reader import read_trace
from allranks.errors import GroupAborted
from allranks.manager.groups import nccl
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.groups.native_calls import AbandonableCall
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.model.trace import State
from allranks.recording.options import RecorderOptions
from allranks.recording.writer import CallWriter, GroupState


class Slow:
    """A backend that takes an operation only when told to, and says in which order things happened."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.entered, self.take, self.over = threading.Event(), threading.Event(), threading.Event()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.entered.set()
        assert self.take.wait(60)
        self.order.append("taken")
        return dist.Work()

    def abort(self) -> None:
        self.order.append("aborted")
        self.over.set()


class Group(ProcessGroupNCCL):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Slow] = []

    def _make(self, meeting: GroupSpec) -> Slow:
        self.made.append(Slow())
        return self.made[-1]


def meet(group: Group, number: int) -> Slow:
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, number))
    return group.made[-1]


def beside(call: Callable[[], Any]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_an_abort_waits_until_the_operation_is_taken() -> None:
    """torch would otherwise ask a communicator that is gone, again and again, whether it has been."""
    group = Group()
    backend = meet(group, 1)
    thread, errors = beside(lambda: group.allreduce([torch.ones(1)]))
    assert backend.entered.wait(60)
    group.abort("a member died")
    late, refused = beside(lambda: group.allreduce([torch.ones(1)]))
    late.join(60)
    assert [str(error) for error in refused] == ["a member died"]
    time.sleep(0.05)
    assert backend.order == []
    backend.take.set()
    assert backend.over.wait(60)
    thread.join(60)
    assert (backend.order, errors) == (["taken", "aborted"], [])
    group.shutdown()


class Gate:
    """A lock that tells of everybody who comes to it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.came.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_an_operation_that_waited_at_the_gate_is_not_given_to_a_dead_backend() -> None:
    """Two threads issue; the group is aborted while the second waits for the first."""
    group = Group()
    backend = meet(group, 1)
    gate = group._gate = Gate()  # type: ignore[assignment]
    first, _ = beside(lambda: group.allreduce([torch.ones(1)]))
    assert backend.entered.wait(60)
    second, refused = beside(lambda: group.allreduce([torch.ones(1)]))
    assert gate.came.acquire(timeout=300) and gate.came.acquire(timeout=300)
    group.abort("a member died")
    backend.take.set()
    for thread in (first, second):
        thread.join(60)
    assert backend.over.wait(60)
    assert sorted(backend.order) == ["aborted", "taken"]
    assert [str(error) for error in refused] == ["a member died"]
    group.shutdown()


def test_an_operation_that_is_never_taken_does_not_hold_up_the_abort_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full queue: only the abort makes room."""
    monkeypatch.setattr(nccl, "_TAKEN_S", 0.05)
    group = Group()
    backend = meet(group, 1)
    thread, _ = beside(lambda: group.allreduce([torch.ones(1)]))
    assert backend.entered.wait(60)
    group.abort("a member died")
    assert backend.over.wait(60)
    backend.take.set()
    thread.join(60)
    assert backend.order == ["aborted", "taken"]
    group.shutdown()


def test_an_operation_meant_for_one_group_is_never_given_to_the_next() -> None:
    """Between the decision and the call the group may have been replaced."""
    group = Group()
    meet(group, 1)
    backend = meet(group, 2)
    backend.take.set()
    with pytest.raises(GroupAborted, match="the members changed"):
        group.allreduce_in(1, [torch.ones(1)], dist.AllreduceOptions())
    assert backend.order == []
    group.allreduce_in(2, [torch.ones(1)], dist.AllreduceOptions())
    assert backend.order == ["taken"]
    group.shutdown()


class Asked:
    """A work of the stand-in: ended or not. NCCL's would keep every thread waiting, were it asked during its abort."""

    def __init__(self, backend: Slow, ended: bool) -> None:
        self.backend, self.ended, self.asked = backend, ended, list[str]()

    def is_completed(self) -> bool:
        self.asked.append("during the abort" if self.backend.entered.is_set() else "before it")
        return self.ended


def test_the_recorder_looks_at_the_works_of_a_group_before_it_is_aborted_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "x.box", 32, 1 << 16)
    box.open()
    writer = CallWriter(box, RecorderOptions(stack_depth=0))
    monkeypatch.setattr(
        record, "_current", SimpleNamespace(writer=writer, pid=os.getpid(), given_up=writer.given_up)
    )
    counters = GroupState(1, "g", (0,), "nccl", 0)
    group = Group()
    backend = meet(group, 1)
    works = [Asked(backend, ended=False), Asked(backend, ended=True)]
    for work in works:
        writer.track(work, writer.begin(counters, 1, (0, 0, 0)), counters)
        group._works.append(work)
    monkeypatch.setattr(backend, "abort", lambda: (backend.entered.set(), backend.take.wait(60)))
    try:
        group.abort("a member died")
        assert backend.entered.wait(60)
        writer.sweep(everything=True)  # the side thread, while NCCL aborts
        assert [set(work.asked) for work in works] == [{"before it"}, {"before it"}]
        assert list(read_trace(box.path).calls["state"]) == [State.FAILED, State.COMPLETED]
    finally:
        works[0].ended = True
        backend.take.set()


def destroyed(backend: object) -> threading.Event:
    """Set when nobody holds the backend any more."""
    gone = threading.Event()
    weakref.finalize(backend, gone.set)
    return gone


@pytest.fixture
def no_collector() -> Iterator[None]:
    """It would find a backend that is left over, and destroy it on the thread that happens to make an object."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_an_error_that_is_kept_keeps_no_backend() -> None:
    """The thread that dropped the traceback had to destroy the communicator: the training thread was blocked for a minute."""

    def refuse(*_: object) -> None:
        raise RuntimeError("remote process exited")

    group = Group()
    meet(group, 1).broadcast = refuse  # type: ignore[attr-defined]
    gone = destroyed(group.made.pop())
    errors = list[Exception]()
    with pytest.raises(RuntimeError, match="remote process") as refused:
        group.broadcast_one(torch.ones(1), 0)
    errors.append(refused.value)
    group.abort("a member died")
    with pytest.raises(GroupAborted, match="a member died") as aborted:
        group.allreduce([torch.ones(1)])
    errors.append(aborted.value)
    assert gone.wait(60)
    assert len(errors) == 2
    group.shutdown()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("abandoned", [False, True])
def test_a_making_that_failed_leaves_nothing_behind(abandoned: bool) -> None:
    """Neither by its error, which is kept, nor by what it was to finish."""
    gone, began, going = list[threading.Event](), threading.Event(), threading.Event()

    def finish(given: Slow) -> Slow:
        made = Slow()
        gone.append(destroyed(made))
        began.set()
        assert going.wait(60)
        raise RuntimeError("remote process exited")

    given = Slow()
    gone.append(destroyed(given))
    call = AbandonableCall(partial(finish, given))
    del given
    if abandoned:
        call.abandon(GroupAborted("a member died"))
    else:
        going.set()
    with pytest.raises((RuntimeError, GroupAborted)) as failed:
        call.result()
    assert began.wait(60)
    going.set()
    assert type(failed.value) is (GroupAborted if abandoned else RuntimeError)
    assert [event.wait(60) for event in gone] == [True, True]


def test_a_group_that_was_left_in_good_order_is_ended_some_steps_later() -> None:
    """Not while a new member takes its first steps."""
    group, over = Group(), threading.Event()
    idle = meet(group, 1)
    idle.shutdown = over.set  # type: ignore[attr-defined]
    group.retire("the members changed")
    meet(group, 2)
    for _ in range(nccl._IDLE_STEPS - 1):
        group.drop_retired()
    assert group._retired and not over.is_set()
    group.drop_retired()
    assert over.wait(60)
    group.shutdown()


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_functional_collectives_reach_the_backend_under_its_own_name(name: str) -> None:
    """torch 2.15 calls the group by the names of 2.13, and its backends have others."""
    group = ProcessGroupGloo(30.0)
    group.reconfigure(GroupSpec(dist.HashStore(), 0, 1, 1))
    group.register(f"functional_{name}")
    call = getattr(functional, f"{name}_single", None) or getattr(functional, f"{name}_tensor")
    more = ("sum",) if name == "reduce_scatter" else ()
    try:
        assert (call(torch.arange(4.0), *more, 0, group) + 0.0).tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        group.unregister()
        group.shutdown()
