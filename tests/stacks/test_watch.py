"""`allranks watch`: exit codes and signals pass through, triggers collect, the end of the job ends the watch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.model.debug_options import DebugOptions
from allranks.stacktraces import read_bundle
from allranks.stacktraces.debuggers import find_pyspy
from allranks.watch.sidecar import MainThreadWork, Sidecar

from . import victims as v

pytestmark = pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")

# A rank with a black box that stops moving after its third step.
BOXED = """
import numpy as np
from allranks.blackbox.header import MAGIC, VERSION
from allranks.blackbox.layout import HEADER, file_name
from allranks.model.trace import CALL
folder = os.environ["ALLRANKS_DIR"]
head = np.zeros(1, HEADER)
head["magic"], head["version"], head["record_bytes"], head["capacity"] = MAGIC, VERSION, CALL.itemsize, 0
head["rank"], head["world_size"], head["pid"] = 0, 1, os.getpid()
head["start_ticks"] = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
head["start_ns"] = began = time.time_ns()
box = os.path.join(folder, file_name("job", 0, 0, os.getpid()))
for step in range(3):
    head["step"], head["step_ns"] = step, began + step * 10**6  # however slow the machine: its steps are short
    open(box, "wb").write(head.tobytes().ljust(4096, b"\\0"))
def stuck():
    time.sleep(1000)
ready()
stuck()
"""


def watch(*words: str) -> list[str]:
    return [sys.executable, "-m", "allranks", "watch", *words]


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_the_command_passes_through(code: int, tmp_path: Path) -> None:
    """The sidecar is invisible to anyone who waits for the job."""
    command = watch(
        "-o", str(tmp_path), "--", sys.executable, "-c", f"print('hello'); raise SystemExit({code})"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert done.stdout == "hello\n"
    assert list(tmp_path.iterdir()) == []


def test_a_signal_reaches_the_command_and_shows_in_the_exit_code(tmp_path: Path) -> None:
    """SIGTERM is passed on; a command that dies of it gives 128 + 15."""
    script, mark = tmp_path / "job.py", tmp_path / "ready"
    script.write_text(v.PREAMBLE + v.SLEEP)
    process = subprocess.Popen(watch("-o", str(tmp_path / "o"), "--", sys.executable, str(script), str(mark)))
    try:
        v.wait_until(mark.exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_a_standstill_of_the_black_box_is_collected_and_judged(tmp_path: Path) -> None:
    """No change to the job but its black box: the collection says hung, where, and why."""
    boxes, out = tmp_path / "boxes", tmp_path / "out"
    boxes.mkdir()
    script, mark = tmp_path / "job.py", tmp_path / "ready"
    script.write_text(v.PREAMBLE + BOXED)
    words = watch(
        "--wait", "0", "--no-progress", "2", "--interval", "0.2", "--json", "-o", str(out), "--",
        sys.executable, str(script), str(mark),
    )  # fmt: skip
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, "ALLRANKS_DIR": str(boxes)}
    )
    try:
        v.wait_until(mark.exists, process)
        assert process.stderr is not None
        lines = (line for line in process.stderr if line.startswith("{"))
        told = json.loads(next(lines))
        assert told["reason"].startswith("no progress for")
        assert told["hung"] is True
        assert told["culprits"] == [0]
        folder = Path(told["folder"])
        assert {"bundle.json", "report.txt", "report.json", "report.html"} <= {
            p.name for p in folder.iterdir()
        }
        assert read_bundle(folder).ranks[0].where.endswith("in stuck")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)


DELEGATES = """
import subprocess, sys
busy = "import time; end = time.monotonic() + 8\\nwhile time.monotonic() < end: pass"
subprocess.run([sys.executable, "-c", busy], check=True)
"""


def test_a_program_that_leaves_the_work_to_its_children_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """It waits for them all the time: what they do is its progress."""
    words = watch(
        "--wait", "0", "--no-progress", "3", "-o", str(tmp_path), "--", sys.executable, "-c", DELEGATES
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == [], done.stderr


LAUNCHES = """
import os, subprocess, sys
rank = lambda number, code: subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": number, "LOCAL_RANK": number})
ranks = [rank("0", "input()"), rank("1", "input()")]
print("started", flush=True)
input()
for one in ranks: one.kill(); one.wait()
print("alone", flush=True)
input()
"""


def test_a_launcher_that_outlives_its_ranks_is_not_a_rank(tmp_path: Path) -> None:
    """Its ranks have ended: nobody is left to be looked at."""
    script = tmp_path / "launch.py"
    script.write_text(LAUNCHES)
    sidecar = Sidecar(DebugOptions(), tmp_path)
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        sidecar.take([process.pid])
        assert process.stdout.readline() == b"started\n"
        assert [target.rank for target in sidecar._find()] == [0, 1]
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"alone\n"
        assert sidecar._find() == []
        process.stdin.close()


def test_allranks_itself_is_no_rank_while_its_ranks_start(tmp_path: Path) -> None:
    """`allranks run` watches its own process for the `debug:` section of a job file."""
    sidecar = Sidecar(DebugOptions(), tmp_path)
    words = [sys.executable, "-m", "allranks", "watch", "-o", str(tmp_path), "--pid", str(os.getpid())]
    with subprocess.Popen(words) as process:
        try:
            sidecar.take([process.pid])
            v.wait_until(
                lambda: " watch " in Path(f"/proc/{process.pid}/cmdline").read_text().replace("\0", " ")
            )
            assert sidecar._find() == []
        finally:
            process.terminate()


def test_running_processes_are_watched_by_pid_and_asked_on_demand(tmp_path: Path) -> None:
    """--pid takes a running job; SIGQUIT collects at once; the watch ends with the job, with code 0."""
    out = tmp_path / "out"
    with v.victim(v.SLEEP, tmp_path) as victim:
        words = watch("--pid", str(victim.pid), "--wait", "0", "--interval", "0.1", "-o", str(out))
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        try:
            v.wait_until(lambda: _catches_quit(process.pid), process)
            process.send_signal(signal.SIGQUIT)
            v.wait_until(lambda: out.exists() and list(out.glob("*/report.html")), process)
        finally:
            os.killpg(victim.pid, signal.SIGKILL)
            victim.process.wait()
            _, told = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "asked for" in told


def _catches_quit(pid: int) -> bool:
    from allranks.stacktraces.procfs import catches

    return catches(pid, signal.SIGQUIT)


def test_a_command_and_a_pid_together_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """One of them, and the message shows how; an unknown command is an error, not a traceback."""
    from allranks.cli import main

    assert main(["watch"]) == 2
    assert "allranks watch -- torchrun" in capfd.readouterr().err
    assert main(["watch", "--", "/no/such/command"]) == 2
    assert "cannot start" in capfd.readouterr().err


def test_a_look_that_fails_does_not_touch_the_job(tmp_path: Path) -> None:
    """The output folder cannot be made: that is said, and the command runs to its own end."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    command = watch(
        "--wait", "0.5", "--interval", "0", "-o", str(blocker / "sub"), "--",
        sys.executable, "-c", "import time; time.sleep(4); raise SystemExit(7)",
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7
    assert "failed" in done.stderr or "could not be written" in done.stderr
    assert "stacks cannot be written there" in done.stderr.partition("\n")[0]  # before anything is lost


@pytest.mark.parametrize("busy", [False, True])
def test_a_hang_of_ranks_without_black_boxes_is_noticed_when_one_of_them_does_not_work(busy: bool) -> None:
    """The other one waits by burning CPU, or not. Work of all is progress; a poll now and then is none."""
    work, now = MainThreadWork(), 0.0
    for second in range(10):  # both work
        work = work.after(now := float(second), {0: (50 * second, 0), 1: (0, 100 * second)})
    rounds = work.rounds
    assert rounds >= 3
    for second in range(10, 100):
        other = 50 * second if busy else 450
        work = work.after(now := float(second), {0: (other, 0), 1: (0, 900 + second)})
    assert now == 99 and work.rounds <= rounds + 1


def test_a_hang_of_a_plain_job_is_collected_and_what_cannot_be_seen_is_said(tmp_path: Path) -> None:
    """No black box, no log file: two ranks, one of which sleeps for good."""
    script = tmp_path / "train.py"
    script.write_text("import time\ndef stuck():\n    time.sleep(1000)\nstuck()\n")
    command = watch(
        "-o", str(tmp_path / "out"), "--no-progress", "3", "--wait", "0", "--rounds", "1", "--json"
    )
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    process = subprocess.Popen(
        [*command, "--", sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("{"):
                break
        assert any("have no black box" in line and "is not noticed" in line for line in lines)
        assert json.loads(lines[-1])["reason"].startswith("no progress for ")
    finally:
        process.terminate()
        process.communicate(timeout=300)
