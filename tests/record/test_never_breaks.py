"""Training is never broken: not by a full disk, not by forks, signals, or an error of the recorder itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import allranks
from allranks.blackbox.header import read_header
from allranks.blackbox.reader import find_boxes
from allranks.drill.ranks import Ranks
from allranks.recording.options import RecorderOptions
from allranks.recording.recorder import Recorder

from .boxes import ops, traces


def _train(rank: int, world: int) -> tuple[bool, list[str]]:
    """Whether it recorded, and what it was warned of; raises when training is disturbed."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        recorder = allranks.record()
        for step in range(3):
            allranks.step(step)
            with allranks.expect("eval", up_to_s=5):
                value = torch.ones(2)
                dist.all_reduce(value)
                assert value[0].item() == world
    return recorder.active, [str(item.message) for item in seen if "allranks" in str(item.message)]


def _is_off_with_one_warning(place: Path, reason: str) -> None:
    with Ranks(_train, 2, env={"ALLRANKS_DIR": str(place)}) as ranks:
        for active, said in ranks.values():
            assert not active
            assert len(said) == 1
            assert "training continues" in said[0]
            assert reason in said[0] and str(place) in said[0] and "set ALLRANKS_DIR" in said[0]


def test_an_unusable_folder_turns_recording_off(tmp_path: Path) -> None:
    """One warning that names the reason; every collective works."""
    (tmp_path / "file").write_text("not a folder")
    _is_off_with_one_warning(tmp_path / "file" / "boxes", "ot a directory")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.needs_root
def test_a_full_disk_turns_recording_off_instead_of_killing_the_rank(tiny: Path) -> None:
    """Touching a page that a full tmpfs cannot give is SIGBUS: the room is reserved before."""
    _is_off_with_one_warning(tiny / "boxes", "No space left")


def test_the_environment_turns_it_off(folder: Path) -> None:
    """ALLRANKS_RECORD=0: no file, no warning."""
    with Ranks(_train, 2, env={"ALLRANKS_RECORD": "0"}) as ranks:
        assert ranks.values() == [(False, []), (False, [])]
    assert not folder.exists()


def _break_meet(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        recorder = allranks.record()

        def broken(*args: object) -> None:
            raise LookupError("a bug of ours")

        assert recorder.box is not None
        recorder.box.append = broken  # type: ignore[assignment, method-assign]  # a new group cannot be written down
        group = dist.new_group([0, 1])
        for _ in range(3):
            value = torch.ones(1)
            dist.all_reduce(value, group=group)
            assert value.item() == world
    return [str(item.message) for item in seen if "allranks" in str(item.message)]


def test_an_error_of_our_own_turns_recording_off_with_one_warning(folder: Path) -> None:
    """The call that met the error, and all later ones, go through to torch."""
    with Ranks(_break_meet, 2) as ranks:
        for said in ranks.values():
            assert len(said) == 1
            assert "a bug of ours" in said[0]


class _Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        allranks.step(1000 + index)  # a worker must not move the parent's mark
        return index * index


def _loads_data(rank: int, world: int) -> int:
    allranks.record()
    allranks.step(5)
    dist.all_reduce(torch.ones(1))
    total = sum(int(batch.sum()) for batch in DataLoader(_Squares(), batch_size=2, num_workers=2))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert allranks.recording.current() is None
            mine = allranks.record(rank=90 + rank)  # a child may record, into a box of its own
            code = 0 if mine.active and mine.path and f"p{os.getpid()}" in mine.path.name else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.all_reduce(torch.ones(1))
    return total


def test_forked_children_never_write_into_their_parents_box(folder: Path) -> None:
    """DataLoader workers do nothing; a child that records makes its own file."""
    with Ranks(_loads_data, 2) as ranks:
        assert ranks.values() == [140, 140]
    found = traces(folder)
    assert sorted(found) == [0, 1, 90, 91]
    assert found[0].progress.step == 5
    assert ops(found[0]) == ["all_reduce", "all_reduce"]
    assert len(found[90].calls) == 0


SPAWNED = """
import os, sys, torch, allranks
recorder = allranks.record()
if __name__ == "__main__":
    import torch.multiprocessing as mp
    from torch.utils.data import DataLoader, TensorDataset
    loader = DataLoader(TensorDataset(torch.arange(6)), num_workers=1, multiprocessing_context="spawn")
    print(sum(int(batch[0]) for batch in loader), recorder.active)
"""


def test_spawned_workers_that_import_a_recording_script_do_nothing(folder: Path, tmp_path: Path) -> None:
    """A DataLoader worker started by spawn runs the top of the script again; it makes no box."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "15 True", done.stderr
    assert len(find_boxes(folder)) == 1


def _under_signals(rank: int, world: int) -> tuple[int, int]:
    """Collectives while a timer interrupts at random instructions; the handler itself records."""
    recorder = allranks.record()
    hits = 0

    def handler(number: int, frame: object) -> None:
        nonlocal hits
        hits += 1
        allranks.step(hits, label=f"hit {hits}")

    signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    count = 3000
    for n in range(count):
        dist.all_reduce(torch.ones(1 + n % 50))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    assert recorder.active
    return hits, count


def test_signals_at_any_instruction_neither_deadlock_nor_spoil_a_record(folder: Path) -> None:
    """Hundreds of interruptions, each of which writes to the box."""
    with Ranks(_under_signals, 2) as ranks:
        values = ranks.values(timeout_s=100)
    assert all(hits > 20 for hits, _ in values)  # the fault fired
    for rank, trace in traces(folder).items():
        assert trace.progress.calls_completed == values[rank][1]
        assert list(trace.calls["seq"]) == list(range(1001, 3001))
        assert trace.torn == 0
        assert trace.notes == ()


def test_a_process_without_a_group_records_and_exits_cleanly(folder: Path) -> None:
    """No rank, no torch.distributed: a box with no calls, threads that do not hold up the exit."""
    code = "import allranks; r = allranks.record(); allranks.step(3); print(r.active)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.returncode, done.stderr) == ("True", 0, "")
    (box,) = find_boxes(folder)
    assert read_header(box).step == 3
    assert read_header(box).closed == "exit"


def test_old_boxes_of_dead_processes_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory does not fill up with the boxes of jobs long gone."""
    from allranks.blackbox import files as place

    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    old, own, fresh = (place.job_folder(name) for name in ("old", "own", "fresh"))
    for folder in (old / "dumps", own, fresh):
        folder.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    boxes = [
        old / f"old.a0.r0.p{gone.pid}.box",
        own / f"own.a0.r0.p{os.getpid()}.box",
        fresh / f"x.a0.r0.p{gone.pid}.box",
    ]
    for box in boxes:
        box.touch()
    for box in boxes[:2]:
        os.utime(box, (1, 1))
    place.remove_old()
    assert [box.exists() for box in boxes] == [False, True, True]
    assert not old.exists()


def test_a_rank_that_is_restarted_again_and_again_keeps_the_last_few_boxes(tmp_path: Path) -> None:
    """Shared memory is memory: each new process of a rank leaves the newest boxes of those before it, and no others."""
    ended = []
    for attempt in range(5):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        ended.append(tmp_path / f"job.a{attempt}.r1.p{gone.pid}.box")
        ended[-1].touch()
        os.utime(ended[-1], (attempt, attempt))
    others = [
        tmp_path / name
        for name in (f"job.a0.r1.p{os.getpid()}.box", "job.a0.r11.p1.box", "x.a0.r1.p999999.box")
    ]
    for path in others:
        path.touch()
    recorder = Recorder(RecorderOptions(folder=tmp_path, job="job", rank=1, attempt=5))
    recorder.start()
    recorder.close()
    assert [path.exists() for path in ended] == [False, False, True, True, True]
    assert all(path.exists() for path in others)
