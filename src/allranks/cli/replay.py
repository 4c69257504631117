"""`allranks replay PATH…`: writes a recorded hang as a Python file that hangs in the same way on any machine with torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.diagnose import job_or_path
from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer, at_work, check_target, write_whole
from allranks.errors import InputError, require
from allranks.model.options import argument, check_options, option

if TYPE_CHECKING:  # heavy: numpy comes with them
    from allranks.diagnosis import DiagnoseOptions
    from allranks.diagnosis.replay import ReplayPlan
    from allranks.load import LoadResult
    from allranks.model.diagnosis import RankNow

_flag = partial(option, group="output")


@dataclass(frozen=True)
class ReplayFlags:
    paths: tuple[str, ...] = argument(
        (),
        "the folder of an incident; black boxes and dumps; or the name of a job",
        metavar="PATH",
        required=True,
    )
    output: str = _flag("replay.py", "the file to write", flags="-o --output", metavar="FILE")
    run: bool = _flag(False, "run it under the recorder, and check that cause and ranks are the same")
    processes: int = _flag(
        16, "repeat at most this many ranks, those that matter for the verdict", at_least=2, at_most=64
    )
    json: bool = _flag(False, "one JSON object on stdout")
    force: bool = _flag(False, "overwrite an existing file")

    def __post_init__(self) -> None:
        check_options(self)


FLAGS = (ReplayFlags,)


def main(args: argparse.Namespace) -> int:
    """0 written, and with --run the same verdict; 1 another verdict; 2 could not run."""
    options = read_flags(ReplayFlags, args)
    check_target(options.output, options.force)
    if options.run:
        require("torch", feature="allranks replay --run", extra="torch")
    plan = make_plan([job_or_path(path) for path in args.paths], options.processes)
    from allranks.diagnosis.replay_script import write_script

    write_whole(options.output, [write_script(plan, Path(options.output).name)])
    facts: dict[str, object] = {"schema": 1, "file": options.output, "ranks": list(plan.ranks), "same": None}
    if not options.run:
        answer(options.json, facts, _about(plan, options.output))
        return 0
    from allranks.drill.replay import run_replay

    with at_work(f"repeating the calls in {len(plan.ranks)} processes"):
        result = run_replay(plan, Path(options.output).resolve())
    facts |= {"same": result.same, "cause": result.cause, "named": list(result.ranks)}
    outcome = "the replay hangs in the same way" if result.same else "the replay ends differently"
    answer(options.json, facts, f"{outcome}: {result.sentence}")
    return 0 if result.same else 1


def _about(plan: ReplayPlan, name: str) -> str:
    verdict = plan.verdict.sentence if plan.verdict is not None else "no fault in these calls"
    return f"{verdict}\n`python {name}` repeats it with {len(plan.ranks)} processes"


def make_plan(paths: list[str], processes: int) -> ReplayPlan:
    """The calls of a few processes, from the files of a job."""
    from allranks.diagnosis import diagnose
    from allranks.diagnosis.align import align, forget_past_quorums
    from allranks.diagnosis.replay import plan_replay
    from allranks.load import LoadOptions, load_paths

    loaded = load_paths(paths, LoadOptions(allow_nothing=True))
    if not any(len(trace.calls) or trace.progress.inside for trace in loaded.traces):
        bad = [f"  {note.path}: {note.note or note.kind}" for note in loaded.files if note.status != "ok"]
        raise InputError(
            f"{', '.join(paths)}: these files hold no recorded call, so nothing can be repeated",
            hint="\n".join(bad[:20]),
        )
    seen, options = _circumstances(paths, loaded)
    with at_work(f"comparing the calls of {len(loaded.traces):,} ranks"):
        verdict = diagnose(loaded.traces, loaded.files, stacks=seen, options=options).verdict
        job = align(forget_past_quorums(loaded.traces), now_ns=options.now_ns, ended=options.ended)
        return plan_replay(job, verdict, [now.rank for now in seen], processes)


def _circumstances(paths: list[str], loaded: LoadResult) -> tuple[list[RankNow], DiagnoseOptions]:
    """(ranks whose process was gone, options with the time of the files). Stacks do not count: a replay repeats calls."""
    from allranks.diagnosis import DiagnoseOptions
    from allranks.incidents.evidence import find_evidence, is_incident, read_incident

    incident = is_incident(paths)
    found = read_incident(Path(paths[0])) if incident else find_evidence(loaded, loaded.traces, paths)
    gone = [now for now in found.seen if now.cause == "gone"]
    quiet_s = found.observed.quiet_s if found.observed is not None else 0.0
    return gone, DiagnoseOptions(now_ns=found.now_ns, quiet_s=quiet_s, ended=found.ended)
