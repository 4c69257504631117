"""Faults that strike in a phase of a rank's life, not at a step mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.drill.plan import DrillFault, make_plan
from allranks.errors import InputError

pytestmark = pytest.mark.usefixtures("forks")

RANK = """
import allranks.drill.preload as preload
from allranks.recording.options import RecorderOptions
from allranks.recording.recorder import Recorder
recorder = Recorder(RecorderOptions(enabled=False))
for step in (0, 1, 1, 2):
    preload.reach("save")
    recorder.step(step)
"""


@pytest.mark.parametrize(
    ("phase", "at_step", "before", "code", "fired"),
    [
        ("step", 2, [], 3, 2),
        ("save", 1, [], 3, 1),  # not at the first one: step 1 has not begun
        ("regroup", 0, [], 3, 1),  # step 1 is begun again
        (
            "save",
            0,
            [{"kind": "kill", "rank": 1, "at_step": 0}],
            0,
            None,
        ),  # the fault before it has not fired
    ],
)
def test_a_fault_strikes_in_its_phase_after_those_before_it(
    tmp_path: Path, phase: str, at_step: int, before: list[object], code: int, fired: int | None
) -> None:
    """Rank 0 marks steps 0, 1, 1 and 2, and saves before each of them."""
    faults = [*before, {"kind": "exit", "rank": 0, "at_step": at_step, "at": phase}]
    plan = make_plan({"faults": faults}, ranks=2)
    (tmp_path / "plan.json").write_text(plan.to_json())
    environment = {**os.environ, "ALLRANKS_DRILL": str(tmp_path), "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", RANK], env=environment, check=False, timeout=300)
    assert done.returncode == code
    mark = tmp_path / f"fired.{len(before)}"
    assert (json.loads(mark.read_text())["step"] if mark.exists() else None) == fired


def test_the_phase_of_a_fault_is_part_of_its_plan() -> None:
    """And must be a name."""
    content = {"faults": [{"kind": "hang", "rank": 0, "at_step": 3, "at": "heal"}]}
    assert make_plan(content).faults == (DrillFault("hang", 0, 3, at="heal"),)
    with pytest.raises(InputError, match=r"Expected `str`, got `int` - at `\$.faults\[0\].at`"):
        make_plan({"faults": [{"kind": "hang", "rank": 0, "at": 3}]})
