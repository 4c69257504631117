"""A slice of the fuzzing by default; 100,000 inputs per reader with --soak (as `python -m tests.soak.fuzz`)."""

from __future__ import annotations

import pytest

from .fuzz import TARGETS, fuzz


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_changed_bytes_are_refused_or_read(target: str) -> None:
    assert fuzz(target, 200).failed == ""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_hundred_thousand_changed_inputs(target: str) -> None:
    assert fuzz(target, 100_000).failed == ""


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_inputs_are_good_before_they_are_changed(target: str) -> None:
    """Or the fuzzing would not get far into a reader."""
    for data in TARGETS[target].seeds:
        TARGETS[target].read(data)
