"""The command line for people: grouped help, examples that are true, hints, completion, colour, closed pipes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pty
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.box_files import box_bytes

from allranks.cli import COMMANDS, GROUPS, main, make_parser
from allranks.cli.parser import EXAMPLES
from allranks.cli.status import CLEAR, render
from allranks.cli.terminal import use_color
from allranks.model.cluster import JobView, RankRow
from pages.gallery import make_traces

ALLRANKS = [sys.executable, "-m", "allranks"]


def parsers() -> list[argparse.ArgumentParser]:
    """Of every command and of every action of a command."""
    found: list[argparse.ArgumentParser] = []
    todo = [make_parser(name, alone=True) for name in COMMANDS]
    while todo:
        parser = todo.pop()
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        todo += [one for action in inner for one in dict.fromkeys(action.choices.values())]
        found += [parser] if parser.prog != "allranks" else []
    return found


def test_every_command_stands_in_one_group_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is forgotten, nothing is listed twice."""
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    main([])
    assert "My job hangs now:\n  diagnose" in capsys.readouterr().out


def test_every_help_has_an_example() -> None:
    """Of actions too."""
    assert [
        p.prog for p in parsers() if f"\n  {p.prog}" not in p.format_help().partition("options:")[2]
    ] == []


SLOW = {
    "asyncio",
    "http",
    "logging.config",
    "multiprocessing",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
}
LOADED = """
import sys
before = set(sys.modules)
from allranks.cli import main
try:
    main([sys.argv[1], "--help"])
except SystemExit as end:
    assert not end.code
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_no_library_and_nothing_slow(command: str) -> None:
    """Each takes less than 60 ms of CPU: numpy alone takes more."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, command], capture_output=True, text=True, timeout=300, check=True
    )
    loaded = set(done.stderr.split())
    ours = {name for name in loaded if name.partition(".")[0] == "allranks"}
    others = {name.partition(".")[0].lstrip("_") for name in loaded - ours}
    assert others <= {name.lstrip("_") for name in sys.stdlib_module_names}, others
    assert not loaded & SLOW, loaded & SLOW
    assert len(ours) <= 24, ours


def test_every_example_is_shown() -> None:
    """Those that begin with another program were in no help."""
    shown = "".join(parser.format_help() for parser in parsers())
    assert [line for lines in EXAMPLES.values() for line in lines if f"  {line}\n" not in shown] == []


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_can_be_parsed(line: str) -> None:
    """Flags and arguments exist."""
    command = line.partition("#")[0].partition(" | ")[0].partition(" > ")[0].strip()
    words = shlex.split(command.removeprefix('eval "$(').removesuffix(')"').rpartition(" -- allranks ")[2])
    words = words[words[0] == "allranks" :]
    module = importlib.import_module(f"allranks.cli.{COMMANDS[words[0]][0]}")
    arranged = module.arrange_words(words) if hasattr(module, "arrange_words") else words
    assert make_parser(words[0], alone=True).parse_args(arranged).command == words[0]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["diagnos", "x"], "Did you mean diagnose?"),
        (["explain", "x"], "Did you mean `allranks doctor explain LOG`?"),  # was replay
        (["incident"], "Did you mean `allranks status JOB`?"),  # was index
        (["diagnose", "x", "--htlm", "y"], "did you mean --html"),
        (["checkpoint", "verfy", "x"], "did you mean verify"),
        (["lighthouse", "readmitt", "job", "replica-1"], "did you mean readmit"),
        (["nonsense"], "`allranks --help` lists the commands."),
        (["diagnose"], "For example: allranks diagnose dumps/\n"),
        (["slurm"], "give one of submit, wrap, collect\n"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_one_that_was_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, on stderr."""
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert hint in capsys.readouterr().err


def test_a_script_that_is_not_there_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No lighthouse, and no folder of a job that never was."""
    monkeypatch.setenv("ALLRANKS_DIR", str(tmp_path / "boxes"))
    assert main(["run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "nope.py")]) == 2
    told = capsys.readouterr().err
    assert "there is no script" in told and "lighthouse" not in told and not (tmp_path / "boxes").exists()


def test_a_mistyped_job_is_answered_with_the_jobs_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name."""
    monkeypatch.setattr("allranks.incidents.job_overview.job_folders", lambda: [tmp_path / "llama-42"])
    (tmp_path / "llama-42").mkdir()
    (tmp_path / "llama-42" / "x.box").write_bytes(b"")
    assert main(["status", "llame-42"]) == 2
    assert "Did you mean llama-42?" in capsys.readouterr().err


def test_the_page_of_a_job_is_found_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file that `allranks run` leaves; without a lighthouse there is none."""
    (tmp_path / "x.box").write_bytes(b"")
    assert main(["page", str(tmp_path), "--no-browser"]) == 2
    assert "has no lighthouse" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as lighthouse:
        address = f"127.0.0.1:{lighthouse.getsockname()[1]}"
        (tmp_path / "job.json").write_text(json.dumps({"lighthouse": address}))
        assert main(["page", str(tmp_path), "--no-browser"]) == 0
    assert main(["page", "host:80", "--json"]) == 0
    assert capsys.readouterr().out == f'http://{address}/\n{{"schema": 1, "url": "http://host:80/"}}\n'
    monkeypatch.setenv("ALLRANKS_CA", "ca.pem")
    assert main(["page", "host:80", "--no-browser"]) == 0
    assert capsys.readouterr().out == "https://host:80/\n"
    monkeypatch.delenv("ALLRANKS_CA")
    for words in (["page", "--no-browser"], ["lighthouse", "status"]):
        assert main([*words, str(tmp_path)]) == 2
        assert "the job has probably ended" in capsys.readouterr().err


def test_bash_completes_commands_flags_and_files(tmp_path: Path) -> None:
    """In a real bash."""
    assert _bash(tmp_path, "di") == ["diagnose"]
    assert _bash(tmp_path, "diagnose", "--ht") == ["--html"]
    (tmp_path / "dumps").mkdir()
    assert _bash(tmp_path, "diagnose", "dum") == ["dumps"]
    assert _bash(tmp_path, "completion", "z") == ["zsh"]


@cache
def _script(shell: str) -> str:
    return subprocess.run([*ALLRANKS, "completion", shell], capture_output=True, text=True, check=True).stdout


def _bash(folder: Path, *words: str) -> list[str]:
    script = _script("bash")
    ask = f"COMP_WORDS=(allranks {' '.join(words)}); COMP_CWORD={len(words)}; _allranks; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", script + ask], capture_output=True, text=True, cwd=folder, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_the_scripts_of_other_shells_are_valid(shell: str, check: list[str], tmp_path: Path) -> None:
    """As the shell itself judges."""
    script = _script(shell)
    assert "diagnose" in script and "html" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script)
    subprocess.run([shell, *check, str(path)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colour_obeys_the_environment(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR wins; a pipe has none unless it is forced."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with open(os.devnull, "w") as pipe:
        assert use_color(pipe) is expected


def test_a_closed_pipe_loses_no_file(tmp_path: Path) -> None:
    """`diagnose --html page.html | head` writes the page."""
    for trace in make_traces(3, 5):
        (tmp_path / f"job.a0.r{trace.header.rank}.p{trace.header.rank}.box").write_bytes(box_bytes(trace))
    page = tmp_path / "page.html"
    read, write = os.pipe()
    os.close(read)
    subprocess.run(
        [*ALLRANKS, "diagnose", str(tmp_path), "--html", str(page)], stdout=write, timeout=300, check=False
    )
    os.close(write)
    assert page.read_text().endswith("</html>")


VIEW = JobView(
    "llama", "/x", 0.0,
    (RankRow(0, 4711, "n", True, 165, 9000, 33.0, "all_reduce #9000 of default_pg", (2,)),
     RankRow(2, 4713, "n", True, 165, 8999, 33.1, "computes")),
    state="hung",
)  # fmt: skip


def test_sixty_columns_show_who_is_waited_for() -> None:
    """Pid and calls give way to it."""
    lines = list(render(VIEW, width=60))
    assert all(len(line) <= 60 for line in lines)
    assert "<- 1 rank waits for it" in lines[-1]
    assert "waits for rank 2" in lines[-2]
    assert "4711" in list(render(VIEW, width=100))[-2]


WITHOUT_TEXTUAL = (
    "import sys; sys.modules['textual'] = None; from allranks.cli import main; sys.exit(main(sys.argv[1:]))"
)


def test_without_textual_the_table_is_drawn_again_and_again(tmp_path: Path) -> None:
    """In a real terminal, until Ctrl-C."""
    trace = make_traces(1, 5)[0]
    mine = replace(trace, header=replace(trace.header, pid=os.getpid()))
    (tmp_path / f"job.a0.r0.p{os.getpid()}.box").write_bytes(box_bytes(mine))
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TEXTUAL, "top", str(tmp_path), "--interval", "0.1"],
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while seen.count(CLEAR.encode()) < 3:
            seen += os.read(ours, 4096)
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
    finally:
        program.kill()
        os.close(ours)
    assert b"1 of 1 rank runs" in seen
