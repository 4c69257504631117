"""The end of a process does not wait for groups that were given up."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest

from allranks.drill.ranks import Ranks
from allranks.errors import GroupAborted, HealingFailed
from allranks.manager.groups import teardown
from allranks.manager.groups.native_calls import MAX_LEFT_RUNNING, AbandonableCall
from allranks.manager.groups.teardown import end_compile_workers
from allranks.manager.training import TrainingState

from .cluster import LIMIT_S


class Backend:
    """Stands for a native backend: what matters is whether and when it is destroyed."""


class Work:
    """An operation that ends when it is told to."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


def _destroyed(works: list[Work], keep_at_exit: bool) -> bool:
    backend = Backend()
    found = weakref.ref(backend)
    teardown.destroy_later(backend, works, keep_at_exit)
    del backend
    teardown.finish(limit_s=20.0)
    gc.collect()
    return found() is None


@pytest.mark.parametrize(
    ("done", "keep_at_exit", "destroyed"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_at_exit_only_what_ends_at_once_is_destroyed(done: bool, keep_at_exit: bool, destroyed: bool) -> None:
    """A pending operation, or a destructor that may take seconds: the backend is kept until the process is gone."""
    assert _destroyed([Work(done)], keep_at_exit) is destroyed


class AskedWork(Work):
    """Notes whether it was asked while the abort of its communicator was under way: NCCL's may answer only after it."""

    def __init__(self, aborting: threading.Thread) -> None:
        super().__init__(done=True)
        self.aborting = aborting
        self.asked: list[bool] = []

    def is_completed(self) -> bool:
        self.asked.append(self.aborting.is_alive())
        return True


def test_no_operation_is_asked_for_its_end_while_its_communicator_is_aborted() -> None:
    """torch's answer may wait for the abort, without giving the interpreter to other threads."""
    over = threading.Event()
    aborting = teardown.start_attended("test-abort", over.wait)
    work, backend = AskedWork(aborting), Backend()
    found = weakref.ref(backend)
    teardown.destroy_later(backend, [work], abort=aborting)
    del backend
    threading.Event().wait(3 * teardown._POLL_S)  # long enough for it to ask, if it did
    over.set()
    while found() is not None:
        threading.Event().wait(teardown._POLL_S)
    assert work.asked
    assert not any(work.asked)


def test_a_teardown_that_does_not_end_is_waited_for_once() -> None:
    """An abort that is stuck in the driver: `shutdown` and the exit of the process do not add up their waits."""
    stuck = threading.Event()
    thread = teardown.start_attended("test-abort", stuck.wait)
    teardown.finish(limit_s=0.01)
    assert thread.is_alive()
    teardown.finish(limit_s=60.0)  # returns at once: only hanging reaches the limit of the test
    assert thread.is_alive()
    stuck.set()
    thread.join()


def test_what_is_given_up_while_teardowns_are_waited_for_is_waited_for_too() -> None:
    """An idle communicator that has been shut down: its destructor must not begin when the process ends."""
    backend = Backend()
    found = weakref.ref(backend)

    def shut_down(held: list[object]) -> None:
        teardown._exiting.wait()
        teardown.destroy_later(held.pop(), (), keep_at_exit=True)

    teardown.start_attended("test-shut-down", shut_down, [backend])
    del backend
    teardown.finish(limit_s=20.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "allranks-teardown"]
    assert found() is not None


def _end_with_frozen_workers(rank: int, world: int) -> bool:
    from torch._inductor import async_compile
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    async_compile._pool_set.add(pool)
    os.kill(pool.process.pid, signal.SIGSTOP)  # it cannot end, as one with many workers cannot soon
    try:
        end_compile_workers()
        async_compile.shutdown_compile_workers()  # what torch does at exit
        return pool.process.poll() is None
    finally:
        os.kill(pool.process.pid, signal.SIGKILL)


def test_the_end_of_a_process_does_not_wait_for_the_workers_of_torch_compile() -> None:
    """torch would wait for them up to 300 s."""
    with Ranks(_end_with_frozen_workers, 1, backend=None) as ranks:
        assert ranks.values(LIMIT_S) == [True]


def test_calls_that_were_abandoned_do_not_pile_up() -> None:
    """Each leaves a thread until it returns: with too many of them left no other is begun."""
    back, begun = threading.Event(), threading.Semaphore(0)

    def stuck() -> int:
        begun.release()
        back.wait(60)
        return 1

    def abandon_one() -> None:
        call = AbandonableCall(stuck)
        later = threading.Thread(target=lambda: (begun.acquire(), call.abandon(GroupAborted("lost"))))
        later.start()
        with pytest.raises(GroupAborted, match="lost"):
            call.result()
        later.join()

    for _ in range(MAX_LEFT_RUNNING):
        abandon_one()
    with pytest.raises(GroupAborted, match=f"{MAX_LEFT_RUNNING} earlier calls"):
        AbandonableCall(lambda: 2).result()
    back.set()
    for thread in threading.enumerate():
        if thread.name == "allranks-making":
            thread.join()
    assert AbandonableCall(lambda: 2).result() == 2


def test_a_reader_of_the_state_that_does_not_end_is_not_waited_for_without_limit() -> None:
    """A state_dict function that blocks would stop the training for good."""
    training = TrainingState(eager=False, read_limit_s=0.1)
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        with training.reading(60):
            reading.set()
            done.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(HealingFailed, match="another thread has been reading the state"), training.parking():
        assert reading.wait(60)
    done.set()
    reader.join()
    with training.parking():
        pass
