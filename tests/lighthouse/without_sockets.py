"""A lighthouse's service without sockets, and clients of it, for tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from allranks.lighthouse.messages import Hello
from allranks.lighthouse.options import Options
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session


async def until(condition: Callable[[], bool]) -> None:
    """Waits for it; the test's own limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.002)


async def timers_until(seconds: float) -> None:
    """Waits until every timer that was set with at most this delay has fired."""
    fired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, fired.set_result, None)
    await fired


@dataclass
class FakePeer:
    """Keeps what it is sent."""

    address: str = "test"
    got: list[object] = field(default_factory=list)
    closed: bool = False

    def deliver(self, message: object, frame: bytes) -> None:
        assert frame
        self.got.append(message)

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.got if isinstance(each, kind)]


class Desk:
    """A service on the running loop, and clients of it."""

    def __init__(self, **options: Any) -> None:
        self.service = Service(Options(**options), asyncio.get_running_loop(), address="here")

    def enter(self, name: str, **values: Any) -> tuple[Session, FakePeer]:
        peer = FakePeer()
        session = self.service.hello(
            peer, Hello(replica=name, session=values.pop("session", f"{name}.1"), **values)
        )
        assert isinstance(session, Session)
        return session, peer

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an asynchronous test."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run
