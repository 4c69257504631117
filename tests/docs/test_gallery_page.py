"""The page of twenty hangs shows the programs as they are, and what is said about them today."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "tasks" / "gallery.md").read_text()


def test_every_hang_has_its_lines_its_picture_its_verdict_and_its_fix() -> None:
    parts = PAGE.split("\n## ")[1:]
    assert len(parts) == 20
    for part in parts:
        found = re.fullmatch(
            r".+\n```python\n(.+?)\n```\n!\[.+?\]\(\.\./images/hangs/(\w+)\.png\)\n```text\n(.+)\n```\n\*\*Fix:\*\* .+\n*",
            part,
            re.S,
        )
        assert found, part
        lines, name, verdict = found.groups()
        program = (ROOT / "examples" / "hangs" / f"{name}.py").read_text().replace("  # <- here", "")
        assert all(line.strip() in program for line in lines.splitlines())
        assert (ROOT / "docs" / "images" / "hangs" / f"{name}.png").is_file()
        assert re.search(r"ranks? \d", verdict)


@pytest.mark.everything
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (make packages)")
def test_the_verdicts_are_still_those_of_the_page() -> None:
    ran = subprocess.run(
        [sys.executable, "scripts/hangs_page.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
