"""The types that an IDE and mypy see of `import allranks`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import allranks

result = allranks.diagnose("x")
reveal_type(result.verdict)
reveal_type(allranks.stacks())
reveal_type(allranks.jobs())
reveal_type(allranks.status())
reveal_type(allranks.record())
reveal_type(allranks.Manager(min_replica_size=2))
reveal_type(allranks.examples.missing_rank)
reveal_type(allranks.goodput("j"))
"""


@pytest.mark.everything
def test_a_users_script_sees_types_and_no_any(tmp_path: Path) -> None:
    """In the strictest mode."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    shown = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0 and len(shown) == 8, done.stdout
    assert not any("Any" in line for line in shown), shown
