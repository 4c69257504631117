"""Looking up the lighthouse's name: never on the thread that beats and listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from allranks.lighthouse.client.link import resolve
from allranks.lighthouse.client.reactor import Reactor


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
    real, answered = socket.getaddrinfo, threading.Event()

    def hangs(host: str, *rest: Any, flags: int = 0, **options: Any) -> Any:
        if host == "lighthouse.example" and not flags & socket.AI_NUMERICHOST:
            assert answered.wait(30)
            host = "127.0.0.1"
        return real(host, *rest, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    found: list[Any] = []
    went_on, told = threading.Event(), threading.Event()

    def tell(what: Any) -> None:
        found.append((what, threading.current_thread().name))
        told.set()

    reactor.call(lambda: resolve("lighthouse.example:29510", reactor, tell) and None)
    reactor.call(went_on.set)
    assert went_on.wait(20) and not told.is_set()
    answered.set()
    assert told.wait(20)
    ((_, target), thread) = found[0]
    assert target == ("127.0.0.1", 29510) and thread != "allranks-resolve"


@pytest.mark.parametrize("address", ["127.0.0.1:29510", "[::1]:29510"])
def test_numbers_need_no_thread(reactor: Reactor, address: str) -> None:
    found: list[Any] = []
    assert resolve(address, reactor, found.append) is None
    ((_, target),) = found
    assert target[1] == 29510
