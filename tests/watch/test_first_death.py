"""Which deaths are the program's own, and which only follow another's."""

from __future__ import annotations

import pytest

from allranks.watch.exits import Ending, find_deaths, find_first

from .test_silence import sample


@pytest.mark.parametrize(
    ("said", "follows"),
    [
        ("exception: RuntimeError: gloo: Connection closed by peer", True),
        ("exception: DistBackendError: NCCL error: remote process exited", True),
        (
            "exception: TypeError (train.py:9): incompatible arguments: <ProcessGroupNCCL object at 0x7f>",
            False,
        ),
        ("exception: FileNotFoundError (data.py:3): /data/socket", False),
        ("exception: DistNetworkError (t.py:5): The server socket has failed to listen: EADDRINUSE", False),
    ],
)
def test_an_error_of_the_program_is_no_broken_connection_whatever_its_text_names(
    said: str, follows: bool
) -> None:
    """A TypeError that mentions NCCL was taken for the end of a peer, and the job was restarted for ever."""
    (death,) = find_deaths([sample(0, 3, closed=said, closed_ns=5)], {}, since_ns=0)
    assert death.secondary is follows


def test_a_rank_that_left_with_code_zero_is_named_when_the_others_lost_it() -> None:
    """os._exit(0) of one rank was "connections between ranks broke and no rank had died before"."""
    left, lost = (
        sample(1, 3, alive=False),
        sample(0, 3, closed="exception: RuntimeError (t.py:5): Connection reset by peer"),
    )
    endings = {left.pid: Ending(left.pid, 0, 4.0)}
    assert find_deaths([left, sample(0, 3)], endings, since_ns=0) == []
    first = find_first(find_deaths([left, lost], endings, since_ns=0))
    assert first is not None and (first.rank, first.secondary) == (1, False)
    assert first.sentence == "rank 1 exited with code 0 while the others needed it (os._exit)"
    own = sample(0, 3, closed="exception: ValueError (t.py:5): no such label", closed_ns=5)
    assert [death.rank for death in find_deaths([left, own], endings, since_ns=0)] == [0]


def test_a_refused_connection_of_the_program_is_not_one_between_ranks() -> None:
    """The program's own service did not answer; torch raises RuntimeError and its own errors."""
    said = "exception: {} (fetch.py:9): Connection refused"
    for kind, of_torch in (
        ("ConnectionRefusedError", False),
        ("RuntimeError", True),
        ("DistNetworkError", True),
    ):
        (death,) = find_deaths([sample(0, 3, closed=said.format(kind))], {}, since_ns=0)
        assert death.secondary and death.of_torch is of_torch


def test_a_wait_that_timed_out_is_not_called_a_broken_connection() -> None:
    """A store without the key, or a collective without a rank: all connections are there."""
    said = "exception: DistStoreError (job.py:13): {}"
    losses = {
        text: find_deaths([sample(0, 3, closed=said.format(text), closed_ns=5)], {}, since_ns=0)[0].loss
        for text in (
            "wait timeout after 300000ms, keys: /0/0",
            "Timed out waiting 1800000ms",
            "Connection reset by peer",
        )
    }
    assert list(losses.values()) == [
        *["a wait for other ranks timed out"] * 2,
        "connections between ranks broke",
    ]
