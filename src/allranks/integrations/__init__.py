"""Other people's training loops: transformers, lightning, accelerate, torchtitan, ray.

One module per library, of the same name; importing this package imports none of them.
"""

from __future__ import annotations

import contextlib

from allranks import recording as record


class Silences:
    """Announced pauses (evaluation, saving) that are no hang. Opened when a pause begins, closed when training continues; for loops with hooks, which have no block to wrap."""

    def __init__(self, up_to_s: float) -> None:
        self.up_to_s = up_to_s
        self._open = contextlib.ExitStack()

    def begin(self, phase: str) -> None:
        """From now on the rank may be silent for `up_to_s` seconds."""
        self.end()
        self._open.enter_context(record.expect(phase, up_to_s=self.up_to_s))

    def end(self) -> None:
        """Any number of times."""
        self._open.close()
