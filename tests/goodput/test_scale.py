"""The simulator of large jobs: no failure costs nothing, and replicas lose less than restarts of everything."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["scale"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_job_without_failures_only_pays_for_its_saves(scale: ModuleType) -> None:
    known = replace(scale.Assumptions(), failures_per_gpu_day=1e-12)
    assert all(value > 0.998 for value in scale.simulate(1024, 10.0, 1, known).values())


def test_replicas_lose_less_than_restarts_and_more_gpus_lose_more(scale: ModuleType) -> None:
    small, large = (scale.simulate(gpus, 10.0, 2, scale.Assumptions()) for gpus in (1024, 16384))
    assert large["allranks replicas"] > large["allranks whole job"] > large["torchrun"]
    assert all(large[mode] <= small[mode] + 0.001 for mode in small)
    assert scale.quorum_delay_s(64) == 0.0  # survivors of a death wait for nobody
