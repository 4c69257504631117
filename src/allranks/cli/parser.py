"""The parsers of the commands: examples in every help, and the argument that was meant where one is not known."""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from typing import Any, NoReturn

import allranks
from allranks.cli import COMMANDS, program_help
from allranks.cli.catalog import EXAMPLES


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
        """Paths may stand on both sides of a flag. Words that are not known are the sub-command's to explain: it
        knows the flags that were meant."""
        found, unknown = self.parse_known_args(args, namespace)
        inner = self._inner(found)
        lists = [action.dest for action in inner._positionals._group_actions if action.nargs in ("+", "*")]
        if lists and not any(word.startswith("-") for word in unknown):
            getattr(found, lists[-1]).extend(unknown)
        elif unknown:
            inner.error(f"unrecognized arguments: {' '.join(unknown)}")
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
        return program_help()


def make_parser(chosen: str | None, *, alone: bool) -> argparse.ArgumentParser:
    """The parser; only the chosen sub-command's module is imported for its arguments. `alone`: the command is the
    first word, so that nobody can ask for the list of the others."""
    parser = _Program(prog="allranks")
    parser.add_argument("--version", action="version", version=f"allranks {allranks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    names = [chosen] if alone and chosen in COMMANDS else list(COMMANDS)
    for name in names:
        module, text = COMMANDS[name]
        sub = subparsers.add_parser(name, help=text)
        if name == chosen:
            importlib.import_module(f"allranks.cli.{module}").add_arguments(sub)
            _add_examples(sub, text)
    return parser


def _examples(prog: str) -> tuple[str, ...]:
    """Lines to copy, of a command or one of its actions."""
    lines = EXAMPLES.get(prog.split()[1], ()) if " " in prog else ()
    return tuple(line for line in lines if line.startswith(prog))


def _add_examples(parser: argparse.ArgumentParser, about: str) -> None:
    """The help of a command and of its actions: what it does, the arguments, what the module adds, examples."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(f"{about[0].upper()}{about[1:]}.", 80)
    examples = "examples:\n" + "\n".join(f"  {line}" for line in _examples(parser.prog))
    parser.epilog = f"{parser.epilog}\n{examples}" if parser.epilog else examples
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                _add_examples(action.choices[choice.dest], choice.help or "")
