"""The first cause in logs of many ranks."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from allranks.doctor.explain import Pattern, explain, match_line, parse_line, patterns, read_lines


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_each_pattern_knows_its_own_sample(pattern: Pattern) -> None:
    """The sample line of every entry is explained by that entry and by no earlier one."""
    match = match_line(parse_line("log", 1, pattern.sample))
    assert match is not None
    assert match.pattern.id == pattern.id
    assert "{" not in match.cause
    assert match.cure


@pytest.mark.parametrize(
    "line",
    [
        "step 1200 loss: 2.341 grad_norm: 0.81",
        "INFO saved checkpoint to s3://bucket/step_403",
        "rank 3 waiting for data",
        "[rank 2] epoch 1 done, 0 errors",
        "loss=0.98 information gain 0.3",
    ],
)
def test_healthy_lines_are_not_explained(line: str) -> None:
    """Ordinary output of a job matches nothing."""
    assert match_line(parse_line("log", 1, line)) is None


def test_the_root_beats_thousands_of_consequences(tmp_path: Path) -> None:
    """One rank runs out of memory; all others only see their peer go."""
    for rank in range(64):
        text = (
            "2026-01-01 03:00:09,5 RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.7]:41\n" * 20
        )
        if rank == 37:
            text = (
                "2026-01-01 03:00:09,1 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
                + text
            )
        (tmp_path / f"rank{rank}.log").write_text(text)
    found = explain(read_lines([tmp_path]))
    assert found.first is not None
    assert (found.first.pattern.id, found.first.line.rank) == ("cuda_out_of_memory", 37)
    assert [(m.pattern.id, n) for m, n in found.others] == [("gloo_connection_lost", 64 * 20)]


def test_among_roots_the_earliest_time_wins(tmp_path: Path) -> None:
    """Two ranks fail; the later one reads first in the folder."""
    (tmp_path / "rank0.log").write_text("2026-01-01 03:00:10 OSError: [Errno 28] No space left on device\n")
    (tmp_path / "rank1.log").write_text(
        "2026-01-01 03:00:02 RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.\n"
    )
    found = explain(read_lines([tmp_path]))
    assert found.first is not None
    assert found.first.pattern.id == "dataloader_worker_killed"


def test_ranks_are_read_from_prefixes_files_and_torchrun_folders(tmp_path: Path) -> None:
    """The usual ways of telling ranks apart."""
    assert parse_line("x", 1, "[rank 12] hello").rank == 12
    assert parse_line("x", 1, "[rank3]: Traceback").rank == 3
    assert parse_line("x", 1, "[default5]:hello").rank == 5
    folder = tmp_path / "attempt_0" / "7"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("ValueError: x\n")
    assert next(read_lines([tmp_path])).rank == 7


def test_compressed_and_broken_bytes_are_read(tmp_path: Path) -> None:
    """A gz log with bytes that are no UTF-8."""
    path = tmp_path / "rank4.log.gz"
    path.write_bytes(gzip.compress(b"\xff\xfe garbage\nFatal Python error: Segmentation fault\n"))
    found = explain(read_lines([path]))
    assert found.first is not None
    assert (found.first.pattern.id, found.first.line.rank, found.first.line.number) == ("segfault", 4, 2)


def test_logs_without_a_known_failure_say_so() -> None:
    """Nothing is invented."""
    assert explain([parse_line("x", 1, "all fine")]).first is None


def test_an_unknown_exception_long_before_a_known_failure_is_its_cause(tmp_path: Path) -> None:
    """Rank 5 raises; ten minutes later all others give up waiting for it. The traceback has the time of the line before."""
    for rank in range(8):
        last = "2026-01-01 03:20:01 wait timeout after 600000ms, keys: /default_pg/0/0\n"
        if rank == 5:
            last = "Traceback (most recent call last):\nValueError: too many values to unpack (expected 2)\n"
        (tmp_path / f"rank{rank}.log").write_text(f"2026-01-01 03:10:00 step 900\n{last}")
    found = explain(read_lines([tmp_path]))
    assert found.first is not None
    assert (found.first.pattern.id, found.first.line.rank) == ("python_exception", 5)
    assert [(m.pattern.id, n) for m, n in found.others] == [("init_timeout", 7)]


def test_without_times_the_rank_that_the_launcher_saw_fail_first_is_asked(tmp_path: Path) -> None:
    """torchrun's summary stands below the tracebacks, which come in any order."""
    (tmp_path / "all.log").write_text(
        "[rank0]: RuntimeError: the peer of rank 3\n[rank3]: ValueError: bad label 77\n"
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n"
        "Root Cause (first observed failure):\n[0]:\n  host      : n\n  rank      : 3 (local_rank: 3)\n"
    )
    found = explain(read_lines([tmp_path]))
    assert found.first is not None and found.first.cause == "The program raised ValueError: bad label 77"
