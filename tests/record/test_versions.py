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

from allranks.recording import torch_internals
from allranks.recording.torch_internals import missing
from allranks.recording.torch_names import C10D, PRIVATE, RECORDED

PATTERN = re.compile(
    r"\btorch\.(?:\w+\.)*_[a-z]\w*|\bdistributed_c10d\b|\._(?:world|get_backend|device_types|torchdynamo)\w*"
)


def test_only_one_file_of_the_recorder_knows_private_names_of_torch() -> None:
    """Where a new version of torch breaks something, this is where to look."""
    home = Path(torch_internals.__file__)
    strangers = {}
    for path in home.parent.glob("*.py"):
        code = re.sub(r'""".*?"""|#.*|"[^"\n]*"', "", path.read_text(), flags=re.DOTALL)
        if path not in (home, home.with_name("torch_names.py")) and (found := PATTERN.findall(code)):
            strangers[path.name] = found
    assert strangers == {}


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


USED = re.compile(
    r"\b(?:torch|dist|c10d|distributed_c10d|backend|group|proxy|options)((?:\.\w+)*)\.(_[a-z]\w*)",
    re.IGNORECASE,
)


def test_no_other_private_name_of_torch_is_used() -> None:
    """Each one is in recording/torch_names.py, with what it costs when it is gone."""
    source = Path(torch_internals.__file__).parents[1]
    known = {word for name in PRIVATE for word in name.split(".")} | {"_inductor"}  # looked for, never called
    unknown = {}
    for path in source.rglob("*.py"):
        text = path.read_text()
        if "torch" not in text or path.parent.name == "torchft":
            continue
        code = re.sub(r'""".*?"""|#.*|"[^"\n]*"', "", text, flags=re.DOTALL)
        found = {word for _, word in USED.findall(code) if not word.startswith("__")} - known
        if found and re.search(r"^\s*(?:import|from) torch", text, re.MULTILINE):
            unknown[str(path.relative_to(source))] = found
    assert unknown == {}


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
