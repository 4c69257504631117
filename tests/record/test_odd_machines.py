"""Machines that are not as one wishes: no descriptors left, shared memory full, a clock that jumps, no ptrace, reused pids.

Recording gives way before training does, with one message that names the thing and the fix.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.blackbox import files
from allranks.blackbox.header import is_alive, start_ticks
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.model.trace import State
from allranks.stacktraces.debuggers import find_pyspy

from .test_never_breaks import _train


def _few_descriptors(rank: int, world: int, left: int) -> tuple[bool, list[str]]:
    dist.all_reduce(torch.ones(1))  # connects
    _train_module()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while (last := os.dup(0)) < highest:
        pass  # fills the holes, so that the limit says what is left
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (last + 1 + left, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return _train(rank, world)


def _train_module() -> None:
    """What recording imports must not need the descriptors that are measured."""
    import allranks.recording.hook
    import allranks.recording.recorder  # noqa: F401


@pytest.mark.parametrize("left", [0, 1, 2])
def test_without_descriptors_training_goes_on_unrecorded(folder: Path, left: int) -> None:
    """One warning that says what is missing and how to raise the limit."""
    with Ranks(_few_descriptors, 2, (left,)) as ranks:
        for active, said in ranks.values(timeout_s=60):
            assert len(said) <= 1
            if not active:
                assert "training continues" in said[0]
                assert "Too many open files" in said[0] and "ulimit -n" in said[0]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A small file system in place of shared memory."""
    place = tmp_path / "shm"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _shared_memory_is_full(rank: int, world: int, full: str, temporary: str) -> tuple[str, list[str]]:
    files.SHARED_MEMORY = Path(full)
    os.environ.pop("ALLRANKS_DIR", None)
    files.tempfile.tempdir = temporary
    active, said = _train(rank, world)
    recorder = allranks.recording.current()
    assert active and recorder is not None
    return str(recorder.path), said


@pytest.mark.needs_root
def test_boxes_go_to_the_temporary_folder_when_shared_memory_is_full(full: Path, tmp_path: Path) -> None:
    """Nothing is lost, and nothing is written to what is full."""
    with Ranks(_shared_memory_is_full, 2, (str(full), str(tmp_path / "t"))) as ranks:
        (tmp_path / "t").mkdir(exist_ok=True)
        for path, _ in ranks.values():
            assert path.startswith(str(tmp_path / "t"))
    assert len(find_boxes(tmp_path / "t")) == 2
    assert find_boxes(full) == []


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
#include <stdlib.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(id, t);
    const char *jumped = getenv("JUMPED");
    if (id == CLOCK_REALTIME && jumped && access(jumped, F_OK) == 0) t->tv_sec -= 3600;
    return answer;
}
"""
JUMPS = """
import os, sys, time, torch, torch.distributed as dist, allranks
recorder = allranks.record(poll_s=1000.0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def calls(n):
    for _ in range(n):
        dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(0.002)
calls(5)
before = time.time()
open(os.environ["JUMPED"], "w").close()
assert time.time() < before - 3000, "the clock did not jump"
calls(20)
print(recorder.path, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_is_set_back_does_not_stop_the_notice_of_ends(tmp_path: Path, folder: Path) -> None:
    """Distances are measured on a clock that only ticks; the wall clock is a label."""
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(tmp_path / "clock.c"), "-o", str(library), "-ldl"], check=True
    )
    # by its name, looked for in the folder: a path in LD_PRELOAD would end at a space
    env = {
        **os.environ,
        "LD_PRELOAD": library.name,
        "LD_LIBRARY_PATH": str(tmp_path),
        "JUMPED": str(tmp_path / "jumped"),
    }
    done = subprocess.run([sys.executable, "-c", JUMPS], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    states = [int(state) for state in read_trace(done.stdout.strip()).calls["state"]]
    assert len(states) == 25
    assert states[:10] == [State.COMPLETED] * 10  # those after the jump were noticed by later calls


def test_a_reused_pid_is_not_the_process_that_wrote_the_box() -> None:
    """The kernel's start time tells them apart."""
    ticks = start_ticks(os.getpid())
    assert ticks > 0 and is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks + 1)


LOOK = """
import json, os, sys
from allranks.stacktraces.debuggers import run_pyspy
os.setgroups([]); os.setgid(65534); os.setuid(65534)
run = run_pyspy(sys.argv[1], int(sys.argv[2]))
print(json.dumps([run.output, run.problem]))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read."""
    place = Path(tempfile.mkdtemp(prefix="allranks-open-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.mark.needs_root
@pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")
def test_a_refused_look_names_the_rule_and_what_to_do(open_folder: Path) -> None:
    """py-spy as another user: the message says whose process it is, and how the look is allowed."""
    pyspy = Path(shutil.copy(find_pyspy() or "", open_folder / "py-spy"))
    pyspy.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(pyspy), str(os.getpid())],
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    output, problem = json.loads(done.stdout)
    assert output == ""
    for part in (
        "may not look into process",
        f"it belongs to uid {os.getuid()}",
        "CAP_SYS_PTRACE",
        "--cap-add=SYS_PTRACE",
    ):
        assert part in problem


def _children(rank: int, world: int, how: str) -> list[str]:
    import multiprocessing

    recorder: Any = allranks.record()
    dist.all_reduce(torch.ones(1))
    context = multiprocessing.get_context(how)
    child = context.Process(target=_child_of_a_rank)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    dist.all_reduce(torch.ones(1))
    return [str(recorder.path), *map(str, find_boxes(Path(os.environ["ALLRANKS_DIR"])))]


def _child_of_a_rank() -> None:
    """Marks and would-be calls of a child go nowhere."""
    allranks.step(77)
    with allranks.expect("child", up_to_s=1):
        pass


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_child_of_a_rank_writes_to_no_box(folder: Path, how: str) -> None:
    """However it was started: neither to its parent's, nor to one of its own."""
    with Ranks(_children, 1, (how,)) as ranks:
        (found,) = ranks.values(timeout_s=90)
    assert found[1:] == [found[0]]
    trace = read_trace(found[0])
    assert trace.progress.step == -1 or trace.progress.step is None
    assert len(trace.calls) == 2
