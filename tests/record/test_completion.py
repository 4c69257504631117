"""How a call ends: completed, failed, timed out, or not yet; noticed without blocking."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.blackbox.header import read_header
from allranks.blackbox.reader import read_trace
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.model.trace import Flag, State
from allranks.recording import torch_internals as internals
from allranks.recording.writer import GroupState, is_timeout

from .boxes import LateWork, Methods, make_writer, ops, states, traces


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


def test_a_call_that_timed_out_is_not_completed_and_leaves_a_dump(folder: Path, tmp_path: Path) -> None:
    """The rank that waited in vain says so in its box, and writes a dump at that moment."""
    with Ranks(_times_out, 2, (str(tmp_path / "gave up"),), timeout_s=3) as ranks:
        outcomes = ranks.join(timeout_s=60)
    assert "imed out" in outcomes[0].value  # the fault fired
    found = traces(folder)
    assert states(found[0]) == [State.COMPLETED, State.TIMED_OUT]
    assert states(found[1]) == [State.COMPLETED]
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


def test_a_wait_with_a_limit_of_its_own_does_not_end_the_call(folder: Path, tmp_path: Path) -> None:
    """Rank 0 looks twice, in vain; the call continues and completes, and nothing was dumped for a timeout."""
    with Ranks(_waits_in_slices, 2, (str(tmp_path / "sliced"),), timeout_s=30) as ranks:
        ranks.join(timeout_s=60)
    assert (tmp_path / "sliced").exists()  # the fault fired
    for trace in traces(folder).values():
        assert states(trace) == [State.COMPLETED, State.COMPLETED]
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


def test_a_call_whose_peer_died_has_failed(folder: Path) -> None:
    """Failed, not completed, not timed out."""
    with Ranks(_peer_dies, 2, timeout_s=30) as ranks:
        ranks.wait_for("ready")
        ranks.kill(1)
        outcomes = ranks.join(timeout_s=60)
    assert outcomes[1].exit_code == -signal.SIGKILL  # the fault fired
    assert outcomes[0].exit_code == 0, outcomes[0].error
    assert states(traces(folder)[0]) == [State.COMPLETED, State.FAILED]


def _never_waited(rank: int, world: int) -> None:
    recorder = allranks.record()
    assert recorder.path is not None
    work = dist.all_reduce(torch.ones(1), async_op=True)
    path = recorder.path
    _wait_until(lambda: read_header(path).calls_completed == 1)  # only the side thread can notice
    assert recorder.writer is not None
    assert not recorder.writer.pending  # and the work, with its tensors, is let go
    work.wait()


def test_a_call_that_nobody_waits_for_is_noticed_by_the_side_thread(folder: Path) -> None:
    """Completion needs no help from the program."""
    with Ranks(_never_waited, 2) as ranks:
        ranks.values()
    assert states(traces(folder)[0]) == [State.COMPLETED]


def _hangs(rank: int, world: int) -> None:
    allranks.record()
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        reached("entering")
        dist.all_reduce(torch.ones(2))
    time.sleep(60)


def test_a_hanging_call_is_started_and_not_over(folder: Path) -> None:
    """Read from outside while it hangs."""
    with Ranks(_hangs, 2) as ranks:
        ranks.wait_for("entering", [0])
        _wait_until(lambda: states(traces(folder)[0])[1:] == [State.STARTED])
        trace = traces(folder)[0]
        assert int(trace.calls[-1]["completed_ns"]) == 0
        assert trace.progress.calls_started == 2
        assert trace.progress.calls_completed == 1


def test_calls_that_end_in_any_order_are_all_noticed(tmp_path: Path) -> None:
    """A call that never ends does not hide the ends of later ones."""
    writer = make_writer(tmp_path)
    group = GroupState(1, "g", (0,), "nccl", 0)
    works = [LateWork() for _ in range(5)]
    for work in works:
        writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    works[3].over = True
    works[1].error = RuntimeError("NCCL timeout")
    works[2].error = ValueError("NCCL communicator was aborted")
    writer.sweep(everything=True)
    found = states(read_trace(writer.box.path))
    assert found == [State.SCHEDULED, State.TIMED_OUT, State.FAILED, State.COMPLETED, State.SCHEDULED]
    assert len(writer.pending) == 2


def test_works_that_never_say_that_they_are_over_are_let_go(tmp_path: Path) -> None:
    """No more of them are kept than there are rows to write their end to."""
    writer = make_writer(tmp_path)
    group = GroupState(1, "g", (0,), "nccl", 0)
    works = [LateWork() for _ in range(500)]
    for work in works:
        writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    writer.sweep(everything=True)
    assert len(writer.pending) == writer.box.capacity


def test_nothing_is_asked_of_cuda_while_a_graph_is_captured(tmp_path: Path) -> None:
    """Querying an event would spoil the capture."""
    writer = make_writer(tmp_path)
    group = GroupState(1, "g", (0,), "nccl", 0)
    work = LateWork()
    work.error = AssertionError("asked")
    writer.track(work, writer.begin(group, 1, (0, 0, 0)), group)
    writer.begin_capture()
    writer.sweep(everything=True)
    assert len(writer.pending) == 1
    methods = Methods(writer, group)
    for answer in (LateWork(), None):
        methods.send(lambda *args, answer=answer: answer)(0, 1)
    assert len(writer.pending) == 1  # captured calls are not followed
    trace = read_trace(writer.box.path)
    assert [bool(int(row["flags"]) & Flag.CAPTURED) for row in trace.calls] == [False, True, True]
    assert set(states(trace)) == {State.SCHEDULED}


class _Graph:
    """What torch calls of CUDA to capture a graph. At its end torch 2.15 calls the last two, older ones `capture_end`."""

    def capture_begin(self, spoiled: bool = False) -> None:
        if spoiled:
            raise RuntimeError("on the default stream")

    def capture_end(self) -> None: ...
    def capture_end_pre(self) -> None: ...
    def capture_end_post(self) -> None: ...


@pytest.mark.parametrize("last", ["capture_end", "capture_end_pre", "capture_begin"])
def test_after_a_capture_the_ends_of_calls_are_noticed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """However it ends: as torch ends it, as torch ended it before, or before it has begun."""
    monkeypatch.setattr(torch._C, "_CUDAGraph", _Graph, raising=False)
    recorder, graph = allranks.record(), _Graph()
    try:
        assert recorder.writer is not None
        ring = recorder.writer.ring
        if last == "capture_begin":
            with pytest.raises(RuntimeError):
                graph.capture_begin(True)
        else:
            graph.capture_begin()
            assert ring.capturing == 1
            getattr(graph, last)()
        assert ring.capturing == 0
    finally:
        recorder.close()


def test_every_way_to_end_a_capture_is_known() -> None:
    graph = internals.cuda_graph()
    if graph is None:
        pytest.skip("this torch has no CUDA")
    assert {name for name in vars(graph) if name.startswith("capture_")} <= {
        "capture_begin",
        *internals.CAPTURE_ENDS,
        "capture_end_post",  # after capture_end_pre
    }


class _Asked(LateWork):
    """A Work whose question takes until it is told to answer."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order, self.entered, self.answer = order, threading.Event(), threading.Event()

    def is_completed(self) -> bool:
        self.entered.set()
        assert self.answer.wait(30)
        self.order.append("asked")
        return False


def test_a_capture_begins_only_after_a_question_that_is_under_way(tmp_path: Path) -> None:
    """The side thread may be asking an event at the very moment at which the program begins to capture."""
    writer, order = make_writer(tmp_path), list[str]()
    group = GroupState(1, "g", (0,), "nccl", 0)
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
    _wait_until(lambda: writer.ring.capturing == 1)
    works[0].answer.set()
    for thread in threads:
        thread.join(30)
    assert order == ["asked", "captured"]  # and the second work was not asked at all


def test_in_a_group_with_two_backends_the_tensor_decides_what_wait_means(tmp_path: Path) -> None:
    """Calls on CPU tensors of "cpu:gloo,cuda:nccl" end with wait(); the others when the device says so."""
    writer = make_writer(tmp_path)
    group = GroupState(1, "g", (0,), "cpu:gloo,cuda:nccl", 0)
    send = Methods(writer, group).send(lambda *args: LateWork())
    for count in (1, 0):  # a list without tensors is not on the CPU
        send(0, count)
    writer.ring.hand_over(writer.pending)
    assert [entry[2].blocking for entry in writer.pending.values()] == [True, True]
    assert states(read_trace(writer.box.path)) == [State.STARTED, State.STARTED]


def test_a_coalesced_group_ends_as_a_whole(tmp_path: Path) -> None:
    """Its parts share one number, are marked as parts, and end with it."""
    writer = make_writer(tmp_path)
    group = GroupState(1, "g", (0, 1), "nccl", 0)
    work = LateWork()
    methods = Methods(writer, group)
    send, (start, end) = methods.send(lambda *args: LateWork()), methods.batch(lambda group: work)
    start()
    for peer in (0, 1):
        send(peer, 1)
    assert not writer.pending
    assert end() is work
    before = read_trace(writer.box.path)
    assert set(states(before)) == {State.SCHEDULED}
    work.over = True
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert set(states(trace)) == {State.COMPLETED}
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
