"""Dumps in two formats with stacks beside them: one attempt, and the stacks are used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.load import LoadOptions, load_paths

CASE = Path(__file__).parent / "stacks_beside"


def test_the_same_dumps_in_two_formats_are_one_attempt_and_the_telling_one_wins() -> None:
    """Pickles hold stacks, JSON does not; both end at the same moment."""
    result = load_paths([str(CASE)], LoadOptions())
    assert len(result.attempts) == 1
    assert [trace.kind.split()[1] for trace in result.traces] == ["pickle"] * 4


def test_tracebacks_beside_dumps_say_where_the_guilty_rank_is(capsys: pytest.CaptureFixture[str]) -> None:
    """stack_2.txt is what faulthandler wrote of rank 2."""
    assert main(["diagnose", str(CASE), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["cause"], verdict["ranks"]) == ("stuck_before_collective", [2])
    assert verdict["where"] == "case.py:5 in slow_data_loader"
