"""`allranks run` takes torchrun's command line as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import held_port
from torch.distributed.run import get_args_parser

from allranks.errors import ConfigurationError
from allranks.launch import whole_job
from allranks.launch.command_line import (
    _ALONE,
    _VALUED,
    arrange,
    check,
    flag_value,
    from_environment,
    has_flag,
    job_token,
)
from allranks.launch.torchrun_patches import LaunchError

pytestmark = pytest.mark.usefixtures("forks")

OURS = {"--replicas": True, "--no-watch": False}


def test_our_flags_are_found_among_torchruns() -> None:
    """In any order, with = or a blank; nothing after the script is touched."""
    words = [
        "--nnodes=2:4",
        "--replicas",
        "3",
        "--standalone",
        "--no-watch",
        "--rdzv_id",
        "job7",
        "train.py",
        "--replicas",
        "9",
        "--lr=1",
    ]
    assert arrange(words, OURS) == (
        ["--replicas", "3", "--no-watch"],
        ["--nnodes=2:4", "--standalone", "--rdzv_id", "job7"],
        ["train.py", "--replicas", "9", "--lr=1"],
    )


def test_modules_and_commands_are_scripts_too() -> None:
    """-m and --no-python stand alone, so the next word is the script."""
    assert arrange(["-m", "pkg.train", "--x", "1"], OURS) == ([], ["-m"], ["pkg.train", "--x", "1"])
    assert arrange(["--no_python", "./run.sh", "a"], OURS) == ([], ["--no_python"], ["./run.sh", "a"])
    assert arrange(["--replicas=2", "--", "./run.sh"], OURS) == (["--replicas=2"], [], ["./run.sh"])


def test_every_flag_of_torchrun_is_known() -> None:
    """In both spellings, with values that it takes itself."""
    for action in get_args_parser()._actions:
        for flag in action.option_strings:
            assert not flag.startswith("--") or flag[2:].replace("_", "-") in _VALUED | _ALONE
    check(
        ["--nnodes=1:4", "--nproc_per_node", "gpu", "-r", "3", "-t3", "--standalone", "--rdzv-conf", "a=--b"],
        (),
    )
    check(["--nproc-per-node", "8", "--max-restarts=3", "--module", "--node_rank", "0"], ())


def test_both_spellings_of_a_flag_are_found() -> None:
    """torchrun knows --rdzv-id and --rdzv_id."""
    assert flag_value(["--rdzv_id", "a"], "--rdzv-id") == "a"
    assert flag_value(["--rdzv-id=b"], "--rdzv-id") == "b"
    assert has_flag(["--rdzv_backend=c10d"], "--rdzv-backend")
    assert not has_flag(["--rdzv"], "--rdzv-backend")


def test_variables_of_torchrun_are_read_like_its_flags() -> None:
    """PET_* as Kubeflow sets them; what was typed wins."""
    variables = {
        "PET_NNODES": "2:4",
        "PET_RDZV_ID": "a",
        "PET_STANDALONE": "0",
        "PET_NO_PYTHON": "1",
        "PET": "x",
    }
    assert from_environment(variables, ["--rdzv_id=b"]) == ["--nnodes=2:4", "--no-python"]


def test_the_token_of_a_job_is_given_read_or_made(tmp_path: Path) -> None:
    """The variable, the file that another names, or a new one each time."""
    (tmp_path / "token").write_text("from the file\n")
    file = {"ALLRANKS_TOKEN_FILE": str(tmp_path / "token")}
    assert job_token({**file, "ALLRANKS_TOKEN": "given"}) == "given"
    assert job_token(file) == "from the file"
    assert len({job_token({}) for _ in range(3)}) == 3
    with pytest.raises(ConfigurationError, match="cannot read the job token"):
        job_token({"ALLRANKS_TOKEN_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("known", "expected"),
    [({"localhost"}, "localhost"), (set(), "127.0.0.1 localhost"), ({"here"}, "None")],
)
def test_ranks_do_not_wait_for_a_host_name_that_does_not_resolve(
    known: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun gives the name to the ranks, who ask for it until their timeout."""
    monkeypatch.setattr("allranks.launch.whole_job.resolves", known.__contains__)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    try:
        found = str(whole_job._own_address(None, alone=True))
    except LaunchError as error:
        found = error.hint
    assert expected in found


LATE = """
import os, signal, time
import torch, torch.distributed as dist
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and rank == 1:
    time.sleep(2)  # the other one asks for its address meanwhile
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.everything  # a restart: tests/elastic_runs
def test_ranks_that_are_restarted_at_a_given_master_port_do_not_meet_dead_ones(tmp_path: Path) -> None:
    """torchrun keeps one store there for all attempts, with the addresses of ranks that are gone."""
    (tmp_path / "late.py").write_text(LATE)
    words = ["--master-port", str(held_port()), "--nproc-per-node", "2", "--max-restarts", "1", "late.py"]
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "run", "--incidents", "incidents", *words],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
