"""torchft.checkpointing.http_transport."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from allranks.torchft.checkpointing.transport import AcceptedTransport

__all__ = ["HTTPTransport"]

T = TypeVar("T")


class HTTPTransport(AcceptedTransport[T]):
    """Accepted; no port is opened."""

    def __init__(self, timeout: timedelta, num_chunks: int = 0) -> None:
        self.timeout, self.num_chunks = timeout, num_chunks
