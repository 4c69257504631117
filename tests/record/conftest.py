"""What the tests of the recorder share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for black boxes of this test."""
    place = tmp_path / "boxes"
    monkeypatch.setenv("ALLRANKS_DIR", str(place))
    monkeypatch.setenv("ALLRANKS_JOB_ID", "test")
    for name in (
        "ALLRANKS_RECORD",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCHCOMM_FR_DUMP_TEMP_FILE",
        "ALLRANKS_ATTEMPT",
    ):
        monkeypatch.delenv(name, raising=False)
    return place
