"""Integrations with transformers, lightning, accelerate, torchtitan and ray.

One module per library, with the same name. Importing this package imports none of them.
"""

from __future__ import annotations

import contextlib

from allranks import recording as record


class Silences:
    """Announced pauses (evaluation, saving) that are not hangs, for training loops with hooks instead of blocks."""

    def __init__(self, up_to_s: float) -> None:
        self.up_to_s = up_to_s
        self._open = contextlib.ExitStack()

    def begin(self, phase: str) -> None:
        """Announces that the rank may be silent for `up_to_s` seconds from now on."""
        self.end()
        self._open.enter_context(record.expect(phase, up_to_s=self.up_to_s))

    def end(self) -> None:
        """Ends the pause, if there is one."""
        self._open.close()
