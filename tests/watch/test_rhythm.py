"""The rhythm of recorded calls: how long a rank usually stays where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from allranks.model.trace import CALL, Flag
from allranks.watch.samples import Rhythm, measure_rhythm, read_rhythm


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
