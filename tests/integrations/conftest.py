"""Fixtures of the integrations' tests."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

#: whose versions docs/compatibility.md names
PACKAGES = [
    "torch",
    "transformers",
    "lightning",
    "accelerate",
    "deepspeed",
    "megatron-core",
    "torchtitan",
    "ray",
    "trl",
    "peft",
    "torchtune",
    "sentence-transformers",
    "diffusers",
    "fairscale",
    "pytorch-ignite",
    "hydra-core",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's black boxes are."""
    place = tmp_path / "boxes"
    monkeypatch.setenv("ALLRANKS_DIR", str(place))
    monkeypatch.setenv("ALLRANKS_JOB_ID", "test")
    monkeypatch.delenv("ALLRANKS_RECORD", raising=False)
    return place


@pytest.fixture(scope="session", autouse=True)
def machine(record_testsuite_property: Callable[[str, object], None]) -> None:
    """What these tests ran on, for scripts/compatibility.py."""
    found = [(one.metadata["Name"], one.version) for one in distributions()]
    versions = dict(reversed(found))  # of two of one name the first on the path is imported
    where = f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}, torch {versions.get('torch')}"
    record_testsuite_property("where", where.partition("+")[0])
    for name in PACKAGES:
        if name in versions:
            record_testsuite_property(name, versions[name].partition("+")[0])
