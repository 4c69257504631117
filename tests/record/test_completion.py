"""How a call ends: completed, failed, timed out, or not yet; noticed without blocking."""

from __future__ import annotations

import ctypes
import itertools
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.blackbox.file_writer import Box
from allranks.blackbox.header import read_header
from allranks.blackbox.reader import read_trace
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.model.trace import Flag, State
from allranks.record.groups import GroupState
from allranks.record.options import RecorderOptions
from allranks.record.writer import CallWriter, is_timeout

from .boxes import ops, traces


def _states(trace: Any) -> list[State]:
    return [State(int(value)) for value in trace.calls["state"]]


def _times_out(rank: int, world: int, gave_up: str) -> str:
    allranks.record()
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        _wait_until(lambda: Path(gave_up).exists())
        return ""
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    finally:
        Path(gave_up).touch()
    return ""


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_that_timed_out_is_not_completed_and_leaves_a_dump(
    folder: Path, tmp_path: Path, engine: str
) -> None:
    """The rank that waited in vain says so in its box, and writes a dump at that moment."""
    with Ranks(_times_out, 2, (str(tmp_path / "gave up"),), timeout_s=3) as ranks:
        outcomes = ranks.join(timeout_s=60)
    assert "imed out" in outcomes[0].value  # the fault fired
    found = traces(folder)
    assert _states(found[0]) == [State.COMPLETED, State.TIMED_OUT]
    assert _states(found[1]) == [State.COMPLETED]
    row = found[0].calls[-1]
    assert int(row["flags"]) & Flag.RETIRED
    assert int(row["timeout_ms"]) == 3000
    assert found[0].progress.calls_completed == 1
    assert (folder / "dumps" / "timeout.a0.1" / "rank_0").exists()
    assert (folder / "dumps" / "timeout.a0.1.fr" / "rank_0").exists()  # torch's own ring, beside ours


def _waits_in_slices(rank: int, world: int, sliced: str) -> None:
    allranks.record()
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        _wait_until(lambda: Path(sliced).exists())
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 0:
        for limit in ((timedelta(milliseconds=20),), (timedelta(milliseconds=1),)):
            with pytest.raises(RuntimeError, match="imed out"):
                work.wait(*limit)
        Path(sliced).touch()
    work.wait()


def test_a_wait_with_a_limit_of_its_own_does_not_end_the_call(
    folder: Path, tmp_path: Path, engine: str
) -> None:
    """Rank 0 looks twice, in vain; the call goes on and completes, and nothing was dumped for a timeout."""
    with Ranks(_waits_in_slices, 2, (str(tmp_path / "sliced"),), timeout_s=30) as ranks:
        ranks.join(timeout_s=60)
    assert (tmp_path / "sliced").exists()  # the fault fired
    for trace in traces(folder).values():
        assert _states(trace) == [State.COMPLETED, State.COMPLETED]
    assert not (folder / "dumps").exists()


def _peer_dies(rank: int, world: int) -> None:
    allranks.record()
    dist.all_reduce(torch.ones(1))
    reached("ready")
    if rank == 1:
        time.sleep(60)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(RuntimeError):
        work.wait()


def test_a_call_whose_peer_died_has_failed(folder: Path, engine: str) -> None:
    """Failed, not completed, not timed out."""
    with Ranks(_peer_dies, 2, timeout_s=30) as ranks:
        ranks.wait_for("ready")
        ranks.kill(1)
        outcomes = ranks.join(timeout_s=60)
    assert outcomes[1].exit_code == -signal.SIGKILL  # the fault fired
    assert outcomes[0].exit_code == 0, outcomes[0].error
    assert _states(traces(folder)[0]) == [State.COMPLETED, State.FAILED]


def _never_waited(rank: int, world: int) -> None:
    recorder = allranks.record()
    assert recorder.path is not None
    work = dist.all_reduce(torch.ones(1), async_op=True)
    path = recorder.path
    _wait_until(lambda: read_header(path).calls_completed == 1)  # only the side thread can notice
    assert recorder.writer is not None
    assert not recorder.writer.pending  # and the work, with its tensors, is let go
    work.wait()


def test_a_call_that_nobody_waits_for_is_noticed_by_the_side_thread(folder: Path, engine: str) -> None:
    """Completion needs no help from the program."""
    with Ranks(_never_waited, 2) as ranks:
        ranks.values()
    assert _states(traces(folder)[0]) == [State.COMPLETED]


def _hangs(rank: int, world: int) -> None:
    allranks.record()
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        reached("entering")
        dist.all_reduce(torch.ones(2))
    time.sleep(60)


def test_a_hanging_call_is_started_and_not_over(folder: Path, engine: str) -> None:
    """Read from outside while it hangs."""
    with Ranks(_hangs, 2) as ranks:
        ranks.wait_for("entering", [0])
        _wait_until(lambda: _states(traces(folder)[0])[1:] == [State.STARTED])
        trace = traces(folder)[0]
        assert int(trace.calls[-1]["completed_ns"]) == 0
        assert trace.progress.calls_started == 2
        assert trace.progress.calls_completed == 1


class _Work:
    """Stands for a Work of a library that finishes later, as NCCL's."""

    def __init__(self) -> None:
        self.over = False
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over


def _writer(tmp_path: Path, engine: str) -> CallWriter:
    box = Box(tmp_path / "x.box", 32, 1 << 16)
    box.open()
    return CallWriter(box, RecorderOptions(stack_depth=0, accelerate=engine == "c"))


def test_calls_that_end_in_any_order_are_all_noticed(tmp_path: Path, engine: str) -> None:
    """A call that never ends does not hide the ends of later ones."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0,), "nccl", 0, engine == "c")
    works = [_Work() for _ in range(5)]
    for work in works:
        writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    works[3].over = True
    works[1].error = RuntimeError("NCCL timeout")
    works[2].error = ValueError("NCCL communicator was aborted")
    writer.sweep(everything=True)
    states = _states(read_trace(writer.box.path))
    assert states == [State.SCHEDULED, State.TIMED_OUT, State.FAILED, State.COMPLETED, State.SCHEDULED]
    assert len(writer.pending) == 2


def test_works_that_never_say_that_they_are_over_are_let_go(tmp_path: Path, engine: str) -> None:
    """No more of them are kept than there are rows to write their end to."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0,), "nccl", 0, engine == "c")
    works = [_Work() for _ in range(500)]
    for work in works:
        writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    writer.sweep(everything=True)
    assert len(writer.pending) == writer.box.capacity


def test_nothing_is_asked_of_cuda_while_a_graph_is_captured(tmp_path: Path, engine: str) -> None:
    """Querying an event would spoil the capture."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0,), "nccl", 0, engine == "c")
    work = _Work()
    work.error = AssertionError("asked")
    writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    writer.capturing = 1
    writer.sweep(everything=True)
    assert len(writer.pending) == 1
    number = writer.begin(group, 1, (0, 0, 0))
    writer.returned(_Work(), number, group)
    writer.returned(None, writer.begin(group, 1, (0, 0, 0)), group)
    assert len(writer.pending) == 1  # captured calls are not followed
    trace = read_trace(writer.box.path)
    assert [bool(int(row["flags"]) & Flag.CAPTURED) for row in trace.calls] == [False, True, True]
    assert set(_states(trace)) == {State.SCHEDULED}


class _Asked(_Work):
    """A Work whose question takes until it is told to answer."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order, self.entered, self.answer = order, threading.Event(), threading.Event()

    def is_completed(self) -> bool:
        self.entered.set()
        assert self.answer.wait(30)
        self.order.append("asked")
        return False


def test_a_capture_begins_only_after_a_question_that_is_under_way(tmp_path: Path, engine: str) -> None:
    """The side thread may be asking an event at the very moment at which the program begins to capture."""
    writer, order = _writer(tmp_path, engine), list[str]()
    group = GroupState(1, "g", (0,), "nccl", 0, engine == "c")
    works = [_Asked(order), _Asked(order)]
    for work in works:
        writer.pending[id(work)] = (work, writer.begin(group, 1, (0, 0, 0)), group.counters, ())

    def capture() -> None:
        writer.begin_capture()
        order.append("captured")

    threads = [threading.Thread(target=writer.sweep, args=(True,)), threading.Thread(target=capture)]
    threads[0].start()
    assert works[0].entered.wait(30)
    threads[1].start()
    _wait_until(lambda: writer.capturing == 1)
    works[0].answer.set()
    for thread in threads:
        thread.join(30)
    assert order == ["asked", "captured"]  # and the second work was not asked at all


def test_a_work_that_was_waited_for_is_let_go_before_the_device_is_done(tmp_path: Path, engine: str) -> None:
    """It would keep its tensors in the device's memory; a marker on the stream that waits takes its place."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0,), "nccl", 0, engine == "c")
    work, marker = _Work(), _Work()
    writer.mark_device = lambda: marker
    writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    writer.waited(work, writer.pending[id(work)])
    assert [entry[0] for entry in writer.pending.values()] == [marker]
    assert _states(read_trace(writer.box.path)) == [State.SCHEDULED]
    marker.over = True
    writer.sweep(everything=True)
    assert _states(read_trace(writer.box.path)) == [State.COMPLETED]


def test_a_call_without_a_work_is_followed_by_a_marker_on_the_device(tmp_path: Path, engine: str) -> None:
    """NCCL gives no Work for a call that the program does not want to wait for by itself."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0,), "nccl", 0, engine == "c")
    marker = _Work()
    writer.mark_device = lambda: marker
    writer.returned(None, writer.begin(group, 1, (0, 0, 0)), group)
    assert _states(read_trace(writer.box.path)) == [State.SCHEDULED]
    marker.over = True
    writer.sweep(everything=True)
    assert _states(read_trace(writer.box.path)) == [State.COMPLETED]


class _Driver:
    """Stands in for CUDA's driver, which no test machine has: the addresses of its functions, and what they were told."""

    _events = itertools.count(0x1000)  # those of one test are used again by the next
    CREATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
    RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

    def __init__(self) -> None:
        self.created, self.recorded, self.asked = 0, list[tuple[int, int]](), list[int]()
        self.answers: dict[int, int] = {}  # by event: 0 passed, 600 not yet
        self.capturing = 0
        kinds = (self.CREATE, self.RECORD, self.QUERY, self.CAPTURING)
        methods = (self._create, self._record, self._query, self._is_capturing)
        self.functions = [kind(method) for kind, method in zip(kinds, methods, strict=True)]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self.functions]
        self.parts = (lambda: True, lambda: 3, lambda device: 0xABC0 + device, *addresses)

    def _create(self, event: Any, flags: int) -> int:
        self.created += 1
        event[0] = next(self._events)
        return 0 if flags == 2 else 1

    def _record(self, event: int, stream: int) -> int:
        self.recorded.append((event, stream))
        self.answers[event] = 600
        return 0

    def _query(self, event: int) -> int:
        self.asked.append(event)
        return self.answers[event]

    def _is_capturing(self, stream: int, status: Any) -> int:
        status[0] = self.capturing
        return 0


@pytest.fixture
def driver() -> _Driver:
    """What the part in C takes for CUDA's driver."""
    return _Driver()


def _marking(tmp_path: Path, driver: _Driver) -> tuple[CallWriter, GroupState]:
    module = pytest.importorskip("allranks.record._fast", reason="the part in C was not built")
    writer = _writer(tmp_path, "c")
    writer.markers = module.Markers(writer.ring, *driver.parts)
    return writer, GroupState(1, "g", (0, 1), "nccl", 0)


def _method(writer: CallWriter, group: GroupState, original: Callable[..., Any]) -> tuple[object, Any]:
    """A group and its send(), recorded in C."""
    from allranks.record import _fast
    from allranks.record.torch_internals import FAST, NO_OPTIONS

    target = object()
    groups = {id(target): group.counters}

    def learn(known: Any, key: Any, args: Any) -> tuple[int, int, int]:
        return (0, 1, 1)

    def slow(*args: Any) -> None:
        raise AssertionError("not in C")

    return target, _fast.Collective(
        original, slow, writer.failed, writer.pending, writer.ring, writer.markers, groups, {}, learn,
        writer.sweep, writer.no_work, None, 1, FAST["send"][1], NO_OPTIONS,
    )  # fmt: skip


def test_events_of_the_driver_follow_calls_without_a_work(tmp_path: Path, driver: _Driver) -> None:
    """Each call is over when the device has passed its event, in any order; events are used again."""
    writer, group = _marking(tmp_path, driver)
    target, send = _method(writer, group, lambda *args: None)
    for _ in range(3):
        assert send(target, [torch.ones(1)], 1, 7) is None
    assert [stream for _, stream in driver.recorded] == [0xABC3] * 3
    first, second, third = (event for event, _ in driver.recorded)
    writer.sweep(everything=True)
    assert _states(read_trace(writer.box.path)) == [State.SCHEDULED] * 3
    driver.answers.update({first: 0, third: 0})
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert _states(trace) == [State.COMPLETED, State.SCHEDULED, State.COMPLETED]
    assert trace.progress.calls_completed == 2
    driver.answers[second] = 700  # the device is broken
    writer.sweep(everything=True)
    assert _states(read_trace(writer.box.path)) == [State.COMPLETED, State.FAILED, State.COMPLETED]
    assert len(writer.markers) == 0
    made = driver.created
    send(target, [torch.ones(1)], 1, 7)
    assert driver.created == made and driver.recorded[-1][0] in {first, second, third}


def test_a_work_that_was_waited_for_in_c_is_let_go_and_its_event_followed(
    tmp_path: Path, driver: _Driver
) -> None:
    """The call made last and those before it, whatever their order; a wait that fails is a failed call."""
    from allranks.record import _fast

    writer, group = _marking(tmp_path, driver)
    works = [_Work() for _ in range(4)]
    target, send = _method(writer, group, lambda *args: works[writer.box.get("next_id") - 1])

    def original(work: _Work) -> bool:
        if work.error is not None:
            raise work.error
        return True

    wait = _fast.Wait(
        original, writer.wait_failed, writer.waited, writer.pending, writer.ring, writer.markers
    )
    for _ in works:
        send(target, [torch.ones(1)], 1, 7)
    works[1].error = RuntimeError("broken")
    assert wait(works[3]) and wait(works[0])
    with pytest.raises(RuntimeError, match="broken"):
        wait(works[1])
    assert len(driver.recorded) == len(writer.markers) == 2
    assert [entry[0] for entry in writer.pending.values()] == [works[2]]
    driver.answers = dict.fromkeys(driver.answers, 0)
    works[2].over = True
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert _states(trace) == [State.COMPLETED, State.FAILED, State.COMPLETED, State.COMPLETED]
    assert trace.progress.calls_completed == 3


def test_no_event_is_recorded_or_asked_while_a_graph_is_captured(tmp_path: Path, driver: _Driver) -> None:
    """Neither one that our hooks have seen, nor one that only the stream knows of."""
    writer, group = _marking(tmp_path, driver)
    target, send = _method(writer, group, lambda *args: None)
    send(target, [torch.ones(1)], 1, 7)
    driver.asked.clear()
    writer.begin_capture()
    send(target, [torch.ones(1)], 1, 7)
    writer.sweep(everything=True)
    assert (len(driver.recorded), driver.asked) == (1, [])
    writer.end_capture()
    driver.capturing = 1
    assert not writer.markers.mark(1, ())
    assert len(driver.recorded) == 1
    driver.capturing, driver.answers = 0, dict.fromkeys(driver.answers, 0)
    writer.sweep(everything=True)
    assert _states(read_trace(writer.box.path)) == [State.COMPLETED, State.SCHEDULED]


def test_the_event_of_a_batch_ends_its_parts(tmp_path: Path, driver: _Driver) -> None:
    """As one call that is counted once."""
    writer, group = _marking(tmp_path, driver)
    target, send = _method(writer, group, lambda *args: None)
    group.counters.open_batch()
    for _ in range(2):
        send(target, [torch.ones(1)], 1, 7)
    assert driver.recorded == []
    number, parts = writer.begin_end(group, 1, None)
    assert parts == (1, 2)
    writer.returned(None, number, group, parts)
    driver.answers = dict.fromkeys(driver.answers, 0)
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert _states(trace) == [State.COMPLETED] * 3
    assert trace.progress.calls_completed == 1
    assert [int(flags) & ~Flag.RETIRED for flags in trace.calls["flags"]] == [3, 3, 5]


def test_in_a_group_with_two_backends_the_tensor_decides_what_wait_means(tmp_path: Path, engine: str) -> None:
    """Calls on CPU tensors of "cpu:gloo,cuda:nccl" end with wait(); the others when the device says so."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0,), "cpu:gloo,cuda:nccl", 0, engine == "c")
    for on_cpu in (True, False):
        writer.returned(_Work(), writer.begin(group, 1, (0, 0, 0)), group, on_cpu=on_cpu)
    assert [entry[2].blocking for entry in writer.pending.values()] == [True, False]
    assert _states(read_trace(writer.box.path)) == [State.STARTED, State.SCHEDULED]


def test_a_coalesced_group_ends_as_a_whole(tmp_path: Path, engine: str) -> None:
    """Its parts share one number, are marked as parts, and end with it."""
    writer = _writer(tmp_path, engine)
    group = GroupState(1, "g", (0, 1), "nccl", 0, engine == "c")
    group.counters.open_batch()
    for peer in (0, 1):
        number = writer.begin(group, 1, (0, 1, 1), peer=peer, p2p=True)
        writer.returned(_Work(), number, group)
    assert not writer.pending
    end, parts = writer.begin_end(group, 2, None)
    work = _Work()
    writer.returned(work, end, group, parts)
    before = read_trace(writer.box.path)
    assert set(_states(before)) == {State.SCHEDULED}
    work.over = True
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert set(_states(trace)) == {State.COMPLETED}
    assert [int(value) for value in trace.calls["p2p_seq"]] == [1, 1, 1]
    assert int(trace.calls[0]["flags"]) & Flag.COALESCED_PART
    assert int(trace.calls[2]["flags"]) & Flag.COALESCED_END
    assert int(trace.calls[2]["flags"]) & Flag.P2P
    assert trace.progress.calls_completed == 1
    assert writer.begin(group, 1, (0, 1, 1), peer=0, p2p=True) == 4
    assert int(read_trace(writer.box.path).calls[3]["p2p_seq"]) == 2


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)"), True),
        (TimeoutError(), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), False),
        (KeyError("timeout"), False),
    ],
)
def test_timeouts_are_told_from_other_errors(error: Exception, answer: bool) -> None:
    """By type, or by the words that torch's backends use."""
    assert is_timeout(error) is answer


def _own_timeout(rank: int, world: int) -> None:
    allranks.record()
    dist.monitored_barrier(timeout=timedelta(seconds=17))
    dist.all_reduce(torch.ones(1))


def test_the_timeout_of_the_call_or_of_its_group_is_recorded(folder: Path) -> None:
    """A call's own timeout wins."""
    with Ranks(_own_timeout, 2, timeout_s=21) as ranks:
        ranks.values()
    trace = traces(folder)[0]
    assert ops(trace) == ["monitored_barrier", "all_reduce"]
    assert [int(value) for value in trace.calls["timeout_ms"]] == [17_000, 21_000]
