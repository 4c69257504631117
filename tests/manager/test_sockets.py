"""Sockets that a forked child lets go of."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from allranks.manager.groups.gloo import SocketSet


def test_a_child_closes_only_descriptors_that_are_still_those_sockets(tmp_path: Path) -> None:
    """A number may have become another file's since: closing that would lose somebody's data."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    reused, kept = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    with listener, kept:
        held = SocketSet()
        held.take((), (port,))
        number = reused.detach()
        file = os.open(tmp_path / "data", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        held.close_in_child()
        assert os.write(number, b"safe") == 4
        os.close(number)
        os.close(file)
        try:
            os.fstat(kept.fileno())
            raise AssertionError("the other connection is still open in the child")
        except OSError:
            kept.detach()
    assert (tmp_path / "data").read_bytes() == b"safe"
