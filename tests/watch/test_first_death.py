"""Which deaths are the program's own, and which only follow another's."""

from __future__ import annotations

import pytest

from allranks.watch.exits import find_deaths

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
    assert death.echo is follows
