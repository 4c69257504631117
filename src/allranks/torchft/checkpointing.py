"""torchft.checkpointing and its modules: how torchft's managers hand their state over.

Here the manager does that itself (checked, authenticated, without unpickling), so a transport is only a note that
one was wanted. It cannot be used without a manager.
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
    """torchft's interface, for type annotations and for subclasses that scripts bring along.

    Stores nothing and opens nothing: `Manager(checkpoint_transport=...)` takes it and heals in its own way.
    """

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        self._refuse()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        self._refuse()

    def disallow_checkpoint(self) -> None:
        """The state may change from now on."""

    def shutdown(self, wait: bool = True) -> None:
        """Closes what is open."""

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"{type(self).__name__} moves no state by itself: healing is part of the Manager; "
            "to save and load files use allranks.checkpoint"
        )


class HTTPTransport(CheckpointTransport[T]):
    """Accepted; no port is opened."""

    def __init__(self, timeout: timedelta, num_chunks: int = 0) -> None:
        self.timeout, self.num_chunks = timeout, num_chunks


class PGTransport(CheckpointTransport[T]):
    """Accepted; tensors that have their place in `state_dict` are received in place anyhow."""

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        self.timeout, self.device = timeout, device
