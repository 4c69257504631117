"""Module paths that earlier versions had: they can be imported, give the same names, and warn."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from allranks.old_modules import homes

SHOWN = Path(__file__).with_name("old_names.txt").read_text().split("\n")


@pytest.mark.parametrize("old", sorted(old for old, now in homes().items() if now))
def test_an_old_module_gives_the_names_of_the_new_ones_and_warns(old: str) -> None:
    sys.modules.pop(f"allranks.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"allranks\.{old} is now allranks\.") as caught:
        module = importlib.import_module(f"allranks.{old}")
    assert Path(caught[-1].filename).name in (
        Path(__file__).name,
        "__init__.py",
    )  # the import, not our finder
    for home in homes()[old]:
        there = vars(importlib.import_module(f"allranks.{home}"))
        names = {name for name in there if name[0] != "_" and not isinstance(there[name], ModuleType)}
        assert names <= vars(module).keys()


_TAKEN = """
import importlib, sys, types, warnings
warnings.simplefilter("ignore")
for old in sys.argv[1:]:
    package, _, name = old.rpartition(".")
    there = vars(importlib.import_module(f"allranks.{package}")).get(name)
    if there is not None and not isinstance(there, types.ModuleType):
        print(old)
"""


def test_an_old_module_takes_the_place_of_nothing() -> None:
    """An import sets the module's name in its package: a function of that name would be gone. In a process of its own, where no
    old module has been imported yet."""
    inside = sorted(old for old in homes() if "." in old)
    ask = [sys.executable, "-c", _TAKEN]
    done = subprocess.run([*ask, *inside], capture_output=True, text=True, timeout=300, check=True)
    assert inside and done.stdout == ""
    taken = subprocess.run(
        [*ask, "elastic.config.check"], capture_output=True, text=True, timeout=300, check=True
    )
    assert taken.stdout == "elastic.config.check\n"  # as it was found


@pytest.mark.parametrize("line", [line for line in SHOWN if line and not line.startswith("#")])
def test_what_docs_and_examples_of_earlier_versions_import_is_there(line: str) -> None:
    """One line: module and name."""
    module, name = line.split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import allranks.testing.faults", "allranks.testing is now allranks.drill"),
        ("from allranks.agent.policy import PolicyOptions", "allranks.agent.policy is now"),
        ("from allranks.lighthouse.client import Client", "is now allranks.lighthouse.client.client.Client"),
    ],
)
def test_the_warning_is_shown_where_the_import_is(tmp_path: Path, statement: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{statement}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=True)
    assert f"{script}:1: DeprecationWarning" in done.stderr and said in done.stderr


def test_a_module_that_never_was_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'allranks\.agent\.nothing'"):
        importlib.import_module("allranks.agent.nothing")
