"""torchft.checkpointing and its modules: torchft's transports for the state of its managers.

allranks' manager transfers the state itself (checked, authenticated, without unpickling), so transports are accepted and
do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from allranks.errors import ConfigurationError

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]

T = TypeVar("T")


class CheckpointTransport(Generic[T]):
    """torchft's interface, for type annotations and subclasses in scripts.

    `Manager(checkpoint_transport=...)` accepts and ignores it.
    """

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        self._refuse()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        self._refuse()

    def disallow_checkpoint(self) -> None:
        """Does nothing."""

    def shutdown(self, wait: bool = True) -> None:
        """Does nothing."""

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"{type(self).__name__} does not transfer state by itself: healing is part of the Manager; "
            "to save and load files use allranks.checkpoint"
        )


class HTTPTransport(CheckpointTransport[T]):
    """Accepted; opens no port."""

    def __init__(self, timeout: timedelta, num_chunks: int = 0) -> None:
        self.timeout, self.num_chunks = timeout, num_chunks


class PGTransport(CheckpointTransport[T]):
    """Accepted; tensors in `state_dict` are received in place in any case."""

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        self.timeout, self.device = timeout, device
