"""Every engine of the recorder is tested: the part in C, and the same in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.record.options import fast


@pytest.fixture(params=["c", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once with each engine; ranks inherit the choice through the environment."""
    if request.param == "c" and fast(True) is None:
        pytest.skip("the part in C was not built: no compiler when allranks was installed")
    monkeypatch.setenv("ALLRANKS_PURE_PYTHON", "1" if request.param == "python" else "0")
    return str(request.param)


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
