"""What a box knows beside sizes and times: tags, threads, batches, destroyed groups, and where a rank is before its first call."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.box_files import box_bytes

import allranks
from allranks.blackbox.file_writer import Box
from allranks.blackbox.layout import Item
from allranks.blackbox.reader import read_trace
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.load import load_paths
from allranks.model.torch_dump import to_torch_dump
from allranks.model.trace import CALL, Flag, RankTrace
from allranks.recording.options import RecorderOptions
from allranks.recording.writer import CallWriter, GroupState

from .boxes import Methods, ops, traces

BOX = Path(__file__).parent / "cases" / "mixed_calls.r0.box"


def _talk(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    recorder = allranks.record()
    pair = dist.new_group([0, 1])
    alone = dist.new_group([0])
    value = torch.ones(2)
    for tag in (0, 7, 2**31 - 1):
        if rank == 0:
            dist.send(value, 1, group=pair, tag=tag)
        else:
            dist.recv(value, 0, group=pair, tag=tag)
    threads = [threading.Thread(target=dist.all_reduce, args=(value,), name=f"saver-{n}") for n in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    with contextlib.suppress(RuntimeError):  # NCCL takes sizes that differ, gloo refuses
        dist.all_gather([torch.empty(1), torch.empty(3)], torch.empty(3 if rank else 1))
    dist.destroy_process_group(pair)
    if rank == 0:
        dist.destroy_process_group(alone)  # that has made no call
    recorder.close()


def _both(folder: Path) -> list[dict[int, RankTrace]]:
    """The boxes of a folder as the recorder reads them and as `load` does."""
    return [traces(folder), {trace.header.rank or 0: trace for trace in load_paths([str(folder)]).traces}]


def test_tags_threads_parts_and_destroyed_groups_are_in_the_box(folder: Path) -> None:
    """Both ends of a send know its tag, a thread is known by name, a destroyed group says when."""
    with Ranks(_talk, 2) as ranks:
        ranks.values()
    for found in _both(folder):
        for rank, trace in found.items():
            op = "recv" if rank else "send"
            assert ops(trace) == [op] * 3 + ["all_reduce"] * 2 + ["all_gather"]
            assert trace.calls["tag"].tolist() == [0, 7, 2**31 - 1, -1, -1, -1]
            names = [trace.threads[int(thread)] for thread in trace.calls["thread"]]
            assert names == ["MainThread"] * 3 + ["saver-0", "saver-1", "MainThread"]
            gathered = trace.shapes[int(trace.calls[-1]["shapes"])]
            assert gathered.outputs == ((1,), (3,))
            destroyed = {trace.groups[index].ranks: when for index, when in trace.destroyed.items()}
            assert set(destroyed) == ({(0, 1), (0,)} if rank == 0 else {(0, 1)})
            assert min(destroyed.values()) >= int(trace.calls["created_ns"].max())
            assert (trace.progress.inside, trace.progress.setups) == ("", 4 - rank)
    entries: Any = to_torch_dump(found[0])["entries"]
    assert [entry["thread_name"] for entry in entries][3:5] == ["saver-0", "saver-1"]


def _all_but_one(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    recorder = allranks.record()
    if rank == 1:
        reached("waiting")
        threading.Event().wait()
    threading.Thread(target=_tell_when_inside, args=(recorder.box,), daemon=True).start()
    dist.init_process_group("gloo", rank=rank, world_size=world)


def _tell_when_inside(box: Any) -> None:
    while not box.get("inside"):
        time.sleep(0.005)
    reached("waiting")


def test_a_rank_that_waits_in_init_process_group_says_so(folder: Path) -> None:
    """Without a single call the boxes tell who is inside, under which rank, and who has not come."""
    with Ranks(_all_but_one, 2, backend=None) as ranks:
        ranks.wait_for("waiting")
    for found in _both(folder)[:1]:
        waiting = found[0]
        assert len(waiting.calls) == 0
        assert waiting.progress.inside == "init_process_group"
        assert waiting.progress.inside_ns >= waiting.header.start_ns
        assert (waiting.header.world_size, waiting.progress.setups) == (2, 0)
        absent = found[-1]  # it has told nobody its rank
        assert (absent.progress.inside, absent.progress.setups) == ("", 0)


def _group_of_two(rank: int, world: int) -> None:
    recorder = allranks.record()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if rank == 1:
        reached("waiting")
        threading.Event().wait()
    threading.Thread(target=_tell_when_inside, args=(recorder.box,), daemon=True).start()
    dist.new_group([1, 0], use_local_synchronization=True)


def test_a_rank_that_waits_in_new_group_says_for_which_members(folder: Path) -> None:
    """And that these members alone make the group."""
    with Ranks(_group_of_two, 2, backend=None) as ranks:
        ranks.wait_for("waiting")
    for found in _both(folder)[:1]:
        waiting = found[0].progress
        assert (waiting.inside, waiting.members, waiting.alone) == ("new_group", (0, 1), True)


def _inner_group(rank: int, world: int) -> None:
    os.environ["ALLRANKS_RANK"], os.environ["ALLRANKS_WORLD_SIZE"] = str(4 + rank), "8"
    recorder = allranks.record()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.all_reduce(torch.ones(1))
    recorder.close()


def test_a_replica_keeps_its_place_in_the_job_whatever_its_inner_group_says(folder: Path) -> None:
    """A group inside a replica counts from 0 in each of them; boxes of two replicas must not share a rank."""
    with Ranks(_inner_group, 2, backend=None) as ranks:
        ranks.values()
    found = traces(folder)
    assert set(found) == {4, 5}
    assert {trace.header.world_size for trace in found.values()} == {8}


def _fail(rank: int, world: int) -> None:
    recorder = allranks.record()
    try:
        dist.init_process_group("gloo", "nonsense://nowhere", rank=0, world_size=1)
    except RuntimeError as error:
        assert "nonsense" in str(error)
    recorder.close()


def test_a_failed_init_process_group_has_been_left(folder: Path) -> None:
    """The user's error is the user's; the box does not say that the rank is still inside, nor that it has joined."""
    with Ranks(_fail, 1, backend=None) as ranks:
        ranks.values()
    (trace,) = traces(folder).values()
    assert (trace.progress.inside, trace.progress.setups) == ("", 0)
    met = trace.header.rendezvous
    assert (met.address, met.world_size, met.line.split(":")[0]) == ("nowhere", 1, "test_facts.py")


def _put_back(rank: int, world: int) -> None:
    before = dist.init_process_group
    globals()["init_process_group"] = before
    recorder = allranks.record()
    assert globals()["init_process_group"] is dist.init_process_group is not before
    recorder.close()
    assert globals()["init_process_group"] is dist.init_process_group is before


def test_functions_are_put_back_where_they_were_taken_from(folder: Path) -> None:
    """Also in a module of the user's that has imported them by name."""
    with Ranks(_put_back, 1, backend=None) as ranks:
        ranks.values()


def test_the_parts_of_a_coalesced_batch_are_found_from_its_end(tmp_path: Path) -> None:
    """Each with its own sizes and tag; a batch before it and calls of other groups are not taken for them."""
    box = Box(tmp_path / "x.box", 32, 1 << 14)
    box.open()
    writer = CallWriter(box, RecorderOptions(stack_depth=0))
    first, other = (
        GroupState(box.append(Item.GROUP, [name, "", [0, 1], "nccl"]), name, (0, 1), "nccl", 0)
        for name in ("a", "b")
    )
    methods = Methods(writer, first)
    send, (start, end) = methods.send(lambda *args: None), methods.batch(lambda group: None)
    for sizes in ((1, 2), (3, 4, 5)):
        start()
        for size in sizes:
            send(1, size)
        writer.begin(other, 1, (0, 9, 9))
        end()
    trace = read_trace(box.path)
    ends = np.flatnonzero(trace.calls["flags"] & Flag.COALESCED_END)
    assert [trace.calls[trace.parts(at)]["in_numel"].tolist() for at in ends] == [[1, 2], [3, 4, 5]]
    assert trace.calls[trace.parts(ends[1])]["tag"].tolist() == [3, 4, 5]
    assert len(trace.parts(0)) == 0


def test_a_converted_trace_keeps_what_the_box_knew(tmp_path: Path) -> None:
    """Threads, destroyed groups and where the rank is survive the way through `box_bytes`."""
    trace = read_trace(BOX)
    calls = trace.calls.copy()
    calls["tag"] = 5
    thread = int(calls["thread"][0])
    richer = replace(
        trace, calls=calls, threads={thread: "main"}, destroyed={1: 99},
        progress=replace(trace.progress, inside="new_group", inside_ns=98, setups=3),
    )  # fmt: skip
    path = tmp_path / "x.a0.r0.p7.box"
    path.write_bytes(box_bytes(richer))
    (again,) = load_paths([str(path)]).traces
    assert again.calls["tag"].tolist() == [5] * len(calls)
    assert (again.threads, again.destroyed) == ({thread: "main"}, {1: 99})
    assert (again.progress.inside, again.progress.inside_ns, again.progress.setups) == ("new_group", 98, 3)
    assert again.calls.dtype == CALL
