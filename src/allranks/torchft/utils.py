"""torchft.utils: streams of whatever accelerator there is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["get_stream_context", "record_event", "synchronize"]


def get_stream_context(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Work inside runs on `stream`; nothing changes for None or without an accelerator."""
    if stream is None or not torch.cuda.is_available():
        return nullcontext()
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def record_event() -> Any:
    """An event in the current stream, which is returned; None without an accelerator."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.current_stream().record_event(torch.cuda.Event(interprocess=True))


def synchronize() -> None:
    """Waits for the current stream."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
