"""gRPC's own poller thread lives as long as the process: it is started before the tests count threads."""

from __future__ import annotations

import grpc
import pytest


@pytest.fixture(scope="session", autouse=True)
def _grpc_poller() -> None:
    grpc.aio.init_grpc_aio()
