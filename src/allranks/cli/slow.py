"""`allranks slow`: the cost of slow ranks per step, and why they are slow, from black boxes or dumps."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.diagnose import job_or_path
from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer
from allranks.errors import InputError
from allranks.model.formatting import count
from allranks.model.options import argument, option

if TYPE_CHECKING:
    from allranks.blackbox.phases import PhaseMark
    from allranks.model.trace import RankTrace


@dataclass(frozen=True)
class SlowFlags:
    jobs: tuple[str, ...] = argument(
        (),
        "name of a job on this node, or dumps and folders of them (default: the newest job)",
        metavar="JOB|DUMPS",
    )
    json: bool = option(False, "print one JSON object")


FLAGS = (SlowFlags,)


def main(args: argparse.Namespace) -> int:
    """0 no rank slows the others down, 1 one does, 2 not enough data."""
    from allranks.ledger.slow import find_slow

    flags = read_flags(SlowFlags, args)
    traces, paths = _traces(list(flags.jobs))
    found = find_slow(traces, read_marks(paths))
    if found is None:
        raise InputError(
            f"too few steps or collectives in common to compare, in the dumps of {count(len(traces), 'rank')}",
            hint="Give the black boxes or dumps of all ranks, from a time in which the job trained.",
        )
    error = abs(found.replayed_s / max(found.step_s, 1e-9) - 1)
    lines = [f"  without {one.who}: steps take {one.gain:.0%} less time" for one in found.what_ifs[1:5]]
    lines += [f"  {line}" for line in found.evidence]
    last = f"From {found.steps:,} steps of {found.ranks} ranks; the replay itself is off by {error:.1%}."
    answer(flags.json, {"sentence": found.sentence, **asdict(found)}, [found.sentence, *lines, last])
    return 1 if found.what_ifs else 0


def _traces(words: list[str]) -> tuple[list[RankTrace], list[Path]]:
    """The traces and their paths."""
    from allranks.incidents.job_overview import find_job
    from allranks.load import LoadOptions, load_paths

    paths = [job_or_path(word) for word in words] or [str(find_job(None))]
    return list(load_paths(paths, LoadOptions()).traces), [Path(path) for path in paths]


def read_marks(paths: list[Path]) -> dict[int, tuple[PhaseMark, ...]]:
    """The phases of each rank, such as saves and pauses, from its newest black box in these paths."""
    from allranks.blackbox.header import HEADER_BYTES, parse_header, read_regular
    from allranks.blackbox.phases import read_phases

    found: dict[int, tuple[int, tuple[PhaseMark, ...]]] = {}
    for path in (box for one in paths for box in (one.rglob("*.box") if one.is_dir() else [one])):
        with suppress(OSError, InputError):
            page = read_regular(path, HEADER_BYTES)
            head = parse_header(page)
            if head.start_ns >= found.get(head.rank, (0, ()))[0]:
                found[head.rank] = head.start_ns, read_phases(page)
    return {rank: marks for rank, (_, marks) in found.items()}
