"""Accelerate: step marks for the black box, and pauses while a state is saved or loaded.

    from allranks.integrations.accelerate import Accelerator    # instead of accelerate's

Runs in a rank.
"""

from __future__ import annotations

from typing import Any

import accelerate

from allranks import record


class Accelerator(accelerate.Accelerator):
    """Counts optimizer steps by the backwards that synchronise; `pause_s` is how long saving may take."""

    def __init__(self, *args: Any, pause_s: float = 1800.0, **named: Any) -> None:
        super().__init__(*args, **named)
        self.pause_s = pause_s
        self.steps = 0  # begun; set it after a restore

    def backward(self, loss: Any, **named: Any) -> None:
        """Marks the step when this backward is the last of it."""
        super().backward(loss, **named)
        if self.sync_gradients:
            self.steps += 1
            record.step(self.steps)

    def save_state(self, *args: Any, **named: Any) -> Any:
        with record.expect("save", up_to_s=self.pause_s):
            return super().save_state(*args, **named)

    def load_state(self, *args: Any, **named: Any) -> Any:
        with record.expect("load", up_to_s=self.pause_s):
            return super().load_state(*args, **named)
