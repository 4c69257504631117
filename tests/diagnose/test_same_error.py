"""All ranks raised the same error at the same line: that is the whole answer."""

from __future__ import annotations

from allranks.diagnosis.weak_findings import same_error

TEXT = "exception: RuntimeError (train.py:5): Could not find the default backend type 2 for Process Group with name nccl."


def test_one_error_of_all_ranks_is_said_as_such() -> None:
    found = same_error({0: TEXT, 1: TEXT})
    assert found is not None
    assert (found.cause, found.ranks, found.where) == ("call_error", (0, 1), "train.py:5")
    assert found.sentence.startswith(
        "all 2 ranks ended with the same error at the same line: RuntimeError (train.py:5)"
    )


def test_errors_that_differ_or_follow_from_a_death_are_not() -> None:
    other = TEXT.replace("train.py:5", "train.py:9").replace("RuntimeError", "ValueError")
    lost = "exception: RuntimeError (train.py:5): Connection closed by peer [127.0.0.1]:4242"
    assert same_error({0: TEXT, 1: other}) is None
    assert same_error({0: lost, 1: lost}) is None
    assert same_error({0: TEXT}) is None
