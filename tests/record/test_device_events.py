"""How calls on a device end: events of CUDA's driver, recorded and asked from C."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest

from allranks.blackbox.reader import read_trace
from allranks.model.trace import State
from allranks.recording import _fast
from allranks.recording.writer import CallWriter, GroupState

from .boxes import LateWork, Methods, make_writer, states


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


def _marking(tmp_path: Path, driver: _Driver) -> tuple[CallWriter, Methods]:
    writer = make_writer(tmp_path)
    writer.markers = _fast.Markers(writer.ring, *driver.parts)
    return writer, Methods(writer, GroupState(1, "g", (0, 1), "nccl", 0))


def test_events_of_the_driver_follow_calls_without_a_work(tmp_path: Path, driver: _Driver) -> None:
    """Each call is over when the device has passed its event, in any order; events are used again."""
    writer, methods = _marking(tmp_path, driver)
    send = methods.send(lambda *args: None)
    for _ in range(3):
        assert send(1, 7) is None
    assert [stream for _, stream in driver.recorded] == [0xABC3] * 3
    first, second, third = (event for event, _ in driver.recorded)
    writer.sweep(everything=True)
    assert states(read_trace(writer.box.path)) == [State.SCHEDULED] * 3
    driver.answers.update({first: 0, third: 0})
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert states(trace) == [State.COMPLETED, State.SCHEDULED, State.COMPLETED]
    assert trace.progress.calls_completed == 2
    driver.answers[second] = 700  # the device is broken
    writer.sweep(everything=True)
    assert states(read_trace(writer.box.path)) == [State.COMPLETED, State.FAILED, State.COMPLETED]
    assert len(writer.markers) == 0
    made = driver.created
    send(1, 7)
    assert driver.created == made and driver.recorded[-1][0] in {first, second, third}


def test_a_work_that_was_waited_for_in_c_is_let_go_and_its_event_followed(
    tmp_path: Path, driver: _Driver
) -> None:
    """The call made last and those before it, whatever their order; a wait that fails is a failed call."""
    writer, methods = _marking(tmp_path, driver)
    works = [LateWork() for _ in range(4)]
    send = methods.send(lambda *args: works[writer.box.get("next_id") - 1])

    def original(work: LateWork) -> bool:
        if work.error is not None:
            raise work.error
        return True

    wait = methods.wait(original)
    for _ in works:
        send(1, 7)
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
    assert states(trace) == [State.COMPLETED, State.FAILED, State.COMPLETED, State.COMPLETED]
    assert trace.progress.calls_completed == 3


def test_a_batch_in_c_ends_with_its_work_its_event_or_its_error(tmp_path: Path, driver: _Driver) -> None:
    """Its row stands for its parts, however the library answers; the next call is none of them."""
    writer, methods = _marking(tmp_path, driver)
    send = methods.send(lambda *args: None)
    answers: list[Any] = [LateWork(), None, RuntimeError("broken")]

    def finish(*args: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    start, end = methods.batch(finish)
    wait = methods.wait()

    def batch() -> Any:
        start()
        send(1, 7)
        send(1, 7)
        return end()

    wait(batch())
    assert batch() is None
    with pytest.raises(RuntimeError, match="broken"):
        batch()
    send(1, 7)
    assert len(driver.recorded) == 3 and not writer.pending
    driver.answers.update({driver.recorded[0][0]: 0, driver.recorded[1][0]: 0})
    writer.sweep(everything=True)
    trace = read_trace(writer.box.path)
    assert states(trace) == [State.COMPLETED] * 6 + [State.FAILED] * 3 + [State.SCHEDULED]
    assert [int(row["flags"]) & 7 for row in trace.calls] == [3, 3, 5] * 3 + [1]
    assert [int(row["p2p_seq"]) for row in trace.calls] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert trace.progress.calls_completed == 2


def test_no_event_is_recorded_or_asked_while_a_graph_is_captured(tmp_path: Path, driver: _Driver) -> None:
    """Neither one that our hooks have seen, nor one that only the stream knows of."""
    writer, methods = _marking(tmp_path, driver)
    send = methods.send(lambda *args: None)
    send(1, 7)
    driver.asked.clear()
    writer.begin_capture()
    send(1, 7)
    writer.sweep(everything=True)
    assert (len(driver.recorded), driver.asked) == (1, [])
    writer.end_capture()
    driver.capturing = 1
    send(1, 7)  # nothing will tell when it ends
    assert len(driver.recorded) == 1
    driver.capturing, driver.answers = 0, dict.fromkeys(driver.answers, 0)
    writer.sweep(everything=True)
    assert states(read_trace(writer.box.path)) == [State.COMPLETED, State.SCHEDULED, State.COMPLETED]
