"""The pictures of README and docs can be made again, by the script that made them."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.everything,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (make packages)"),
]


def test_every_picture_that_is_shown_is_made_by_the_script(tmp_path: Path) -> None:
    """The same names and sizes, and something is on them."""
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(
        ["bash", "scripts/pictures.sh", str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=300
    )
    made, kept = sorted(tmp_path.glob("*.png")), sorted((ROOT / "docs" / "images").glob("*.png"))
    assert [path.name for path in made] == [path.name for path in kept]
    for new, old in zip(made, kept, strict=True):
        assert struct.unpack(">II", new.read_bytes()[16:24]) == struct.unpack(">II", old.read_bytes()[16:24])
        assert new.stat().st_size > 20_000
