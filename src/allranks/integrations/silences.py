"""Pauses that a training loop announces: evaluation and saving are no hang. Runs in a rank."""

from __future__ import annotations

import contextlib

from allranks import record


class Silences:
    """Opened when a pause begins, closed when training goes on; loops with hooks have no block to wrap."""

    def __init__(self, up_to_s: float) -> None:
        self.up_to_s = up_to_s
        self._open = contextlib.ExitStack()

    def begin(self, phase: str) -> None:
        """From now on nothing may be heard for `up_to_s` seconds."""
        self.end()
        self._open.enter_context(record.expect(phase, up_to_s=self.up_to_s))

    def end(self) -> None:
        """Any number of times."""
        self._open.close()
