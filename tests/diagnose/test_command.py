"""`allranks diagnose` from the outside: exit codes, flags, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.box_files import box_bytes

from allranks.load import load_paths

from .torch_dumps import entry, number, write

pytestmark = pytest.mark.usefixtures("forks")

CASES = Path(__file__).parent / "cases"
HANG = str(CASES / "flight_recorder_subgroup_hang" / "dumps")
HEALTHY = str(CASES / "flight_recorder_normal" / "dumps")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "allranks", "diagnose", *words], capture_output=True, text=True, timeout=300,
        env={**os.environ, **env},
    )  # fmt: skip


def test_a_fault_exits_1_and_the_first_line_is_the_verdict() -> None:
    """No colour in a pipe."""
    done = run(HANG)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith(
        "rank 3 never entered all_reduce #5 of group tp_1 (case.py:11)"
    )
    assert "\x1b" not in done.stdout


def test_nothing_wrong_exits_0() -> None:
    """And says so."""
    done = run(HEALTHY)
    assert (done.returncode, done.stdout.splitlines()[0][:13]) == (0, "nothing wrong")


def test_nothing_readable_exits_2_and_names_the_files(tmp_path: Path) -> None:
    """With a sentence, not a traceback."""
    (tmp_path / "notes.txt").write_text("hello")
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr
    assert run(str(tmp_path / "no-such-folder")).returncode == 2


def test_json_is_one_object_with_the_verdict() -> None:
    """On stdout, nothing else."""
    done = run(HANG, "--json")
    body = json.loads(done.stdout)
    assert done.returncode == 1
    assert (body["verdict"]["cause"], body["verdict"]["ranks"], body["verdict"]["group"]) == (
        "missing_rank",
        [3],
        "tp_1",
    )


def test_all_outputs_can_be_written_at_once_and_are_not_overwritten(tmp_path: Path) -> None:
    """--force overwrites."""
    page, trace, out = tmp_path / "p.html", tmp_path / "t.pftrace", tmp_path / "o.json"
    words = [HANG, "--html", str(page), "--perfetto", str(trace), "-o", str(out)]
    assert run(*words).returncode == 1
    assert json.loads(out.read_text())["status"] == "fault"
    assert b"Verdict" in trace.read_bytes()
    assert page.read_text().startswith("<!doctype html>")
    again = run(*words)
    assert again.returncode == 2 and "--force" in again.stderr
    assert run(*words, "--force").returncode == 1


def test_entries_are_printed_one_column_per_rank() -> None:
    """-j, with filters that work."""
    done = run(HANG, "-j")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == ["rank", "0", "rank", "1", "rank", "2", "rank", "3"]
    assert "all_reduce(input_sizes=[[4]], state=scheduled)" in done.stdout
    only = run(HANG, "-j", "--selected-ranks", "2", "3", "--pg-filters", "tp_1")
    assert only.stdout.splitlines()[0].split() == ["rank", "2", "rank", "3"]
    assert "[[6]]" not in only.stdout
    stacks = run(HANG, "-j", "--print_stack_trace", "--selected-ranks", "2")
    assert "case.py:11 in <module>" in stacks.stdout


def test_filters_work_without_j_too() -> None:
    """Only the group asked for is judged; ranks left out are not dead."""
    world = json.loads(run(HANG, "--json", "--pg-filters", "default_pg").stdout)
    assert world["verdict"]["ranks"] == [2]
    some = json.loads(run(HANG, "--json", "--selected-ranks", "0", "1").stdout)
    assert some["verdict"] is None or some["verdict"]["cause"] != "rank_died"


def test_incomplete_ranks_are_not_dead_when_allowed() -> None:
    """The file is missing, and that is said to be known."""
    folder = str(CASES / "flight_recorder_rank_died" / "dumps")
    assert json.loads(run(folder, "--json").stdout)["verdict"]["cause"] == "rank_died"
    allowed = json.loads(run(folder, "--json", "--allow-incomplete-ranks").stdout)
    assert allowed["status"] != "fault"


def test_consequences_are_capped(tmp_path: Path) -> None:
    """--mismatch_cap limits the list, not the verdict."""
    groups: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", list(range(12)))}
    ranks = {3: [entry(seq=1)]}
    for rank in {*range(12)} - {3}:
        name, kind = f"pair{rank}", "abcdefghijkl"[rank]  # groups of one kind share a line
        groups[name] = (kind, sorted((rank, 3)))
        pair = {"group": (name, kind)}
        ranks[3].append(entry(seq=1, **pair))
        ranks[rank] = [
            entry(seq=1),
            entry(seq=1, **pair),
            entry(seq=2, state="scheduled"),
            entry(seq=2, state="scheduled", **pair),
        ]
    folder = write(tmp_path, {rank: number(entries) for rank, entries in ranks.items()}, groups)
    body = json.loads(run(str(folder), "--json", "--mismatch_cap", "2").stdout)
    assert body["verdict"]["ranks"] == [3]
    listed = [f for f in body["findings"] if f["severity"] == "consequence"]
    assert len(listed) == 3 and "more blocked calls" in listed[-1]["sentence"]


def test_replicas_of_torchft_are_put_in_their_place(tmp_path: Path) -> None:
    """Each replica numbers its ranks from 0; --transform-ft needs to know how many they are."""
    replica = {"0": ("default_pg", [0, 1])}
    usual = [entry(seq=1), entry(seq=2, state="started")]
    ranks = {rank: number(usual) for rank in range(4)}
    ranks[3] = number(usual[:1])
    write(tmp_path, ranks, {"0": ("default_pg", [0, 1, 2, 3])})
    for rank in range(4):
        write(tmp_path / "ft", {rank: ranks[rank]}, {"0": ("default_pg", [rank])})
    import pickle

    for rank in range(4):
        path = tmp_path / "ft" / f"trace_{rank}"
        dump = pickle.loads(path.read_bytes())
        dump["pg_config"] = {"0": {"name": "0", "desc": replica["0"][0], "ranks": "[0, 1]"}}
        path.write_bytes(pickle.dumps(dump, protocol=2))
    folder = str(tmp_path / "ft")
    assert run(folder, "--transform-ft").returncode == 2
    body = json.loads(run(folder, "--json", "--transform-ft", "--group-world-size", "2").stdout)
    assert [f["ranks"] for f in body["findings"] if f["cause"] == "missing_rank"] == [[3]]


@pytest.mark.parametrize("flag", ["-v", "--stacks", "--print_stack_trace"])
def test_verbose_flags_add_and_change_no_verdict(flag: str) -> None:
    """Groups and files, or whole stacks."""
    done = run(HANG, flag)
    assert done.returncode == 1
    assert ("\ngroups\n" in done.stdout) == (flag == "-v")
    assert ("c10d_logger.py" in done.stdout) == (flag != "-v")


def test_help_names_every_flag_of_torchfrtrace() -> None:
    """So that users find their way."""
    text = run("--help").stdout
    for flag in ("--just_print_entries", "--selected-ranks", "--pg-filters", "--allow-incomplete-ranks", "--prefix", "--output",
                 "--print_stack_trace", "--mismatch_cap", "--transform-ft", "--group-world-size", "--verbose", "--html", "--perfetto"):  # fmt: skip
        assert flag in text


def test_diagnosing_imports_no_torch() -> None:
    """The analysis runs on a machine without it."""
    code = (
        "import sys; from allranks.cli import main; "
        f"main(['diagnose', {HANG!r}]); print('torch' in sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-I", "-c", code]  # an interpreter of its own, not a fork
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stderr.strip().splitlines()[-1] == "False"


STACK = """Thread 0x00007f31b0aa8b80 (most recent call first):
  File "/home/me/data.py", line 88 in next_batch
  File "/home/me/train.py", line 9 in <module>
"""


def test_a_stack_beside_the_dumps_says_where_the_rank_is(tmp_path: Path) -> None:
    """faulthandler's text is enough to turn missing into stuck."""
    ranks = {rank: number([entry(seq=1), entry(seq=2, state="started")]) for rank in range(3)}
    ranks[1] = ranks[1][:1]
    write(tmp_path / "dumps", ranks)
    (tmp_path / "stack_1.txt").write_text(STACK)
    body = json.loads(run(str(tmp_path), "--json").stdout)
    assert (body["verdict"]["cause"], body["verdict"]["ranks"]) == ("stuck_before_collective", [1])
    assert "data.py:88" in body["verdict"]["where"]


def test_a_job_that_was_killed_while_it_hung_is_told_less_surely(tmp_path: Path) -> None:
    """All processes are gone, their black boxes tell where they stood, and nothing tells for how long."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait(60)
    ranks = {rank: number([entry(seq=1), entry(seq=2, state="started")]) for rank in range(3)}
    ranks[1] = ranks[1][:1]
    for trace in load_paths([str(write(tmp_path / "dumps", ranks))]).traces:
        header = replace(trace.header, host=os.uname().nodename, pid=gone.pid, written_ns=0)
        box = tmp_path / "boxes" / f"job.a0.r{header.rank}.p{gone.pid}.box"
        box.parent.mkdir(exist_ok=True)
        box.write_bytes(box_bytes(replace(trace, header=header)))
    done = run(str(tmp_path / "boxes"), "--json")
    verdict = json.loads(done.stdout)["verdict"]
    assert (done.returncode, verdict["cause"], verdict["ranks"]) == (1, "missing_rank", [1])
    assert verdict["confidence"] < 0.6
    assert any("when the processes ended" in text for text in verdict["missing_evidence"])
    assert not any("allranks stacks" in text for text in verdict["missing_evidence"])


def _copied_boxes(folder: Path, events_ns: int, copied_ns: int) -> Path:
    """Black boxes of another machine: rank 1 lacks in the last call; the files bear the time of the copy."""
    ranks = {
        rank: number([*(entry(seq=s) for s in range(1, 13)), entry(seq=13, state="started")])
        for rank in range(3)
    }
    ranks[1] = ranks[1][:-1]
    for trace in load_paths([str(write(folder / "dumps", ranks))]).traces:
        calls = trace.calls.copy()
        moved = events_ns - int(calls["created_ns"][-1])
        calls["created_ns"] += moved
        calls["completed_ns"][calls["completed_ns"] > 0] += moved
        header = replace(trace.header, host="elsewhere", pid=77, written_ns=0)
        box = folder / "boxes" / f"job.a0.r{header.rank}.p77.box"
        box.parent.mkdir(exist_ok=True)
        box.write_bytes(box_bytes(replace(trace, header=header, calls=calls)))
        os.utime(box, ns=(copied_ns, copied_ns))
    return folder / "boxes"


def test_waits_of_copied_boxes_end_when_they_were_copied(tmp_path: Path) -> None:
    """Not when somebody reads them an hour later."""
    hung = time.time_ns() - 3600 * 10**9
    done = run(str(_copied_boxes(tmp_path, hung, hung + 20 * 10**9)), "--json")
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["cause"], verdict["ranks"]) == ("missing_rank", [1])
    assert 19 < verdict["waited_s"] < 21


def test_copies_that_kept_the_time_of_the_original_do_not_tell_how_long(tmp_path: Path) -> None:
    """The hang is found, and no time is invented."""
    hung = time.time_ns() - 3600 * 10**9
    done = run(str(_copied_boxes(tmp_path, hung, hung - 10**9)), "--json")
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["cause"], verdict["ranks"], verdict["waited_s"]) == ("missing_rank", [1], None)
