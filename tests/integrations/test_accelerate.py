"""Accelerate, as it comes from the registry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

import allranks
from allranks.blackbox.header import read_header
from allranks.integrations.accelerate import Accelerator


def test_backwards_that_synchronise_mark_steps_and_saving_is_announced(tmp_path: Path, folder: Path) -> None:
    """Four batches in twos are two steps; a save may take its time."""
    recorder = allranks.record()
    assert recorder.path is not None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(3, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert read_header(recorder.path).step == accelerator.steps == 2
    during: list[bool] = []

    def looks(models: object, weights: object, output_dir: object) -> None:
        during.append(read_header(recorder.path).expect_until_ns > 0)

    accelerator.register_save_state_pre_hook(looks)
    accelerator.save_state(str(tmp_path / "state"))
    assert during == [True] and read_header(recorder.path).expect_until_ns == 0
    accelerator.load_state(str(tmp_path / "state"))
    recorder.close()
