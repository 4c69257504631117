"""Looking up the lighthouse's name: never on the thread that beats and listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from allranks.lighthouse.client.link import Link
from allranks.lighthouse.client.options import ClientOptions
from allranks.lighthouse.client.reactor import Reactor
from allranks.lighthouse.messages import PREAMBLE


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    """One that runs in a thread."""
    reactor = Reactor()
    reactor.open()
    thread = threading.Thread(target=reactor.run)
    thread.start()
    yield reactor
    reactor.stop()
    thread.join(20)
    reactor.close()


def test_a_name_server_that_hangs_does_not_hold_up_the_reactor(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths are noticed and heartbeats sent while a name is looked up."""
    real, answered, went_on = socket.getaddrinfo, threading.Event(), threading.Event()

    def hangs(host: str, *rest: Any, **options: Any) -> Any:
        if host == "lighthouse.example":
            assert answered.wait(30)
            host = "127.0.0.1"
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        address = f"lighthouse.example:{listener.getsockname()[1]}"
        link = Link(ClientOptions((address,), replica="a"), reactor, lambda kind, payload: None)
        reactor.call(link.open)
        reactor.call(went_on.set)
        assert went_on.wait(20)
        answered.set()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(20)
            assert connection.recv(len(PREAMBLE), socket.MSG_WAITALL) == PREAMBLE
        reactor.call(link.close)
