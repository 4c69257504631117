"""What is printed of files and names of others does not steer the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.cli import main

ESCAPE = "\x1b]0;owned\x07"


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
