"""Programs of other projects, unmodified, under `allranks run`: healthy, killed ten times, and hung."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.integrations.programs.faults import KILLS

PROGRAMS = Path(__file__).parent / "programs"
#: name -> script and first arguments, the package that it needs
KINDS = {
    "hf_trainer": (["hf_trainer.py"], "transformers"),
    "lightning": (["lightning_ddp.py"], "lightning"),
    "accelerate": (["accelerate_loop.py"], "accelerate"),
    "fsdp2": (["plain.py", "fsdp2"], "torch"),
    "pipeline": (["plain.py", "pipeline"], "torch"),
    "zero": (["plain.py", "zero"], "torch"),
    "deepspeed": (["deepspeed_zero.py"], "deepspeed"),
    "megatron": (["megatron_loop.py"], "megatron"),
}
LIMIT_S = int(os.environ.get("PROGRAM_LIMIT_S", "540"))  # for one run of a program
pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * LIMIT_S + 100)]


def run(name: str, folder: Path, *flags: str, **variables: str) -> tuple[str, Path, Path]:
    """The program's output, its black boxes and its incidents, after it has ended well."""
    words, package = KINDS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    saved, boxes, incidents = (folder / part for part in ("saved", "boxes", "incidents"))
    saved.mkdir(parents=True)
    command = [
        sys.executable, "-m", "allranks", "run", "--standalone", "--nproc-per-node", "2", "--incidents", str(incidents),
        *flags, str(PROGRAMS / words[0]), *words[1:], str(saved),
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # DeepSpeed builds with ninja
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ALLRANKS_DIR": str(boxes), "ALLRANKS_JOB_ID": name,
           "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "PATH": path, **variables}  # fmt: skip
    log = folder / "output.log"  # a file: what was said remains when the time is over
    with open(log, "w") as output:
        job = subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        code: int | str = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = f"none after {LIMIT_S} s"
        job.terminate()
        job.wait(30)
    said = log.read_text(errors="replace")
    assert code == 0, f"exit code {code}: {said[-5000:]}"
    return said, boxes, incidents


def bits(output: str) -> dict[str, str]:
    """What every rank said at its end, the last time it ended."""
    return dict(re.findall(r"SAYS rank=(\d) (.*)", output))


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """DeepSpeed's operators are built once, and not in the home folder: a lock left there by a killed build hangs every later run."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("built")))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path, Path]]:
    """One healthy run of each program, shared by the tests of it."""
    return {}


def healthy(name: str, clean: dict[str, tuple[str, Path, Path]], folder: Path) -> tuple[str, Path, Path]:
    if name not in clean:
        clean[name] = run(name, folder / "clean")
    return clean[name]


@pytest.mark.parametrize("name", KINDS)
def test_runs_unmodified_and_healthy(
    name: str, clean: dict[str, tuple[str, Path, Path]], tmp_path: Path
) -> None:
    """It ends well without an incident, and the verdict on its black boxes is that nothing is wrong."""
    output, boxes, incidents = healthy(name, clean, tmp_path)
    assert set(bits(output)) == {"0", "1"} and not list(incidents.glob("*/incident.json"))
    asked = [sys.executable, "-m", "allranks", "diagnose", str(boxes), "--json"]
    verdict = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    assert verdict.returncode == 0, verdict.stdout[-3000:] + verdict.stderr


@pytest.mark.parametrize("name", KINDS)
def test_ten_kills_and_a_hang(name: str, clean: dict[str, tuple[str, Path, Path]], tmp_path: Path) -> None:
    """Rank 1 is killed ten times and hangs once: its line is named, the job ends well, and its bits are a healthy run's."""
    wanted = bits(healthy(name, clean, tmp_path)[0])
    begin = time.monotonic()
    output, _, incidents = run(
        name, tmp_path / "troubled", "--max-restarts", "30", "--recovery", "on", "--notice-s", "10", TROUBLE=str(tmp_path)
    )  # fmt: skip
    print(f"{name}: {time.monotonic() - begin:.0f} s with {KILLS} kills and a hang")
    assert len(list(tmp_path.glob("kill-*"))) == KILLS and (tmp_path / "hung").exists()
    assert bits(output) == wanted
    found = [json.loads(path.read_text()) for path in incidents.glob("*/incident.json")]
    hangs = [one for one in found if one["kind"] == "hang"]  # a slow moment of this machine is a stall
    script = PROGRAMS / KINDS[name][0][0]
    line = 1 + next(i for i, text in enumerate(script.read_text().splitlines()) if "# hangs here" in text)
    assert [one["action"]["ranks"] for one in hangs] == [[1]], hangs
    assert f"{script.name}:{line}" in hangs[0]["verdict"]["sentence"], hangs[0]["verdict"]["sentence"]
