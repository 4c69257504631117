"""torchft.checkpointing: transports of the state. Accepted by the Manager, which heals in its own way."""

from __future__ import annotations

from allranks.torchft.checkpointing.http_transport import HTTPTransport
from allranks.torchft.checkpointing.pg_transport import PGTransport
from allranks.torchft.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]
