"""A future that always comes true: with the value, or with a default when it fails or takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def sure(
    future: torch.futures.Future[Any], default: Any, limit_s: float, on_error: Callable[[Exception], None]
) -> torch.futures.Future[Any]:
    """Holds what `future` brings; `default`, and the error is told, when that fails or does not come in time."""
    here = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_initialized() else None
    outer: torch.futures.Future[Any] = torch.futures.Future(devices=here)
    first = threading.Lock()  # taken by who settles it, and never given back

    def settle(value: Any, error: Exception | None = None) -> None:
        if first.acquire(blocking=False):
            if error is not None:
                on_error(error)
            outer.set_result(value)

    timer = threading.Timer(
        limit_s, lambda: settle(default, TimeoutError(f"a future did not come true in {limit_s:.1f} s"))
    )
    timer.daemon = True

    def arrived(done: torch.futures.Future[Any]) -> None:
        timer.cancel()
        try:
            value = done.value()
        except Exception as error:
            settle(default, error)
        else:
            settle(value)

    timer.start()
    future.add_done_callback(arrived)
    return outer
