"""Missing, cut, foreign and hostile files: findings, never crashes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.cli import main
from allranks.stacktraces import read_bundle
from allranks.stacktraces.boxes import find_boxes
from allranks.stacktraces.debuggers import (
    parse_faulthandler,
    parse_gdb,
    parse_json,
    parse_kernels,
    parse_pystack,
    parse_text,
)
from allranks.stacktraces.procfs import parse_facts

CASE = Path(__file__).parent / "cases" / "hangs" / "gloo_allreduce_missing_rank"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a captured hang, to be damaged."""
    return Path(shutil.copytree(CASE, tmp_path / "case"))


def test_a_folder_without_captures_cannot_be_run_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, and the message says what was looked for."""
    assert main(["stacks", "--from", str(tmp_path)]) == 2
    assert "rank{R}.pyspy.s1.json" in capsys.readouterr().err
    assert main(["stacks", "--from", str(tmp_path / "nowhere")]) == 2


def test_truncated_and_foreign_files_are_notes(folder: Path) -> None:
    """The rank with the cut file is read from what is left; the verdict stands."""
    whole = (folder / "rank2.pyspy.s2.json").read_bytes()
    (folder / "rank2.pyspy.s2.json").write_bytes(whole[: len(whole) // 2])
    (folder / "rank1.proc.s1.json").write_bytes(b"\xff\xfe\x00not json")
    (folder / "rank0.pyspy_native.json").write_text('{"a": 1}')
    (folder / "rankX.pyspy.json").write_text("[]")
    (folder / "core").write_bytes(b"\0" * 100)
    report = read_bundle(folder)
    assert report.culprits == (2,)
    assert report.ranks[2].cause == "sleep"
    assert any("rank2.pyspy.s2.json: damaged" in note for note in report.notes)
    assert any("rank1.proc.s1.json: damaged" in note for note in report.notes)


def test_a_rank_with_text_only_is_still_told(folder: Path) -> None:
    """py-spy's text stands in for its JSON; without /proc the cause is weaker but the culprit is the same."""
    for rank in range(4):
        for path in folder.glob(f"rank{rank}.*"):
            if not path.name.endswith((".pyspy.txt", "progress.jsonl")):
                path.unlink()
    report = read_bundle(folder)
    assert report.hung is None
    assert report.culprits == (2,)
    assert report.ranks[2].where == "cases.py:13 in load_batch_slow_storage"
    assert report.ranks[0].cause == "collective_wait"


def test_a_rank_with_facts_only_is_told_from_the_kernel(folder: Path) -> None:
    """Without py-spy the system call alone tells a sleep."""
    for path in folder.glob("rank2.pyspy*"):
        path.unlink()
    report = read_bundle(folder)
    assert report.ranks[2].cause == "sleep"
    assert report.culprits == (2,)


def test_a_rank_of_which_nothing_is_left_is_unknown(folder: Path) -> None:
    """An empty file makes a rank that cannot be read, with the reason."""
    for path in folder.glob("rank2.*"):
        path.unlink()
    (folder / "rank2.pyspy.s1.json").write_text("")
    report = read_bundle(folder)
    assert report.ranks[2].cause == "unknown"
    assert "damaged" in report.ranks[2].evidence


def test_marks_that_are_not_marks_are_counted(folder: Path) -> None:
    """Broken lines of a progress file are passed over and said."""
    with open(folder / "rank0.progress.jsonl", "ab") as file:
        file.write(b'{"t": "soon", "step": 1}\n\xff\xff\n[1]\n{"t": 1e999, "step": 2}\n')
    report = read_bundle(folder)
    assert report.hung is True
    assert any("rank0.progress.jsonl" in note and "not progress marks" in note for note in report.notes)


def test_hostile_names_reach_neither_the_page_nor_the_terminal_unescaped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function name with markup is text in the page."""
    rows = json.loads((folder / "rank2.pyspy.s2.json").read_text())
    rows[-1]["frames"][0]["name"] = "<script>alert(1)</script>"
    rows[-1]["frames"][0]["filename"] = '/x/"><img src=x onerror=alert(1)>.py'
    rows[-1]["thread_name"] = "MainThread"
    (folder / "rank2.pyspy.s2.json").write_text(json.dumps(rows))
    page = tmp_path / "page.html"
    assert main(["stacks", "--from", str(folder), "--html", str(page)]) == 1
    text = page.read_text()
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_pipes_and_devices_among_the_files_are_not_waited_for(folder: Path, tmp_path: Path) -> None:
    """Anyone who can write to a shared folder must not be able to stop those who look into it."""
    for name in ("bundle.json", "rank7.pyspy.txt", "rank7.progress.jsonl", "rank8.pyspy.s1.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "rank9.pyspy.txt").symlink_to("/dev/zero")
    assert read_bundle(folder).culprits == (2,)
    os.mkfifo(tmp_path / "job.box")
    assert all(box.path.parent != tmp_path for box in find_boxes((tmp_path,)))


def test_a_page_is_not_overwritten_without_force(tmp_path: Path) -> None:
    """An existing file is refused, and kept."""
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert main(["stacks", "--from", str(CASE), "--html", str(page)]) == 2
    assert page.read_text() == "mine"
    assert main(["stacks", "--from", str(CASE), "--html", str(page), "--force"]) == 1
    assert page.read_text() != "mine"


def test_a_damaged_bundle_falls_back_to_the_raw_files_beside_it(folder: Path) -> None:
    """Half a bundle.json is a note; the raw files give the answer."""
    (folder / "bundle.json").write_text('{"kind": "allranks stacks bundle", "frames": [[')
    report = read_bundle(folder)
    assert report.culprits == (2,)
    assert any("bundle.json is damaged" in note for note in report.notes)


@settings(max_examples=150)
@given(st.text(max_size=400) | st.binary(max_size=400).map(lambda data: data.decode("utf-8", "replace")))
def test_text_parsers_survive_anything(text: str) -> None:
    """No input makes a text parser raise."""
    for parser in (parse_text, parse_pystack, parse_faulthandler, parse_gdb, parse_kernels):
        assert isinstance(parser(text), tuple)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["frames", "os_thread_id", "thread_name", "threads", "tid", "syscall", "kstack", "pid", "name", "line", "at_s"]
    ), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=200)
@given(_JSON)
def test_json_parsers_raise_only_what_the_reader_expects(value: object) -> None:
    """Any JSON value gives threads or a ValueError."""
    for parser in (parse_json, parse_facts):
        try:
            parser(json.dumps(value))
        except ValueError:
            pass


def test_a_deeply_nested_answer_of_pyspy_is_refused_as_any_other_damage() -> None:
    """No recursion error leaves the reader."""
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
