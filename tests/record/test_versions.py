"""What of torch is not public stays in one file, which says what a version lacks."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from allranks import torch_private
from allranks.errors import ConfigurationError
from allranks.recording import torch_internals
from allranks.recording.torch_internals import missing
from allranks.torch_private import C10D, PRIVATE, RECORDED


def _look_up(name: str) -> Any:
    """What a dotted name stands for; LookupError names it."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:count]))
        except ImportError:
            continue
        for word in words[count:]:
            if not hasattr(found, word):
                raise LookupError(f"torch has no {name}: {PRIVATE[name][1]}")
            found = getattr(found, word)
        return found
    raise LookupError(name)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_of_torch_is_there_and_takes_what_we_give_it(name: str) -> None:
    """A new torch fails here, by name."""
    if "nccl" in name.lower() and not hasattr(torch_internals.c10d, "ProcessGroupNCCL"):
        pytest.skip("a build without NCCL")
    if "_cuda_" in name and not hasattr(torch_internals.torch._C, "_cuda_getDevice"):
        pytest.skip("a build without CUDA")
    assert PRIVATE[name][0] in (_look_up(name).__doc__ or "")


PATTERN = re.compile(
    r"\b(?:torch|dist)\.(?:\w+\.)*_[a-z]\w*|\bfrom torch\S*\._\w+|\bfrom torch\S* import _\w+|\b(?:distributed_)?c10d\._[a-z]\w*"
    r"|\b(?:backend|group|proxy|options|inductor|iterator)\._[a-z]\w*|\._(?:world|get_backend|device_types|torchdynamo)\w*",
)


def test_only_two_files_know_private_names_of_torch() -> None:
    """Where a new version of torch breaks something, these are where to look."""
    homes = [Path(torch_internals.__file__), Path(torch_private.__file__)]
    found = {}
    for path in homes[1].parent.rglob("*.py"):
        text = path.read_text()
        if path in homes or not re.search(r"^\s*(?:import|from) torch", text, re.MULTILINE):
            continue
        code = re.sub(r'""".*?"""|#.*|"[^"\n]*"', "", text, flags=re.DOTALL)
        if names := PATTERN.findall(code):
            found[str(path.relative_to(homes[1].parent))] = names
    assert found == {}


def test_a_name_that_is_gone_is_named_with_the_versions_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_private.c10d, "_get_default_store")
    with pytest.raises(
        ConfigurationError, match=r"has no _get_default_store: use a version from 2\.13 and 2\.15"
    ):
        torch_private.default_store()


def test_what_torch_copies_in_one_call_is_copied_one_by_one_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch_private.torch, "_foreach_copy_")
    targets = [torch_private.torch.zeros(2), torch_private.torch.zeros(3)]
    torch_private.copy_all(targets, [torch_private.torch.ones(2), torch_private.torch.ones(3)])
    assert all(bool(target.all()) for target in targets)


BUILD = """
import importlib.machinery, importlib.util, sys
spec = importlib.util.spec_from_file_location("allranks.recording._fast", sys.argv[1])
try:
    importlib.util.module_from_spec(spec)
    print("loaded")
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("other", [False, True])
def test_the_part_in_c_loads_only_in_the_python_it_was_built_for(other: bool, tmp_path: Path) -> None:
    """It reads Python's inner frames, which another version lays out otherwise."""
    built = "3.9.1" if other else ".".join(map(str, (*sys.version_info[:2], 99)))
    source, made = Path(torch_internals.__file__).with_name("_fast.c"), tmp_path / "_fast.so"
    flags = ["-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", f'-DBUILT_FOR="{built}"']
    try:
        subprocess.run(["cc", *flags, str(source), "-o", str(made)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler, or no headers of Python")
    told = subprocess.run([sys.executable, "-c", BUILD, str(made)], capture_output=True, text=True)
    assert told.stdout.strip() == ("built for Python 3.9.1" if other else "loaded"), told.stderr


def test_this_version_of_torch_has_all_that_is_needed() -> None:
    """Versions that we promise lose nothing."""
    assert missing() == []


def test_what_a_version_lacks_is_named_with_what_is_lost_by_it() -> None:
    """One sentence for each part."""
    cpp, batch = RECORDED
    names = {f"{C10D}.ProcessGroup._gone": ("", batch), f"{C10D}._a": ("", cpp), f"{C10D}._b.c": ("", cpp)}
    assert missing({**names, f"{C10D}.Work": ("", cpp), f"{C10D}.other": ("", "no Manager")}) == [
        f"{batch} (torch has no _gone)",
        f"{cpp} (torch has no _a, c)",
    ]


def test_every_module_of_ours_that_runs_under_a_collective_is_hidden_from_the_compiler() -> None:
    """A name that is written wrong would hide nothing."""
    from allranks.recording.hook import OURS

    assert all(importlib.import_module(name) for name in OURS)
