"""The `allranks` command: finds the sub-command's file, turns errors into exit codes. Only cli prints or exits.

Each sub-command is one file with `HELP` (one line, in COMMANDS here so that start-up imports nothing else),
`add_arguments(parser)` and `main(args) -> int`. Exit codes: 0 nothing wrong, 1 fault found, 2 could not run.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import allranks
from allranks.errors import AllranksError

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

#: Commands that read dumps with numpy and start in the blink of an eye.
READING = frozenset({"diagnose", "frtrace", "dump-info", "convert"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; never raises for what the user can fix."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    with _one_thread() if name in READING else nullcontext():
        return _main(words, name)


def _main(words: list[str], name: str | None) -> int:
    if words and name == words[0] and name not in COMMANDS:
        return _unknown(name)
    parser = make_parser(name, alone=bool(words) and words[0] == name)
    if name in COMMANDS:
        module = importlib.import_module(f"allranks.cli.{COMMANDS[name][0]}")
        if hasattr(module, "arrange_words"):  # `run` takes another command's flags as they are
            words = module.arrange_words(words)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 2
    module = importlib.import_module(f"allranks.cli.{COMMANDS[args.command][0]}")
    try:
        code: int = module.main(args)
        return code
    except AllranksError as error:
        print(f"allranks {args.command}: {error}", file=sys.stderr)
        if error.hint:
            print(error.hint, file=sys.stderr)
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets numpy be imported without the threads of its linear algebra: they spin for longer than a small diagnosis
    takes."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _unknown(name: str) -> int:
    """Says so, with the names that are near."""
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, 3, 0.6)
    print(f"allranks: there is no command {name!r}", file=sys.stderr)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`allranks --help` lists the commands."
    print(hint, file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """An argument that is not known is answered with the one that was meant."""

    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches

        known = [flag for action in self._actions for flag in action.option_strings]
        choices = [name for action in self._actions for name in action.choices or ()]
        wrong = re.search(r"unrecognized arguments: (\S+)|invalid choice: '([^']*)'", message)
        word = (wrong[1] or wrong[2]) if wrong else ""
        near = get_close_matches(word.split("=")[0], [*known, *map(str, choices)], 2, 0.6) if word else []
        tail = f"; did you mean {' or '.join(near)}?" if near else ""
        lines = [f"{self.prog}: {message}{tail}"]
        if example := next(iter(_examples(self.prog)), ""):
            lines.append(f"For example: {example.partition('  #')[0].rstrip()}")
        self.exit(2, "\n".join([*lines, f"`{self.prog} --help` explains it.\n"]))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown words are the sub-command's to explain: it knows the flags that were meant."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._inner(found).error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def _inner(self, found: argparse.Namespace) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                inner = action.choices.get(getattr(found, action.dest, None) or "")
                if isinstance(inner, _Parser):
                    return inner._inner(found)
        return self


class _Program(_Parser):
    """The program's own help: commands by what people come for."""

    def format_help(self) -> str:
        from allranks.cli.catalog import GROUPS

        lines = ["usage: allranks COMMAND …", "", str(self.description), ""]
        for heading, names in GROUPS.items():
            lines.append(f"{heading}:")
            lines += [f"  {name:<12}{COMMANDS[name][1]}" for name in names]
            lines.append("")
        lines += ["allranks COMMAND --help shows arguments and examples; allranks --version the version."]
        return "\n".join(lines) + "\n"


def make_parser(chosen: str | None, *, alone: bool) -> argparse.ArgumentParser:
    """The parser; only the chosen sub-command's module is imported for its arguments. `alone`: the command is the
    first word, so that nobody can ask for the list of the others."""
    parser = _Program(
        prog="allranks",
        description="Finds out why a distributed PyTorch job hangs, and keeps it training when machines fail.",
    )
    parser.add_argument("--version", action="version", version=f"allranks {allranks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    names = [chosen] if alone and chosen in COMMANDS else list(COMMANDS)
    for name in names:
        module, text = COMMANDS[name]
        sub = subparsers.add_parser(name, help=text, description=text)
        if name == chosen:
            importlib.import_module(f"allranks.cli.{module}").add_arguments(sub)
            _add_examples(sub)
    return parser


def _examples(prog: str) -> tuple[str, ...]:
    """Lines to copy, of a command or one of its actions."""
    from allranks.cli.catalog import EXAMPLES

    return EXAMPLES.get(prog.removeprefix("allranks "), ())


def _add_examples(parser: argparse.ArgumentParser) -> None:
    """Puts the examples of the catalog under the help of a command and of its actions."""
    if lines := _examples(parser.prog):
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        examples = "examples:\n" + "\n".join(f"  {line}" for line in lines)
        parser.epilog = f"{parser.epilog}\n\n{examples}" if parser.epilog else examples
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                _add_examples(inner)
