"""torchfrtrace's command line and its two steps, read_dir and build_db, with its arguments and return values.

Filters work with every kind of output, not only with -j.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.diagnose.align import transform_ft as move_ranks
from allranks.errors import InputError
from allranks.frtrace.database import build_database
from allranks.frtrace.events import Analysis, analyse
from allranks.frtrace.types import Database
from allranks.load import LoadOptions, load_paths
from allranks.load.reading import Reader
from allranks.load.torch_dump import read_dump
from allranks.model.diagnosis import FileNote
from allranks.model.torch_dump import to_torch_dump
from allranks.model.trace import RankTrace


@dataclass(frozen=True)
class Details(Mapping[str, dict[str, Any]]):
    """What read_dir found: file name → {rank, host_name, version, pg_config, entries}, made when asked for."""

    traces: tuple[RankTrace, ...]
    files: tuple[FileNote, ...] = ()
    now_ns: int = 0

    def __getitem__(self, name: str) -> dict[str, Any]:
        for trace in self.traces:
            if trace.path == name:
                dump = to_torch_dump(trace)
                host = trace.header.host or f"host_rank{trace.header.rank}"
                return {**dump, "rank": trace.header.rank, "host_name": host, "version": _version(trace)}
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (trace.path for trace in self.traces)

    def __len__(self) -> int:
        return len(self.traces)


def _version(trace: RankTrace) -> str:
    last = trace.kind.rpartition(" ")[2]
    return last if "." in last else "2.10"


def read_dir(args: argparse.Namespace) -> tuple[Details, str]:
    """(details, version) of all dumps under args.trace_dir. Raises InputError when there are none."""
    import time

    if not args.trace_dir:
        raise InputError("Trace directory trace_dir is required")
    result = load_paths([args.trace_dir], LoadOptions(prefix=args.prefix))
    details = Details(tuple(result.traces), tuple(result.files), time.time_ns())
    return details, _version(details.traces[0]) if details.traces else "2.10"


def transform_ft(details: Mapping[str, dict[str, Any]], group_world_size: int) -> Details:
    """torchft numbers the ranks of each replica from 0; moves them to where they are in the job."""
    own = as_details(details)
    return replace(own, traces=tuple(move_ranks(trace, group_world_size) for trace in own.traces))


def build_db(details: Mapping[str, dict[str, Any]], args: argparse.Namespace, version: str) -> Database:
    """The database of a job. `details` may also be a plain dictionary, as torch's read_dir returns it."""
    del args, version  # filters only concern what is shown; all versions are read alike
    return build_database(analyse_details(as_details(details)))


def analyse_details(details: Details) -> Analysis:
    return analyse(details.traces, details.files, details.now_ns)


def as_details(details: Mapping[str, dict[str, Any]]) -> Details:
    if isinstance(details, Details):
        return details
    reader = Reader(LoadOptions())
    raws = [
        (name, dump, read_dump(dict(dump), reader.tables, reader.dumps.members, "pickle"))
        for name, dump in details.items()
    ]
    tables = reader.tables.freeze()
    traces = []
    for name, dump, raw in raws:
        raw.header = replace(raw.header, rank=int(dump["rank"]))
        traces.append(raw.as_trace(*tables, name))
    return Details(tuple(sorted(traces, key=lambda trace: trace.header.rank or 0)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of torchfrtrace, with the same names and defaults."""
    add = parser.add_argument
    add("trace_dir", nargs="?", help="folder with one dump per rank (any kind that allranks reads)")
    add("--selected-ranks", default=None, nargs="+", type=int, metavar="R", help="show only these ranks")
    add("--allow-incomplete-ranks", action="store_true", help="say nothing of ranks that have no dump")
    add(
        "--pg-filters",
        default=None,
        nargs="+",
        metavar="NAME",
        help="show only these groups, by name or description",
    )
    add("-o", "--output", default=None, metavar="FILE", help="write the database as a pickle")
    add("-p", "--prefix", default=None, help="file name in front of the rank; found out if not given")
    add("-j", "--just_print_entries", action="store_true", help="print all entries, a column per rank")
    add("-v", "--verbose", action="store_true", help="print the tables of the database too")
    add("--print_stack_trace", action="store_true", help="with -j: print the stacks too")
    add("--mismatch_cap", type=int, default=10, metavar="N", help="at most N findings per group (default 10)")
    add("--transform-ft", action="store_true", help="torchft: ranks of a replica → ranks of the job")
    add(
        "--group-world-size",
        type=int,
        default=None,
        metavar="N",
        help="ranks per replica, for --transform-ft",
    )


class JobConfig:
    """Parses torchfrtrace's arguments: `JobConfig().parse_args([...])`."""

    def __init__(self) -> None:
        self.parser = argparse.ArgumentParser(prog="frtrace", description="Analyses flight recorder dumps.")
        add_arguments(self.parser)

    def parse_args(self, args: Sequence[str] | None) -> argparse.Namespace:
        """The parsed arguments; every combination of them is allowed."""
        return self.parser.parse_args(args)
