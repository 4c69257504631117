"""The black box outlives its rank, whatever ends it."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.blackbox.file_writer import Box
from allranks.blackbox.header import is_alive, read_header
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.model.trace import State

from .boxes import last, ops, traces

pytestmark = pytest.mark.usefixtures("forks")


def _loop_then(rank: int, world: int, ending: str) -> None:
    allranks.record()
    for step in range(5):
        allranks.step(step)
        dist.all_reduce(torch.ones(2))
    reached("looped")
    if rank == 1:
        _end(ending)
    dist.all_reduce(torch.ones(3))


def _end(ending: str) -> None:
    faulthandler.disable()  # pytest's would print the crash that is asked for
    if ending == "segfault":
        import ctypes

        ctypes.string_at(0)
    if ending == "exit":
        os._exit(7)
    if ending == "abort":
        os.abort()
    time.sleep(60)  # to be killed from outside


def _ended(folder: Path, ending: str, code: int) -> None:
    with Ranks(_loop_then, 2, (ending,), timeout_s=30) as ranks:
        ranks.wait_for("looped")
        if ending == "kill":
            ranks.kill(1)
        outcomes = ranks.join(timeout_s=40)
    assert outcomes[1].exit_code == code  # the fault fired
    trace = traces(folder)[1]
    assert ops(trace) == ["all_reduce"] * 5
    assert set(trace.calls["state"]) == {State.COMPLETED}
    assert trace.progress.step == 4
    assert trace.progress.closed == ""  # it never shut down
    assert trace.torn == 0
    innocent = traces(folder)[0]
    assert int(innocent.calls[-1]["state"]) in {State.FAILED, State.STARTED}  # waited for the dead


def test_the_box_survives_sigkill(folder: Path) -> None:
    """kill -9 leaves every finished record readable."""
    _ended(folder, "kill", -signal.SIGKILL)


def test_the_box_survives_a_segmentation_fault(folder: Path) -> None:
    """A crash in C loses nothing."""
    _ended(folder, "segfault", -signal.SIGSEGV)


def test_the_box_survives_abort_and_hard_exit(folder: Path) -> None:
    """os._exit runs no clean-up at all; abort is what C++ does on a bad day."""
    _ended(folder, "exit", 7)


def _cut_short(rank: int, world: int, faults: str, how: str) -> float:
    total = torch.ones(2)
    recorder = allranks.record()
    if faults == "enabled later":
        faulthandler.enable()
    for step in range(20):
        allranks.step(step)
        dist.all_reduce(total)
        total /= 2
        if step == 5 and recorder.path is not None:
            os.truncate(recorder.path, 0 if how == "empty" else 8192)
        dist.all_gather([torch.empty(step + 1)] * world, torch.ones(step + 1))
    recorder.close()
    if faults == "then a real one":
        os.kill(os.getpid(), signal.SIGBUS)
    return float(total.sum())


@pytest.mark.parametrize("how", ["empty", "shorter"])
@pytest.mark.parametrize("faults", ["disabled", "enabled later"])
def test_a_box_that_is_cut_short_does_not_end_its_rank(folder: Path, faults: str, how: str) -> None:
    """By a script that empties shared memory, say. A store into the missing page would be a bus error."""
    faulthandler.disable()
    with Ranks(_cut_short, 2, (faults, how), timeout_s=30) as ranks:
        assert ranks.values(40) == [2.0, 2.0]


def test_a_bus_error_of_the_program_still_ends_it(folder: Path) -> None:
    """Also after one that was ours."""
    faulthandler.disable()
    with Ranks(_cut_short, 1, ("then a real one", "empty"), timeout_s=30) as ranks:
        assert ranks.join(timeout_s=40)[0].exit_code == -signal.SIGBUS


def _mismatch(rank: int, world: int) -> None:
    faulthandler.disable()
    allranks.record()
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4 if rank == 0 else 3), src=0)
    dist.barrier()


def test_gloo_aborts_the_innocent_rank_and_its_box_tells_why(folder: Path) -> None:
    """With different sizes gloo kills the receiver by SIGABRT; the sizes that both ranks gave are on file."""
    with Ranks(_mismatch, 2, timeout_s=5) as ranks:
        outcomes = ranks.join(timeout_s=40)
    assert outcomes[1].exit_code == -signal.SIGABRT  # the fault fired
    found = traces(folder)
    sizes = {
        rank: found[rank].shapes[int(last(found[rank], "broadcast")["shapes"])].inputs for rank in (0, 1)
    }
    assert sizes == {0: ((4,),), 1: ((3,),)}
    assert int(last(found[1], "broadcast")["state"]) != State.COMPLETED


def _write_for_ever(rank: int, world: int, path: str) -> None:
    from allranks.recording._fast import Counters
    from allranks.recording.writer import make_ring

    box = Box(Path(path), 64, 1 << 16)
    box.open()
    box.set(rank=0)
    ring, group = make_ring(box), Counters(7, 0, True, (0,))
    reached("writing")
    number = 0
    while True:
        number += 1
        ring.begin(group, number, (number, number, number), number, False, number, 0, -1, -1, -1)


def test_a_kill_in_the_middle_of_writing_is_never_misread(tmp_path: Path) -> None:
    """Killed at a random instruction, again and again: whole records only, at most one torn."""
    for attempt in range(12):
        path = tmp_path / f"{attempt}.box"
        with Ranks(_write_for_ever, 1, (str(path),), backend=None) as ranks:
            ranks.wait_for("writing")
            time.sleep(0.002 * attempt)  # spreads the kills; nothing depends on it
            ranks.kill(0)
            assert ranks.join()[0].exit_code == -signal.SIGKILL  # the fault fired
        trace = read_trace(path)
        assert trace.torn <= 1
        for field in ("group", "op", "shapes", "stack"):  # names that are not in the heap are cleared
            assert not trace.calls[field].any()
        for field in ("seq", "op_id", "in_numel", "out_numel", "timeout_ms"):
            assert (trace.calls[field] == trace.calls["begin"]).all()


SCRIPT = """
import sys, allranks, torch, torch.distributed as dist
allranks.record()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
{ending}
"""


def _script(folder: Path, tmp_path: Path, ending: str, port: int) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(ending=ending))
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=300)


def test_the_box_says_how_the_process_ended(folder: Path, tmp_path: Path) -> None:
    """A normal end and an exception are told apart from a sudden death; an exception also leaves a dump."""
    from tests.ports import held_port

    done = _script(folder, tmp_path, "dist.destroy_process_group()", held_port())
    assert done.returncode == 0, done.stderr
    (first,) = find_boxes(folder)
    header = read_header(first)
    assert header.closed == "exit"
    assert not is_alive(header)
    assert not (folder / "dumps").exists()

    failed = _script(folder, tmp_path, "raise KeyError('no such layer')", held_port())
    assert failed.returncode == 1
    assert "no such layer" in failed.stderr  # the program's own traceback is still printed
    (second,) = set(find_boxes(folder)) - {first}  # the earlier run's file is untouched
    assert read_header(second).closed.startswith("exception: KeyError")
    assert read_header(first).closed == "exit"
    dump = folder / "dumps" / "exception.a0.1" / "rank_0"
    assert dump.stat().st_mode & 0o777 == 0o600

    for error in ("KeyboardInterrupt", "ValueError"):  # without a text no colon is left behind it
        _script(folder, tmp_path, f"raise {error}", held_port())
        closed = {read_header(box).closed for box in find_boxes(folder)}
        assert f"exception: {error} (train.py:6)" in closed, closed


def test_whoever_reads_while_a_rank_says_how_it_ended_never_gets_the_short_text(tmp_path: Path) -> None:
    """The agent reads at once when a rank ends; a text cut short hides that another rank had ended first."""
    box = Box(tmp_path / "0.box", 4, 4096)
    box.open()
    how = "exception: RuntimeError (train.py:58): " + "; ".join(["Connection closed by peer"] * 3)
    seen = set()

    class Watched:
        """The mapping, read after every store."""

        def __init__(self, memory: mmap.mmap) -> None:
            self.memory = memory

        def __setitem__(self, where: slice, data: bytes) -> None:
            self.memory[where] = data
            seen.add(read_header(box.path).closed)

    memory, box.memory = box.memory, Watched(box.memory)  # type: ignore[assignment]
    box.mark_closed(how, 1)
    box.memory = memory
    box.close()
    assert seen == {how}
