"""Reading by several processes is only a faster way to the same result."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.box_files import box_bytes

from allranks.load import LoadOptions, LoadResult, load_paths
from allranks.load import parallel as parallel_module
from allranks.load import reading as share_module

from .dumps import dump, entry
from .test_blackbox import make_trace
from .test_torch_dumps import assert_same


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


def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes three processes pay for a dozen files."""
    monkeypatch.setattr(share_module, "MIN_FILES", 4)
    monkeypatch.setattr(share_module, "MIN_WORK_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    # Servers of other tests may have threads in this process; the children only read files and end.
    count = threading.active_count
    others = count() - 1
    monkeypatch.setattr(share_module.threading, "active_count", lambda: count() - others)


def assert_equal(one: LoadResult, two: LoadResult) -> None:
    assert [(n.path, n.rank, n.status, n.note) for n in one.files] == [
        (n.path, n.rank, n.status, n.note) for n in two.files
    ]
    assert len(one.traces) == len(two.traces) == 13
    for left, right in zip(one.traces, two.traces, strict=True):
        assert_same(left, right)
    assert len({id(trace.stacks) for trace in two.traces}) == 1


def test_several_processes_give_the_same_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, tables, notes and their order."""
    alone = load_paths([str(folder)])
    split(monkeypatch)
    forks = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    assert_equal(alone, load_paths([str(folder)]))
    assert len(forks) == 2, "nothing was read by another process, so this test shows nothing"


def test_rows_that_do_not_fit_are_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed files have more rows than their size suggests."""
    alone = load_paths([str(folder)])
    split(monkeypatch)
    monkeypatch.setattr(parallel_module, "ROWS_PER_BYTE", 0.0)
    assert_equal(alone, load_paths([str(folder)]))


def test_a_child_that_dies_leaves_its_share_to_the_parent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills the child in the middle of its work; nothing is lost."""
    alone = load_paths([str(folder)])
    split(monkeypatch)
    parent = os.getpid()
    died = folder.parent / "died"
    take = parallel_module._SharedRows.take

    def take_or_die(self: parallel_module._SharedRows, raw: object) -> None:
        if os.getpid() != parent:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        take(self, raw)  # type: ignore[arg-type]

    monkeypatch.setattr(parallel_module._SharedRows, "take", take_or_die)
    result = load_paths([str(folder)])
    assert died.exists()
    assert_equal(alone, result)


def test_a_process_with_threads_is_not_forked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock held by another thread would stay locked in the child for ever."""
    split(monkeypatch)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked beside a thread"))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,), name="bystander")
    thread.start()
    try:
        assert len(load_paths([str(folder)]).traces) == 13
    finally:
        stop.set()
        thread.join()


#: Takes a lease on a file: whoever opens it is made to wait in the kernel, as on a dead file server.
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
    path = folder / "trace_5"  # a child is to read it, where there are children
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


@pytest.mark.parametrize("processes", [1, 3])
def test_a_file_that_gives_no_answer_does_not_hold_up_the_others(
    folder: Path, silent: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note says how long was waited; all other ranks are there, whoever was to read it."""
    if processes > 1:
        split(monkeypatch)
    result = load_paths([str(folder)], LoadOptions(read_limit_s=0.3))
    notes = {note.path: (note.rank, note.status, note.note) for note in result.files}
    assert notes[silent.name] == (5, "unreadable", "no answer within 0.3 s")
    assert [trace.header.rank for trace in result.traces] == [*range(5), *range(6, 12), 13]
