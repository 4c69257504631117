"""Files that cannot be opened, dumps that hold nothing, dumps that would run code, and results that cannot be written."""

from __future__ import annotations

import http.server
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.box_files import box_bytes

import allranks
from allranks.load import LoadOptions, load_paths

from .dumps import dump, entry
from .test_blackbox import make_trace

MEMBERS = "[0, 1, 2]"


def run(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks", "diagnose", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


def waiting(seq: int = 5) -> bytes:
    """A dump of a rank that has waited in its last call."""
    entries = [entry(number, number) for number in range(1, seq)]
    last = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    return pickle.dumps(dump([*entries, entry(seq, seq, **last)], MEMBERS), protocol=2)


@pytest.fixture
def two_of_three(tmp_path: Path) -> Path:
    """Ranks 0 and 2 wait; the file of rank 1 is there and cannot be opened."""
    for rank in (0, 2):
        (tmp_path / f"trace_{rank}").write_bytes(waiting())
    (tmp_path / "trace_1").symlink_to("trace_1")  # opening it fails for root too: a link to itself
    return tmp_path


def test_a_file_that_cannot_be_opened_is_not_damaged_and_its_rank_not_dead(two_of_three: Path) -> None:
    result = allranks.diagnose(two_of_three).diagnosis
    note = next(note for note in result.files if note.path == "trace_1")
    assert (note.status, note.rank) == ("unreadable", 1)
    assert result.verdict is not None
    assert (result.status, result.verdict.cause) == ("unclear", "missing_rank")
    assert (
        "the file of rank 1 could not be opened (trace_1: Too many levels of symbolic links)"
        in result.verdict.sentence
    )
    assert not any(finding.cause in ("rank_died", "damaged_file") for finding in result.findings)


def test_a_file_without_permission_is_named_with_the_reason(two_of_three: Path) -> None:
    """As a user who may not read it."""
    path = two_of_three / "trace_1"
    path.unlink()
    path.write_bytes(waiting())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    sentence = allranks.diagnose(two_of_three).sentence
    assert "the file of rank 1 could not be opened (trace_1: Permission denied)" in sentence


def test_a_damaged_file_does_not_make_its_rank_dead(two_of_three: Path) -> None:
    (two_of_three / "trace_1").unlink()
    (two_of_three / "trace_1").write_bytes(b"")
    result = allranks.diagnose(two_of_three).diagnosis
    assert result.verdict is not None and result.verdict.cause == "missing_rank"
    assert "the file of rank 1 is damaged" in result.verdict.sentence


BASE = dump([], MEMBERS)
WHOLE = pickle.dumps({**BASE, "entries": [entry(number, number) for number in range(1, 9)]}, protocol=2)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({**BASE, "entries": [1, 2, 3]}, protocol=2),
        pickle.dumps({**BASE, "entries": 5}, protocol=2),
        WHOLE[: WHOLE.index(b"entries")],
    ],
    ids=["entries of another type", "no list", "cut short"],
)
def test_dumps_of_which_nothing_could_be_read_are_not_fine(data: bytes, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"trace_{rank}").write_bytes(data)
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("unclear: nothing to judge: no call could be read from the dumps")


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harm",)


def test_a_dump_that_would_run_code_is_a_finding(tmp_path: Path) -> None:
    """Beside the verdict on the calls, on the second line."""
    for rank in (0, 1, 2):
        (tmp_path / f"trace_{rank}").write_bytes(WHOLE)
    entries = [*(entry(number, number) for number in range(1, 9)), Harmful()]
    (tmp_path / "trace_1").write_bytes(pickle.dumps({**BASE, "entries": entries}, protocol=2))
    done = run(tmp_path, cwd=tmp_path)
    first, second, *_ = done.stdout.splitlines()
    assert (
        first
        == "unclear: the file of rank 1 is damaged: what could be read was used, and its end is not held against it"
    )
    assert second.startswith("security: trace_1 is not safe to open: it contains the global posix.system")
    assert done.returncode == 1
    assert not (tmp_path / "harm").exists()
    causes = [finding.cause for finding in allranks.diagnose(tmp_path).findings]
    assert "unsafe_pickle" in causes


@pytest.mark.parametrize("flag", ["--html", "--perfetto", "--output"])
def test_a_failed_write_does_not_cost_the_verdict(flag: str, two_of_three: Path, tmp_path: Path) -> None:
    """A file system that takes nothing: the verdict is printed, and no draft is left."""
    (two_of_three / "trace_1").unlink()
    name = "x" * 250  # the draft's longer name is one too long
    done = run(two_of_three, flag, tmp_path / name)
    assert done.stdout.startswith("there is no file of rank 1")
    assert (done.returncode, "cannot write" in done.stderr) == (2, True)
    small = run(two_of_three, flag, tmp_path / "page", preexec_fn=limit_file_size)
    assert small.stdout.startswith("there is no file of rank 1")
    assert (small.returncode, "File too large" in small.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_0", "trace_2"]


def limit_file_size() -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_one_file_behind_a_web_address_is_read(web: str, tmp_path: Path) -> None:
    (tmp_path / "web" / "trace_3").write_bytes(WHOLE)
    (trace,) = load_paths([f"{web}/trace_3"]).traces
    assert trace.header.rank == 3
    with pytest.raises(allranks.AllranksError, match=r"(?i)not found"):
        load_paths([f"{web}/trace_4"])


def test_words_for_standard_input_and_for_an_empty_folder(tmp_path: Path) -> None:
    assert "standard input is not read" in run("-").stderr
    assert "there are no files in it" in run(tmp_path).stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pickles, boxes, a damaged and a foreign file; every rank with sizes and stacks of its own."""
    for rank in range(12):
        if rank % 3:
            frames = [{"name": f"f{rank}", "filename": "train.py", "line": rank}]
            entries = [entry(i, i + 1, frames=frames, input_sizes=[[rank, i % 3]]) for i in range(20)]
            (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump(entries), 2))
        else:
            (tmp_path / f"x.a0.r{rank}.p1.box").write_bytes(box_bytes(make_trace(rank)))
    (tmp_path / "trace_13").write_bytes((tmp_path / "trace_1").read_bytes()[:-300])
    (tmp_path / "notes.txt").write_text("hello")
    return tmp_path


#: Takes a lease on a file: a process that opens it waits in the kernel, as on a dead file server.
HOLD = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def silent(folder: Path) -> Iterator[Path]:
    """One of the folder's files, made to give no answer."""
    path = folder / "trace_5"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"held\n":
            pytest.skip("this file system knows no leases")
        yield path
    finally:
        holder.communicate(timeout=300)
        for thread in threading.enumerate():
            if thread.name == "allranks-load":
                thread.join(60)


def test_a_file_that_gives_no_answer_does_not_hold_up_the_others(folder: Path, silent: Path) -> None:
    """Its note says how long was waited; all other ranks are there."""
    result = load_paths([str(folder)], LoadOptions(read_limit_s=0.3))
    notes = {note.path: (note.rank, note.status, note.note) for note in result.files}
    assert notes[silent.name] == (5, "unreadable", "no response within 0.3 s")
    assert [trace.header.rank for trace in result.traces] == [*range(5), *range(6, 12), 13]
