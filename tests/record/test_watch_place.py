"""Where an uncaught exception is located in the black box's closing message."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.blackbox.header import read_header
from allranks.errors import InputError
from allranks.record.side_thread import _place


def test_an_exception_raised_inside_our_own_code_is_located_at_the_users_line(tmp_path: Path) -> None:
    """The wrappers around a collective are on every traceback; nobody can fix anything there."""
    with pytest.raises(InputError) as caught:
        read_header(tmp_path / "no.box")
    assert any("allranks" in str(entry.path) for entry in caught.traceback[1:])
    line = caught.traceback[0].lineno + 1
    assert _place(caught.tb) == f" (test_watch_place.py:{line})"
