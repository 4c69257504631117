"""Fixtures of the lighthouse's tests: whatever they start is ended with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse

from .processes import LighthouseProcess, Proxy, Victim


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes things in reverse order."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def embedded(stack: ExitStack) -> Callable[..., Lighthouse]:
    """embedded(min_replicas=2, ...) starts a lighthouse in a thread of the test."""

    def start(server: ServerOptions | None = None, **options: Any) -> Lighthouse:
        return stack.enter_context(Lighthouse(Options(**options), server))

    return start


@pytest.fixture
def connect(stack: ExitStack) -> Callable[..., Client]:
    """connect(address, "r0") starts a client in the test's process."""

    def start(address: str, replica: str = "", **options: Any) -> Client:
        client = Client(ClientOptions(addresses=(address,), replica=replica, **options)).start(30)
        stack.callback(client.close)
        return client

    return start


@pytest.fixture
def run_lighthouse(stack: ExitStack, tmp_path: Path) -> Callable[..., LighthouseProcess]:
    """run_lighthouse("--min-replicas", "2") starts the command."""

    def start(*arguments: str, **options: Any) -> LighthouseProcess:
        lighthouse = LighthouseProcess(tmp_path, *arguments, **options)
        stack.callback(lighthouse.close)
        return lighthouse

    return start


@pytest.fixture
def victims(stack: ExitStack) -> Callable[..., list[Victim]]:
    """victims(address, "r0", "r1") starts replicas in processes of their own and waits until they are connected."""

    def start(address: str, *names: str, prefix: tuple[str, ...] = (), **options: Any) -> list[Victim]:
        started = []
        for name in names:
            started.append(Victim(prefix, addresses=address.split(","), replica=name, **options))
            stack.callback(started[-1].close)
        return [victim.ready() for victim in started]

    return start


@pytest.fixture
def proxy(stack: ExitStack) -> Callable[[str], Proxy]:
    """proxy(address) stands between clients and a lighthouse."""

    def start(target: str) -> Proxy:
        proxy = Proxy(target)
        stack.callback(proxy.close)
        return proxy

    return start
