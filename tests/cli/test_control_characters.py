"""What is printed of files and names of others does not steer the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.cli import main

ESCAPE = "\x1b]0;owned\x07"


PYSPY = f"""Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread{ESCAPE}"
    step{ESCAPE} (train{ESCAPE}.py:9)
"""


@pytest.mark.parametrize(
    "command",
    [["stacks", "--all-threads", "--from"], ["doctor", "explain"], ["config", "check"]],
)
def test_stacks_logs_and_names_in_errors_are_shown_without_control_characters(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever can write a log or name a function must not write to the terminal of who reads it."""
    folder = tmp_path / f"captured{ESCAPE}"
    folder.mkdir()
    (folder / "rank0.pyspy.txt").write_text(PYSPY)
    (folder / "rank0.log").write_text(f"[rank0]: RuntimeError: no such {ESCAPE} thing\n")
    main([*command, str(folder)])
    told = "".join(capsys.readouterr())
    assert "owned" in told
    assert "\x1b" not in told and "\x07" not in told


def test_dump_info_shows_hostile_names_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In names of files and of groups."""
    group = {"0": {"name": f"default{ESCAPE}", "desc": f"pg{ESCAPE}", "ranks": "[0, 1]"}}
    dump = {"version": "2.10", "pg_config": group, "pg_status": {}, "entries": []}
    (tmp_path / f"trace_0{ESCAPE}").write_text(json.dumps(dump))
    main(["dump-info", str(tmp_path)])
    told = capsys.readouterr()
    assert "owned" in told.out
    assert "\x1b" not in told.out and "\x07" not in told.out
