"""docs/compatibility.md is made from the kept results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


def test_the_page_of_compatibility_is_made_from_its_results(tmp_path: Path) -> None:
    """Nothing on it was written by hand; a test's last result counts, and runs of a folder in parts are joined."""
    script = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "compatibility.py")))
    assert (ROOT / "docs" / "compatibility.md").read_text() == script.page(
        json.loads(script.KEPT.read_text())
    )
    cases = ("<testcase classname='tests.record.test_a' name='one'/>",
             "<testcase classname='tests.record.test_a' name='two'><failure/></testcase>",
             "<testcase classname='tests.record.test_a' name='two'><skipped message='no'/></testcase>")  # fmt: skip
    for part, text in enumerate(cases):
        (tmp_path / f"python-3.12.1_torch-2.15.0.part{part}.xml").write_text(f"<testsuite>{text}</testsuite>")
    counted = script.count_versions([tmp_path])
    files = len(list((ROOT / "tests" / "record").glob("test_*.py")))
    row = {"record": {"passed": 1, "not run": 1, "files": 1, "of": files}}
    assert counted == {"Python 3.12.1, torch 2.15.0": row}
    assert "torch 2.15.0 | 1 | 1 | 0 | 1 |" in script.version_table(counted)
