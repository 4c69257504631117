"""Black boxes: whole, live, cut, and written by the recorder itself."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.box_files import box_bytes

from allranks.blackbox.header import HEADER_BYTES
from allranks.blackbox.layout import HEADER, Item, packed_ranks
from allranks.blackbox.reader import BytesFile, read_box
from allranks.blackbox.tables import MAX_MEMBERS, Tables, read_heap
from allranks.drill.ranks import Ranks, signal
from allranks.errors import InputError
from allranks.lighthouse.history import History
from allranks.load import LoadOptions, load_paths
from allranks.model.trace import CALL, Frame, Group, Progress, RankTrace, Shapes, State, TraceHeader


def make_trace(rank: int = 1, count: int = 20, first: int = 0) -> RankTrace:
    """A trace with every kind of column filled."""
    calls = np.zeros(count, CALL)
    calls["begin"] = calls["end"] = np.arange(first + 1, first + count + 1)
    calls["created_ns"] = 10**18 + np.arange(count)
    calls["seq"] = calls["op_id"] = np.arange(1, count + 1)
    calls["op"], calls["shapes"], calls["stack"], calls["group"] = 1, 1, 1, 1
    calls["label"], calls["peer"], calls["root"], calls["reduce_op"] = 2, -1, -1, 1
    calls["state"][:-1] = State.COMPLETED
    header = TraceHeader(
        rank, 4, "node7", 77, "job", 2, 10**18, 10**18 + count, "nccl", (("torch", "2.13.0"),), first
    )
    return RankTrace(
        header, calls, (Group(""), Group("0", "default_pg", (0, 1, 2, 3), "nccl")), ("", "all_reduce", "loss"),
        (Shapes(), Shapes(((4, 4),), ((4, 4),), ("Float",), ("Float",))), ((), (Frame("f", "train.py", 10),)),
        Progress(step=5, step_ns=10**18, phase="train", closed="exit"),
    )  # fmt: skip


def test_a_box_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Header, progress, groups, names, sizes and stacks survive the file."""
    trace = make_trace(first=100)
    (tmp_path / "x.a2.r1.p77.box").write_bytes(box_bytes(trace))
    result = load_paths([str(tmp_path)])
    back = result.traces[0]
    assert (back.header.rank, back.header.host, back.header.attempt, back.header.job) == (
        1,
        "node7",
        2,
        "job",
    )
    assert back.header.versions == (("torch", "2.13.0"),) and back.header.dropped == 100
    assert back.progress == trace.progress
    assert back.groups == trace.groups
    assert (back.calls["seq"] == trace.calls["seq"]).all()
    last = back.calls[-1]
    assert back.names[last["op"]] == "all_reduce" and back.names[last["label"]] == "loss"
    assert back.stacks[last["stack"]] == (Frame("f", "train.py", 10),)
    assert back.shapes[last["shapes"]].inputs == ((4, 4),)
    assert result.files[0].kind == "black box 2" and result.files[0].status == "ok"


def test_ranks_share_their_tables(tmp_path: Path) -> None:
    """Equal stacks of different ranks are one index in one tuple, whatever each file numbered them."""
    for rank in (0, 1):
        (tmp_path / f"x.a2.r{rank}.p77.box").write_bytes(box_bytes(make_trace(rank)))
    one, two = load_paths([str(tmp_path)]).traces
    assert one.stacks is two.stacks and one.names is two.names and one.groups[1] is two.groups[1]
    assert (one.calls["stack"] == two.calls["stack"]).all()


def test_torn_and_empty_rows_are_skipped(tmp_path: Path) -> None:
    """A row whose end does not match was being written when the process died."""
    data = bytearray(box_bytes(make_trace(count=10)))
    rows = np.frombuffer(data, CALL, 10, HEADER_BYTES)
    rows["end"][9] = 0
    rows["begin"][3] = 0
    (tmp_path / "x.a0.r1.p1.box").write_bytes(data)
    trace = load_paths([str(tmp_path)]).traces[0]
    assert trace.calls["seq"].tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert trace.torn == 1


def test_a_ring_that_wrapped_is_put_in_order(tmp_path: Path) -> None:
    """The oldest record may be in any slot."""
    data = bytearray(box_bytes(make_trace(count=10, first=1000)))
    rows = np.frombuffer(data, CALL, 10, HEADER_BYTES)
    rows[:] = np.roll(rows.copy(), 4)
    (tmp_path / "x.a0.r1.p1.box").write_bytes(data)
    trace = load_paths([str(tmp_path)]).traces[0]
    assert trace.calls["begin"].tolist() == list(range(1001, 1011))


@pytest.mark.parametrize("keep", [HEADER_BYTES + CALL.itemsize * 7 + 20, HEADER_BYTES, -10])
def test_a_box_that_is_cut_gives_what_is_there(tmp_path: Path, keep: int) -> None:
    """In the ring, right behind the header, and in the heap."""
    data = box_bytes(make_trace(count=10))
    (tmp_path / "x.a0.r1.p1.box").write_bytes(data[:keep])
    result = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True))
    assert result.files[0].status == "damaged" and "truncated" in result.files[0].note
    assert len(result.traces[0].calls) == {7: 7, 0: 0}.get((keep - HEADER_BYTES) // CALL.itemsize, 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 9), ("record_bytes", 100), ("capacity", 0)],
)
def test_an_unknown_layout_is_refused_with_the_reason(field: str, value: int) -> None:
    """Never guess at bytes of another version."""
    data = bytearray(box_bytes(make_trace()))
    np.frombuffer(data, HEADER, 1)[field] = value
    with pytest.raises(InputError):
        read_box(BytesFile(bytes(data)), Tables(), 1 << 30)


@pytest.mark.parametrize("field", ["capacity", "heap_used", "heap_bytes", "heap_offset", "next_id"])
def test_absurd_numbers_in_the_header_cost_no_memory(field: str) -> None:
    """Sizes are bounded by what the file has."""
    data = bytearray(box_bytes(make_trace()))
    np.frombuffer(data, HEADER, 1)[field] = (1 << 63) - 1
    raw = read_box(BytesFile(bytes(data)), Tables(), 1 << 30)
    assert len(raw.calls) <= 30


@pytest.mark.parametrize(
    ("ranks", "longest"),
    [(range(100_000), 1), (range(5, 25_000, 8), 1), ([*range(50), 60, *range(70, 900)], 3), ([3, 1, 2], 3)],
)
def test_the_members_of_a_large_group_take_little_of_the_heap(ranks: range | list[int], longest: int) -> None:
    """They are written as ranges, in their order, and read as they were."""
    assert len(packed_ranks(ranks)) == longest
    trace = make_trace()
    data = box_bytes(replace(trace, groups=(Group(""), Group("0", "default_pg", tuple(ranks), "nccl"))))
    assert read_box(BytesFile(data), Tables()).groups[1].ranks == tuple(ranks)


def test_a_hostile_range_of_members_costs_no_memory() -> None:
    """A few bytes must not become a list of a trillion ranks."""
    data = json.dumps(["0", "x", [[0, 10**12, 1], [5, 10**15, 3]], "nccl"]).encode()
    item = struct.pack("<IHHI", len(data), Item.GROUP, 0, 1) + data
    assert len(read_heap(item, Tables()).groups[1].ranks) == MAX_MEMBERS


def test_a_box_is_read_while_it_is_written(tmp_path: Path) -> None:
    """A writer overwrites rows as fast as it can; every row that is read is whole, and in order."""
    path = tmp_path / "x.a0.r1.p1.box"
    trace = make_trace(count=500)
    data = bytearray(box_bytes(trace))
    head = np.frombuffer(data, HEADER, 1)
    head["closed_ns"] = 0
    head["closed"] = b""
    path.write_bytes(data)
    with Ranks(_overwrite, 1, (str(path),), backend=None) as ranks:
        ranks.wait_for("writing")
        newest = []
        for _ in range(60):
            back = load_paths([str(tmp_path)]).traces[0]
            assert (back.calls["begin"] == back.calls["seq"].astype(np.uint64)).all()
            assert (np.diff(back.calls["begin"].astype(np.int64)) > 0).all()
            newest += back.calls["begin"][-1:].tolist()
        deadline = time.monotonic() + 30
        while newest[-1] == newest[0] and time.monotonic() < deadline:
            newest += load_paths([str(tmp_path)]).traces[0].calls["begin"][-1:].tolist()
    assert newest[-1] > newest[0], "the writer never wrote while we read"


def _overwrite(rank: int, world_size: int, path: str) -> None:
    """Writes record after record until it is killed, a pause between two as in a fast job."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as box:
        rows = np.frombuffer(box, CALL, 500, HEADER_BYTES)
        head = np.frombuffer(box, HEADER, 1)
        record = 500
        while True:
            row = rows[record % 500 : record % 500 + 1]
            row["begin"] = record + 1
            row["seq"] = record + 1
            row["end"] = record + 1
            head["next_id"] = record + 1
            record += 1
            time.sleep(50e-6)
            if record == 600:
                signal("writing")


def test_a_box_inside_an_archive_is_read_too(tmp_path: Path) -> None:
    """From memory, with the same code."""
    import gzip

    (tmp_path / "x.a0.r1.p1.box.gz").write_bytes(gzip.compress(box_bytes(make_trace())))
    assert len(load_paths([str(tmp_path)]).traces[0].calls) == 20


def test_reading_leaves_no_file_open(tmp_path: Path) -> None:
    """16,384 boxes must not exhaust descriptors."""
    for rank in range(30):
        (tmp_path / f"x.a0.r{rank}.p1.box").write_bytes(box_bytes(make_trace(rank)))
    before = len(os.listdir("/proc/self/fd"))
    load_paths([str(tmp_path)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_heap_still_tells_sizes(tmp_path: Path) -> None:
    """Sizes that found no room are known by the number of their elements, which stands in the row."""
    trace = make_trace()
    trace.calls["shapes"][10:] = 0
    trace.calls["in_numel"] = trace.calls["out_numel"] = 16
    trace.calls["in_numel"][-1] = 17
    data = bytearray(box_bytes(trace))
    at = HEADER.fields["heap_full"][1]  # type: ignore[index]
    data[at] = 1
    (tmp_path / "x.a2.r1.p77.box").write_bytes(data)
    result = load_paths([str(tmp_path)])
    shapes = result.traces[0].shapes
    inputs = [shapes[number].inputs for number in result.traces[0].calls["shapes"][8:].tolist()]
    assert inputs == [((4, 4),)] * 2 + [((16,),)] * 9 + [((17,),)]
    assert "heap" in result.files[0].note


def test_the_history_of_the_lighthouse_beside_boxes_is_no_damaged_box(tmp_path: Path) -> None:
    """It lies in the folder of a running job; a damaged file would lower the confidence of the verdict."""
    (tmp_path / "x.a0.r0.p77.box").write_bytes(box_bytes(make_trace()))
    history = History(path=tmp_path / "history")
    history.open()
    history.close()
    (note,) = [one for one in load_paths([str(tmp_path)], LoadOptions()).files if one.path == "history"]
    assert note.status == "skipped", note
