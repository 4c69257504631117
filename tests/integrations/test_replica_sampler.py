"""Which samples a replica takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allranks.integrations.replica_sampler import ReplicaSampler, replica_number


def test_replicas_share_an_epoch_and_shuffle_the_next_one_anew() -> None:
    """Every sample once when it divides evenly; the same seed gives the same order."""
    parts = [ReplicaSampler(12, replica, 3, seed=5) for replica in range(3)]
    first, second = [[list(part) for part in parts] for _ in range(2)]
    assert sorted(index for part in first for index in part) == list(range(12))
    assert first != second
    assert list(ReplicaSampler(12, 1, 3, seed=5)) == first[1]


def test_an_epoch_that_does_not_divide_is_filled_up() -> None:
    """All replicas have the same number of samples, and nobody is left out."""
    parts = [list(ReplicaSampler(10, replica, 4, seed=0, shuffle=False)) for replica in range(4)]
    assert {len(part) for part in parts} == {3}
    assert {index for part in parts for index in part} == set(range(10))


def test_a_jump_moves_a_pass_that_has_begun() -> None:
    """After healing the order continues as if the replica had never been away."""
    whole = ReplicaSampler(8, 0, 2, seed=1)
    order = [*whole, *whole, *whole]
    late = ReplicaSampler(8, 0, 2, seed=1)
    running: Iterator[int] = iter(late)
    next(running)
    late.seek(1, 2)
    assert [*running][:3] == order[6:9]
    assert late.drawn == 4


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"REPLICA_GROUP_ID": "2", "NUM_REPLICA_GROUPS": "4"}, (2, 4)),
        ({"ALLRANKS_REPLICA": "replica-3", "NUM_REPLICA_GROUPS": "5"}, (3, 5)),
        ({"ALLRANKS_REPLICA": "trainer"}, (0, 1)),
        ({}, (0, 1)),
    ],
)
def test_the_launcher_says_which_replica_this_is(
    env: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`allranks run --replicas` and torchft's launchers."""
    for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "ALLRANKS_REPLICA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert replica_number() == expected
