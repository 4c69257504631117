"""torchfrtrace's command line. Filters work with every kind of output, not only with -j."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of torchfrtrace, with the same names and defaults."""
    parser.add_argument(
        "trace_dir", nargs="?", help="folder with one dump per rank (any kind that allranks reads)"
    )
    parser.add_argument(
        "--selected-ranks", default=None, nargs="+", type=int, metavar="R", help="show only these ranks"
    )
    parser.add_argument(
        "--allow-incomplete-ranks", action="store_true", help="say nothing of ranks that have no dump"
    )
    parser.add_argument(
        "--pg-filters",
        default=None,
        nargs="+",
        metavar="NAME",
        help="show only these groups, by name or description",
    )
    parser.add_argument("-o", "--output", default=None, metavar="FILE", help="write the database as a pickle")
    parser.add_argument(
        "-p", "--prefix", default=None, help="file name in front of the rank; found out if not given"
    )
    parser.add_argument(
        "-j", "--just_print_entries", action="store_true", help="print all entries, a column per rank"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the tables of the database too")
    parser.add_argument("--print_stack_trace", action="store_true", help="with -j: print the stacks too")
    parser.add_argument(
        "--mismatch_cap", type=int, default=10, metavar="N", help="at most N findings per group (default 10)"
    )
    parser.add_argument(
        "--transform-ft", action="store_true", help="torchft: ranks of a replica → ranks of the job"
    )
    parser.add_argument(
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
