"""Launchers of other projects as they are typed, with `allranks watch` in front: healthy, killed ten times, and hung."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integrations.programs.faults import KILLS

from allranks.stacktraces.procfs import descendants

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = int(os.environ.get("PROGRAM_LIMIT_S", "240"))
RECORD = "allranks.recording"
ROW = '{"reason"'  # a collection, as `watch --json` prints it
pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT_S + 60)]


@dataclass(frozen=True)
class Launcher:
    """A launcher: the words before the script, the script's own words, and what it can do."""

    words: tuple[str, ...]
    program: tuple[str, ...]
    package: str = "torch"
    restarts: bool = False
    module: str = ""  # its flag for a module instead of a script, by which `allranks.record` comes in


TORCHRUN = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "30")
KINDS = {
    "torchrun": Launcher(("torchrun", *TORCHRUN), ("plain.py", "zero"), restarts=True, module="-m"),
    "torch.distributed.run": Launcher(
        ("python", "-m", "torch.distributed.run", *TORCHRUN), ("plain.py", "fsdp2"), restarts=True, module="-m"
    ),
    "accelerate": Launcher(
        ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
         "--max_restarts", "30", "--main_process_port", "0", "--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file"),
        ("accelerate_loop.py",), "accelerate", restarts=True, module="-m",
    ),
    "deepspeed": Launcher(("deepspeed", "--num_gpus", "2"), ("deepspeed_zero.py",), "deepspeed", module="--module"),
    "fabric": Launcher(
        ("fabric", "run", "--accelerator", "cpu", "--devices", "2", "--strategy", "ddp"), ("fabric_ddp.py",), "lightning"
    ),
    "lightning": Launcher(("python",), ("lightning_ddp.py",), "lightning"),
    "spawn": Launcher(("python",), ("spawn_ddp.py",)),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """DeepSpeed's operators are built once, and not in the home folder."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("built")))


@pytest.fixture(scope="module")
def clean() -> dict[str, Ended]:
    """One healthy run of each launcher, shared by the tests of it."""
    return {}


@dataclass(frozen=True)
class Ended:
    """What is left of a watched job."""

    code: int
    said: str
    collections: list[dict[str, object]]


def watch(
    name: str, folder: Path, *, record: bool = False, until_seen: bool = False, **variables: str
) -> Ended:
    """Runs the launcher to its end, or until the first collection, after which it is terminated."""
    kind = KINDS[name]
    if importlib.util.find_spec(kind.package) is None:
        pytest.skip(f"{kind.package} is not installed")
    bin_folder = Path(sys.executable).parent
    found = shutil.which(kind.words[0], path=f"{bin_folder}:{os.environ['PATH']}")
    assert found, f"{kind.package} brings no {kind.words[0]}"
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    recorder = (kind.module, RECORD) if record else ()
    command = [
        sys.executable, "-m", "allranks", "watch", "--wait", "0", "--no-progress", "8", "--interval", "1", "--json",
        "-o", str(folder / "backtraces"), "--", found, *kind.words[1:], *recorder, str(PROGRAMS / kind.program[0]),
        *kind.program[1:], str(saved),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ALLRANKS_DIR": str(folder / "boxes"), "ALLRANKS_JOB_ID": name,
           "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without us, too, restarts would meet addresses of the attempt before
           "DS_ACCELERATOR": "cpu", "PATH": f"{bin_folder}:{os.environ['PATH']}", **variables}  # fmt: skip
    said: list[str] = []
    with (
        open(folder / "output.log", "w", buffering=1) as output,
        subprocess.Popen(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job,
    ):
        try:
            assert job.stdout is not None
            for line in job.stdout:
                said.append(line)
                output.write(line)
                if until_seen and line.startswith(ROW):
                    _kill(job.pid)  # a rank in gloo's C++ runs no handler of SIGTERM
            code = job.wait(LIMIT_S)
        finally:
            _kill(job.pid)
    return Ended(code, "".join(said), [json.loads(one) for one in said if one.startswith(ROW)])


def _kill(pid: int) -> None:
    """A job with all that it started."""
    for one in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def healthy(name: str, clean: dict[str, Ended], folder: Path) -> Ended:
    if name not in clean:
        (folder / "clean").mkdir()
        clean[name] = watch(name, folder / "clean")
    return clean[name]


def bits(output: str) -> dict[str, str]:
    """What every rank said at its end, the last time it ended."""
    return dict(re.findall(r"SAYS rank=(\d) (step=\d+ bits=[0-9a-f]{16})", output))


@pytest.mark.parametrize("name", KINDS)
def test_runs_to_its_end(name: str, clean: dict[str, Ended], tmp_path: Path) -> None:
    """The launcher's exit code is ours, both ranks end well, and no stall is seen."""
    ended = healthy(name, clean, tmp_path)
    assert ended.code == 0 and set(bits(ended.said)) == {"0", "1"}, ended.said[-5000:]
    assert not [row for row in ended.collections if row["hung"]], ended.collections


@pytest.mark.timeout(2 * LIMIT_S + 60)  # two runs
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.restarts])
def test_a_launcher_that_restarts_continues_after_ten_kills(
    name: str, clean: dict[str, Ended], tmp_path: Path
) -> None:
    """With the recorder in its ranks, too, a launcher restarts them as it does without us, and the bits are the same."""
    wanted = bits(healthy(name, clean, tmp_path).said)
    (tmp_path / "hung").touch()  # kills only
    ended = watch(name, tmp_path, record=True, TROUBLE=str(tmp_path))
    assert ended.code == 0 and bits(ended.said) == wanted, ended.said[-5000:]
    assert len(list(tmp_path.glob("kill-*"))) == KILLS


@pytest.mark.parametrize("record", [False, True], ids=["as_it_is", "recorded"])
@pytest.mark.parametrize("name", KINDS)
def test_a_hang_is_named_with_its_line(name: str, record: bool, tmp_path: Path) -> None:
    """Rank 1 sleeps in the program's own code: the collection names that rank and that line."""
    if record and not KINDS[name].module:
        pytest.skip(f"{name} takes no module: call allranks.record() in the script")
    for number in range(KILLS):  # all kills have been
        (tmp_path / f"kill-{number}").touch()
    ended = watch(name, tmp_path, record=record, until_seen=True, TROUBLE=str(tmp_path))
    assert ended.collections, ended.said[-5000:]
    row, script = ended.collections[0], PROGRAMS / KINDS[name].program[0]
    line = 1 + next(i for i, text in enumerate(script.read_text().splitlines()) if "# hangs here" in text)
    assert row["culprits"] == [1] and f"{script.name}:{line}" in str(row["sentence"]), (
        row,
        ended.said[-3000:],
    )
