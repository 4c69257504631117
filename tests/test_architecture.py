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

# Formats and protocols that every package may import.
GROUND_FLOOR = {"errors", "model", "blackbox", "channel", "pages", "torch_private", "__version__"}

# package -> what it may import besides the ground floor. The table of docs/architecture.md.
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "blackbox": set(),
    "channel": set(),
    "pages": set(),
    "load": set(),
    "diagnosis": set(),
    "report": set(),
    "stacktraces": set(),
    "lighthouse": {"etcd"},
    "recording": set(),
    "ledger": {"load", "watch.samples"},
    "checkpoint": set(),
    # the job file is made from the options of the parts
    "elastic": {
        "checkpoint",
        "lighthouse.options",
        "incidents.policy",
        "watch.silence",
    },
    "compat": {"checkpoint", "elastic"},
    "doctor": {
        "stacktraces",
        "load",
        "lighthouse.client",
        "checkpoint",
        "etcd",
        "recording.options",
        "ledger.history",
    },
    "manager": {"recording", "checkpoint", "lighthouse.client"},
    "torchft": {"manager", "lighthouse"},
    "integrations": {"manager", "recording", "torchft", "lighthouse", "incidents", "launch", "watch"},
    "supervise": set(),
    "watch": {"load", "stacktraces", "diagnosis", "lighthouse.client"},
    "incidents": {"watch", "load", "stacktraces", "diagnosis", "report", "lighthouse.client"},
    "launch": {"supervise", "watch", "incidents", "recording", "report", "lighthouse.client", "etcd"},
    "frtrace": {"load", "diagnosis"},
    "drill": {"*"},
    "api": {"load", "diagnosis", "report", "stacktraces", "checkpoint", "incidents", "watch", "ledger"},
    "examples": set(),
    "cli": {"*"},
}
NO_TORCH = {
    "model", "blackbox", "channel", "load", "frtrace", "diagnosis", "report", "stacktraces", "lighthouse", "supervise", "watch",
    "incidents", "ledger", "cli",
}  # fmt: skip


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at top level) for every import of a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
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
    if home in {"model", "errors"}:
        return first in {"model", "errors", "__version__"}
    if first == home or first in GROUND_FLOOR or "*" in allowed:
        return first != "cli" or home == "cli"
    return any(
        target == rule or target.startswith(f"{rule}.") or rule.startswith(f"{target}.") for rule in allowed
    )


def test_every_package_has_its_row() -> None:
    """A new folder must say what it may import."""
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_only_point_where_the_architecture_says(folder: str) -> None:
    """No station imports another; nobody imports cli; reading parts never import torch."""
    wrong = []
    for path in sorted((SOURCE / folder).rglob("*.py")):
        for module, _ in _imports(path):
            if module.startswith("allranks.") and not _allowed(folder, module.removeprefix("allranks.")):
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
            if folder in NO_TORCH and (module.split(".")[0] == "torch" or module == "allranks.torch_private"):
                wrong.append(f"{path.relative_to(SOURCE)} imports torch")
    assert wrong == []


def test_every_public_name_can_be_imported() -> None:
    """`__all__` tells the truth."""
    for name in allranks.__all__:
        assert getattr(allranks, name) is not None
    assert len(allranks.__all__) <= 20


# Names that others gave: torchft's, torchfrtrace's, the harness's; and one callback for each trainer.
SHARED_NAMES = {"AllranksCallback", "Group", "JobConfig", "Manager", "Quorum"}


def test_no_two_public_classes_have_the_same_name() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice.keys() <= SHARED_NAMES, twice


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_and_a_main(command: str) -> None:
    """Each sub-command is one file that follows the convention."""
    module = importlib.import_module(f"allranks.cli.{COMMANDS[command][0]}")
    assert callable(module.main)
    assert getattr(module, "FLAGS", ()) or module.ACTIONS


def test_starting_the_command_imports_neither_torch_nor_numpy() -> None:
    """`allranks --help` is instant."""
    code = "import sys; from allranks.cli import main; main([]); print(sorted({'torch','numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_every_documented_command_exists() -> None:
    """`allranks WORD` in README and docs is a command of the program."""
    root = Path(__file__).parent.parent
    wrong = set()
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for word in re.findall(r"(?:^|[`$>(] ?|-- )allranks ([a-z][a-z-]+)\b", path.read_text(), re.M):
            if word not in COMMANDS:
                wrong.add(f"{path.name}: allranks {word}")
    assert wrong == set()
