"""Ten thousand replicas held under load with a crowd of unknown clients: the specification's number, under `make test ARGS=--soak`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lighthouse.py"


@pytest.mark.soak
def test_ten_thousand_replicas_are_held_without_a_false_death() -> None:
    """Busy processes take the CPU, half-open and dripping unknown clients the door; everybody beats; nobody is given up."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--soak", "180", "--json"],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    numbers = json.loads(done.stdout.splitlines()[-1])["numbers"]
    assert numbers["soak_replicas"] == 10_000
    assert numbers["soak_heartbeats"] > 500_000
    assert numbers["soak_false_deaths"] == numbers["soak_losses_told"] == 0
    assert numbers["soak_still_there"] == 10_000
    assert numbers["soak_unknown_clients_closed"] > 1000
