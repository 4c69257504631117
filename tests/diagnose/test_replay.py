"""A recorded hang as a program: it hangs in the same way, nothing of a record becomes code, large jobs become small ones."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.diagnosis.align import align
from allranks.diagnosis.replay import Await, EndProcess, MarkStep, PostCall, ReplayPlan, plan_replay
from allranks.diagnosis.replay_script import write_script
from allranks.model.diagnosis import Finding, RankNow
from allranks.model.trace import Frame, Group, RankTrace

from .histories import STUCK, Do, Layout, on_shared_tables, run, with_change
from .test_recorded import NAMES, RECORDED, _read
from .torch_dumps import entry, number, write

HOSTILE = 'x"""\nimport os; os.abort()\n#\\ \u2028{QUIET_S} %s \x00'


def plan_of(name: str) -> ReplayPlan:
    """The replay of a recorded job."""
    facts, traces = _read(name)
    now_ns, gone = facts["now_ns"], facts["gone"]
    seen = [RankNow(rank, "gone", "", "its process is gone") for rank in gone]
    options = DiagnoseOptions(now_ns=now_ns, ended=not now_ns)
    verdict = diagnose(traces, (), stacks=seen, options=options).verdict
    return plan_replay(align(traces, now_ns=now_ns, ended=not now_ns), verdict, gone)


def test_the_replay_of_every_recorded_job_is_a_program() -> None:
    """Every rank has a process, and every process an end."""
    for name in NAMES:
        plan = plan_of(name)
        text = write_script(plan)
        ast.parse(text)
        assert plan.ranks == tuple(sorted(trace.header.rank for trace in _read(name)[1])), name
        assert all(isinstance(program[-1], EndProcess) for program in plan.programs), name


def test_what_ended_before_the_next_call_is_waited_for_and_nothing_else() -> None:
    """A call that never ended is waited for last; one that ended later, behind the calls that were made meanwhile."""
    plan = plan_of("swapped_calls")
    posts = [a for a in plan.programs[0] if isinstance(a, PostCall)]
    assert not posts[-1].waits and plan.programs[0][-1] == EndProcess("wait")
    waited = {a.post for a in plan.programs[0] if isinstance(a, Await)}
    assert all(post.waits or index in waited for index, post in enumerate(posts[:-4]))


@pytest.mark.parametrize("name", ["nan_skip", "lost_send"])
def test_a_replay_hangs_as_the_recorded_job_did(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes under the recorder: same cause, same rank."""
    pytest.importorskip("torch")
    target = tmp_path / "hang.py"
    words = ["replay", str(RECORDED / f"{name}.tar.gz"), "-o", str(target), "--run", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] and told["file"] == str(target) and target.is_file()


def hostile(trace: RankTrace) -> RankTrace:
    """The trace with names that would be code if they were not escaped."""
    stacks = tuple(tuple(Frame(HOSTILE, HOSTILE, frame.line) for frame in stack) for stack in trace.stacks)
    groups = tuple(Group(HOSTILE + group.name, HOSTILE, group.ranks, group.backend) for group in trace.groups)
    progress = replace(trace.progress, closed=f"exception: {HOSTILE}" if trace.header.rank == 0 else "")
    return replace(trace, stacks=stacks, groups=groups, progress=progress)


def test_names_of_a_record_never_become_code() -> None:
    """Functions, files, groups and errors with quotes, newlines and backslashes: constants and comments only."""
    traces = [hostile(trace) for trace in _read("nan_skip")[1]]
    job = align(traces)
    verdict = Finding("missing_rank", (1,), HOSTILE)
    text = write_script(plan_replay(job, verdict), HOSTILE)
    tree = ast.parse(text)
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert "abort" not in called and text.isascii()
    assert {type(node) for node in tree.body} <= {
        *(ast.Expr, ast.Import, ast.Assign, ast.FunctionDef, ast.If),
    }


def test_a_rank_without_a_file_ends_where_the_others_wait_for_it() -> None:
    """Its calls are those that the others have finished with it."""
    traces = _read("killed")[1]
    rest = [trace for trace in traces if trace.header.rank != 1]
    verdict = diagnose(rest, options=DiagnoseOptions(ended=True)).verdict
    assert verdict is not None and verdict.cause == "rank_died"
    plan = plan_replay(align(rest, ended=True), verdict)
    assert plan.unrecorded == (1,) and plan.programs[1][-1] == EndProcess("kill")
    finished = [a for a in plan.programs[0] if isinstance(a, PostCall)][:-1]
    assert len([a for a in plan.programs[1] if isinstance(a, PostCall)]) == len(finished)


def test_a_large_job_becomes_the_ranks_that_matter() -> None:
    """The guilty rank, members of each of its groups, and not more processes than allowed."""
    layout = Layout(128, 4)
    programs = with_change(layout.programs(3), 77, 13, STUCK)
    traces = on_shared_tables(run(layout.members(), programs).traces())
    verdict = diagnose(traces).verdict
    assert verdict is not None and verdict.ranks == (77,)
    plan = plan_replay(align(traces), verdict)
    assert len(plan.ranks) <= 16 and 77 in plan.ranks and len(plan.guilty) == 1
    assert {len(group) for group in plan.groups} > {1} or min(map(len, plan.groups)) > 1
    ast.parse(write_script(plan))


def test_long_rings_are_cut_behind_a_call_that_all_ranks_finished() -> None:
    """The newest calls are repeated, from the same call on on all ranks."""
    programs = {
        rank: [Do("all_reduce", size=4, line=10 + step % 7) for step in range(900)] for rank in range(3)
    }
    programs[1] = [*programs[1][:890], STUCK]
    traces = on_shared_tables(run({"world": (0, 1, 2)}, programs).traces())
    plan = plan_replay(align(traces), diagnose(traces).verdict)
    first = {next(a.number for a in program if isinstance(a, PostCall)) for program in plan.programs}
    lengths = [sum(isinstance(a, PostCall) for a in program) for program in plan.programs]
    assert len(first) == 1 and max(lengths) <= 600 and lengths[1] == lengths[0] - 1


def test_large_tensors_are_made_small_and_stay_different() -> None:
    """Sizes that differ are the fault: they differ in the replay too."""
    sizes = {0: 1 << 30, 1: (1 << 30) + 1}
    programs = {
        rank: [Do("all_reduce", size=8), Do("all_reduce", size=sizes[rank], line=11)] for rank in sizes
    }
    traces = on_shared_tables(run({"world": (0, 1)}, programs).traces())
    plan = plan_replay(align(traces), diagnose(traces).verdict)
    given = [[a.given[0] for a in program if isinstance(a, PostCall)] for program in plan.programs]
    assert given[0][0] == given[1][0] == 8 and given[0][1] != given[1][1] and max(map(max, given)) < 1 << 16


def test_step_marks_are_repeated() -> None:
    """They tell which call was skipped."""
    marks = [a.step for a in plan_of("nan_skip").programs[0] if isinstance(a, MarkStep)]
    assert marks == sorted(set(marks)) and len(marks) > 5


def test_dumps_of_torch_can_be_repeated(tmp_path: Path) -> None:
    """Without times of completion and without our recorder."""
    calls = [entry(seq=seq, line=10 + seq) for seq in range(1, 5)]
    folder = write(tmp_path / "dumps", {0: number([*calls, entry(seq=5, state="started")]), 1: number(calls)})
    assert main(["replay", str(folder), "-o", str(tmp_path / "hang.py")]) == 0
    text = (tmp_path / "hang.py").read_text()
    ast.parse(text)
    assert len(re.findall(r"\('(?:call|post)'", text)) == 9


@pytest.mark.parametrize("content", [None, b"", b"ABLACKBX" + bytes(100)])
def test_files_without_calls_are_refused(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder, an empty file, a file that is cut: one sentence, exit code 2, no file."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    if content is not None:
        (folder / "job.a0.r0.p1.box").write_bytes(content)
    assert main(["replay", str(folder), "-o", str(tmp_path / "hang.py")]) == 2
    assert "no recorded call" in capsys.readouterr().err and not (tmp_path / "hang.py").exists()
