"""The debug log says where the time of a regroup went: for a death and for a rejoin, in every member."""

import logging
import re

import pytest

from allranks.manager.groups.generation import RegroupTimes


def test_parts_are_listed_in_order_of_time_and_only_the_first_of_a_repeated_one():
    times = RegroupTimes(wanted=True, quorum=3)
    times.mark("quorum requested")
    times.mark_first("launched")
    times.mark_first("launched")
    assert re.fullmatch(r"quorum requested \d+, launched \d+", times.parts())


@pytest.mark.parametrize(("quorum", "lines"), [(0, 0), (4, 1)])
def test_a_line_is_logged_only_when_a_group_was_made_since_the_last_commit(quorum, lines, caplog):
    caplog.set_level(logging.DEBUG, "allranks.manager")
    times = RegroupTimes(quorum=quorum)
    times.mark("committed")
    times.log_if_regrouped(7)
    assert len(caplog.records) == lines
