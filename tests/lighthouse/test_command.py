"""`allranks lighthouse`: the line it prints, torchft's spellings, and what can be asked of a running one."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ports import held_port

from allranks.blackbox.files import job_folder
from allranks.channel.keys import write_token
from allranks.cli import main
from allranks.cli.lighthouse import LighthouseFlags, default_token_file
from allranks.cli.lighthouse_serve import server_token
from allranks.incidents.job_overview import TOKEN_FILE, write_job
from allranks.lighthouse.client.client import Client
from allranks.model.cluster import Member

from .processes import LighthouseProcess
from .waiting import eventually


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """(the printed line, the process) of `allranks lighthouse WORDS`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "allranks", "lighthouse", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_torchfts_command_line_works(tmp_path: Path) -> None:
    """Swap the name of the program and go on; the line has the shape of the contract."""
    with serving(
        "--min_replicas", "1", "--join_timeout_ms", "1000", "--quorum_tick_ms", "100", "--heartbeat_timeout_ms",
        "2000", "--bind", "127.0.0.1:0", "--json", XDG_RUNTIME_DIR=str(tmp_path),
    ) as (line, process):  # fmt: skip
        assert line["http"] == f"http://{line['address']}"
        assert not line["address"].endswith(":0")
        token_file = Path(line["token_file"])
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert len(token_file.read_text().strip()) >= 24
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not token_file.exists()


def test_a_given_token_file_is_used_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody of the job reads the same file; commands without it are refused."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving("--json", "--bind", "127.0.0.1:0", "--token-file", str(token)) as (line, _):
        assert line["token_file"] == str(token)
        assert main(["lighthouse", "status", line["address"], "--json", "--token-file", str(token)]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == 1
        assert main(["lighthouse", "status", line["address"]]) == 2
        assert "no job token" in capsys.readouterr().err
    assert token.exists()


def test_only_a_lighthouse_that_made_its_token_knows_that_nobody_trains_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the first quorum need not wait for members of an earlier lighthouse; with a token from before it must."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("ALLRANKS_TOKEN", "ALLRANKS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    options = LighthouseFlags()
    token, _, fresh = server_token(options)
    assert token and fresh
    write_token(default_token_file(options.bind), token)
    assert server_token(options) == (token, None, False)
    monkeypatch.setenv("ALLRANKS_TOKEN", "given")
    assert server_token(options) == ("given", None, False)


def test_a_restarted_lighthouse_has_the_same_token_and_lets_members_come_first(
    connect: Callable[..., Client], tmp_path: Path
) -> None:
    """kill -9 and the same command again: a member comes back by itself, before a newcomer that was faster."""
    with serving("--json", "--bind", "127.0.0.1:0", XDG_RUNTIME_DIR=str(tmp_path)) as (line, process):
        words = ("--json", "--bind", line["address"], "--start-grace-ms", "30000")
        token_file = Path(line["token_file"])
        token = token_file.read_text().strip()
        member = connect(line["address"], "a", token=token)
        first = member.join(Member("a"), 30)
        assert first.number == 1
        process.kill()
        process.wait(20)
    with serving(*words, XDG_RUNTIME_DIR=str(tmp_path)) as (line, process):
        assert token_file.read_text().strip() == token
        newcomer = connect(line["address"], "b", token=token)
        waiting = newcomer.request_quorum(Member("b"))
        eventually(lambda: member.connected)
        quorum = member.join(Member("a", step=7), 30)
        assert waiting.result(30) == quorum
        assert (quorum.names, quorum.number) == (("a", "b"), 2) and quorum.epoch > first.epoch
        assert quorum.names == ("a", "b")
        process.terminate()
        assert process.wait(20) == 0
    assert token_file.exists()  # they are still there, and know no other


def test_status_evict_readmit_and_collect(
    run_lighthouse: Callable[..., LighthouseProcess],
    connect: Callable[..., Client],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The actions of the page, from a shell."""
    lighthouse = run_lighthouse()
    client = connect(lighthouse.address, "r0", node="host-a")
    client.report(step=4)
    client.join(Member("r0", step=4), 30)
    assert main(["lighthouse", "status", lighthouse.address, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["number"] == 1 and status["quorum"]["members"][0]["replica"] == "r0"
    assert main(["lighthouse", "status", lighthouse.address]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Training: step 4")
    assert f"quorum 1 (epoch {status['epoch']}), 1 member" in out and "r0" in out and "step 4" in out
    assert main(["lighthouse", "evict", lighthouse.address, "r0", "--reason", "bad GPU"]) == 0
    assert main(["lighthouse", "status", lighthouse.address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["evicted"] == {"r0": "bad GPU"}
    assert main(["lighthouse", "readmit", lighthouse.address, "r0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "replica": "r0", "done": "readmit"}
    assert main(["lighthouse", "readmit", lighthouse.address, "r0"]) == 2
    assert "is not evicted, in back-off or too late" in capsys.readouterr().err
    assert main(["lighthouse", "collect", lighthouse.address, "r0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["incident"]
    for words in (["evict"], ["readmit"], ["collect"]):
        assert main(["lighthouse", *words, lighthouse.address, "nosuch"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            "allranks lighthouse: no replica 'nosuch' is known",
            "Known: r0.",
        ]


def test_a_lighthouse_is_found_by_the_name_of_its_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address and token are in the job's folder; without a name it is the newest job; unknown names are errors."""
    monkeypatch.setattr("allranks.blackbox.files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert main(["lighthouse", "status"]) == 2
    assert "no recorded job on this node" in capsys.readouterr().err
    folder = job_folder("mine")
    write_token(folder / TOKEN_FILE, "secret-of-the-job")
    with serving("--bind", "127.0.0.1:0", "--json", "--token-file", str(folder / TOKEN_FILE)) as (line, _):
        write_job(folder, {"job": "mine", "lighthouse": line["address"]})
        for name in (["mine"], []):
            assert main(["lighthouse", "status", *name]) == 0
            assert "quorum 0" in capsys.readouterr().out
        assert main(["lighthouse", "status", "other"]) == 2
        assert "Jobs on this node: mine." in capsys.readouterr().err


def test_status_says_with_its_exit_code_that_a_member_is_lost(
    run_lighthouse: Callable[..., LighthouseProcess],
    connect: Callable[..., Client],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 as in grep: something is wrong."""
    lighthouse = run_lighthouse()
    a, b = connect(lighthouse.address, "a"), connect(lighthouse.address, "b")
    tickets = [client.request_quorum(Member(client.options.replica)) for client in (a, b)]
    for ticket in tickets:
        ticket.result(30)
    b.leave("enough")
    eventually(lambda: a.status()["lost"])
    assert main(["lighthouse", "status", lighthouse.address, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["lost"] == {"b": "enough"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lighthouse", "status", "no-such-job"], "no job 'no-such-job' on this node"),
        (["lighthouse", "--bind", "nowhere:x:y:99999"], "--bind"),
        (
            ["lighthouse", "--min-replicas", "0", "--bind", "127.0.0.1:0"],
            "--min-replicas (0) must be at least 1",
        ),
        (["lighthouse", "--bind", "203.0.113.7:1"], "cannot listen on 203.0.113.7:1"),
        (
            ["lighthouse", "--token-file", "/nonexistent"],
            "cannot read the job token in /nonexistent: No such file or directory\n",
        ),
        (
            ["lighthouse", "--bind", "127.0.0.1:0", "--certificate", "/nonexistent"],
            "cannot use /nonexistent for TLS: No such file or directory\n",
        ),
        (
            ["lighthouse", "--bind", "127.0.0.1:0", "--certificate", __file__],
            f"cannot use {__file__} for TLS: not a certificate and its key in PEM\n",
        ),
    ],
)
def test_mistakes_are_said_in_one_line_with_exit_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What happened, no traceback."""
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_taken_port_is_said(
    run_lighthouse: Callable[..., LighthouseProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """The most common mistake of all."""
    lighthouse = run_lighthouse()
    assert main(["lighthouse", "--no-token", "--bind", lighthouse.address]) == 2
    assert "another process uses this port" in capsys.readouterr().err


def test_a_token_that_cannot_be_left_is_an_error_that_names_the_folder_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    """A read-only home, a full disk: one sentence instead of a traceback."""
    (tmp_path / "file").write_text("no folder")
    command = [sys.executable, "-m", "allranks", "lighthouse", "--bind", "127.0.0.1:0"]
    blocked = {name: value for name, value in os.environ.items() if not name.startswith("ALLRANKS_TOKEN")}
    blocked["XDG_RUNTIME_DIR"] = str(tmp_path / "file")
    done = subprocess.run(command, env=blocked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert str(tmp_path / "file") in done.stderr and "--token-file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lighthouse_that_was_given_its_token_starts_where_it_cannot_leave_it(tmp_path: Path) -> None:
    """Anyone who makes the folder in /tmp before us, or a read-only one, does not keep it from its job."""
    (tmp_path / "file").write_text("no folder")
    given = {"XDG_RUNTIME_DIR": str(tmp_path / "file"), "ALLRANKS_TOKEN": "given-by-the-job"}
    with serving("--json", "--bind", "127.0.0.1:0", **given) as (line, _):
        assert "token_file" not in line and ":" in line["address"]


def test_the_token_of_a_killed_lighthouse_is_not_used_for_one_without(
    run_lighthouse: Callable[..., LighthouseProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = held_port()
    left = tmp_path / f"lighthouse-{port}.token"
    left.write_text("of-a-lighthouse-that-was-killed")
    lighthouse = run_lighthouse(port=port)
    assert main(["lighthouse", "status", lighthouse.address]) == 0
    assert not left.exists()


def test_evicting_a_replica_that_does_not_exist_is_an_error_that_names_the_others(
    run_lighthouse: Callable[..., LighthouseProcess],
    connect: Callable[..., Client],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lighthouse = run_lighthouse()
    connect(lighthouse.address, "r0")
    assert main(["lighthouse", "evict", lighthouse.address, "nosuch"]) == 2
    said = capsys.readouterr().err
    assert "'nosuch'" in said and "r0" in said
