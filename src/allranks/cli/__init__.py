"""The `allranks` command: finds the sub-command's file, turns errors into exit codes. Only cli prints or exits.

Each sub-command is one file with `HELP` (one line, in COMMANDS here so that start-up imports nothing else),
`add_arguments(parser)` and `main(args) -> int`. Exit codes: 0 nothing wrong, 1 fault found, 2 could not run.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

TYPE_CHECKING = False  # as type checkers know it, without the cost of importing typing
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

#: sub-command -> (module under allranks.cli, one-line help). Order is the order of `--help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "diagnose": (
        "diagnose",
        "why the job hangs: the guilty rank, the line and the cause, from dumps of any origin",
    ),
    "run": ("run", "start a job: torchrun's command line, recorded, watched, kept alive"),
    "lighthouse": (
        "lighthouse",
        "run the lighthouse of a job: which replicas are alive and train together; or query one",
    ),
    "dump": ("dump", "copy a job's black boxes while it runs: as they are, or PyTorch's dump formats"),
    "stacks": ("stacks", "show what every rank is doing, without disturbing it, and what it is stuck on"),
    "watch": ("watch", "run or join a job as a sidecar and collect stacks when it stalls"),
    "status": ("status", "ranks, steps, who waits for whom, incidents of a running job"),
    "top": ("status", "the same, live"),
    "page": ("page", "open the page of a running job in the browser"),
    "demo": ("demo", "the whole story on CPU, in about a minute"),
    "drill": ("drill", "run a job under a fault plan and report what was noticed"),
    "frtrace": ("frtrace", "torchfrtrace's command line and output, without its crashes"),
    "dump-info": ("dump_info", "show what a dump or black box is and what it holds"),
    "convert": ("convert", "turn dumps and black boxes into one another: box, pickle, json"),
    "doctor": ("doctor", "check a node before the job, or explain logs after it"),
    "checkpoint": (
        "checkpoint",
        "list, show, verify, copy, prune, export checkpoints on disks and in object stores",
    ),
    "slurm": ("slurm", "submit or start a job under Slurm, or collect its stacks"),
    "etcd": ("etcd", "start, check or stop an etcd on this machine"),
    "config": ("config", "check, show or describe a job's configuration file"),
    "index": ("index", "build, show or verify a token index"),
    "completion": ("completion", "print a completion script for bash, zsh or fish"),
}

#: Commands that read dumps with numpy; their start-up time counts.
READING = frozenset({"diagnose", "frtrace", "dump-info", "convert"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; never raises for what the user can fix."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    if not words or words in (["-h"], ["--help"]):  # needs no parser
        print(program_help(), end="")
        return 0 if words else 2
    return _with_one_thread(words, name) if name in READING else _main(words, name)


def _main(words: list[str], name: str | None) -> int:
    from allranks.errors import AllranksError

    if words and name == words[0] and name not in COMMANDS:
        return _unknown(name)
    parser = make_parser(name, alone=bool(words) and words[0] == name)
    if name in COMMANDS:
        module = importlib.import_module(f"allranks.cli.{COMMANDS[name][0]}")
        if hasattr(module, "arrange_words"):  # `run` takes another command's flags as they are
            words = module.arrange_words(words)
    args = parser.parse_args(words)
    if args.command is None:
        print(program_help(), end="")
        return 2
    module = importlib.import_module(f"allranks.cli.{COMMANDS[args.command][0]}")
    try:
        code: int = module.main(args)
        return code
    except AllranksError as error:
        from allranks.model.parsing import printable

        for line in f"allranks {args.command}: {error}\n{error.hint}".rstrip().split("\n"):
            print(printable(line), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"allranks {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run() -> None:
    """Console entry point. A reading command never collects garbage and ends without taking apart what it has read:
    with the rings of a thousand ranks in memory both take longer than the diagnosis."""
    if sys.argv[1:2] == [] or sys.argv[1] not in READING:
        sys.exit(main())
    gc.disable()
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = 141
    os._exit(code)


def _with_one_thread(words: list[str], name: str | None) -> int:
    """Lets numpy be imported without the threads of its linear algebra: they spin for longer than a small diagnosis
    takes."""
    variable = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(variable)
    os.environ[variable] = before or "1"
    try:
        return _main(words, name)
    finally:
        if before is None:
            del os.environ[variable]


def program_help() -> str:
    """What `allranks --help` prints: commands by what people come for."""
    from allranks.cli.catalog import GROUPS

    about = "Finds out why a distributed PyTorch job hangs, and keeps it training when machines fail."
    lines = ["usage: allranks COMMAND …", "", about, ""]
    for heading, names in GROUPS.items():
        lines += [f"{heading}:", *(f"  {name:<12}{COMMANDS[name][1]}" for name in names), ""]
    lines += ["allranks COMMAND --help shows arguments and examples; allranks --version the version."]
    return "\n".join(lines) + "\n"


def make_parser(chosen: str | None, *, alone: bool) -> argparse.ArgumentParser:
    """The parser of the chosen command, or of all; see allranks.cli.parser."""
    from allranks.cli import parser

    return parser.make_parser(chosen, alone=alone)


def _unknown(name: str) -> int:
    """Says so, with the names that are near."""
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, 3, 0.6)
    print(f"allranks: there is no command {name!r}", file=sys.stderr)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`allranks --help` lists the commands."
    print(hint, file=sys.stderr)
    return 2
