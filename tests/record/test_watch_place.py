"""Where an uncaught exception is located in the black box's closing message."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from allranks.blackbox.header import read_header
from allranks.errors import InputError
from allranks.recording.side_thread import _of_worker, user_line


def test_an_exception_raised_inside_our_own_code_is_located_at_the_users_line(tmp_path: Path) -> None:
    """The wrappers around a collective are on every traceback; nobody can fix anything there."""
    with pytest.raises(InputError) as caught:
        read_header(tmp_path / "no.box")
    assert any("allranks" in str(entry.path) for entry in caught.traceback[1:])
    line = caught.traceback[0].lineno + 1
    assert user_line(caught.tb) == f"test_watch_place.py:{line}"


def _read(shard: str) -> None:
    raise OSError(f"{shard}: unexpected end of file")


def test_what_a_dataloader_worker_raised_is_located_in_the_dataset() -> None:
    """It was "Caught OSError in DataLoader worker process 0." at the line of the loop, and half a traceback."""
    try:
        _read("shard-17.tar")
    except OSError:
        again = ExceptionWrapper(where="in DataLoader worker process 0")  # how torch brings it to the rank
    with pytest.raises(OSError, match="Original Traceback") as caught:
        again.reraise()
    place = f"test_watch_place.py:{_read.__code__.co_firstlineno + 1}"
    text = "shard-17.tar: unexpected end of file (in DataLoader worker process 0)"
    assert _of_worker(str(caught.value)) == (place, text)
    assert _of_worker("shard-17.tar: unexpected end of file") is None
