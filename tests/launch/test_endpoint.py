"""Where a c10d rendezvous is held: told from the port alone, and waited for only as long as allowed."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from tests.ports import held_port

from allranks.launch.torchrun_patches import port_state, split, wait_for_host
from allranks.launch.whole_job import explain


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("node1:1234", ("node1", 1234)),
        ("node1", ("node1", 29400)),
        ("[::1]:1234", ("::1", 1234)),
        ("[::1]", ("::1", 29400)),
        ("", ("localhost", 29400)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, place: tuple[str, int]) -> None:
    """Without a port it is torchrun's."""
    assert split(endpoint) == place


def test_a_port_of_this_machine_is_free_or_held_and_others_are_elsewhere() -> None:
    """The last one is an address that no machine may have."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert port_state(f"127.0.0.1:{server.getsockname()[1]}") == "used"
    assert port_state(f"127.0.0.1:{held_port()}") == "free"
    assert port_state("192.0.2.1:29400") == "elsewhere"


def test_a_host_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    """A name that nobody has; a port here needs no wait."""
    assert not wait_for_host("no-such-host.invalid:29400", time.monotonic() + 0.1)
    assert wait_for_host(f"127.0.0.1:{held_port()}", time.monotonic())


def test_a_host_elsewhere_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts to listen while we wait. (Every address of this machine can be bound: that one is ours is hidden.)"""
    port = held_port()
    monkeypatch.setattr("allranks.launch.torchrun_patches.port_state", lambda endpoint: "elsewhere")
    found: list[bool] = []
    waiting = threading.Thread(
        target=lambda: found.append(wait_for_host(f"127.0.0.1:{port}", time.monotonic() + 60))
    )
    waiting.start()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(60)
    assert found == [True]


@pytest.mark.parametrize(
    "problem", [ConnectionRefusedError("connection refused"), TimeoutError("not in time")]
)
def test_the_password_of_an_endpoint_is_not_shown(problem: Exception) -> None:
    error = explain(problem, endpoint="http://root:S3CRET@node1:2379,root:S3CRET@node2:2379", run_id="job")
    assert "node1:2379,node2:2379" in str(error) and "S3CRET" not in f"{error} {error.hint}"
