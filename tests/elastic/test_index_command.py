"""`allranks index` as it is typed: every documented spelling, what it shows, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from allranks.cli import main

from .corpus import build_command, small_index, texts, tokens_of, write_jsonl


@pytest.mark.parametrize("words", ["one.jsonl two.jsonl -o i.bin", "*.jsonl -o i.bin"])
def test_all_documented_command_lines_work(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files, and a pattern."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "one.jsonl", ["ab"])
    write_jsonl(tmp_path / "two.jsonl", ["cd"])
    assert main(["index", "build", *words.split()]) == 0
    printed = capsys.readouterr()
    assert "Wrote i.bin: 4 tokens of 2 documents" in printed.out and printed.err == ""
    assert tokens_of(tmp_path / "i.bin") == [[97, 98], [99, 100]]


def test_an_existing_index_is_kept_or_said_to_be_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same request is up to date; another one needs --force."""
    path = small_index(tmp_path)
    source = tmp_path / "data.jsonl"
    assert main(["index", "build", str(source), "-o", str(path)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert main(["index", "build", str(source), "-o", str(path), "--append-eos"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["index", "build", str(source), "-o", str(path), "--append-eos", "--force"]) == 0


def test_show_tells_where_an_index_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Provenance: files with sizes, tokenizer with digest, key, version, time."""
    path = small_index(tmp_path)
    assert main(["index", "show", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"][0]["size"] == (tmp_path / "data.jsonl").stat().st_size
    assert facts["tokenizer"]["name"] == "bytes" and facts["text_key"] == "text" and facts["created"]


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(tmp_path: Path, tokenizer_file: Path) -> None:
    """On a real pseudo-terminal: share, speed, time left."""
    import pty

    source = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    master, slave = pty.openpty()
    done = subprocess.run(
        build_command(source, tmp_path / "a.index", tokenizer_file), stdout=subprocess.PIPE, stderr=slave, timeout=300
    )  # fmt: skip
    os.close(slave)
    said = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        said += chunk
    os.close(master)
    assert done.returncode == 0
    assert b"100%" in said and b"MB/s" in said and b"s left" in said
