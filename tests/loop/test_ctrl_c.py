"""Ctrl-C of `allranks run` and `allranks watch`: an exit code, no traceback, no process and no incident left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proc import gone

pytestmark = pytest.mark.usefixtures("forks")

RANK = """
import os, sys, time, allranks
rank = os.environ.get("ALLRANKS_RANK") or os.environ.get("RANK") or "0"
allranks.step(11_500)  # first: an interrupted import prints two tracebacks
with open(f"{sys.argv[1]}/new{rank}", "w") as out: out.write(str(os.getpid()))
os.replace(f"{sys.argv[1]}/new{rank}", f"{sys.argv[1]}/pid{rank}")
time.sleep(600)
"""


def wait_for(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Polls for a limited time, while the command runs."""
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def run(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """A command of ours, in a session of its own as in a terminal of its own."""
    environment = {**os.environ, "ALLRANKS_DIR": str(folder / "boxes")}
    command = [sys.executable, "-m", "allranks", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.parametrize("whole_group", [False, True], ids=["to the command", "to all, as a terminal does"])
@pytest.mark.parametrize("mode", ["replicas", "watch"])
def test_ctrl_c_ends_the_job_and_leaves_nothing_behind(tmp_path: Path, mode: str, whole_group: bool) -> None:
    """Two ranks sleep; whole-job mode is tested in test_run.py."""
    script = tmp_path / "train.py"
    script.write_text(RANK)
    if mode == "replicas":
        words = [
            "run",
            "--replicas",
            "2",
            "--incidents",
            str(tmp_path / "incidents"),
            str(script),
            str(tmp_path),
        ]
    else:
        words = ["watch", "-o", str(tmp_path / "out"), "--", sys.executable, str(script), str(tmp_path)]
    process = run(tmp_path, words)
    try:
        wait_for(lambda: len(list(tmp_path.glob("pid*"))) == (2 if mode == "replicas" else 1), process)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    ours = [line for line in output.splitlines() if line.startswith("Traceback")]
    assert not ours if mode == "replicas" else len(ours) <= 1, output  # the watched script may print its own
    if mode == "replicas":
        assert output.splitlines()[-1] == "[allranks] Stopped by Ctrl-C at step 11,500.", output
        assert "rank exited" not in output and "signal 2" not in output, output
    assert all(gone(pid) for pid in pids)
    assert not [path for path in tmp_path.glob("incidents/*") if path.is_dir()] and not list(
        tmp_path.glob("out/*")
    ), output


EARLY = """
import os, signal, subprocess, sys
from allranks.cli import main
begin = subprocess.Popen.__init__
def begin_and_interrupt(self, *args, **keywords):
    begin(self, *args, **keywords)
    open(sys.argv[1], "w").write(str(self.pid))
    os.kill(os.getpid(), signal.SIGINT)
subprocess.Popen.__init__ = begin_and_interrupt
sys.exit(main(["watch", "--", "sleep", "600"]))
"""


def test_ctrl_c_while_a_watch_starts_its_command_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EARLY, str(tmp_path / "pid")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 130, ended
    assert gone(int((tmp_path / "pid").read_text()))


def test_ctrl_c_of_a_watch_by_pid_leaves_the_job_alone(tmp_path: Path) -> None:
    """The watch ends with 130 and without a word of Python; the job was somebody else's."""
    script = tmp_path / "train.py"
    script.write_text(RANK)
    job = subprocess.Popen([sys.executable, str(script), str(tmp_path)], start_new_session=True)
    process = run(tmp_path, ["watch", "--pid", str(job.pid), "--wait", "0", "-o", str(tmp_path / "out")])
    try:
        wait_for(lambda: list(tmp_path.glob("pid*")) and _catches(process.pid), process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
        assert job.poll() is None
    finally:
        for one in (process, job):
            one.kill()
            one.wait()
    assert process.returncode == 130 and "Traceback" not in output, output


def _catches(pid: int) -> bool:
    from allranks.stacktraces.procfs import catches

    return catches(pid, signal.SIGQUIT)
