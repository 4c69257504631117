"""What common mistakes are answered with: what is wrong, and the way out."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli import main, terminal
from allranks.launch import rank_entry
from allranks.lighthouse.server import explain_listen
from allranks.recording.__main__ import _raised_before


def test_a_port_in_use_is_said_once_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    """It was "[Errno 98] … (while attempting to bind …)", twice the same."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["lighthouse", "--bind", f"127.0.0.1:{port}", "--no-token"]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: another process uses this port" in said
    assert f"sport = :{port}" in said and "--bind 127.0.0.1:0" in said and "Errno" not in said
    text, hint = explain_listen(OSError(errno.EADDRNOTAVAIL, "x"), "10.9.9.9:1")
    assert "requested address" in text and "--bind" in hint


def test_run_shows_its_own_notes_and_not_those_of_torch() -> None:
    """Ctrl-C during the start showed torch's cache statistics as lines of allranks."""
    program = (
        "import logging; from allranks.cli import main; assert main(['run']) == 2\n"
        "print([logging.getLogger(name).isEnabledFor(logging.INFO) for name in ('allranks.agent', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, False]\n"


def test_a_word_where_a_number_belongs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """ "invalid int value" is Python's word for it."""
    with pytest.raises(SystemExit):
        main(["diagnose", "x", "--selected-ranks", "a"])
    assert "--selected-ranks takes a whole number, not 'a'" in capsys.readouterr().err


def test_a_file_that_is_no_dump_is_answered_with_what_dumps_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "Dumps are files of torch's flight recorder, black boxes (*.box)" in capsys.readouterr().err


def test_on_a_narrow_terminal_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It broke inside of "case.py"; where there is no terminal lines stay whole."""
    line = "\x1b[31mrank 0 never entered _all_gather_base #94 of group default_pg (nccl_cases.py:98)\x1b[0m"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal.fold(line) == [line]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    folded = terminal.fold(line)
    assert len(folded) == 3 and all(one.startswith("\x1b[31m") and one.endswith("\x1b[0m") for one in folded)
    words = " ".join(terminal._PAINT.sub("", one).strip() for one in folded)
    assert words == terminal._PAINT.sub("", line) and "(nccl_cases.py:98)" in folded[-1]
    assert terminal.fold("  - " + "word " * 12)[1].startswith("    word")


@pytest.mark.parametrize("width", range(30, 60))
def test_no_line_breaks_inside_of_a_flag_or_a_short_command(width: int) -> None:
    """It broke after "--first-", and between a command and its flag."""
    text = "rank 3 is gone: start again with `allranks run --replicas 4` or allranks run --first-replica N (--no-lighthouse)"
    lines = terminal.wrap(text, width)
    assert "".join(" " + line.strip() for line in lines).strip() == text
    for whole in ("`allranks run --replicas 4`", "allranks run --first-replica", "--no-lighthouse"):
        assert any(whole in line for line in lines), lines


def test_what_all_ranks_raise_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of the first rank; the others name it. Another error, and one of later, are shown whole."""
    monkeypatch.setenv("ALLRANKS_DIR", str(tmp_path))

    def of(rank: int, error: Exception) -> str:
        monkeypatch.setenv("RANK", str(rank))
        return _raised_before(type(error), error, error.__traceback__)

    assert [of(rank, ValueError("the loss is nan")) for rank in (3, 0, 1)] == ["", "3", "3"]
    assert of(1, ValueError("another")) == "" == of(2, KeyError("the loss is nan"))
    for path in tmp_path.glob("raised.*"):
        os.utime(path, (1, 1))
    assert of(2, ValueError("the loss is nan")) == ""
    monkeypatch.delenv("ALLRANKS_DIR")
    assert of(1, ValueError("the loss is nan")) == ""


def test_a_dump_through_a_pipe_that_is_not_there_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dump --native STEM` said nothing when no rank listened."""
    box = Path(__file__).parents[1] / "record" / "cases" / "mixed_calls.r0.box"
    out = tmp_path / "out"
    assert main(["dump", str(box), "-o", str(out), "--native", str(tmp_path / "pipe")]) == 0
    said = capsys.readouterr().err
    assert "no NCCL dump of rank 0" in said and "TORCH_NCCL_DEBUG_INFO_PIPE_FILE=" in said


def test_an_address_that_nobody_answers_at_is_told_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was "[Errno 111]", and an internal address of the cloud."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert main(["diagnose", f"http://127.0.0.1:{port}/trace_0"]) == 2
    said = capsys.readouterr().err
    assert "trace_0: Connection refused\n" in said and "that this machine can reach it." in said

    def refuse(url: str) -> None:
        raise OSError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token")

    monkeypatch.setattr("allranks.load.sources._open_obstore", refuse)
    assert main(["diagnose", "s3://bucket/dumps"]) == 2
    said = capsys.readouterr().err
    assert "s3://bucket/dumps: no credentials found\n" in said and "AWS_ACCESS_KEY_ID" in said


DROPPED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")  # root may read everything


@pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root without setpriv")
@pytest.mark.parametrize("closed", ["files", "folder"])
def test_dumps_of_another_user_are_told_from_damaged_ones(closed: str, tmp_path: Path) -> None:
    """It was "[Errno 13] … job.json", and what dumps are."""
    (tmp_path / "trace_0").write_bytes(b"")
    (tmp_path / "trace_0").chmod(0)
    tmp_path.chmod(0 if closed == "folder" else 0o700)
    words = [sys.executable, "-m", "allranks", "diagnose", str(tmp_path)]
    words = [*DROPPED, *words] if os.getuid() == 0 else words
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    tmp_path.chmod(0o700)
    assert done.returncode == 2 and "Errno" not in done.stderr and "`ls -l" in done.stderr, done.stderr
    assert "may be read by this user" in done.stderr or "Permission denied" in done.stderr


def test_a_job_in_two_places_is_completed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a folder without a box is not offered: no command takes it."""
    folders = [tmp_path / "shm" / "llama", tmp_path / "tmp" / "llama", tmp_path / "tmp" / "empty"]
    for folder in folders:
        folder.mkdir(parents=True)
    for folder in folders[:2]:
        (folder / "x.box").write_bytes(b"")
    monkeypatch.setattr("allranks.incidents.job_overview.job_folders", lambda: folders)
    assert main(["completion", "--jobs"]) == 0
    assert capsys.readouterr().out == "llama\n"


def test_all_nodes_of_the_named_job_are_asked_and_not_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dump JOB --all-nodes` took the boxes of another job when that was newer."""
    monkeypatch.setattr("allranks.blackbox.files.base_folder", lambda: tmp_path)
    monkeypatch.delenv("ALLRANKS_LIGHTHOUSE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for job, pid, when in (("ended", 2**22, 1), ("newest", os.getpid(), 2)):
        folder = tmp_path / job
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"lighthouse": address, "pid": pid}))
        (folder / "token").write_text("secret")
        (folder / "token").chmod(0o600)
        os.utime(folder / "job.json", (when, when))
    assert main(["dump", "ended", "--all-nodes", "-o", str(tmp_path / "out")]) == 2
    assert "--all-nodes needs a job under `allranks run`" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_starts_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It recorded nothing and said nothing."""
    monkeypatch.setattr("allranks.cli.record._site_folders", lambda: [str(tmp_path)])
    (tmp_path / "allranks_record.pth").touch()
    started = tmp_path / "started"
    assert (
        main(["record", "-o", str(tmp_path / "allranks_record.pth" / "x"), "--", "touch", str(started)]) == 2
    )
    assert "allranks_record.pth is not a folder" in capsys.readouterr().err and not started.exists()


def test_a_folder_without_a_ledger_is_not_taken_for_the_name_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was "no job 'incidents' on this node"."""
    monkeypatch.chdir(tmp_path)
    Path("incidents").mkdir()
    for name in ("incidents", "./incidents"):
        assert main(["goodput", name]) == 2
        assert "allranks goodput: there is no ledger in incidents\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "choices"), [(["etcd"], "start, status, stop"), (["config"], "check, show, schema")]
)
def test_a_missing_word_is_answered_with_the_words_that_fit(
    words: list[str], choices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was "the following arguments are required: action"."""
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().err.startswith(f"allranks {words[0]}: give one of {choices}\n")


def test_a_replay_takes_the_name_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `diagnose`, `dump` and `stacks` do: it said "no such file or folder"."""
    assert main(["replay", "no-such-job-here", "-o", str(tmp_path / "x.py")]) == 2
    assert "no-such-job-here: no such file, folder or job" in capsys.readouterr().err


def test_ctrl_c_names_the_line_of_the_script(tmp_path: Path) -> None:
    """Inside of torch's backward it named graph.py of torch."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, threading\nthreading.Timer(1, lambda: os.kill(os.getpid(), 2)).start()\nthreading.Event().wait(600)\n"
    )
    entry = Path(rank_entry.__file__)
    done = subprocess.run([sys.executable, str(entry), str(script)], capture_output=True, text=True, env={**os.environ, "ALLRANKS_DIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert f"interrupted at {script}:" in done.stderr.splitlines()[-1], done.stderr
