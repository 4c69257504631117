"""Accelerate: step marks for the black box, and announced pauses while a state is saved or loaded.

    from allranks.integrations.accelerate import Accelerator    # instead of accelerate's

Runs in a rank.
"""

from __future__ import annotations

from pathlib import Path

import accelerate
import torch

from allranks import recording as record


class Accelerator(accelerate.Accelerator):
    """Counts steps by the backward passes that synchronise. `pause_s` is how long saving may take."""

    def __init__(self, *args: object, pause_s: float = 1800.0, **named: object) -> None:
        super().__init__(*args, **named)
        self.pause_s = pause_s
        self.steps = 0  # begun; set it after a restore

    def backward(self, loss: torch.Tensor, **named: object) -> None:
        """Marks the step if this backward pass is its last."""
        super().backward(loss, **named)
        if self.sync_gradients:
            self.steps += 1
            record.step(self.steps)

    def save_state(self, *args: object, **named: object) -> Path:
        with record.expect("save", up_to_s=self.pause_s):
            saved: Path = super().save_state(*args, **named)
            return saved

    def load_state(self, *args: object, **named: object) -> None:
        with record.expect("load", up_to_s=self.pause_s):
            super().load_state(*args, **named)
