"""The ring of a box: wrap-around, threads, and readers that race the writer."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allranks.blackbox import files as place
from allranks.blackbox.file_writer import Box
from allranks.blackbox.header import HEADER_BYTES, read_header
from allranks.blackbox.layout import Item, ring_bytes
from allranks.blackbox.reader import read_trace
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.errors import InputError
from allranks.model.trace import CALL, Flag, State
from allranks.recording._fast import Counters, Ring
from allranks.recording.writer import make_ring
from allranks.stacktraces.boxes import find_boxes


def _box(path: Path, capacity: int = 32, heap: int = 1 << 16) -> Box:
    box = Box(path, capacity, heap)
    box.open()
    return box


def _group() -> Counters:
    return Counters(1, 14, False, (0, 1))


def _begin(ring: Ring, group: Counters, number: int) -> int:
    return ring.begin(group, 1, (1, number, number), 0, False, number, 1, -1, -1, -1)


def test_a_ring_that_is_closed_while_a_call_begins_gets_no_row(tmp_path: Path) -> None:
    """The first call of a thread asks Python for its name, and other threads run meanwhile."""
    ring = make_ring(_box(tmp_path / "x.box"))
    ring.on_thread = lambda number: ring.release()
    with pytest.raises(ValueError, match="closed"):
        _begin(ring, _group(), 5)
    assert not len(read_trace(tmp_path / "x.box").calls)


def test_a_row_holds_what_it_was_given(tmp_path: Path) -> None:
    """Numbers, times, how it ended."""
    box = _box(tmp_path / "x.box")
    ring = make_ring(box)
    ring.set_step(77, 3)
    number = ring.begin(_group(), 0, (0, 8, 9), 0, True, 0, 2, 3, -1, 15)
    ring.started(number)
    ring.finish(number, int(State.FAILED))
    (row,) = read_trace(box.path).calls
    names = ("in_numel", "out_numel", "seq", "p2p_seq", "op_id", "timeout_ms", "reduce_op", "root", "peer")
    assert [int(row[name]) for name in names] == [8, 9, 0, 1, 1, 14, 2, 3, -1]
    assert 0 < int(row["created_ns"]) <= int(row["started_ns"]) <= int(row["completed_ns"])
    assert int(row["state"]) == State.FAILED
    assert int(row["flags"]) == Flag.P2P | Flag.RETIRED
    assert int(row["step"]) == 77
    assert int(row["tag"]) == 15


def test_the_ring_wraps_and_says_how_many_it_dropped(tmp_path: Path) -> None:
    """The newest records stay, in order; a late end of a dropped one changes nothing."""
    box = _box(tmp_path / "x.box", capacity=16)
    ring, group = make_ring(box), _group()
    numbers = [_begin(ring, group, n) for n in range(1, 101)]
    ring.finish(numbers[3], int(State.COMPLETED))
    ring.finish(numbers[99], int(State.COMPLETED))
    trace = read_trace(box.path)
    assert list(trace.calls["seq"]) == list(range(85, 101))
    assert trace.header.dropped == 84
    assert [int(state) for state in trace.calls["state"]] == [State.SCHEDULED] * 15 + [State.COMPLETED]
    assert trace.progress.calls_completed == 2


def test_two_threads_write_without_losing_a_record(tmp_path: Path) -> None:
    """Every number is used exactly once, and all rows are whole."""
    box = _box(tmp_path / "x.box", capacity=8192)
    ring, group = make_ring(box), _group()
    threads = [
        threading.Thread(target=lambda: [_begin(ring, group, 7) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    trace = read_trace(box.path)
    assert list(trace.calls["begin"]) == list(range(1, 8001))
    assert trace.torn == 0
    assert len(set(trace.calls["thread"])) == 4


def _write_millions(rank: int, world: int, path: str, count: int) -> None:
    box = Box(Path(path), 256, 1 << 16)
    box.open()
    ring, group = make_ring(box), _group()
    reached("writing")
    for number in range(1, count + 1):
        begin = ring.begin(group, 0, (0, number, -number), 0, False, number, 0, -1, -1, -1)
        if number & 3 == 0:
            ring.finish(begin, 2)


@pytest.mark.parametrize("count", [600_000, pytest.param(20_000_000, marks=pytest.mark.soak)])
def test_a_reader_that_races_the_writer_never_accepts_a_torn_record(tmp_path: Path, count: int) -> None:
    """Hundreds of thousands of records, read all the while: every accepted one is consistent in itself."""
    path = tmp_path / "x.box"
    seen, torn, reads = 0, 0, 0
    with Ranks(_write_millions, 1, (str(path), count), backend=None) as ranks:
        ranks.wait_for("writing")
        while read_header(path).calls_started < count:
            trace = read_trace(path)
            calls = trace.calls
            for field in ("seq", "op_id", "in_numel", "timeout_ms"):
                assert (calls[field] == calls["begin"]).all()
            assert (calls["out_numel"] == -calls["begin"].astype(np.int64)).all()
            assert (np.diff(calls["begin"]) > 0).all()
            over = calls["state"] == State.COMPLETED
            assert (calls["completed_ns"][over] > 0).all()
            seen, torn, reads = seen + len(calls), torn + trace.torn, reads + 1
        ranks.values(timeout_s=60)
    assert reads > 10  # the race took place
    assert seen > 1000
    assert len(read_trace(path).calls) == 256


def test_a_full_heap_keeps_the_numbers(tmp_path: Path) -> None:
    """When there is no room for more names and stacks, the rows go on and the file says so."""
    box = _box(tmp_path / "x.box", heap=256)
    numbers = [box.intern(Item.NAME, f"a name of some length {n}") for n in range(20)]
    assert numbers[0] == 1
    assert numbers[-1] == 0
    _begin(make_ring(box), _group(), 1)
    trace = read_trace(box.path)
    assert len(trace.calls) == 1
    assert any("heap of the black box is full" in note for note in trace.notes)


def test_the_same_thing_is_stored_once(tmp_path: Path) -> None:
    """Interning is by content; groups are appended even when equal, for a new group of an old name is another."""
    box = _box(tmp_path / "x.box")
    assert box.intern(Item.NAME, "x") == box.intern(Item.NAME, "x") == 1
    assert box.append(Item.GROUP, ["0", "", [], ""]) == 1
    assert box.append(Item.GROUP, ["0", "", [], ""]) == 2


@pytest.mark.parametrize("cut", [0, 100, HEADER_BYTES + 40, HEADER_BYTES + 5 * CALL.itemsize, -70])
def test_a_cut_file_gives_what_is_there_or_a_clear_error(tmp_path: Path, cut: int) -> None:
    """Never an unexpected exception, never an invented record."""
    box = _box(tmp_path / "x.box", capacity=16, heap=64)
    ring, group = make_ring(box), _group()
    for n in range(10):
        _begin(ring, group, n)
    box.intern(Item.NAME, "x" * 30)
    data = box.path.read_bytes()
    shorter = data[:cut]
    if len(shorter) < HEADER_BYTES:
        with pytest.raises(InputError):
            read_trace(shorter)
        return
    trace = read_trace(shorter)
    assert len(trace.calls) == min(10, (len(shorter) - HEADER_BYTES) // CALL.itemsize)
    assert trace.notes or cut == -70


def test_random_damage_is_never_an_unexpected_exception(tmp_path: Path) -> None:
    """Whatever byte is flipped, the reader answers with a trace or an InputError."""
    box = _box(tmp_path / "x.box", capacity=16, heap=2048)
    box.append(Item.META, {"host": "h", "versions": {"torch": "2"}})
    box.append(Item.GROUP, ["0", "d", [0, 1], "gloo"])
    box.append(Item.SHAPES, [[[1]], [[1]], ["Float"], ["Float"], [], []])
    box.append(Item.STACK, [["f", "x.py", 3]])
    ring, group = make_ring(box), _group()
    for n in range(20):
        _begin(ring, group, n)
    data = bytearray(box.path.read_bytes())
    random = np.random.default_rng(5)
    for _ in range(1500):
        damaged = bytearray(data)
        for at in random.integers(0, len(damaged), 4):
            damaged[at] = random.integers(0, 256)
        try:
            read_trace(bytes(damaged))
        except InputError:
            pass


def test_files_and_folders_are_private(folder: Path) -> None:
    """0600 in 0700, and a file that exists is never taken over."""
    box = _box(folder / "deep" / "x.box")
    assert box.path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "deep").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        _box(folder / "deep" / "x.box")
    assert box.path.stat().st_size == HEADER_BYTES + ring_bytes(32) + (1 << 16)


def test_our_own_folder_is_closed_when_somebody_has_opened_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the folder that holds this user's jobs nothing is readable by others."""
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path)
    folder = place.job_folder("4711")
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o777)
    place.make_folder(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: makes a folder of another user")
def test_a_folder_that_another_user_made_in_our_name_is_refused_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the temporary folder, which is used when shared memory is full: anyone who owns it could lead our logs elsewhere."""
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = place.fallback_folder("4711")
    folder.parent.mkdir()
    os.chown(folder.parent, 4242, 4242)
    with pytest.raises(PermissionError, match="belongs to uid 4242"):
        place.make_folder(folder)
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    with pytest.raises(PermissionError, match="belongs to uid 4242"):
        place.make_folder(folder)


@pytest.mark.needs_root
@pytest.mark.parametrize("taken_by", ["a folder", "a link", "a file"])
def test_a_user_who_has_taken_our_names_does_not_stop_a_job(
    taken_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to what is his, nor where his links lead; the job has a folder with a name that nobody knew before."""
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "elsewhere").mkdir()
    for root in ("shm", "tmp"):
        name = tmp_path / root / place.base_folder().name
        name.parent.mkdir()
        if taken_by == "a link":
            name.symlink_to(tmp_path / "elsewhere")
        else:
            name.mkdir(mode=0o777) if taken_by == "a folder" else name.touch()
        os.lchown(name, 4242, 4242)
    folder, problem = place.usable_folder(None, "job")
    assert folder.parent == tmp_path / "tmp" and folder.stat().st_mode & 0o777 == 0o700
    assert str(place.job_folder("job")) in problem
    assert list(folder.iterdir()) == list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list(tmp_path.rglob("*"))) == 6


def test_runs_that_start_at_once_may_remove_the_same_finished_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that another run has just removed is gone, and no error."""
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    for number in range(60):
        folder = place.job_folder(f"old-{number}")
        folder.mkdir(parents=True)
        (folder / "x.box").write_bytes(b"x" * 8192)
        os.utime(folder, (1.0, 1.0))
    with ThreadPoolExecutor(4) as pool:
        removed = [pool.submit(place.remove_finished, None, 0) for _ in range(4)]
        assert sum(len(one.result(60)) for one in removed) >= 60
    assert not place._in_use(tmp_path / "gone")
    assert place.job_folders() == []


def test_a_folder_that_is_removed_while_it_is_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job ends between two reads: `allranks watch` and the next recorder see one folder less."""
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    removed, elsewhere = [], []

    def removing(real: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).name.startswith("allranks-"):
                if Path(path).is_relative_to(tmp_path):
                    removed.append(path)
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    elsewhere.append(path)  # the jobs of this machine
            return real(path)

        return listed

    monkeypatch.setattr(os, "listdir", removing(os.listdir))
    monkeypatch.setattr(os, "scandir", removing(os.scandir))
    if accessor := getattr(pathlib, "_normal_accessor", None):  # Python 3.10 keeps the functions there
        monkeypatch.setattr(accessor, "listdir", os.listdir)
        monkeypatch.setattr(accessor, "scandir", os.scandir)
    for act in (place.job_folders, place.remove_old, find_boxes):
        place.job_folder("job").mkdir(parents=True)
        act()
    assert len(removed) >= 3
    assert elsewhere == []


def test_a_folder_that_somebody_else_made_in_our_name_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world-writable place anybody can make it first, with jobs in it that are not ours."""
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    us = os.getuid() + 1
    (tmp_path / f"allranks-{us}" / "4711").mkdir(parents=True)
    place.job_folder("ours").mkdir(parents=True)
    assert [folder.name for folder in place.job_folders()] == ["ours"]
    monkeypatch.setattr(os, "getuid", lambda: us)
    assert place.job_folders() == []
