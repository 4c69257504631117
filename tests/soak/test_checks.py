"""The checks of the soak find what they are there for."""

from __future__ import annotations

from typing import Any

import pytest

from .checks import Changed, JobChecks, ReplicaChecks


def commit(step: int, digest: str = "", **row: Any) -> dict[str, Any]:
    base = {"kind": "commit", "pid": 1, "replica": "a", "step": step, "quorum": 1, "size": 1, "place": 0}
    made = {**base, "hash": digest or f"h{step}", **row}
    return {"summed": (made["quorum"], made["place"], made["size"]), **made}


def attempt(step: int, **row: Any) -> dict[str, Any]:
    return {"kind": "try", "pid": 1, "replica": "a", "step": step, "quorum": 1, "size": 1, "place": 0, **row}


GOOD = [attempt(0), commit(1), attempt(1), commit(2)]


def test_a_good_run_is_not_blamed() -> None:
    """Also with one that took the others' state over."""
    checks = ReplicaChecks()
    checks.take([*GOOD, commit(2, pid=3, replica="c", quorum=2, size=2, place=None)])
    checks.finish()
    assert checks.wrong == []


def test_the_share_of_a_member_that_dies_in_a_step_is_left_out_and_counted() -> None:
    """The others sum once more among themselves, in another quorum."""
    checks = ReplicaChecks()
    pair = [attempt(2, size=2), attempt(2, size=2, place=1, pid=2, replica="b")]
    checks.take([*GOOD, *pair, commit(3, size=2, summed=(2, 0, 1))])
    checks.finish()
    assert checks.wrong == []
    assert checks.changed == Changed(steps=1, samples=24, left_out=12, twice=0)


def test_one_that_began_by_the_new_number_of_members_may_use_samples_again() -> None:
    checks = ReplicaChecks()
    old = [attempt(2, size=2), commit(3, size=2, summed=(2, 0, 2))]
    new = [attempt(2, size=2, quorum=2, pid=2, replica="b", place=1)]
    checks.take([*GOOD, *old, *new, commit(3, pid=2, replica="b", quorum=2, size=2, place=1)])
    checks.finish()
    assert checks.wrong == [] and checks.changed == Changed(1, 24, 0, 0)
    checks.changed.add([(1, 2, 0), (2, 1, 0)])
    assert checks.changed == Changed(2, 48, 0, 12)


SECOND = {"pid": 2, "replica": "b"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([commit(2, "other", **SECOND)], "another state"),
        ([commit(5)], "committed step 5 after step 2"),
        ([attempt(3), commit(4, pid=2)], "steps were lost"),
        ([attempt(0, replica="b")], "two quorums of number 1"),
        ([commit(2, **SECOND, quorum=2)], "summed in several groups"),
        ([commit(2, **SECOND)], "one is taken twice"),
        ([commit(2, **SECOND, summed=(1, None, 1))], "one is taken twice"),
        ([attempt(2, size=2), commit(3, size=2)], "samples of places"),
        (
            [attempt(2, size=2), commit(3, size=2, summed=(2, 0, 2))],
            "2 gave their samples, only 1 + 0 began it",
        ),
    ],
)
def test_what_must_not_happen_is_named(rows: list[dict[str, Any]], words: str) -> None:
    checks = ReplicaChecks()
    checks.take([*GOOD, *rows])
    checks.finish()
    assert any(words in sentence for sentence in checks.wrong), checks.wrong


def test_a_restored_state_that_never_was_is_named() -> None:
    checks = JobChecks()
    rows = [{"kind": "step", "pid": 1, "replica": "0", "step": n, "hash": f"h{n}"} for n in range(1, 60)]
    checks.take(rows)
    checks.take([{"kind": "restored", "pid": 2, "replica": "0", "step": 40, "hash": "h40"}])
    checks.finish()
    assert checks.wrong == [] and checks.restores == 1
    checks.take([{"kind": "restored", "pid": 3, "replica": "0", "step": 40, "hash": "flipped"}])
    checks.take([{"kind": "start", "pid": 4, "replica": "0", "step": 0, "hash": "h0"}])
    assert len(checks.wrong) == 2
