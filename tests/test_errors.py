"""What people see of our exceptions."""

from __future__ import annotations

import sys
import traceback

import pytest

from allranks.errors import InputError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
def test_a_traceback_shows_the_hint_once_and_the_message_stays_as_it_is() -> None:
    """Nobody catches it: the fix is under the message."""
    error = InputError("there is no file x", hint="try y")
    shown = "".join(traceback.format_exception(error)).splitlines()
    assert shown == ["allranks.errors.InputError: there is no file x", "try y"]
    assert str(error) == "there is no file x"
