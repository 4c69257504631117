"""Waiting for a raw operation in slices of time: decisions without a process group."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch

from allranks.errors import GroupAborted
from allranks.manager.groups.nccl import environment
from allranks.manager.work import result_or_default, wait_on_device, wait_while


class Slow:
    """A work that ends right after a slice of waiting has timed out, well or with an error."""

    def __init__(self, error: str = "", ends: bool = True) -> None:
        self.error, self.ends, self.done, self.waits = error, ends, False, 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if not self.done:
            self.done = self.ends
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.done


def test_an_operation_that_ends_as_its_slice_runs_out_has_not_failed() -> None:
    """On a loaded machine this happened every minute and cost a step and a quorum each time."""
    work = Slow()
    wait_while(work, lambda: True)
    assert work.waits == 2


def test_an_operation_that_failed_tells_its_own_error() -> None:
    """Not the one of the slice that ran out."""
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_while(Slow("Connection closed by peer"), lambda: True)


def test_an_operation_of_a_broken_group_is_given_up() -> None:
    """It does not end though its group is gone."""
    with pytest.raises(GroupAborted):
        wait_while(Slow(ends=False), lambda: False)


def test_an_operation_whose_peer_has_closed_its_connection_is_given_up() -> None:
    """gloo does not always notice; the group itself is not known to be broken yet."""
    with pytest.raises(GroupAborted):
        wait_while(Slow(ends=False), lambda: True, gone=lambda: True)


def test_a_sure_future_holds_the_value_of_the_one_inside() -> None:
    """Nothing is reported when all went well."""
    inner: torch.futures.Future[int] = torch.futures.Future()
    told: list[Exception] = []
    outer = result_or_default(inner, 0, 30.0, told.append)
    inner.set_result(5)
    assert (outer.wait(), told) == (5, [])


def test_a_sure_future_holds_the_default_after_an_error() -> None:
    """And the error is reported once."""
    inner: torch.futures.Future[int] = torch.futures.Future()
    told: list[Exception] = []
    outer = result_or_default(inner, 7, 30.0, told.append)
    inner.set_exception(ValueError("broken"))
    assert outer.wait() == 7
    assert ["broken" in str(error) for error in told] == [True]


def test_a_sure_future_does_not_wait_for_one_that_never_comes() -> None:
    """Its limit makes it the default; what comes later changes nothing."""
    inner: torch.futures.Future[int] = torch.futures.Future()
    told: list[Exception] = []
    outer = result_or_default(inner, 7, 0.01, told.append)
    assert outer.wait() == 7
    inner.set_result(5)
    assert [type(error) for error in told] == [TimeoutError]


def test_variables_of_an_abandoned_making_stay_until_the_next_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at once, the first one ends first; what the user has set is neither changed nor taken away."""
    monkeypatch.setenv("ALLRANKS_TEST_HIS", "his")
    monkeypatch.delenv("ALLRANKS_TEST_OURS", raising=False)
    values = {"ALLRANKS_TEST_HIS": "ours", "ALLRANKS_TEST_OURS": "1"}
    with ExitStack() as second:
        with environment(values):
            second.enter_context(environment(values))
        assert (os.environ["ALLRANKS_TEST_HIS"], os.environ["ALLRANKS_TEST_OURS"]) == ("his", "1")
    assert os.environ["ALLRANKS_TEST_HIS"] == "his"
    assert "ALLRANKS_TEST_OURS" not in os.environ


class OnDevice:
    """A work of NCCL while its communicator is aborted: anyone who asks it for its end is kept waiting."""

    def __init__(self) -> None:
        self.ordered = False

    def wait(self) -> bool:
        self.ordered = True  # of the streams, at once
        return True

    def is_completed(self) -> bool:
        raise AssertionError("it was asked for its end")


@pytest.mark.parametrize(
    ("passes_after", "breaks_after", "given_up"), [(3, None, False), (None, 2, True), (3, 3, True)]
)
def test_a_work_on_a_device_is_waited_for_by_its_stream(
    monkeypatch: pytest.MonkeyPatch, passes_after: int | None, breaks_after: int | None, given_up: bool
) -> None:
    """It is there when the stream has passed, and given up when its group breaks, before or at that moment."""
    looks = 0

    class Event:
        def record(self) -> None:
            assert work.ordered

        def query(self) -> bool:
            nonlocal looks
            looks += 1
            return passes_after is not None and looks >= passes_after

    monkeypatch.setattr(torch.cuda, "Event", Event)
    work = OnDevice()
    usable = lambda: breaks_after is None or looks < breaks_after  # noqa: E731
    if given_up:
        with pytest.raises(GroupAborted):
            wait_on_device(work, usable)
    else:
        wait_on_device(work, usable)
    assert looks == (breaks_after if given_up else passes_after)
