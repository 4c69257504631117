"""The first cause in logs of many ranks."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.doctor.explain import (
    Pattern,
    explain,
    match_line,
    needed_words,
    parse_line,
    patterns,
    read_lines,
)


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_each_pattern_knows_its_own_sample(pattern: Pattern) -> None:
    """The sample line of every entry is explained by that entry and by no earlier one."""
    match = match_line(parse_line("log", 1, pattern.sample))
    assert match is not None
    assert match.pattern.id == pattern.id
    assert "{" not in match.cause
    assert match.hint


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


@pytest.mark.parametrize("number", ["20260301-031207", "20260301-031207-1"])
def test_the_id_of_an_incident_is_no_part_of_the_cause(number: str) -> None:
    line = f"[allranks 03:12:20] {number}: Rank 1 died of SIGKILL; story: /x/{number}/story.html"
    found = explain([parse_line("x", 1, line)]).first
    assert found is not None and found.cause == "Rank 1 died of SIGKILL"


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


def test_a_cut_packed_log_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read as far as it goes, and named."""
    whole = gzip.compress(b"2026-01-01 03:00:00 fine\n" + os.urandom(9000).hex().encode())
    (tmp_path / "rank0.log.gz").write_bytes(whole[:-4000])
    (tmp_path / "rank1.log.gz").write_bytes(b"not packed at all")
    (tmp_path / "rank2.log").write_text("Fatal Python error: Segmentation fault\n")
    assert main(["doctor", "explain", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "rank 2" in said and "rank0.log.gz" in said and "rank1.log.gz" in said
    assert main(["doctor", "explain", str(tmp_path / "rank1.log.gz")]) == 2


def test_a_packed_log_that_unpacks_to_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    """One line without an end; what came before it is explained. In a process with little memory."""
    with gzip.open(tmp_path / "rank0.log.gz", "wb", compresslevel=1) as log:
        log.write(b"Fatal Python error: Segmentation fault\n")
        for _ in range(40):
            log.write(bytes(16 << 20))
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)); "
        f"from allranks.cli import main; raise SystemExit(main(['doctor', 'explain', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "segmentation" in done.stdout.lower() and "only its first 512 MiB" in done.stdout


def test_a_warning_alone_is_told_with_what_to_do_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0."""
    (tmp_path / "log").write_text("SECURITY: Loading checkpoint with weights_only=False\n")
    assert main(["doctor", "explain", str(tmp_path / "log")]) == 0
    assert "what to do" in capsys.readouterr().out


#: How torch writes the state of a group: 2.4, 2.5, 2.6 to 2.12, and since 2.13.
TIMED_OUT = [
    "[PG 1 Rank {r}] Timeout at NCCL work: {n}, last enqueued NCCL work: {n}, last completed NCCL work: {done}.",
    "[PG ID 2 PG GUID 1 Rank {r}] Exception (either an error or timeout) detected by watchdog at work: {n}, last enqueued "
    "NCCL work: {n}, last completed NCCL work: {done}.",
    "[PG ID 0 PG GUID 1(default_pg) Rank {r}]  failure detected by watchdog at work sequence id: {n} PG status: last "
    "enqueued work: {n}, last completed work: {done}",
    "[PG ID 0 PG GUID 1(default_pg) Rank {r}]  failure detected by watchdog at work sequence id: {n} PG status: last "
    "enqueued work: {n}, last started work: -1, last completed work: {done}",
]
SIGNALLED = (
    "Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. "
    "Last enqueued NCCL work: {done}, last completed NCCL work: {done}.This is most likely caused by incorrect usages"
)


def _watchdog_log(form: str, waiting: list[int], behind: list[int]) -> str:
    head = "[rank{r}]:[E703 15:37:17.178099253 ProcessGroupNCCL.cpp:1922] "
    prefix = form[: form.index("]") + 1]
    lines = [(head + form).format(r=r, n=56119, done=56118) for r in waiting]
    lines += [f"{head}{prefix} {SIGNALLED}".format(r=r, done=56118) for r in behind]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", TIMED_OUT, ids=["2.4", "2.5", "2.6", "2.13"])
def test_the_rank_that_never_enqueued_the_call_in_which_the_others_timed_out_is_named(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watchdog of every rank prints how far it came in the group."""
    (tmp_path / "job.log").write_text(_watchdog_log(form, [0, 1, 2, 3, 5], [4]))
    found = explain(read_lines([tmp_path])).first
    assert found is not None and found.line.rank == 4
    assert found.cause.startswith("Rank 4 never entered call #56119 of group 1")
    assert "ranks 0-3, 5 timed out" in found.cause and "rank 4" in found.hint
    assert main(["doctor", "explain", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("Rank 4 never entered")


def test_one_rank_that_is_a_call_ahead_of_all_others_makes_no_culprits_of_them(tmp_path: Path) -> None:
    """An extra call of one rank looks like this, too."""
    (tmp_path / "job.log").write_text(_watchdog_log(TIMED_OUT[2], [0], [1, 2, 3]))
    found = explain(read_lines([tmp_path])).first
    assert found is not None and found.line.rank == 0
    assert found.cause.startswith("Only rank 0 entered call #56119 of group 1(default_pg)")


def test_numbers_of_different_groups_or_of_one_rank_alone_name_nobody(tmp_path: Path) -> None:
    """Each group counts for itself; a rank that waits with all others is not a culprit."""
    logs = _watchdog_log(TIMED_OUT[0], [0, 1], []) + _watchdog_log(TIMED_OUT[0], [], [2]).replace(
        "PG 1", "PG 0"
    )
    (tmp_path / "job.log").write_text(logs)
    found = explain(read_lines([tmp_path])).first
    assert found is not None and "did not finish in time on this rank" in found.cause


def test_a_cause_in_the_log_of_a_rank_comes_before_the_numbers_of_the_watchdog(tmp_path: Path) -> None:
    """Why it never entered the call."""
    logs = (
        _watchdog_log(TIMED_OUT[0], [0, 1, 2], [3]) + "[rank3]: torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    (tmp_path / "job.log").write_text(logs)
    found = explain(read_lines([tmp_path]))
    assert found.first is not None and found.first.pattern.id == "cuda_out_of_memory"


def _searches(lines: list[str]) -> int:
    """How often an expression was applied to a text while these lines were explained."""
    number = 0

    def count(frame: object, event: str, called: object) -> None:
        nonlocal number
        number += event == "c_call" and getattr(called, "__name__", "") == "search"

    parsed = [parse_line("log", n, line) for n, line in enumerate(lines, 1)]
    sys.setprofile(count)
    try:
        explain(parsed)
    finally:
        sys.setprofile(None)
    return number


def test_few_expressions_are_applied_to_a_long_ordinary_log() -> None:
    """A log of many megabytes is read in seconds: what a pattern needs is looked for before its expression."""
    kinds = (
        "2026-11-18 12:00:01,123 - INFO - trainer - step {n} loss 1.25 tokens/s 120000 grad_norm 0.3",
        "node1:1:{n} [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read comm 0x5581 nRanks 08",
        '  File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line {n}, in _call_impl',
        "    return forward_call(*args, **kwargs)",
    )
    lines = [kind.format(n=n) for n in range(250) for kind in kinds]
    assert _searches(lines) < len(lines)


def test_a_failure_that_thousands_of_lines_repeat_is_worded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are taken out of what is shown, not of every line."""
    import allranks.doctor.explain as module

    shown: list[str] = []
    monkeypatch.setattr(module, "without_secrets", lambda text: shown.append(text) or text)
    found = explain(parse_line("log", n, "ValueError: bad") for n in range(1, 3001))
    assert found.first is not None and found.lines == 3000
    assert len(shown) == 1


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_each_sample_among_ordinary_lines_is_found(pattern: Pattern) -> None:
    """Also where its failure stands in the middle of a long log, in any block of it."""
    for place in (0, 255, 256, 700):
        lines = ["step done"] * 1000
        lines[place] = pattern.sample
        found = explain(parse_line("log", n, line) for n, line in enumerate(lines))
        assert found.first is not None and found.first.pattern.id == pattern.id
        assert found.first.line.number == place


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("abc", ("abc",)),
        ("(?i)ABC|de+f", ("abc", "d")),
        (r"a\d+bcd", ("bcd",)),
        ("a(?:bcd|efgh)?x", ("a",)),
        ("(?:bcd|efgh)x", ("bcd", "efgh")),
        ("(?:bcd|)", ()),
        (r"(?!abc)\w+", ()),
        ("(?:abc){2}", ("abc",)),
        ("(?:abc)*", ()),
    ],
)
def test_the_words_that_an_expression_needs(expression: str, words: tuple[str, ...]) -> None:
    assert needed_words(expression) == words


def test_every_pattern_needs_some_words() -> None:
    """One that does not would be applied to each line of each log."""
    assert [one.id for one in patterns() if not needed_words(one.pattern)] == []


def test_a_folder_without_a_log_is_no_healthy_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was "no known failure in 0 lines", with exit code 0."""
    assert main(["doctor", "explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"allranks doctor: there is no line of a log in {tmp_path}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was passed over."""
    tmp_path.chmod(0)
    try:
        assert main(["doctor", "explain", str(tmp_path)]) == 2
    finally:
        tmp_path.chmod(0o700)
    assert f"cannot read {tmp_path}: Permission denied" in capsys.readouterr().err
