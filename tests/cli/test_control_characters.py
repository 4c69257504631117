"""What is printed of files and names of others does not steer the terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.box_files import box_bytes
from tests.load.test_blackbox import make_trace

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
    """Anyone who can write a log or name a function must not write to the terminal of who reads it."""
    folder = tmp_path / f"captured{ESCAPE}"
    folder.mkdir()
    (folder / "rank0.pyspy.txt").write_text(PYSPY)
    (folder / "rank0.log").write_text(f"[rank0]: RuntimeError: no such {ESCAPE} thing\n")
    main([*command, str(folder)])
    told = "".join(capsys.readouterr())
    assert "owned" in told
    assert "\x1b" not in told and "\x07" not in told


def test_files_and_groups_with_hostile_names_are_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In names of files and of groups."""
    group = {"0": {"name": f"default{ESCAPE}", "desc": f"pg{ESCAPE}", "ranks": "[0, 1]"}}
    dump = {"version": "2.10", "pg_config": group, "pg_status": {}, "entries": []}
    (tmp_path / f"trace_0{ESCAPE}").write_text(json.dumps(dump))
    main(["diagnose", "--verbose", str(tmp_path)])
    told = capsys.readouterr()
    assert "owned" in told.out
    assert "\x1b" not in told.out and "\x07" not in told.out


def test_status_of_boxes_of_others_is_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phase, how a rank ended, the job's name and incidents are words of the one who wrote the folder."""
    trace = make_trace()
    hostile = replace(trace.progress, phase=f"train{ESCAPE}", closed=f"exception: {ESCAPE}")
    (tmp_path / "x.a2.r1.p77.box").write_bytes(box_bytes(replace(trace, progress=hostile)))
    (tmp_path / "job.json").write_text(json.dumps({"job": f"job{ESCAPE}", "incidents": str(tmp_path / "i")}))
    incident = {
        "id": "hang-1",
        "job": f"job{ESCAPE}",
        "kind": "hang",
        "opened": 1.0,
        "reason": f"why{ESCAPE}",
    }
    (tmp_path / "i" / "hang-1").mkdir(parents=True)
    (tmp_path / "i" / "hang-1" / "incident.json").write_text(json.dumps(incident))
    main(["status", str(tmp_path)])
    told = capsys.readouterr()
    assert "exception: " in told.out and "owned" in told.out
    assert "\x1b" not in told.out + told.err and "\x07" not in told.out + told.err


def test_keys_of_a_job_file_are_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """YAML can write any character; directions of writing hide what is really there."""
    file = tmp_path / "job.yaml"
    file.write_text('model: {"a\\e]0;owned\\a": "b\\u202e"}\n"c\\e]0;owned\\a": 1\n', encoding="utf-8")
    main(["config", "check", str(file)])
    file.write_text('model: {"a\\e]0;owned\\a": "b\\u202e"}\n', encoding="utf-8")
    main(["config", "show", str(file)])
    told = "".join(capsys.readouterr())
    assert "owned" in told
    assert not any(mark in told for mark in ("\x1b", "\x07", "\u202e"))


def test_checkpoints_are_listed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of folders are words of anyone who may write to the store."""
    folder = tmp_path / f"checkpoint_step_00000007{ESCAPE}"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    for words in (["ls"], ["verify"]):
        main(["checkpoint", *words, str(tmp_path)])
    told = "".join(capsys.readouterr())
    assert told.count("checkpoint_step_00000007?]0;owned?") == 2
    assert "\x1b" not in told and "\x07" not in told
