"""The types that an IDE and mypy see of `import allranks`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import allranks
from allranks.checkpoint import CheckpointConfig
from allranks.elastic import ElasticJob

result = allranks.diagnose("x")
reveal_type(result.verdict)
reveal_type(allranks.stacks())
reveal_type(allranks.jobs())
reveal_type(allranks.status())
reveal_type(allranks.record())
reveal_type(allranks.Manager(min_replica_size=2))
reveal_type(allranks.examples.missing_rank)
reveal_type(allranks.goodput("j"))
reveal_type(CheckpointConfig(nvme_path="/x"))
reveal_type(ElasticJob)
"""


@pytest.mark.parametrize("name", ["allranks.checkpoint", "allranks.elastic"])
def test_every_public_name_of_a_package_has_a_type(name: str) -> None:
    """What is imported on first use is imported by name for type checkers, from the same module."""
    package = importlib.import_module(name)
    assert package.__file__ is not None
    blocks = [node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If)]
    typed = {
        alias.asname: str(one.module).removeprefix(f"{name}.")
        for one in blocks[0].body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    }
    assert typed == package._PUBLIC


@pytest.mark.everything
def test_a_users_script_sees_types_and_no_any(tmp_path: Path) -> None:
    """In the strictest mode."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    shown = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0 and len(shown) == 10, done.stdout
    assert not any("Any" in line for line in shown), shown
