"""Fixtures of the integrations' tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's black boxes are."""
    place = tmp_path / "boxes"
    monkeypatch.setenv("ALLRANKS_DIR", str(place))
    monkeypatch.setenv("ALLRANKS_JOB_ID", "test")
    monkeypatch.delenv("ALLRANKS_RECORD", raising=False)
    return place
