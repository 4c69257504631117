"""The rules that keep the parts apart: import arrows, public names, commands."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import allranks
from allranks.cli import COMMANDS

SOURCE = Path(allranks.__file__).parent

# module -> what it may import besides errors and model. The table of docs/architecture.md.
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "channel": set(),
    "load": set(),
    "diagnose": set(),
    "report": set(),
    "stacks": set(),
    "lighthouse": {"channel", "etcd"},
    "record": set(),
    "checkpoint": {"channel"},
    "elastic": {"checkpoint"},
    "compat": {"checkpoint", "elastic"},
    "doctor": {"stacks", "load", "lighthouse.client", "checkpoint", "etcd", "record.engine"},
    "manager": {"channel", "record", "checkpoint", "lighthouse.client"},
    "torchft": {"manager", "lighthouse"},
    "agent": {"channel", "record", "load", "stacks", "diagnose", "report", "lighthouse.client", "etcd"},
    "frtrace": {"load", "diagnose"},
    "testing": {"*"},
    "cli": {"*"},
}
NO_TORCH = {"model", "channel", "load", "frtrace", "diagnose", "report", "stacks", "lighthouse", "cli"}


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at top level) for every import of a file."""
    tree = ast.parse(path.read_text())
    top = set(ast.walk(tree)) if False else {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(node.module, id(node) in top)]
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def _allowed(home: str, target: str) -> bool:
    """Whether a file of folder `home` may import `allranks.<target>`."""
    first = target.split(".")[0]
    allowed = MAY_IMPORT[home]
    if first in {home, "errors", "model", "__version__"} or "*" in allowed:
        return first != "cli" or home == "cli"
    return any(
        target == rule or target.startswith(f"{rule}.") or rule.startswith(f"{target}.") for rule in allowed
    )


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_only_point_where_the_architecture_says(folder: str) -> None:
    """No station imports another; nobody imports cli; reading parts never import torch."""
    wrong = []
    for path in sorted((SOURCE / folder).rglob("*.py")):
        for module, _ in _imports(path):
            if module.startswith("allranks.") and not _allowed(folder, module.removeprefix("allranks.")):
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
            if folder in NO_TORCH and module.split(".")[0] == "torch":
                wrong.append(f"{path.relative_to(SOURCE)} imports torch")
    assert wrong == []


def test_every_public_name_can_be_imported() -> None:
    """`__all__` tells the truth."""
    for name in allranks.__all__:
        assert getattr(allranks, name) is not None
    assert len(allranks.__all__) <= 16


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_and_a_main(command: str) -> None:
    """Each sub-command is one file that follows the convention."""
    module = importlib.import_module(f"allranks.cli.{COMMANDS[command][0]}")
    assert callable(module.main)
    assert callable(module.add_arguments)


def test_starting_the_command_imports_neither_torch_nor_numpy() -> None:
    """`allranks --help` is instant."""
    code = "import sys; from allranks.cli import main; main([]); print(sorted({'torch','numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_every_documented_command_exists() -> None:
    """`allranks WORD` in README and docs is a command of the program."""
    root = Path(__file__).parent.parent
    wrong = set()
    for path in [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md"))]:
        for word in re.findall(r"(?:^|[`$>(] ?|-- )allranks ([a-z][a-z-]+)\b", path.read_text(), re.M):
            if word not in COMMANDS:
                wrong.add(f"{path.name}: allranks {word}")
    assert wrong == set()
