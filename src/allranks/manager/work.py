"""What `Manager.allreduce` returns: a work whose failure fails the step, never the process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


class ManagedWork:
    """Waits like a torch `Work`. An error is told to the manager once and then swallowed."""

    def __init__(self, work: Any, tensor: torch.Tensor, on_error: Callable[[Exception], None]) -> None:
        self._work = work  # None: nothing was started, the step has failed already
        self._tensor = tensor
        self._on_error = on_error
        self.failed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until done; False when it failed (and with it the step). The group's timeout is the limit."""
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                self.failed = True
                self._on_error(error)
        return not self.failed

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return not self.failed

    def exception(self) -> None:
        """Always None: errors are the manager's business (`Manager.errored`)."""

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensor that never holds an error."""
        if self._work is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(self._tensor)
            return done
        return self._work.get_future().then(self._swallow)

    def _swallow(self, future: torch.futures.Future[Any]) -> torch.Tensor:
        try:
            future.wait()
        except Exception as error:
            self.failed = True
            self._on_error(error)
        return self._tensor
