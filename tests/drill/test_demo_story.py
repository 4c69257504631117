"""The demo follows the job's log: it ends when it has heard of both faults."""

from __future__ import annotations

import pytest

from allranks.drill.demo import notable


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[allranks 10:00:00] 20261115-100000: Rank 1 died of SIGKILL; story: /x/story.html", "kill -9: Rank 1 died of SIGKILL"),
        ("[allranks 10:00:00] 20261115-100000: Rank 2 (vm) never entered it; story: /x", "verdict: Rank 2 (vm) never entered it"),
    ],
)  # fmt: skip
def test_the_lines_of_incidents_are_recognised(line: str, shown: str) -> None:
    """A death that is not recognised lets the demo train for ever."""
    assert [text for _, text in notable(line)] == [shown]
