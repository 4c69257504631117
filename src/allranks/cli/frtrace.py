"""`allranks frtrace`: torchfrtrace's command line and output, for scripts that parse it. Like torchfrtrace, it prints results on
stderr and exits 0 whatever it finds (2 when it could not run). Unlike there, filters work with every kind of output, not only -j.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from allranks.cli.parser import read_flags
from allranks.model.options import argument, option


@dataclass(frozen=True)
class FrtraceFlags:
    """All flags of torchfrtrace, with the same names and defaults."""

    trace_dir: str | None = argument(None, "folder with one dump per rank (any kind that allranks reads)")
    selected_ranks: tuple[int, ...] = option((), "show only these ranks", nargs="+", metavar="R")
    allow_incomplete_ranks: bool = option(False, "do not name ranks that have no dump")
    pg_filters: tuple[str, ...] = option(
        (), "show only these groups, by name or description", nargs="+", metavar="NAME"
    )
    output: str = option("", "write the output to a file too", flags="-o --output", metavar="FILE")
    prefix: str | None = option(
        None, "file name in front of the rank; found out if not given", flags="-p --prefix", metavar="PREFIX"
    )
    just_print_entries: bool = option(
        False, "print all entries, a column per rank", flags="-j --just_print_entries"
    )
    verbose: bool = option(
        False, "accepted: -j and `allranks diagnose -v` show all there is", flags="-v --verbose"
    )
    print_stack_trace: bool = option(False, "with -j: print the stacks too", flags="--print_stack_trace")
    mismatch_cap: int = option(10, "at most N findings per group", flags="--mismatch_cap")
    transform_ft: bool = option(False, "torchft: ranks of a replica → ranks of the job")
    group_world_size: int | None = option(None, "ranks per replica, for --transform-ft")


FLAGS = (FrtraceFlags,)


def main(args: argparse.Namespace) -> int:
    from allranks.errors import ConfigurationError, InputError

    flags = read_flags(FrtraceFlags, args)
    if flags.transform_ft and not flags.group_world_size:
        raise ConfigurationError("World size is required for transform_ft", hint="Add --group-world-size N.")
    if not flags.trace_dir:
        raise InputError("Trace directory trace_dir is required")
    lines = list(_lines(flags))
    for line in lines:
        print(line, file=sys.stderr)
    if flags.output:
        from pathlib import Path

        from allranks.model.files import write_atomically

        write_atomically(Path(flags.output), "".join(f"{line}\n" for line in lines), 0o666)
        print(f"Wrote {flags.output}", file=sys.stderr)
    return 0


def _lines(flags: FrtraceFlags) -> Iterator[str]:
    import time

    from allranks.frtrace import analyse, check_filters, render_blocks
    from allranks.load import LoadOptions, load_paths
    from allranks.load.choice import transform_ft
    from allranks.report.text import render_entries

    loaded = load_paths([flags.trace_dir or ""], LoadOptions(prefix=flags.prefix))
    traces = loaded.traces
    if flags.transform_ft and flags.group_world_size:
        traces = [transform_ft(trace, flags.group_world_size) for trace in traces]
    yield from (f"{note.path}: {note.note}" for note in loaded.files if note.status == "damaged")
    filters = (frozenset(flags.selected_ranks), frozenset(flags.pg_filters))
    check_filters(traces, filters)
    if flags.just_print_entries:
        shown = [trace for trace in traces if not filters[0] or trace.header.rank in filters[0]]
        yield from render_entries(shown, pg_filters=filters[1], with_stacks=flags.print_stack_trace)
        return
    analysis = analyse(traces, loaded.files, time.time_ns())
    if analysis.job.missing_ranks and not flags.allow_incomplete_ranks:
        yield f"Missing dump files from ranks {set(analysis.job.missing_ranks)}"
    yield from render_blocks(analysis, filters, flags.mismatch_cap)
