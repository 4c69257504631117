"""gRPC's own poller thread lives as long as the process: it is started before the tests count threads."""

from __future__ import annotations

import asyncio

import grpc
import pytest


@pytest.fixture(scope="session", autouse=True)
def _grpc_poller() -> None:
    async def start() -> None:  # inside of a loop: there may be no other one any more
        grpc.aio.init_grpc_aio()

    asyncio.run(start())
