"""`allranks frtrace`: torchfrtrace's command line and output, for scripts that parse it. Results go to stderr, as there.

Exits 0 when it ran, whatever it found, as torchfrtrace does; 2 when it could not run. `allranks diagnose` is the
command for people, with exit codes that tell.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.frtrace.api import Details


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from allranks.frtrace.api import add_arguments as add_frtrace_arguments

    add_frtrace_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from allranks.errors import ConfigurationError
    from allranks.frtrace.api import read_dir, transform_ft

    if args.transform_ft and not args.group_world_size:
        raise ConfigurationError("World size is required for transform_ft", hint="Add --group-world-size N.")
    details, _ = read_dir(args)
    if args.transform_ft:
        details = transform_ft(details, args.group_world_size)
    for line in _lines(args, details):
        print(line, file=sys.stderr)
    return 0


def _lines(args: argparse.Namespace, details: Details) -> Iterator[str]:
    from allranks.frtrace import database
    from allranks.frtrace.api import analyse_details

    yield from (f"{note.path}: {note.note}" for note in details.files if note.status == "damaged")
    filters = (frozenset(args.selected_ranks or ()), frozenset(args.pg_filters or ()))
    database.check_filters(details.traces, filters)
    if args.just_print_entries:
        yield from database.render_entries(details.traces, filters, args.verbose, args.print_stack_trace)
        return
    analysis = analyse_details(details)
    if analysis.job.missing_ranks and not args.allow_incomplete_ranks:
        yield f"Missing dump files from ranks {set(analysis.job.missing_ranks)}"
    yield from database.render_blocks(analysis, filters, args.mismatch_cap)
    if args.verbose:
        yield from database.render_database(database.build_database(analysis))
    if args.output:
        _write(args.output, database.build_database(analysis))
        yield f"Wrote {args.output}"


def _write(path: str, database: object) -> None:
    """Replaces the file in one step, as a pickle of (types, database)."""
    import pickle
    from pathlib import Path

    from allranks.frtrace.types import types
    from allranks.model.files import replacing

    with replacing(Path(path)) as draft, draft.open("wb") as file:
        pickle.dump((types, database), file)
