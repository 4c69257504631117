"""Waits that any process may end, also one outside of the job: signals and named pipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stacks.test_process_tree import look_at, running

from allranks.diagnosis.process_verdict import explain_processes

SIGNAL = """
    import os, signal, subprocess, sys

    def worker():
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1, signal.SIGUSR2}})
        print("x", flush=True)
        signal.sigwait({waits})
        print("done", flush=True)

    def driver():
        words = [sys.executable, "-u", __file__, "worker"]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        {sends}
        print("ready")
        {needs}

    worker() if len(sys.argv) > 1 else driver()
    """
WRONG, NONE = "child.send_signal(signal.SIGUSR2)", "pass"
ANSWER, END = "child.stdout.readline()", "child.wait()"


@pytest.mark.parametrize(
    ("waits", "sends", "needs", "state"),
    [
        ("{signal.SIGUSR1}", WRONG, ANSWER, "stuck"),
        ("{signal.SIGUSR1}", WRONG, END, "stuck"),
        ("{signal.SIGUSR1}", NONE, ANSWER, "unclear"),
        ("{signal.SIGUSR1}", NONE, END, "unclear"),
        ("{signal.SIGINT, signal.SIGTERM}", NONE, END, "moving"),
    ],
)
def test_a_wait_for_a_signal(tmp_path: Path, waits: str, sends: str, needs: str, state: str) -> None:
    """A wrong one was sent, or none at all, and somebody needs the answer, or only the end; a server waits to be stopped."""
    with running(tmp_path, SIGNAL.format(waits=waits, sends=sends, needs=needs)) as job:
        look = look_at(job.pid)
    found = explain_processes(look)
    assert found.state == state, found
    if state != "moving":
        assert "waits for SIGUSR1" in found.sentence, found
        assert state == "stuck" or "another process may" in found.reason, found
        assert ("SIGUSR2 is pending" in found.sentence) == (sends is WRONG), found
    if state == "stuck":
        assert [(one.role, one.line) for one in found.guilty] == [("worker", 7)], found


FIFO = """
    import os, socket, subprocess, sys

    def worker(path):
        with open(path) as commands:
            print("x", flush=True)
            commands.readline()
        print("done", flush=True)

    def driver():
        path = os.path.join(os.path.dirname(__file__), "commands")
        os.mkfifo(path)
        words = ["bash", "-c", {shell!r}, path, sys.executable, "-u", __file__, path]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        print("ready")
        child.stdout.readline()

    worker(sys.argv[1]) if len(sys.argv) > 1 else driver()
    """


@pytest.mark.parametrize("shell", ['exec 3<>"$0"; "$@"; true', 'sleep 1000 3<>"$0" >/dev/null & "$@"; true'])
def test_a_named_pipe_that_only_a_shell_keeps_open(tmp_path: Path, shell: str) -> None:
    """Somebody outside of the job may write into it: a person, a cron job."""
    with running(tmp_path, FIFO.format(shell=shell)) as job:
        look = look_at(job.pid)
    found = explain_processes(look)
    assert (found.state, found.guilty) == ("unclear", ()), found
    assert "worker" in found.sentence and "into" in found.reason and "commands" in found.reason, found


UNREAD = """
    import subprocess, sys, threading

    def worker():
        print("x", flush=True)
        threading.Event().wait()

    def driver():
        child = subprocess.Popen([sys.executable, "-u", __file__, "worker"], stdout=subprocess.PIPE)
        child.stdout.read(1)
        print("ready")
        child.stdout.read(4)

    worker() if len(sys.argv) > 1 else driver()
    """


def test_a_process_whose_stacks_cannot_be_read_is_not_accused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without py-spy, a Python process that waits for a lock was said to be inside native code."""
    with running(tmp_path, UNREAD) as job:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr("sys.prefix", str(tmp_path))
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        look = look_at(job.pid)
    found = explain_processes(look)
    assert (found.state, found.guilty) == ("unclear", ()), found
    assert "native code" not in found.sentence and any("pip install py-spy" in one for one in look.notes)
