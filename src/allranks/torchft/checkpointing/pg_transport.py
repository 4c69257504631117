"""torchft.checkpointing.pg_transport."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from allranks.torchft.checkpointing.transport import AcceptedTransport

__all__ = ["PGTransport"]

T = TypeVar("T")


class PGTransport(AcceptedTransport[T]):
    """Accepted; tensors that have their place in `state_dict` are received in place anyhow."""

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], Any] | None = None,
    ) -> None:
        self.timeout, self.device = timeout, device
