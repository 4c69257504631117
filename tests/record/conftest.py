"""What the tests of the recorder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.recording.options import fast


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that records here, in ranks too; tests/record/test_engines.py compares the two."""
    found = "c" if fast(True) is not None else "python"
    monkeypatch.setenv("ALLRANKS_PURE_PYTHON", "1" if found == "python" else "0")
    return found


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
