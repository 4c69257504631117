"""`allranks drill`: runs a job under a fault plan, and reports what was noticed and what it cost."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.cli.parser import read_flags, words_after
from allranks.cli.terminal import answer
from allranks.errors import InputError
from allranks.model.options import argument, check_options, option

PLAN = """\
plan.yaml:
  seed: 7
  faults:
    - {kind: kill, rank: 1, at_step: 12}
    - {kind: hang, replica: random, at_step: [20, 30]}

Faults fire at the script's progress mark: a Manager marks each step, other
scripts call allranks.step(n). When ALLRANKS_DRILL is set, a script may report
digests and samples with `from allranks.drill.preload import tell`.

kinds of fault:
"""


def _epilog() -> str:
    from allranks.drill.self_faults import FAULTS

    lines = (f"  {kind:<12}{fault.text}" for kind, fault in FAULTS.items())
    kinds = "\n".join(textwrap.fill(line, 80, subsequent_indent=" " * 14) for line in lines)
    return f"{PLAN.rstrip()}\n{kinds}\n"


@dataclass(frozen=True)
class DrillFlags:
    plan: Path | None = option(None, "the faults, in YAML or JSON", metavar="FILE", required=True)
    words: tuple[str, ...] = argument((), "the job to run", nargs="...", metavar="-- COMMAND…")
    ranks: int | None = option(
        None, 'ranks of the job, for "random" (default: read from the command)', at_least=1
    )
    folder: Path | None = option(
        None, "where the drill keeps its evidence (default: a temporary folder that is kept)", metavar="DIR"
    )
    timeout: float = option(600.0, "end the job after this long", unit="s", above=0)
    quiet: bool = option(False, "the job's output only to DIR/output.log")
    json: bool = option(False, "print one JSON object; implies --quiet")

    def __post_init__(self) -> None:
        check_options(self)


FLAGS = (DrillFlags,)
EPILOG = _epilog()


def main(args: argparse.Namespace) -> int:
    """0 every fault fired, was noticed and survived; 1 otherwise; 2 could not run."""
    import tempfile

    from allranks.drill.plan import read_plan
    from allranks.drill.run import run_drill

    command, flags = words_after(args), read_flags(DrillFlags, args)
    if not command:
        hint = "allranks drill --plan FILE -- allranks run --replicas 2 train.py"
        raise InputError("no command was given", hint=hint)
    ranks, per_replica = find_size(command)
    plan = read_plan(args.plan, ranks=flags.ranks or ranks, ranks_per_replica=per_replica)
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="allranks-drill-"))
    result = run_drill(plan, command, folder, timeout_s=flags.timeout, quiet=flags.quiet or flags.json)
    answer(flags.json, result.to_dict(), render(result.to_dict()))
    good = all(f.fired and f.verdict_right is not False for f in result.faults)
    calm = not result.false_evictions and not result.false_alarms
    return 0 if good and calm and result.exit_code == 0 else 1


def find_size(command: Sequence[str]) -> tuple[int | None, int]:
    """(ranks, ranks per replica), from the command's flags."""
    from allranks.launch.command_line import flag_value

    per = int(flag_value(command, "--nproc-per-replica") or 1)
    replicas = flag_value(command, "--total-replicas") or flag_value(command, "--replicas")
    if replicas and replicas.isdigit():
        return int(replicas) * per, per
    ranks = flag_value(command, "--nproc-per-node")
    return (int(ranks) if ranks and ranks.isdigit() else None), per


def render(result: dict[str, object]) -> Iterator[str]:
    faults = result["faults"]
    assert isinstance(faults, (list, tuple))
    for fault in faults:
        if not fault["fired"]:
            yield f"{fault['kind']} of rank {fault['rank']}: did NOT fire"
            continue
        noticed, recovered = "not noticed", "no rank continued"
        if fault["noticed_s"] is not None:
            noticed = f"noticed after {fault['noticed_s']:.3f} s"
        if fault["recovered_s"] is not None:
            recovered = f"training continued after {fault['recovered_s']:.3f} s"
        right = {True: "verdict right", False: "verdict WRONG", None: "no verdict"}[fault["verdict_right"]]
        yield f"{fault['kind']} of rank {fault['rank']} at step {fault['step']}: {noticed}, {recovered}, {right}"
        if fault["verdict"]:
            yield f"    {fault['verdict'].get('sentence', '')}"
    yield (
        f"exit code {result['exit_code']}, identical replicas: {_word(result['identical_replicas'])}, "
        f"lost steps: {_word(result['lost_steps'])}, lost samples: {_word(result['lost_samples'])}, "
        f"repeated samples: {_word(result['repeated_samples'])}, false alarms: {result['false_alarms']}, "
        f"false evictions: {result['false_evictions']}"
    )
    yield f"evidence in {result['folder']}"


def _word(value: object) -> str:
    if value is None:
        return "not reported"
    return ("yes" if value else "NO") if isinstance(value, bool) else str(value)
