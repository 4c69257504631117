"""Whatever ends a drill ends its job: no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forks")

SLEEPER = """
import os, sys, time
open(os.path.join(sys.argv[1], "pid." + os.environ["ALLRANKS_RANK"]), "w").write(str(os.getpid()))
time.sleep(600)
"""


def wait_for(what: str, check: object, limit_s: float = 90.0) -> None:
    """Polls until it holds; the limit is for hanging only."""
    deadline = time.monotonic() + limit_s
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s:g} s"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(root: int) -> set[int]:
    """All living children of a process, and theirs."""
    found: set[int] = set()
    for path in Path("/proc").glob(f"{root}/task/*/children"):
        for word in path.read_text().split():
            found |= {int(word)} | descendants(int(word))
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_drill_leaves_no_process_behind(tmp_path: Path, number: int, code: int) -> None:
    """The command is interrupted while two ranks sleep; the agent, the ranks and their helpers go with it."""
    (tmp_path / "plan.json").write_text('{"faults": []}')
    (tmp_path / "train.py").write_text(SLEEPER)
    command = [
        sys.executable, "-m", "allranks", "drill", "--plan", "plan.json", "--folder", "drill", "--quiet", "--",
        "allranks", "run", "--replicas", "2", "--no-record", "train.py", str(tmp_path),
    ]  # fmt: skip
    drill = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        pids = [tmp_path / f"pid.{rank}" for rank in range(2)]
        wait_for("the start of both ranks", lambda: all(p.exists() and p.read_text() for p in pids))
        family = descendants(drill.pid)
        assert {int(p.read_text()) for p in pids} <= family
        os.kill(drill.pid, number)
        assert drill.wait(timeout=300) == code
        wait_for("the end of all processes", lambda: not [pid for pid in family if running(pid)])
    finally:
        for pid in (drill.pid, *descendants(drill.pid)):
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        drill.wait(timeout=30)
