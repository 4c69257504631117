"""Tests with gRPC in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _grpc(grpc_poller: None) -> None:
    """For all tests of this folder."""
