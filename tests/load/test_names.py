"""Ranks and attempts found in file names and folders."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.box_files import box_bytes

from allranks.blackbox.layout import file_name
from allranks.errors import InputError
from allranks.load import LoadOptions, load_paths
from allranks.model.parsing import attempt_of_name, rank_by_prefix, rank_of_name, ranks_of_names

from .dumps import dump, entry


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("trace_3", 3), ("trace_0012", 12), ("nccl_trace_rank_3", 3), ("comm_lib_trace_rank_17", 17),
        ("rank3.json", 3), ("rank-3.pickle.gz", 3), ("RANK_4.pkl", 4), ("host12_trace_3", 3), ("trace_3.bak", 3),
        ("node7.trace_3.pickle", 3), ("trace_3_20260101", 3), ("20260101_120000_trace_3", 3), ("dump_5", 5),
        ("local_rank_1_rank_9", 9), ("rank_2/trace", 2), ("job7/rank3/dump.json", 3), ("fr_trace_8.json", 8),
        (file_name("job", 2, 11, 4242), 11), ("core.12345", None), ("trace", None), ("strace_1.log", 1),
        ("events.out.tfevents.1699999999", None), ("trace_20260101", None),
    ],
)  # fmt: skip
def test_a_name_tells_its_rank(name: str, rank: int | None) -> None:
    """The number behind "rank" or "trace", never a date, a process id or a host."""
    assert rank_of_name(name) == rank


def test_the_name_of_a_file_counts_more_than_that_of_a_folder_for_all_ranks() -> None:
    """Somebody keeps the dumps of all ranks under hang_of_rank_0/; where each rank has its folder, the folder counts."""
    assert ranks_of_names([f"hang_of_rank_0/trace_{i}" for i in range(3)]) == {
        f"hang_of_rank_0/trace_{i}": i for i in range(3)
    }
    assert ranks_of_names([f"rank_{i}/trace_0" for i in range(3)]) == {
        f"rank_{i}/trace_0": i for i in range(3)
    }


@pytest.mark.parametrize(
    "names",
    [
        [f"{i}" for i in range(4)],
        [f"node{i // 2}-{i}" for i in range(4)],
        [f"job7_{i}_of_4" for i in range(4)],
        [f"flight.{i}.pickle" for i in range(4)],
        [f"gpu{i}-2026-11-15" for i in range(4)],
        [f"{i}_flight" for i in range(4)],
        [f"host{17 - i}_{i}_pid{9900 + 7 * i}" for i in range(4)],
        [f"{i}_a100-{(12, 55, 77, 80)[i]}" for i in range(4)],
        [f"node{i // 2:02}_gpu{i % 2}.pkl" for i in range(4)],
        [f"host{i // 2 + 1}-local_rank{i % 2}" for i in range(4)],
        [f"stack_{i}_h100-{90 - i}.txt" for i in range(4)],
    ],
)
def test_names_without_a_word_are_told_apart_by_what_differs(names: list[str]) -> None:
    """Among names of one family the column that is different everywhere is the rank."""
    assert ranks_of_names(names) == {name: i for i, name in enumerate(names)}


def test_the_ranks_of_two_nodes_whose_order_is_not_known_are_not_guessed() -> None:
    """host17_gpu0 and host4_gpu0 are two ranks, and not one that is there twice."""
    assert ranks_of_names([f"host{host}_gpu{gpu}" for host in (17, 4) for gpu in range(2)]) == {}


def test_a_prefix_settles_it() -> None:
    """torchfrtrace's -p, with a host in front and anything behind."""
    assert rank_by_prefix("host3_nccl_7.pkl", "nccl_") == 7
    assert rank_by_prefix("other", "nccl_") is None


@pytest.mark.parametrize(
    ("path", "attempt"),
    [("attempt_2/trace_0", 2), ("x/restart1/trace_0", 1), ("job.a3.r0.p1.box", 3), ("trace_0", None), ("data_2/trace_0", None)],
)  # fmt: skip
def test_a_path_tells_its_attempt(path: str, attempt: int | None) -> None:
    """torchrun's attempt_N folders and our own file names."""
    assert attempt_of_name(path) == attempt


def write(path: Path, when: int, count: int = 2, **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        entry(i, i + 1, time_created_ns=when + i, time_discovered_completed_ns=when + i, **changes)
        for i in range(count)
    ]
    path.write_bytes(pickle.dumps(dump(entries), 2))


def test_the_newest_attempt_counts_and_the_others_are_named(tmp_path: Path) -> None:
    """Two attempts in one folder are not one job."""
    for attempt in (0, 1):
        for rank in (0, 1):
            write(tmp_path / f"attempt_{attempt}/trace_{rank}", 10**18 + attempt * 10**9, 2 + attempt)
    result = load_paths([str(tmp_path)])
    assert [len(trace.calls) for trace in result.traces] == [3, 3]
    skipped = [note for note in result.files if note.status == "skipped"]
    assert len(skipped) == 2 and all("attempt 1 is newer" in note.note for note in skipped)
    older = load_paths([str(tmp_path)], LoadOptions(attempt=0))
    assert [len(trace.calls) for trace in older.traces] == [2, 2]


def test_an_attempt_that_is_not_there_is_an_error_with_the_choice(tmp_path: Path) -> None:
    """The message names the attempts that are."""
    write(tmp_path / "attempt_4/trace_0", 10**18)
    with pytest.raises(InputError, match="no attempt 2; found 4"):
        load_paths([str(tmp_path)], LoadOptions(attempt=2))


def test_unnumbered_folders_with_the_same_ranks_are_attempts(tmp_path: Path) -> None:
    """Only time tells them apart, whatever their names."""
    for folder, when in (("zebra", 10**18), ("apple", 2 * 10**18)):
        for rank in (0, 1):
            write(tmp_path / folder / f"trace_{rank}", when)
    result = load_paths([str(tmp_path)])
    assert {trace.path.split("/")[0] for trace in result.traces} == {"apple"}


def test_one_folder_per_node_is_one_job(tmp_path: Path) -> None:
    """No rank repeats, so nothing is an attempt."""
    for rank in range(4):
        write(tmp_path / f"node{rank // 2}" / f"trace_{rank}", 10**18)
    result = load_paths([str(tmp_path)])
    assert [trace.header.rank for trace in result.traces] == [0, 1, 2, 3]


def test_of_two_files_of_a_rank_the_newer_counts(tmp_path: Path) -> None:
    """A backup beside the dump is a duplicate, and said to be."""
    write(tmp_path / "trace_0", 10**18 + 10, 3)
    write(tmp_path / "trace_0.bak", 10**18, 2)
    result = load_paths([str(tmp_path)])
    assert [trace.path for trace in result.traces] == ["trace_0"]
    note = next(note for note in result.files if note.status == "skipped")
    assert note.path == "trace_0.bak" and "rank 0 is read from trace_0" in note.note


def test_a_whole_file_beats_a_newer_damaged_one(tmp_path: Path) -> None:
    """Evidence that is complete is worth more."""
    write(tmp_path / "old/trace_0", 10**18, 60)
    write(tmp_path / "old/trace_0.new", 10**18 + 10**6, 60)
    cut = tmp_path / "old/trace_0.new"
    cut.write_bytes(cut.read_bytes()[:-200])
    result = load_paths([str(tmp_path)])
    assert [trace.path for trace in result.traces] == ["old/trace_0"]


def test_black_boxes_and_dumps_mix(tmp_path: Path) -> None:
    """Rank 0 left a black box and a dump, rank 1 only a dump: one trace each, the box preferred."""
    write(tmp_path / "trace_0", 10**18)
    write(tmp_path / "trace_1", 10**18)
    trace = load_paths([str(tmp_path / "trace_0")]).traces[0]
    (tmp_path / file_name("job", 0, 0, 77)).write_bytes(box_bytes(trace))
    result = load_paths([str(tmp_path)])
    assert [trace.kind.split(" ")[0] for trace in result.traces] == ["black", "torch"]


def test_the_order_of_paths_does_not_matter(tmp_path: Path) -> None:
    """Files given one by one, in any order, give the same traces."""
    for rank in range(3):
        write(tmp_path / f"trace_{rank}", 10**18)
    paths = [str(tmp_path / f"trace_{rank}") for rank in (2, 0, 1)]
    assert [trace.header.rank for trace in load_paths(paths).traces] == [0, 1, 2]


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    """A typing mistake is not an empty job."""
    with pytest.raises(InputError, match="no such file or folder"):
        load_paths([str(tmp_path / "nowhere")])


def test_nothing_readable_is_an_error_that_lists_the_files(tmp_path: Path) -> None:
    """The hint says what each file was taken for."""
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match="none of 1 files is a readable dump") as caught:
        load_paths([str(tmp_path)])
    assert "notes.txt: text" in caught.value.hint
