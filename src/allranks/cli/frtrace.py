"""`allranks frtrace`: torchfrtrace's command line and output, for scripts that parse it. Results go to stderr, as there.

Exits 0 when it ran, whatever it found, as torchfrtrace does; 2 when it could not run. `allranks diagnose` is the
command for people, with exit codes that tell. Filters work with every kind of output, not only with -j.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of torchfrtrace, with the same names and defaults."""
    add = parser.add_argument
    add("trace_dir", nargs="?", help="folder with one dump per rank (any kind that allranks reads)")
    add("--selected-ranks", default=None, nargs="+", type=int, metavar="R", help="show only these ranks")
    add("--allow-incomplete-ranks", action="store_true", help="do not name ranks that have no dump")
    groups = "show only these groups, by name or description"
    add("--pg-filters", default=None, nargs="+", metavar="NAME", help=groups)
    add("-o", "--output", default=None, metavar="FILE", help="write the output to a file too")
    add("-p", "--prefix", default=None, help="file name in front of the rank; found out if not given")
    add("-j", "--just_print_entries", action="store_true", help="print all entries, a column per rank")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="accepted: -j and `allranks diagnose -v` show all there is",
    )
    add("--print_stack_trace", action="store_true", help="with -j: print the stacks too")
    add("--mismatch_cap", type=int, default=10, metavar="N", help="at most N findings per group (default 10)")
    add("--transform-ft", action="store_true", help="torchft: ranks of a replica → ranks of the job")
    size = "ranks per replica, for --transform-ft"
    add("--group-world-size", type=int, default=None, metavar="N", help=size)


def main(args: argparse.Namespace) -> int:
    from allranks.errors import ConfigurationError, InputError

    if args.transform_ft and not args.group_world_size:
        raise ConfigurationError("World size is required for transform_ft", hint="Add --group-world-size N.")
    if not args.trace_dir:
        raise InputError("Trace directory trace_dir is required")
    lines = list(_lines(args))
    for line in lines:
        print(line, file=sys.stderr)
    if args.output:
        from pathlib import Path

        from allranks.model.files import write_atomically

        write_atomically(Path(args.output), "".join(f"{line}\n" for line in lines), 0o666)
        print(f"Wrote {args.output}", file=sys.stderr)
    return 0


def _lines(args: argparse.Namespace) -> Iterator[str]:
    import time

    from allranks.frtrace import analyse, check_filters, render_blocks
    from allranks.load import LoadOptions, load_paths
    from allranks.load.choice import transform_ft
    from allranks.report.text import render_entries

    loaded = load_paths([args.trace_dir], LoadOptions(prefix=args.prefix))
    traces = loaded.traces
    if args.transform_ft:
        traces = [transform_ft(trace, args.group_world_size) for trace in traces]
    yield from (f"{note.path}: {note.note}" for note in loaded.files if note.status == "damaged")
    filters = (frozenset(args.selected_ranks or ()), frozenset(args.pg_filters or ()))
    check_filters(traces, filters)
    if args.just_print_entries:
        shown = [trace for trace in traces if not filters[0] or trace.header.rank in filters[0]]
        yield from render_entries(shown, pg_filters=filters[1], with_stacks=args.print_stack_trace)
        return
    analysis = analyse(traces, loaded.files, time.time_ns())
    if analysis.job.missing_ranks and not args.allow_incomplete_ranks:
        yield f"Missing dump files from ranks {set(analysis.job.missing_ranks)}"
    yield from render_blocks(analysis, filters, args.mismatch_cap)
