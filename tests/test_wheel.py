"""The built wheel in an environment without torch: a laptop can read what a cluster has written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.everything
CASES = Path(__file__).parent


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and its base dependencies; returns its bin folder."""
    folder = tmp_path_factory.mktemp("laptop")
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(wheel, check=True, timeout=300)
    venv.create(folder / "venv", with_pip=True)
    bin_folder = folder / "venv" / "bin"
    (found,) = folder.glob("allranks-*.whl")
    subprocess.run([bin_folder / "pip", "install", "--quiet", str(found)], check=True, timeout=300)
    return bin_folder


def run(laptop: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One command on the laptop."""
    return subprocess.run(
        [laptop / "allranks", *words], capture_output=True, text=True, timeout=300, check=False
    )


def test_reading_commands_work_without_torch(laptop: Path) -> None:
    """diagnose, frtrace, dump, stacks --from and doctor explain; torch is really not there."""
    assert (
        subprocess.run([laptop / "python", "-c", "import torch"], capture_output=True, check=False).returncode
        != 0
    )
    dumps = CASES / "load" / "cases" / "flight_recorder" / "missing_rank"
    found = run(laptop, "diagnose", str(dumps), "--json")
    assert found.returncode == 1, found.stderr
    assert json.loads(found.stdout)["verdict"]["ranks"] == [1]
    told = run(laptop, "frtrace", str(dumps))
    assert "Not all ranks joining collective" in told.stdout + told.stderr
    made = run(laptop, "dump", str(dumps / "trace_0"), "-o", str(laptop.parent / "trace.json"), "--force")
    assert made.returncode == 0, made.stderr
    stacks = run(
        laptop,
        "stacks",
        "--from",
        str(CASES / "stacks" / "cases" / "hangs" / "dataloader_worker_sleep"),
        "--json",
    )
    assert "dataloader_wait" in stacks.stdout, stacks.stderr
    assert run(laptop, "--help").returncode == 0


def test_the_first_lines_of_the_readme_give_what_is_shown(laptop: Path, tmp_path: Path) -> None:
    """A new user copies them after `pip install`: the same output, to the letter."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- transcript: (\S+) -->\n```console\n(.*?)```", readme, re.S)
    assert found is not None
    (tmp_path / "dumps").symlink_to(ROOT / found[1])
    install, command, *shown = found[2].splitlines()
    assert install.startswith("$ pip install allranks ") and command.startswith("$ allranks diagnose dumps/ ")
    words = [laptop / "allranks", "diagnose", "dumps/"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.rstrip("\n").splitlines() == shown


def test_a_missing_extra_is_one_sentence_with_the_command(laptop: Path, tmp_path: Path) -> None:
    """What needs torch says how to get it, before anything is started."""
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    for words in (["demo"], ["run", "--replicas", "2", script], ["run", "--standalone", script]):
        done = run(laptop, *words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "pip install 'allranks[torch]'" in done.stderr, done.stderr
    for code in ("from allranks import Manager", "import allranks.torchft"):
        done = subprocess.run([laptop / "python", "-c", code], capture_output=True, text=True, check=False)
        assert "needs the extra [torch]: pip install" in done.stderr.splitlines()[-1], done.stderr
