"""Fault plans: what is read, what is decided, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.cli.drill import find_size
from allranks.drill.plan import DrillFault, make_plan, read_plan
from allranks.drill.run import is_right, match_incidents
from allranks.errors import InputError


def test_a_plan_is_read_from_yaml_and_json(tmp_path: Path) -> None:
    """Both notations give the same plan."""
    (tmp_path / "a.yaml").write_text("seed: 3\nfaults:\n  - {kind: kill, rank: 1, at_step: 12}\n")
    (tmp_path / "a.json").write_text('{"seed": 3, "faults": [{"kind": "kill", "rank": 1, "at_step": 12}]}')
    plan = read_plan(tmp_path / "a.yaml")
    assert plan == read_plan(tmp_path / "a.json")
    assert plan.faults == (DrillFault("kill", 1, 12),)


def test_random_choices_are_decided_by_the_seed() -> None:
    """The same seed gives the same plan; ranks and steps stay in range."""
    content = {"seed": 5, "faults": [{"kind": "hang", "replica": "random", "at_step": [10, 20]}] * 20}
    plan = make_plan(content, ranks=8, ranks_per_replica=2)
    assert plan == make_plan(content, ranks=8, ranks_per_replica=2)
    assert {fault.rank for fault in plan.faults} <= {0, 2, 4, 6}
    assert len({fault.rank for fault in plan.faults}) > 1
    assert all(10 <= fault.at_step <= 20 for fault in plan.faults)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "Expected `object`, got `array`"),
        ({"faults": [{"kind": "explode", "rank": 0}]}, "unknown kind 'explode'"),
        ({"faults": [{"kind": "kill"}]}, "give either rank or replica"),
        ({"faults": [{"kind": "kill", "rank": 0, "replica": 0}]}, "give either rank or replica"),
        ({"faults": [{"kind": "kill", "rank": 9}]}, "rank 9 does not exist in a job of 4"),
        ({"faults": [{"kind": "kill", "rank": 0, "at_step": [5, 1]}]}, "at_step must be"),
        ({"faults": [{"kind": "kill", "rank": 0, "for_s": -1}]}, r"faults\[0\].for_s"),
        ({"faults": [{"kind": "kill", "rank": 0, "when": 1}]}, "unknown field `when`"),
        ({"seed": "x", "faults": []}, r"Expected `int`, got `str` - at `\$.seed`"),
    ],
)
def test_mistakes_are_named_with_their_place(content: object, message: str) -> None:
    """Nothing is silently ignored."""
    with pytest.raises(InputError, match=message):
        make_plan(content, ranks=4)


def test_random_without_a_size_is_refused() -> None:
    """A rank cannot be drawn from an unknown number."""
    with pytest.raises(InputError, match="needs the number of ranks"):
        make_plan({"faults": [{"kind": "kill", "rank": "random"}]})


def test_the_size_of_a_job_is_read_from_its_command() -> None:
    """Replica mode and whole-job mode."""
    assert find_size(["allranks", "run", "--replicas", "4", "--nproc-per-replica=2", "x.py"]) == (8, 2)
    assert find_size(["allranks", "run", "--nproc_per_node=3", "x.py"]) == (3, 1)
    assert find_size(["train.py"]) == (None, 1)


def test_an_incident_belongs_to_the_fault_that_it_names() -> None:
    """A cut connection was survived without an incident; the exit later is not blamed on it. A wrong verdict counts."""
    faults = [DrillFault("partition", 2, 10), DrillFault("exit", 0, 20), DrillFault("hang", 1, 30)]
    death = {
        "id": "a",
        "kind": "death",
        "opened": 205.0,
        "timeline": [],
        "verdict": {"cause": "rank_died", "ranks": [0]},
    }
    wrong = {
        "id": "b",
        "kind": "hang",
        "opened": 310.0,
        "timeline": [],
        "verdict": {"cause": "missing_rank", "ranks": [2]},
    }
    matched = match_incidents(faults, [100.0, 200.0, 300.0], [death])
    assert {index: incident["id"] for index, incident in matched.items()} == {1: "a"}
    matched = match_incidents(faults[1:], [200.0, 300.0], [death, wrong])
    assert {index: incident["id"] for index, incident in matched.items()} == {0: "a", 1: "b"}
    assert not is_right(faults[2], wrong["verdict"])
    assert match_incidents(faults, [None, None, None], [death]) == {}
