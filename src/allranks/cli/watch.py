"""`allranks watch -- COMMAND` and `allranks watch --pid P`: a sidecar that collects stacks when a job stands still."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import InputError

if TYPE_CHECKING:
    from allranks.stacks.debug_config import DebugOptions
    from allranks.stacks.sidecar import Collection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command_words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the job to start and watch"
    )
    parser.add_argument(
        "--pid",
        type=int,
        action="append",
        default=[],
        metavar="P",
        help="watch this process and its children instead; repeatable",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with a `debug:` section (docs/stacks.md); flags win over it"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="where collections go (default {log_dir}/backtraces)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="collect once, S seconds after the start (default 600; 0 = never)",
    )
    parser.add_argument(
        "--no-progress",
        type=float,
        metavar="S",
        help="collect when the ranks stand still for S seconds, by their black boxes or, without, by the CPU and context switches of their main threads (default 60; 0 = never)",
    )
    parser.add_argument(
        "--no-output",
        type=float,
        metavar="S",
        help="collect when the ranks' log files stand still for S seconds",
    )
    parser.add_argument(
        "--overdue", type=float, metavar="S", help="collect when a collective is open for S seconds"
    )
    parser.add_argument(
        "--at",
        type=float,
        action="append",
        metavar="S",
        help="collect S seconds after the start, too; repeatable",
    )
    parser.add_argument("--rounds", type=int, help="looks in each collection (default 2)")
    parser.add_argument("--interval", type=float, metavar="S", help="seconds between two looks (default 5)")
    parser.add_argument(
        "--cuda-gdb", action="store_true", default=None, help="device kernels by cuda-gdb, too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line for each collection on stderr")
    parser.epilog = "kill -QUIT of this process collects at once. The exit code is the command's (128 + N after signal N)."


def main(args: argparse.Namespace) -> int:
    """Runs the sidecar; the exit code is that of the watched command."""
    from allranks.stacks.sidecar import Sidecar

    words = args.command_words[1:] if args.command_words[:1] == ["--"] else args.command_words
    if bool(words) == bool(args.pid):
        raise InputError(
            "give a command or --pid, one of them",
            hint="allranks watch -- torchrun --nproc-per-node 8 train.py",
        )
    options = _options(args)
    folder = Path(args.output) if args.output else options.folder()
    sidecar = Sidecar(options, folder, _say, _tell_json if args.json else _tell)
    if words:
        sidecar.start_command(words)
    else:
        sidecar.take(args.pid)
    return sidecar.run()


def _options(args: argparse.Namespace) -> DebugOptions:
    from allranks.stacks.debug_config import DebugOptions, read_debug_options

    base = read_debug_options(args.config) if args.config else DebugOptions()
    given = {
        "wait_s": args.wait, "no_progress_s": args.no_progress, "no_output_s": args.no_output,
        "collective_overdue_s": args.overdue, "at_s": tuple(args.at) if args.at else None,
        "rounds": args.rounds, "interval_s": args.interval, "cuda_gdb": args.cuda_gdb,
    }  # fmt: skip
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def _say(text: str) -> None:
    print(f"allranks watch: {text}", file=sys.stderr, flush=True)


def _tell(done: Collection) -> None:
    word = {True: "HUNG", False: "not hung", None: "unclear"}[done.report.hung]
    _say(f"{word}: {done.report.sentence}")
    _say(f"Wrote {done.folder}")


def _tell_json(done: Collection) -> None:
    row = {
        "reason": done.reason, "folder": str(done.folder), "hung": done.report.hung,
        "culprits": list(done.report.culprits), "sentence": done.report.sentence,
    }  # fmt: skip
    print(json.dumps(row), file=sys.stderr, flush=True)
