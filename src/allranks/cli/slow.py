"""`allranks slow`: what slow ranks cost each step, from black boxes or dumps, and why they are slow."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import InputError
from allranks.model.formatting import count

if TYPE_CHECKING:
    from allranks.model.trace import RankTrace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "jobs",
        nargs="*",
        metavar="JOB|DUMPS",
        help="name of a job on this node, or dumps and folders of them (default: the newest job)",
    )
    add("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """0 no rank slows the others down, 1 one does, 2 it cannot be told."""
    from allranks.ledger.slow import find_slow

    traces = _traces(args.jobs)
    found = find_slow(traces, saved_steps(traces))
    if found is None:
        raise InputError(
            f"too few steps or collectives in common to compare, in the dumps of {count(len(traces), 'rank')}",
            hint="Give the black boxes or dumps of all ranks, of a time in which the job trained.",
        )
    if args.json:
        print(json.dumps({"sentence": found.sentence, **asdict(found)}))
    else:
        print(found.sentence)
        for one in found.what_ifs[1:5]:
            print(f"  without {one.who}: {one.gain:.0%} faster steps")
        for line in found.evidence:
            print(f"  {line}")
        error = abs(found.replayed_s / max(found.step_s, 1e-9) - 1)
        print(f"From {found.steps} steps of {found.ranks} ranks; the replay itself is off by {error:.1%}.")
    return 1 if found.what_ifs else 0


def _traces(words: list[str]) -> list[RankTrace]:
    from allranks.incidents.job_overview import find_job
    from allranks.load import LoadOptions, load_paths

    paths = (
        words
        if words and all(Path(word).exists() for word in words)
        else [str(find_job(words[0] if words else None))]
    )
    return list(load_paths(paths, LoadOptions()).traces)


def saved_steps(traces: list[RankTrace]) -> set[int]:
    """Steps in which a rank saved, by the phases in its box."""
    import numpy as np

    from allranks.blackbox.header import HEADER_BYTES, read_regular
    from allranks.blackbox.phases import read_phases
    from allranks.ledger.records import SAVING, kind_of, state_of

    found: set[int] = set()
    for trace in traces:
        if not trace.kind.startswith("black box") or not len(trace.calls):
            continue
        try:
            marks = read_phases(read_regular(trace.path, HEADER_BYTES))
        except OSError:
            continue
        for mark in marks:
            if kind_of(state_of(mark.name)) == SAVING:
                after = int(np.searchsorted(trace.calls["created_ns"], mark.begin_ns))
                if after < len(trace.calls):
                    found.add(int(trace.calls["step"][after]))
    return found
