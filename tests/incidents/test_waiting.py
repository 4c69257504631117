"""Who waits for whom, as an agent tells it."""

from __future__ import annotations

from allranks.incidents.job_overview import who_waits
from pages.gallery import make_traces


def test_the_call_in_which_most_wait_is_told() -> None:
    """With those who wait and those they wait for."""
    assert who_waits(make_traces(4, 6)) == "ranks 0, 2, 3 wait for rank 1 in all_reduce #6 of default_pg"


def test_nobody_waits_when_all_are_there() -> None:
    """Also without any trace."""
    assert who_waits(make_traces(3, 6, stuck=9)) == ""
    assert who_waits([]) == ""
