"""`allranks watch --tree`: a stuck role is reported and restarted by its own command; a job that works is left in peace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.channel import web_client
from allranks.errors import ConfigurationError
from allranks.model.debug_options import DebugOptions
from allranks.model.stacks import Guilty, ProcessFinding
from allranks.stacktraces.debuggers import find_pyspy
from allranks.watch.role_sidecar import MAX_RESTARTS, RoleSidecar, choose_restart, restart_commands

ROLES = Path(__file__).parents[2] / "examples" / "roles"
COMMANDS = restart_commands(["reward=systemctl --user restart 'the judge'"])


def _stuck(*roles: str) -> ProcessFinding:
    return ProcessFinding("stuck", "", tuple(Guilty(number, role) for number, role in enumerate(roles)))


def test_a_role_with_a_command_is_restarted() -> None:
    assert COMMANDS == {"reward": ("systemctl", "--user", "restart", "the judge")}
    assert choose_restart(_stuck("reward 1"), COMMANDS, [], 0.0)[0] == "reward"
    assert choose_restart(_stuck("reward 1", "reward 2"), COMMANDS, [], 0.0)[0] == "reward"


@pytest.mark.parametrize(
    ("finding", "earlier", "why"),
    [
        (_stuck("trainer 0"), [], "no restart command for trainer"),
        (_stuck("reward", "trainer"), [], "2 roles are guilty"),
        (ProcessFinding("moving", ""), [], "not stuck"),
        (_stuck("reward"), [("reward", 0.0)] * MAX_RESTARTS, "3 times within an hour"),
    ],
)
def test_nothing_else_is_ever_restarted(
    finding: ProcessFinding, earlier: list[tuple[str, float]], why: str
) -> None:
    role, reason = choose_restart(finding, COMMANDS, earlier, 10.0)
    assert role == "" and why in reason


def test_a_restart_without_a_command_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not ROLE=COMMAND"):
        DebugOptions(restart=("reward=",))


@pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")
@pytest.mark.parametrize("tree", [["--tree"], []], ids=["asked for", "several processes without ranks"])
def test_a_stuck_role_is_reported_and_its_command_is_run(tmp_path: Path, tree: list[str]) -> None:
    """The command gets no chance to help here: it only leaves a mark. Without --tree the driver was taken for rank 0."""
    job = tmp_path / "job.yaml"
    job.write_text("debug:\n  restart: ['reward=touch restarted']\n")
    words = [
        sys.executable,
        "-m",
        "allranks",
        "watch",
        *tree,
        "--no-progress",
        "4",
        "--interval",
        "2",
        "--json",
    ]
    words += [
        "--config",
        str(job),
        "-o",
        str(tmp_path / "out"),
        "--",
        sys.executable,
        str(ROLES / "reward_lock.py"),
    ]
    watch = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert watch.stderr is not None
        told = json.loads(next(line for line in watch.stderr if line.startswith("{")))
        assert (told["state"], told["guilty"][0]["role"]) == ("stuck", "reward")
        assert json.loads((Path(told["folder"]) / "finding.json").read_text())["sentence"] == told["sentence"]
        assert "exit code 0" in next(line for line in watch.stderr if "restart" in line)
        assert (tmp_path / "restarted").exists()
        watch.send_signal(signal.SIGINT)  # forwarded, also after the watch has changed
        assert watch.wait(120) == 128 + signal.SIGINT
    finally:
        os.killpg(watch.pid, signal.SIGKILL)
        watch.communicate()


ENGINE = """
import http.server, sys
class Metrics(http.server.BaseHTTPRequestHandler):
    served = 0
    def do_GET(self):
        Metrics.served += int(self.path == "/work")
        text = f"vllm:num_requests_running 1.0\\nvllm:generation_tokens_total {Metrics.served}.0\\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_an_engine_moves_when_its_metrics_do(tmp_path: Path) -> None:
    """They are found among the ports of a process whose title tells that it is an engine."""
    script = tmp_path / "vllm_server.py"
    script.write_text(ENGINE)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            address = f"127.0.0.1:{int(engine.stdout.readline())}"
            sidecar = RoleSidecar(DebugOptions(), tmp_path)
            sidecar.take([engine.pid])
            (first,) = sidecar._observe(0.0)
            assert sidecar._ports == {engine.pid: address}
            (still,) = sidecar._observe(10.0)
            assert still.mark == first.mark
            web_client.get(address, "/work", 30.0)
            (moved,) = sidecar._observe(20.0)
            assert moved.mark > still.mark
        finally:
            engine.kill()


RESTING = """
import os, sys, threading
if not os.fork():
    for line in sys.stdin:
        print(line)
        def served(): threading.Event().wait()
        served()
if not os.fork():
    def rests(): threading.Event().wait()
    rests()
os.wait()
"""


@pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")
def test_a_look_reads_only_what_has_run_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three processes at rest none is read a second time; after its input one is, and its new line is known."""
    runs, wrapper = tmp_path / "runs", tmp_path / "py-spy"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {runs}\nexec "{find_pyspy()}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("ALLRANKS_PYSPY", str(wrapper))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-u", "-c", RESTING], text=True, **pipes) as job:  # type: ignore[call-overload]
        sidecar = RoleSidecar(DebugOptions(interval_s=0.2), tmp_path)
        sidecar.take([job.pid])

        def look() -> tuple[set[int], set[str]]:
            """The processes that were read, and the functions in which the job was found."""
            runs.write_text("")
            found = sidecar._inspect()
            read = {int(line.split()[-1]) for line in runs.read_text().splitlines()}
            return read, {t.user.name for p in found.processes for t in p.threads if t.user is not None}

        try:
            looks = (look() for _ in range(100))
            assert next(("rests" in lines for read, lines in looks if not read), False)
            job.stdin.write("x\n")
            job.stdin.flush()
            job.stdout.readline()
            later = [look() for _ in range(3)]
            assert any("served" in lines for _, lines in later)
            assert all("rests" in lines and len(read) <= 1 for read, lines in later)
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_a_process_is_read_again_only_when_it_changes_its_command_line(tmp_path: Path) -> None:
    """At rest nothing is read anew; a program that another one takes over is, and so is what starts meanwhile."""
    text = "import os, sys; input(); os.execl(sys.executable, sys.executable, '-c', 'print(); input()', 'rollout')"
    words = [sys.executable, "-u", "-c", text]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdin is not None and job.stdout is not None
            sidecar = RoleSidecar(DebugOptions(), tmp_path)
            sidecar.take([job.pid])
            sidecar._observe(0.0)
            first = sidecar._entries[job.pid]
            for now in (5.0, 10.0, 15.0):
                sidecar._observe(now)
            assert sidecar._entries[job.pid] is first
            job.stdin.write("\n")
            job.stdin.flush()
            job.stdout.readline()
            for now in (20.0, 40.0, 80.0):
                sidecar._observe(now)
            assert sidecar._entries[job.pid].title.endswith("rollout")
        finally:
            job.kill()
