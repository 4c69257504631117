"""The rhythm of recorded calls: how long a rank usually stays where it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from allranks.model.trace import CALL, Flag, Group, RankTrace, Rendezvous, State, TraceHeader
from allranks.watch.samples import (
    OpenCall,
    Rhythm,
    contradict,
    elsewhere,
    measure_rhythm,
    read_rhythm,
    unfinished,
)
from allranks.watch.silence import longest_pause


def calls(*places: tuple[int, float]) -> np.ndarray:
    """Calls at numbered places, each so many seconds after the one before."""
    rows = np.zeros(len(places), CALL)
    rows["begin"] = rows["end"] = np.arange(1, len(places) + 1)
    rows["stack"] = [place for place, _ in places]
    rows["flags"][:-1] = Flag.RETIRED  # the last one is still under way
    rows["created_ns"] = (np.cumsum([after for _, after in places]) * 1e9).astype(np.int64)
    return rows


def test_the_pauses_after_earlier_calls_at_the_same_place_are_known() -> None:
    """A bucket of DDP in every step, and something else in between."""
    found = measure_rhythm(calls((1, 0), (2, 0.1), (1, 0.5), (2, 0.2), (1, 0.5)))
    assert found.known
    assert found.pauses_s == pytest.approx((0.1, 0.2))


def test_a_place_that_was_never_passed_before_is_not_known() -> None:
    """The first step, and the first call of an evaluation after many steps."""
    assert not measure_rhythm(calls((1, 0), (2, 0.1), (3, 0.1))).known
    assert not measure_rhythm(calls(*[(1, 0.1)] * 50, (9, 0.1))).known


def test_an_unreadable_box_knows_nothing(tmp_path: Path) -> None:
    """Gone, empty, or no black box at all."""
    (tmp_path / "empty.box").write_bytes(b"")
    assert read_rhythm(str(tmp_path / "empty.box")) == read_rhythm(str(tmp_path / "gone.box")) == Rhythm()


def test_the_rhythm_is_read_from_a_recorders_black_box(tmp_path: Path) -> None:
    """As the agent does it, from the file."""
    from tests.boxes import write_box

    path = write_box(tmp_path, rank=0, step=-1, capacity=8, next_id=5, record_bytes=CALL.itemsize)
    rows = calls((1, 0), (2, 0.1), (1, 0.5), (2, 0.2), (1, 0.5))
    path.write_bytes(path.read_bytes().ljust(4096, b"\0") + rows.tobytes().ljust(8 * CALL.itemsize, b"\0"))
    assert read_rhythm(str(path)).known


def test_a_pause_longer_than_the_life_of_the_process_is_a_clock_that_was_set(tmp_path: Path) -> None:
    """Forward, back and forward again: two pauses of an hour, after which a hang was a stall for as long as anything may take."""
    from tests.boxes import write_box

    from allranks.blackbox.header import start_ticks

    ticks = start_ticks(os.getpid())
    path = write_box(
        tmp_path, rank=0, step=-1, capacity=8, next_id=7, record_bytes=CALL.itemsize, start_ticks=ticks
    )
    rows = calls((1, 0), (2, 3600), (1, 0.5), (2, 3600), (1, 0.5), (2, 0.1), (1, 0.5))
    path.write_bytes(path.read_bytes().ljust(4096, b"\0") + rows.tobytes().ljust(8 * CALL.itemsize, b"\0"))
    assert max(read_rhythm(str(path)).pauses_s) == pytest.approx(0.5)


WORLD = ("world", (0, 1))


def waits(*found: OpenCall) -> Rhythm:
    """A rank that waits in these."""
    return Rhythm(waits=frozenset(found))


def test_ranks_that_wait_in_different_calls_of_one_number_contradict_each_other() -> None:
    """A barrier in rank 0's callback, while DDP of the others reduces; several buckets may be under way."""
    reducing = waits(OpenCall(WORLD, 7, "all_reduce"), OpenCall(WORLD, 8, "all_reduce"))
    assert contradict([reducing, waits(OpenCall(WORLD, 7, "barrier"))])
    assert not contradict([reducing, waits(OpenCall(WORLD, 7, "all_reduce"))])
    assert not contradict([reducing, waits(OpenCall(WORLD, 9, "barrier"))])  # one is ahead
    assert not contradict([reducing, waits(OpenCall(("world", (2, 3)), 7, "barrier"))])  # of another group
    assert not contradict([])


def test_ranks_that_wait_in_init_process_group_for_others_elsewhere_contradict_each_other() -> None:
    """One has another port, or expects more ranks than were launched; two names may mean one host."""
    launched = Rendezvous("node-0:29500", 2)

    def meets(address: str, size: int) -> Rhythm:
        return Rhythm(meets=(Rendezvous(address, size), launched))

    usual = meets("node-0:29500", 2)
    assert contradict([usual, meets("node-0:29501", 2)])
    assert contradict([usual, meets("node-0:29500", 3)])
    assert contradict([meets("node-0:29500", 3), Rhythm()])  # the other has not come yet
    assert not contradict([usual, meets("10.0.0.1:29500", 2)])
    assert not contradict([usual, Rhythm()])


def test_only_collectives_that_have_not_ended_and_have_a_number_are_waits() -> None:
    """Messages, parts of batches and captured calls are left out."""
    rows = calls(*[(1, 0.1)] * 5)
    rows["group"], rows["op"], rows["seq"] = 1, 1, np.arange(1, 6)
    rows["state"] = [State.COMPLETED, State.STARTED, State.SCHEDULED, State.STARTED, State.FAILED]
    rows["flags"] = [0, Flag.P2P, 0, Flag.CAPTURED, 0]
    trace = RankTrace(TraceHeader(rank=0), rows, (Group(""), Group("world", ranks=(0, 1))), ("", "barrier"))
    assert unfinished(trace) == {OpenCall(WORLD, 3, "barrier")}


def test_the_rank_that_waits_for_nothing_of_a_group_is_elsewhere() -> None:
    """Ranks of two groups may be in their first calls at the same time; one of three whose call is a message is not."""
    three = OpenCall(("world", (0, 1, 2)), 1, "all_reduce")
    pairs = [OpenCall((f"tp{block}", (2 * block, 2 * block + 1)), 1, "all_reduce") for block in range(2)]
    assert not elsewhere([replace(waits(pairs[rank // 2]), rank=rank) for rank in range(4)])
    assert not elsewhere([replace(waits(three), rank=rank) for rank in range(3)])
    assert elsewhere([replace(waits(three), rank=0), Rhythm(rank=1), replace(waits(three), rank=2)])
    # rank 1 is on another node
    assert not elsewhere([replace(waits(three), rank=0), replace(waits(three), rank=2)])


def test_a_clock_that_is_set_forward_does_not_make_a_long_pause_usual() -> None:
    """One pause of an hour at one place is the clock's; a place that paused twice for long does so."""
    usual = Rhythm((0.1, 0.2, 3600.0))
    assert longest_pause((4.0,), [usual, Rhythm((9000.0,))]) == 4.0
    assert longest_pause((4.0,), [usual, Rhythm((0.1, 60.0, 70.0))]) == 60.0
