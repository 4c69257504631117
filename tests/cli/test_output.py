"""Where output goes wrong: ASCII terminals, full disks, closed outputs, names that are not UTF-8."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.box_files import box_bytes

import allranks
from allranks.blackbox.files import job_folder
from allranks.blackbox.header import read_header
from allranks.cli import COMMANDS, main
from allranks.cli.dump import _of_these_processes
from allranks.errors import InputError
from allranks.incidents.folder import open_incident
from allranks.model.trace import RankTrace, TraceHeader
from boxes import write_box
from pages.gallery import make_traces

ALLRANKS = [sys.executable, "-m", "allranks"]
DUMPS = Path(__file__).parents[1] / "load" / "cases" / "flight_recorder" / "missing_rank"


def run(
    *words: str | bytes, stdout: int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """One command, as a shell would start it."""
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    return subprocess.run(
        [*ALLRANKS, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=300,
        check=False,
    )


def test_an_ascii_terminal_gets_ascii() -> None:
    """Signs that it lacks are written otherwise; nothing is lost."""
    done = run("diagnose", str(DUMPS), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"... 2 more frames" in done.stdout


def test_the_help_is_readable_in_ascii() -> None:
    """The first thing that people try."""
    done = run("--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: allranks COMMAND ...\n")


def test_a_name_that_is_not_utf8_is_no_trouble(tmp_path: Path) -> None:
    """In messages what is not printable is a question mark; files are read and listed."""
    folder = bytes(tmp_path) + b"/d\xff"
    shutil.copytree(bytes(DUMPS), folder)
    missing = run("diagnose", bytes(tmp_path) + b"/nope\xff")
    assert (missing.returncode, b"nope?: no such file" in missing.stderr) == (2, True)
    listed = run("diagnose", "-v", folder, PYTHONIOENCODING="utf-8:strict")
    assert (listed.returncode, listed.stderr) == (1, b"")


def test_a_full_disk_is_an_error_and_not_a_fault_of_the_job() -> None:
    """Exit code 1 would mean that the job has a fault."""
    for words in (["diagnose", str(DUMPS)], ["--help"], ["config", "schema"]):
        with open("/dev/full", "wb") as full:
            done = run(*words, stdout=full.fileno())
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr
        assert done.stderr.endswith(b": no space left where the output goes\nThe output is incomplete.\n"), (
            done.stderr
        )


@pytest.mark.needs_root
@pytest.mark.parametrize(
    "words",
    [["diagnose", str(DUMPS), "--html"], ["stacks", "--no-native", "--for", "0.1", "--pid", "PID", "-o"]],
)  # fmt: skip
def test_a_full_folder_is_named(words: list[str], tmp_path: Path) -> None:
    """ "[Errno 28] No space left on device. The output is incomplete." named neither file nor folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(tmp_path)], check=True)
    command = [sys.executable, "-c", "print(flush=True); input()"]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None and job.stdout.readline()
        (tmp_path / "fill").write_bytes(bytes(8192))
        done = run(*(str(job.pid) if word == "PID" else word for word in words), str(tmp_path / "out"))
    finally:
        job.kill()
        job.communicate()
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert done.returncode == 2 and b"Errno" not in done.stderr
    assert f"cannot write {tmp_path}/out".encode() in done.stderr, done.stderr
    assert f"no space left on {tmp_path}".encode() in done.stderr, done.stderr


@pytest.mark.parametrize("words", [["diagnose", str(DUMPS)], ["--help"], ["config", "schema"]])
def test_a_closed_output_is_no_error(words: list[str]) -> None:
    """`allranks diagnose dumps/ --html page.html >&-`."""
    line = shlex.join([*ALLRANKS, *words]) + " >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1 if words[0] == "diagnose" else 0, b"")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", ">&- <&-"])
def test_no_socket_gets_the_number_of_a_closed_input_or_output(closed: str) -> None:
    """libuv, in torch's store, aborts the whole process when it closes one of these numbers."""
    code = "import os; from allranks.cli import _prepare_output; _prepare_output(); os.execlp('sh', 'sh', '-c', '{}')"
    look = "for n in 0 1 2; do test -e /proc/self/fd/$n || echo $n is closed >&2; done"
    line = f"exec {shlex.join([sys.executable, '-c', code.format(look)])} {closed}"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", [["diagnose", str(DUMPS)], ["--help"], ["config", "schema"]])
def test_a_closed_pipe_is_silent(words: list[str]) -> None:
    """`| head` ends the command without a word."""
    read, write = os.pipe()
    os.close(read)
    done = run(*words, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_bug_is_not_taken_for_a_fault_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, with everything that a report needs."""

    def fail(args: object) -> int:
        raise ZeroDivisionError("dumps")

    monkeypatch.setattr("allranks.cli.diagnose.main", fail)
    assert main(["diagnose", "dumps/"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "ZeroDivisionError: dumps" in shown
    assert shown.splitlines()[-1].startswith("allranks diagnose: this is a bug in allranks")


def test_paths_may_stand_on_both_sides_of_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diagnose dumps/ -v captures/`: both are read."""
    shutil.copytree(DUMPS, tmp_path / "more")
    assert (
        main(["diagnose", str(DUMPS / "trace_0"), "-v", str(DUMPS / "trace_1"), str(DUMPS / "trace_2")]) == 1
    )
    assert "3 of 3 ranks" in capsys.readouterr().out


def test_a_group_that_does_not_exist_is_no_healthy_job(capsys: pytest.CaptureFixture[str]) -> None:
    """The mistake is named, with the groups that are there."""
    assert main(["diagnose", str(DUMPS), "--pg-filters", "nope"]) == 2
    assert "no group 'nope'" in (shown := capsys.readouterr().err) and "default_pg" in shown


def test_ranks_that_do_not_exist_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With the ranks that are there."""
    assert main(["diagnose", str(DUMPS), "--selected-ranks", "0", "99"]) == 2
    assert "no dump of rank 99" in (shown := capsys.readouterr().err) and "0-2" in shown


def test_no_line_of_any_help_is_wider_than_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the program, of commands and of their actions."""
    from allranks.cli import program_help

    from .test_help import parsers

    monkeypatch.setenv("COLUMNS", "80")
    texts = {"": program_help(), **{parser.prog: parser.format_help() for parser in parsers()}}
    wide = {(prog, line) for prog, text in texts.items() for line in text.splitlines() if len(line) > 80}
    assert wide == set()
    assert len(texts) > len(COMMANDS)


def test_dump_takes_the_job_that_runs_among_ended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With none running, or two, it asks which one."""
    monkeypatch.delenv("ALLRANKS_DIR", raising=False)
    monkeypatch.setattr("allranks.blackbox.files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    trace = make_traces(1, 5)[0]
    for name, pid in (("old", 4_000_000), ("older", 4_000_001)):
        _write_box(name, replace(trace.header, pid=pid), trace)
    assert main(["dump", "-o", str(tmp_path / "out")]) == 2
    assert "2 jobs were recorded here: old, older" in capsys.readouterr().err
    _write_box("mine", replace(trace.header, pid=os.getpid()), trace)
    assert main(["dump", "-o", str(tmp_path / "out")]) == 0
    assert f"p{os.getpid()}.box" in capsys.readouterr().out
    assert main(["dump", "older", "-o", str(tmp_path / "named")]) == 0
    assert "p4000001.box" in capsys.readouterr().out
    assert main(["diagnose", "older"]) in (0, 1)
    assert "1 of 1 ranks" in capsys.readouterr().out
    for name in ("dump", "diagnose"):
        assert main([name, "oldest"]) == 2
        assert "Did you mean older or old?" in capsys.readouterr().err
    mine = read_header(job_folder("mine") / f"mine.a0.r0.p{os.getpid()}.box")
    reused = mine._replace(start_ticks=1)  # of an ended process that had this number before
    assert _of_these_processes([reused, mine]) == [mine] and _of_these_processes([reused]) == [reused]
    _write_box("other", replace(trace.header, pid=os.getpid()), trace)
    assert main(["dump", "-o", str(tmp_path / "out")]) == 2
    assert "2 jobs run here: mine, other" in capsys.readouterr().err


def test_without_a_name_the_job_that_runs_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that ended later."""
    monkeypatch.setattr("allranks.blackbox.files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    trace = make_traces(1, 5)[0]
    _write_box("runs", replace(trace.header, pid=os.getpid()), trace)
    _write_box("ended", replace(trace.header, pid=4_000_000), trace)
    os.utime(next(job_folder("runs").iterdir()), (1, 1))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("runs: 1 of 1 rank runs")


def _write_box(job: str, header: TraceHeader, trace: RankTrace) -> None:
    path = job_folder(job) / f"{job}.a0.r0.p{header.pid}.box"
    path.parent.mkdir(parents=True)
    path.write_bytes(box_bytes(replace(trace, header=header)))


@pytest.mark.parametrize("words", [["diagnose", str(DUMPS)], ["stacks", "--pid", "1"], ["goodput"]])
def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for minutes, or loses a sample of a hang, for a mistyped folder."""
    page = tmp_path / "none" / "page.html"
    for wrong, text in (
        (page, f"there is no folder {page.parent}"),
        (tmp_path, "it is a folder"),
        (DUMPS / "trace_0", "exists"),
    ):
        assert main([*words, "--html", str(wrong)]) == 2
        shown = capsys.readouterr()
        assert text in shown.err and shown.out == "" and "ranks and" not in shown.err


@pytest.mark.parametrize(("given", "meant"), [("evict", "evict"), ("colect", "collect")])
def test_what_the_lighthouse_does_is_found_below_its_command(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages say "evict the replica"; the command is `allranks lighthouse evict`."""
    assert main([given, "job", "replica-1"]) == 2
    assert f"Did you mean `allranks lighthouse {meant}`?" in capsys.readouterr().err


def test_stacks_takes_the_name_of_a_job_as_the_other_commands_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`allranks status JOB` works, so `allranks stacks JOB` is tried; an unknown name lists the known ones."""
    monkeypatch.setattr("allranks.blackbox.files.base_folder", lambda: tmp_path)
    (tmp_path / "night-a").mkdir()
    write_box(tmp_path / "night-a", 0, 3, pid=2**22)
    assert main(["stacks", "nosuch"]) == 2
    assert capsys.readouterr().err.splitlines()[:2] == [
        "allranks stacks: no job 'nosuch' on this node",
        "Jobs on this node: night-a.",
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captured").mkdir()
    assert main(["stacks", "captured"]) == 2
    assert "allranks stacks --from captured" in capsys.readouterr().err
    assert main(["stacks", "night"]) == 2
    assert "no rank of job 'night-a'" in capsys.readouterr().err


def test_a_command_on_stores_ends_without_taking_its_process_apart(tmp_path: Path) -> None:
    """Else the threads of the store's library may abort it, behind its answer and with another exit code."""
    code = "import atexit, sys; from allranks.cli import run; atexit.register(print, 'taken apart'); run()"
    words = [sys.executable, "-c", code, "checkpoint", "ls", str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "taken apart" not in done.stdout and done.returncode == 2, done.stderr


def test_a_folder_that_cannot_be_made_is_refused_before_anybody_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking takes seconds, and what was seen would be lost."""
    monkeypatch.setattr("allranks.stacktraces.tree.look_at_processes", lambda *_: pytest.fail("it looked"))
    (tmp_path / "file").touch()
    for words in (["--tree", "--bundle"], ["-o"]):
        assert main(["stacks", "--pid", str(os.getpid()), *words, str(tmp_path / "file" / "here")]) == 2
        assert f"cannot write to {tmp_path / 'file' / 'here'}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stacks", "replay"])
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, command: str) -> None:
    """Of the file that did not fit nothing is left, and the error names it."""
    words = ["replay", str(DUMPS), "-o", str(tmp_path / "replay.py")]
    if command == "stacks":
        words = ["stacks", "--pid", str(os.getpid()), "--tree", "--for", "0.1", "--bundle", str(tmp_path)]
    program = (
        "import resource, sys; from allranks.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, *words], capture_output=True, text=True, timeout=300
    )
    name = "processes.json" if command == "stacks" else "replay.py"
    assert done.returncode == 2, done.stderr
    assert f"cannot write {tmp_path / name}: File too large" in done.stderr and "bug" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_of_a_folder_of_incidents_the_only_one_is_judged_and_of_several_they_are_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their files were taken together: the newest black boxes, often of a job that was healthy again."""
    first = open_incident(tmp_path, kind="hang", job="night", reason="no progress for 30 s")
    shutil.copytree(DUMPS, first.path / "boxes")
    assert main(["diagnose", str(DUMPS), "--json"]) == 1
    wanted = json.loads(capsys.readouterr().out)["findings"]
    assert main(["diagnose", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == wanted
    assert [one.sentence for one in allranks.diagnose(tmp_path).findings] == [
        one["sentence"] for one in wanted
    ]

    second = open_incident(tmp_path, kind="death", job="night", reason="rank 1 died")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"allranks diagnose: there are 2 incidents in {tmp_path}",
        "Give one of them:",
        *(
            f"  {one.path}: {one.current.reason}"
            for one in sorted((first, second), key=lambda o: o.path.name)[::-1]
        ),
    ]
    with pytest.raises(InputError, match="2 incidents"):
        allranks.diagnose(tmp_path)
