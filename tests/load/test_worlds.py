"""Several worlds in one folder of black boxes: their ranks have the same numbers and are different processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from allranks import diagnose
from allranks.cli.record import RecordFlags, variables
from allranks.incidents.job_overview import who_waits
from allranks.load import LoadOptions, load_paths
from allranks.load.choice import TraceFile, number_worlds, split_worlds
from allranks.model.diagnosis import Finding
from allranks.model.formatting import rename
from allranks.model.trace import CALL, Group, RankTrace, Rendezvous, TraceHeader, World
from allranks.watch.samples import read_samples

ANY = LoadOptions(allow_nothing=True)
PTH = Path(__file__).parents[2] / "src" / "allranks" / "recording"

#: Two trainers are a world, two rollouts another; trainer 0 and the rollouts share a group that is made by hand. `bad` does
#: not enter its last broadcast.
JOB = """
import datetime, sys
import torch
import torch.distributed as dist
role, rank, folder, bad = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
limit = datetime.timedelta(seconds=300)

def store(name, size):
    return dist.FileStore(f"{folder}/{name}", size)

def weight_group(number):
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store("weights", 3)), number, 3, limit)

dist.init_process_group("gloo", store=store(role, 2), rank=rank, world_size=2, timeout=limit)
number = 0 if role == "trainer" else 1 + rank
weights = weight_group(number) if role == "rollout" or rank == 0 else None
for step in range(3):
    dist.all_reduce(torch.ones(4))
    if weights is not None:
        if step == 2 and bad == f"{role}{rank}":
            sys.stdin.read()
        weights.broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()
dist.barrier()
print("done", flush=True)
sys.stdin.read()
"""
CALLS = 22  # that are begun when rollout 1 does not come: 7, 5, 6, 4
PARTS = ("rollout 0", "rollout 1", "trainer 0", "trainer 1")


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of the black boxes of a job that runs as far as it comes."""
    script, boxes = tmp_path / "job.py", tmp_path / "boxes"
    script.write_text(JOB)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(PTH)!r})")
    recorded = variables(RecordFlags(output=str(boxes), job="j"), {})
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), **recorded}
    words = [
        [sys.executable, str(script), *part.split(), str(tmp_path), str(request.param)] for part in PARTS
    ]
    started = [
        subprocess.Popen(one, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for one in words
    ]
    try:
        if not request.param:
            assert [one.stdout.readline() for one in started if one.stdout] == ["done\n"] * 4
        yield boxes
    finally:
        for one in started:
            one.kill()
            one.communicate(timeout=60)


def _verdict(boxes: Path) -> Finding:
    """The first verdict, once the job has come to its hang and does not move."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        calls = sum(len(trace.calls) for trace in load_paths([str(boxes.parent)], ANY).traces)
        if calls == CALLS and (found := diagnose(str(boxes)).verdict):
            return found
        time.sleep(0.2)
    raise AssertionError("the job did not come to its hang")


@pytest.mark.parametrize("job", ["rollout1"], indirect=True)
def test_the_guilty_process_of_the_other_world_is_named(job: Path) -> None:
    verdict = _verdict(job)
    names = {trace.header.name: trace.header.rank for trace in load_paths([str(job)]).traces}
    assert (set(names), set(names.values())) == ({*PARTS}, {0, 1, 2, 3})
    assert verdict.ranks == (names["rollout 1"],)
    assert verdict.sentence.startswith("rollout 1 (")
    assert verdict.group == "weights"
    live = read_samples(job)
    assert [(one.name, one.rank) for one in live] == sorted(names.items(), key=lambda pair: pair[1] or 0)
    assert "for rollout 1 in " in who_waits(load_paths([str(job)]).traces)


@pytest.mark.parametrize("job", [""], indirect=True)
def test_two_worlds_that_work_are_not_accused(job: Path) -> None:
    assert diagnose(str(job)).status == "ok"


def _file(
    role: str, rank: int, begin: int, end: int, address: str = "", groups: tuple[Group, ...] = ()
) -> TraceFile:
    met = Rendezvous(address, 2 if address else 0)
    header = TraceHeader(
        rank, 2, pid=begin, job="j", start_ns=begin, written_ns=end, role=role, rendezvous=met
    )
    calls = np.zeros(1, CALL)
    calls["group"], calls["root"] = len(groups), 1
    raw = RankTrace(header, calls, (Group(""), *groups), kind="black box 2")
    return TraceFile(f"{role}{rank}.p{begin}.box", rank, 0, raw)


def test_a_restart_at_another_address_is_the_same_world() -> None:
    earlier = [_file("train", rank, 10, 20, "a:1") for rank in range(2)]
    later = [_file("train", rank, 30, 40, "a:2") for rank in range(2)]
    assert [len(world) for world in split_worlds([*earlier, *later])] == [4]
    beside = [_file("train", rank, 15, 40, "a:2") for rank in range(2)]
    assert [len(world) for world in split_worlds([*earlier, *beside])] == [2, 2]


@pytest.mark.parametrize("rank", [-1, 0])  # 0: that of the trainer that started them, by its environment
def test_processes_without_a_world_are_counted_by_their_place_in_the_group_that_they_share(rank: int) -> None:
    """A trainer of a world of two, and two engines that only joined the group of the weights; one more has no black box."""

    def weights(own: int) -> tuple[Group, ...]:
        return (Group("w", ranks=(0, 1, 2, 3), backend="nccl", store="a:9", own=own),)

    trainers = [_file("train", 0, 10, 50, "a:1", weights(0)), _file("train", 1, 10, 50, "a:1")]
    engines = [_file("engine", rank, 20 + own, 50, "", weights(own)) for own in (3, 1)]
    found = number_worlds(split_worlds([*trainers, *engines]), lambda group: group)
    assert [file.trace.header.name for file in found] == ["train 0", "train 1", "engine 0", "engine 1"]
    assert {file.trace.groups[-1].ranks for file in (found[0], *found[2:])} == {(0, 2, 4, 3)}
    assert [int(file.trace.calls["root"][0]) for file in found] == [2, 1, 2, 2]
    assert found[0].trace.header.worlds == (World("train", 0, 2), World("engine", 2, 2))


def test_names_of_ranks_in_sentences() -> None:
    worlds = (World("trainer", 0, 2), World("rollout", 2, 2))
    assert rename("ranks 0-2 wait for rank 3", worlds) == "trainer 0, 1, rollout 0 wait for rollout 1"
    assert rename("Rank 2 (node) is late", worlds) == "Rollout 0 (node) is late"
    assert rename("rank 3 waits", ()) == "rank 3 waits"
