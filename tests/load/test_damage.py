"""Damaged, foreign and hostile files become notes; what can be read of them is used; nothing in them runs."""

from __future__ import annotations

import gzip
import os
import pickle
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from allranks.load import LoadOptions, LoadResult, load_paths
from allranks.load.unpickle import is_plain, read_pickle, salvage

from .dumps import dump, entry

CASES = Path(__file__).parent / "cases"


def load_bytes(folder: Path, data: bytes, name: str = "trace_0") -> LoadResult:
    (folder / name).write_bytes(data)
    return load_paths([str(folder)], LoadOptions(allow_nothing=True))


def test_a_truncated_dump_gives_its_readable_part() -> None:
    """Rank 3's file is cut in the middle: its first entries count."""
    result = load_paths([str(CASES / "broken_dumps/truncated_file")])
    assert [len(trace.calls) for trace in result.traces] == [50, 50, 50, 24]
    note = next(note for note in result.files if note.rank == 3)
    assert note.status == "damaged" and "truncated" in note.note and "24 calls" in note.note


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_dump_cut_anywhere_never_raises_and_loses_only_the_rest(protocol: int) -> None:
    """Every length from nothing to one byte too few."""
    data = pickle.dumps(dump([entry(i, i + 1) for i in range(6)]), protocol)
    best = 0
    for length in range(len(data)):
        value, problem = salvage(data[:length])
        assert problem
        count = sum("is_p2p" in e for e in value.get("entries", [])) if isinstance(value, dict) else 0
        assert count >= best or count >= best - 1
        best = max(best, count)
    assert best == 6


def test_the_call_in_which_a_file_is_cut_is_not_read(tmp_path: Path) -> None:
    """Without the end of its entry a finished call looks as if it had not finished."""
    data = pickle.dumps(dump([entry(i, i + 1, retired=True) for i in range(6)]), 2)
    cuts = (data[:length] for length in range(len(data) - 1, 0, -1))
    half = next(cut for cut in cuts if "retired" not in salvage(cut)[0]["entries"][-1])
    (trace,) = load_bytes(tmp_path, half).traces
    assert trace.calls["seq"].tolist() == [1, 2, 3, 4, 5]


def test_the_salvager_agrees_with_pickle_on_whole_files() -> None:
    """It is a second reader of the same format."""
    for path in sorted(CASES.glob("nccl/*/trace_*")):
        data = path.read_bytes()
        assert salvage(data) == (pickle.loads(data), "")


class _Bomb:
    """Pickles as a call of os.system that leaves a mark."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_pickle_runs_nothing_and_is_named(tmp_path: Path, protocol: int) -> None:
    """The payload does not run, whichever opcodes carry it; the note names the global."""
    mark = tmp_path / "ran"
    content = dump([entry(0)], evil=_Bomb(f"touch {mark}"))
    data = pickle.dumps(content, protocol)
    pickle.loads(data)
    assert mark.exists(), "the payload does not work, so this test shows nothing"
    mark.unlink()
    folder = tmp_path / "dumps"
    folder.mkdir()
    result = load_bytes(folder, data)
    assert not mark.exists()
    note = result.files[0]
    if protocol >= 2:  # older ones do not begin like a pickle of torch, and are left alone
        assert note.status == "damaged" and "system" in note.note and "no code was run" in note.note
        assert len(result.traces[0].calls) == 1


def test_the_shared_unsafe_pickle_is_read_without_running(tmp_path: Path) -> None:
    """What it holds beside the payload is used."""
    result = load_paths([str(CASES / "broken_dumps/unsafe_pickle")])
    assert [trace.header.rank for trace in result.traces] == [0, 1]
    assert [note.status for note in result.files] == ["ok", "damaged"]


@pytest.mark.parametrize(
    ("name", "data", "status", "word"),
    [
        ("trace_0", b"", "damaged", "empty"),
        ("core.12345", b"\x7fELF" + bytes(600), "skipped", "not a dump"),
        ("notes_1.txt", b"all is well\n", "skipped", "not a dump"),
        ("model_1.pt", b"PK\x03\x04" + bytes(600), "skipped", "not a dump"),
        ("list_1", pickle.dumps([1, 2, 3], 2), "skipped", "not a flight recorder dump"),
        ("config_1.json", b'{"learning_rate": 1}', "skipped", "not a flight recorder dump"),
        ("trace_0", b"\x80", "damaged", "truncated"),
        ("trace_0.gz", b"\x1f\x8b\x08garbage", "damaged", "compressed stream"),
        ("x.a0.r0.p1.box", b"ALLRANKS" + b"\xff" * 50, "damaged", "truncated in its header"),
        ("x.a0.r0.p1.box", b"ALLRANKS" + b"\xff" * 5000, "damaged", "is not supported"),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_noted(tmp_path: Path, name: str, data: bytes, status: str, word: str) -> None:
    """Status and reason of every kind of stray file."""
    result = load_bytes(tmp_path, data, name)
    assert not result.traces
    assert [note.status for note in result.files] == [status]
    assert word in result.files[0].note


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """torch leaves <stem><rank>.pipe beside the dumps; opening one would block."""
    os.mkfifo(tmp_path / "trace_1.pipe")
    result = load_bytes(tmp_path, pickle.dumps(dump([entry(0)]), 2))
    assert len(result.traces) == 1
    assert next(note for note in result.files if note.path == "trace_1.pipe").note == "not a regular file"


def test_an_unreadable_file_is_noted(tmp_path: Path) -> None:
    """A dangling link stands for anything that cannot be opened."""
    (tmp_path / "trace_1").symlink_to(tmp_path / "gone")
    result = load_bytes(tmp_path, pickle.dumps(dump([entry(0)]), 2))
    note = next(note for note in result.files if note.path == "trace_1")
    assert note.status == "unreadable" and "No such file" in note.note


def test_folders_that_contain_themselves_end(tmp_path: Path) -> None:
    """Links to folders are not followed."""
    (tmp_path / "loop").symlink_to(tmp_path)
    result = load_bytes(tmp_path, pickle.dumps(dump([entry(0)]), 2))
    assert len(result.files) <= 2 and len(result.traces) == 1


def test_a_memo_bomb_is_refused_before_it_takes_memory() -> None:
    """One LONG_BINPUT with a large number makes C's unpickler allocate for it: 16 GB here."""
    data = b"\x80\x02}r\xff\xff\xff\x7f."
    assert not is_plain(data)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        f"from allranks.load.unpickle import read_pickle; print(read_pickle({data!r}).value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "{}", done.stderr


def test_shared_references_do_not_multiply(tmp_path: Path) -> None:
    """Thirty lists, each holding the one before twice, would be a billion elements written out."""
    sizes: Any = [1]
    for _ in range(40):
        sizes = [sizes, sizes]
    tracemalloc.start()
    result = load_bytes(tmp_path, pickle.dumps(dump([entry(i, input_sizes=sizes) for i in range(50)]), 2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(result.traces[0].calls) == 50
    assert peak < 50 << 20


def test_a_list_that_holds_itself_is_survived(tmp_path: Path) -> None:
    """Recursion by reference is legal in pickles."""
    sizes: list[Any] = []
    sizes.append(sizes)
    result = load_bytes(tmp_path, pickle.dumps(dump([entry(0, input_sizes=sizes, frames=sizes)]), 2))
    assert len(result.traces[0].calls) == 1


def test_a_compression_bomb_is_refused(tmp_path: Path) -> None:
    """Ten gigabytes of zeros in ten megabytes; a smaller one here, against a smaller limit."""
    bomb = gzip.compress(bytes(80 << 20), 9)
    assert len(bomb) < 200_000
    (tmp_path / "trace_0.gz").write_bytes(bomb)
    result = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True))
    assert result.files[0].status == "damaged" and "refused" in result.files[0].note


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte costs nothing."""
    path = tmp_path / "trace_0"
    path.write_bytes(b"\x80\x02}")
    os.truncate(path, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True))
    assert "exceed the limit" in result.files[0].note
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_deep_nesting_is_survived(tmp_path: Path) -> None:
    """A hundred thousand lists in one another, as pickle and as JSON."""
    deep = b"\x80\x02}(X\x07\x00\x00\x00entries" + b"](" * 100_000
    for name, data in (("trace_0", deep), ("trace_1.json", b'{"version": ' + b"[" * 100_000)):
        result = load_bytes(tmp_path, data, name)
        assert all(note.status != "ok" for note in result.files)


def test_plain_pickles_of_all_protocols_pass_the_scanner() -> None:
    """The scanner is strict, but not against what torch and Python write."""
    content = dump([entry(i, i + 1, duration_ms=1.5, big=1 << 70) for i in range(300)])
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(content, protocol)
        assert is_plain(data), protocol
        assert read_pickle(data).value == content


@pytest.mark.parametrize(
    "levels", [b"N" + b"\x85" * 300_000, b"(" * 300_000 + b"N" + b"t" * 300_000, b"N" + b"N\x86" * 300_000]
)
def test_tuples_nested_without_end_do_not_crash_the_reader(levels: bytes) -> None:
    """As a key they are hashed, which recurses in C without a limit: the process would be gone."""
    value = read_pickle(b"\x80\x02}" + levels + b"Ns.").value
    assert value == {}
