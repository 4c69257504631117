"""`allranks run` with real ranks: exit codes, restarts, recording, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.incidents.job_overview import Overview
from allranks.watch.samples import read_samples
from proc import gone

pytestmark = pytest.mark.usefixtures("forks")

HEAD = """
import os, sys, time
import torch, torch.distributed as dist, allranks
OUT = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
def once(name):
    try: os.close(os.open(f"{OUT}/{name}", os.O_CREAT | os.O_EXCL)); return True
    except FileExistsError: return False
"""


def start(tmp_path: Path, body: str, *flags: str) -> subprocess.Popen[str]:
    """`allranks run` of a small script with two ranks; its boxes go to tmp_path/boxes."""
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    command = [
        sys.executable, "-m", "allranks", "run", "--standalone", "--nproc-per-node", "2", "--no-lighthouse",
        "--incidents", str(tmp_path / "incidents"), *flags, str(script), str(tmp_path),
    ]  # fmt: skip
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.soak  # tests/elastic_runs kills a rank instead, in every run
def test_a_failing_rank_fails_the_job_and_is_restarted_as_asked(tmp_path: Path) -> None:
    """Rank 1 fails in its first life; with one restart the job ends well."""
    body = "if rank == 1 and once('failed'): sys.exit(3)\ndist.barrier(); dist.destroy_process_group()"
    code, output = finish(start(tmp_path, body, "--max-restarts", "1"))
    assert (tmp_path / "failed").exists()
    assert code == 0, output


def test_without_restarts_the_exit_code_and_the_last_line_tell(tmp_path: Path) -> None:
    """A rank that dies of SIGKILL gives 128 + 9. torchrun's report, which knows no line, is not the last thing on the screen."""
    code, output = finish(start(tmp_path, "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)"))
    assert code == 128 + 9, output
    assert output.splitlines()[-1].startswith("[allranks] Rank 1 died of SIGKILL; story: "), output
    assert f"{tmp_path / 'train.py'} FAILED" in output and "rank_entry FAILED" not in output


def test_ctrl_c_ends_everything_and_is_no_incident(tmp_path: Path) -> None:
    """Exit code 130, one line of each rank, no rank left, and no story of a death. (kill -9: tests/elastic_runs.)"""
    # closed by `with`: Python drops an interrupt that comes while a file is closed by its finalizer
    body = "with open(f'{OUT}/pid{rank}', 'w') as out: out.write(str(os.getpid()))\ntime.sleep(600)"
    process = start(tmp_path, body)
    pids = []
    deadline = time.monotonic() + 90
    while len(pids) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        pids = [int(p.read_text()) for p in tmp_path.glob("pid*") if p.read_text()]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert output.count("interrupted at") == 2 and "Traceback" not in output, output
    assert output.splitlines()[-1] == "[allranks] Stopped by Ctrl-C." and "closing signal" not in output, (
        output
    )
    assert all(gone(pid) for pid in pids)
    assert not [path for path in tmp_path.glob("incidents/*") if path.is_dir()], output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "no script was given"),
        (["run", "--replicas", "0", "x.py"], "must be at least 1"),
        (["run", "--replicas", "2", "--no-lighthouse", __file__], "replicas need a lighthouse"),
        (["run", "--config", "/nowhere.yaml", "x.py"], "nowhere.yaml"),
        (["run", "--no-lighthouse", "x.py"], "there is no script x.py"),
        (["run", "--replica", "2", __file__], "Did you mean --replicas?"),
        (["run", "--nproc-per-nod=2", "--verbos", __file__], "unknown flag --verbos"),
        (
            ["run", "--nproc-per-node", "two", __file__],
            "--nproc-per-node takes a number, or auto, cpu, gpu, not 'two'",
        ),
        (["run", "--nnodes=1-2", __file__], "--nnodes takes a number, or MIN:MAX, not '1-2'"),
    ],
)
def test_mistakes_get_one_clear_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and the fix."""
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_what_the_user_has_set_about_the_store_of_the_launcher_stays(tmp_path: Path) -> None:
    """A script may talk through that store; by default rank 0 has one of its own."""
    script = tmp_path / "train.py"
    script.write_text("import os; print(os.environ['TORCHELASTIC_USE_AGENT_STORE'])")
    command = [sys.executable, "-m", "allranks", "run", "--standalone", "--no-lighthouse", str(script)]
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "True" in ended.stdout, ended.stderr


def test_a_failure_is_one_where_signals_of_children_are_ignored(tmp_path: Path) -> None:
    """Anyone who starts us may have ignored SIGCHLD. The kernel keeps no exit codes then, and Python reads them as 0."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    words = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "1", "--no-record", str(script)]
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    ran = subprocess.run(
        ["env", "--ignore-signal=CHLD", *words],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr


@pytest.mark.parametrize(
    ("flags", "code"), [([], 2), pytest.param(["--no-record"], 0, marks=pytest.mark.everything)]
)
def test_a_limit_of_file_sizes_is_said_and_a_job_runs_without_recording(
    tmp_path: Path, flags: list[str], code: int
) -> None:
    """`ulimit -f 64`: no black box has room, and --no-record was refused as well."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "1", *flags, str(script)]
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *words],
        cwd=tmp_path, env={**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert ("(ulimit -f), or start with --no-record" in ran.stderr) == (code == 2)


def test_a_working_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    """Python says "No such file or directory" and nothing more."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "1", str(script)]
    line = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    ran = subprocess.run(
        ["sh", "-c", line, "sh", *words],
        cwd=tmp_path, env={**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (
        ran.returncode == 2 and "the working folder was removed\nChange to another folder (cd)" in ran.stderr
    ), ran.stderr


@pytest.mark.parametrize(
    ("limit", "code"), [("-n 20", 2), pytest.param("-Sn 20", 0, marks=pytest.mark.everything)]
)
def test_a_low_limit_of_open_files_is_raised_or_said(tmp_path: Path, limit: str, code: int) -> None:
    """A soft limit can be raised. A hard one ended in a traceback of the watch."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "1", "--no-record", str(script)]
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    ran = subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *words],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert ("only 20 files may be open at once" in ran.stderr) == (code == 2)
    assert "Traceback" not in ran.stderr


def test_a_good_job_is_seen_from_outside_ends_with_zero_and_leaves_boxes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded without a line in the script, its output prefixed; while rank 1 sleeps rank 0 waits for it."""
    process = start(
        tmp_path,
        "print('hello'); dist.all_reduce(torch.ones(1)); allranks.step(7)\n"
        "if rank == 1:\n    while not os.path.exists(f'{OUT}/go'): time.sleep(0.05)\n"
        "dist.all_reduce(torch.ones(1)); dist.destroy_process_group()",
    )
    try:
        deadline = time.monotonic() + 90
        overview = Overview(tmp_path / "boxes")
        while not any(row.waits_for == (1,) for row in overview.look().rows):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        assert main(["status", str(tmp_path / "boxes"), "--json"]) == 0
        rows = {row["rank"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert rows[0]["doing"].startswith("all_reduce #2") and rows[0]["waits_for"] == [1]
        assert {row["step"] for row in rows.values()} == {7}
    finally:
        (tmp_path / "go").touch()
        code, output = finish(process)
    assert code == 0, output
    assert "[rank 0] hello" in output and "[rank 1] hello" in output
    samples = read_samples(tmp_path / "boxes")
    assert [s.rank for s in samples] == [0, 1]
    assert all(s.calls_completed >= 1 and s.closed == "exit" for s in samples)


def test_a_program_that_always_fails_the_same_way_ends_after_three_times_with_one_incident(
    tmp_path: Path,
) -> None:
    """Before its first step; the last word is the user's own line."""
    body = "open(f'{OUT}/tries', 'a').write('x') if rank == 1 else None\nopen('/nowhere/data.bin') if rank == 1 else time.sleep(600)"
    code, output = finish(start(tmp_path, body, "--max-restarts", "50"))
    assert code == 1, output
    assert (tmp_path / "tries").read_text() == "xxx"
    assert "3 times before the first step: rank 1 raised FileNotFoundError at train.py:11" in output
    assert output.splitlines()[-1].startswith("[allranks] Rank 1 raised FileNotFoundError at train.py:11"), (
        output
    )
    assert len(list((tmp_path / "incidents").glob("*/incident.json"))) == 1


def test_replicas_of_a_script_without_a_manager_are_stopped_with_two_ways_out(tmp_path: Path) -> None:
    """Each would train a model of its own, and nobody would know."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(1))"
    )
    command = [
        sys.executable, "-m", "allranks", "run", "--replicas", "2", "--incidents", str(tmp_path / "incidents"), str(script),
    ]  # fmt: skip
    env = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("did not make a Manager") == 1
    assert "--nproc-per-node 2" in done.stderr and "docs/tasks/survive_kill.md" in done.stderr
