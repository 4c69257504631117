"""`allranks frtrace`: torchfrtrace's command line and output, for scripts that parse it. Results go to stderr, as there.

Exits 0 when it ran, whatever it found, as torchfrtrace does; 2 when it could not run. `allranks diagnose` is the
command for people, with exit codes that tell.
"""

from __future__ import annotations

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from allranks.frtrace.config import add_arguments as add_frtrace_arguments

    add_frtrace_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Loads, analyses and prints."""
    from allranks.errors import ConfigurationError
    from allranks.frtrace.api import analyse_details, read_dir, transform_ft
    from allranks.frtrace.blocks import check_filters, render_blocks, render_database, render_entries
    from allranks.frtrace.database import build_database

    if args.transform_ft and not args.group_world_size:
        raise ConfigurationError("World size is required for transform_ft", hint="Add --group-world-size N.")
    details, _ = read_dir(args)
    if args.transform_ft:
        details = transform_ft(details, args.group_world_size)
    for note in details.files:
        if note.status == "damaged":
            _say(f"{note.path}: {note.note}")
    filters = (frozenset(args.selected_ranks or ()), frozenset(args.pg_filters or ()))
    check_filters(details.traces, filters)
    if args.just_print_entries:
        for line in render_entries(details.traces, filters, args.verbose, args.print_stack_trace):
            _say(line)
        return 0
    analysis = analyse_details(details)
    if analysis.job.missing_ranks and not args.allow_incomplete_ranks:
        _say(f"Missing dump files from ranks {set(analysis.job.missing_ranks)}")
    for line in render_blocks(analysis, filters, args.mismatch_cap):
        _say(line)
    if args.verbose:
        for line in render_database(build_database(analysis)):
            _say(line)
    if args.output:
        _write(args.output, build_database(analysis))
    return 0


def _write(path: str, database: object) -> None:
    """Replaces the file in one step, as a pickle of (types, database)."""
    import pickle

    from allranks.frtrace.types import types

    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "wb") as file:
        pickle.dump((types, database), file)
    os.replace(partial, path)
    _say(f"Wrote {path}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
