"""The parsers of the commands, with examples in every help, and suggestions for unknown arguments.

`add_flags` makes the flags of a command from an options class (allranks.model.options): names, kinds, bounds, help, defaults. A
flag that is not given is None, so that a job file or an environment variable comes before the default.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import allranks
from allranks.cli import COMMANDS, program_help
from allranks.errors import ConfigurationError, InputError
from allranks.model.options import Meaning, default_of, meanings, missed

#: command -> examples; the help of an action shows only its own.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "diagnose": (
        "allranks diagnose dumps/                     # the rank, the line, the cause",
        "allranks diagnose dumps/ --html report.html  # one page, with a timeline",
        "allranks diagnose dumps/ --perfetto t.pftrace.gz",
        "allranks diagnose dumps/ --json | jq .verdict.sentence",
    ),
    "dump": (
        "allranks dump --list                      # jobs recorded on this machine",
        "allranks dump                             # of the job that runs here",
        "allranks dump --job 4711 --format pickle  # PyTorch's format, for torchfrtrace",
        "allranks dump --pid 12345 -o now          # one rank",
        "allranks dump --job 4711 --all-nodes      # of every node of the job",
        "allranks dump /mnt/scratch/boxes --format json --active",
        "allranks dump dumps/ --format pickle -o pickles/  # dumps into another format",
    ),
    "replay": (
        "allranks replay INCIDENT -o hang.py      # then: python hang.py",
        "allranks replay dumps/ -o hang.py --run  # and compare the verdicts",
    ),
    "stacks": (
        "allranks stacks                           # every rank on this node",
        "allranks stacks --pid 4711 --html stacks.html",
        "allranks stacks --all-nodes -o captured/  # under `allranks run` or Slurm",
    ),
    "run": (
        "allranks run --standalone --nproc-per-node 8 train.py  # any script",
        "allranks run --replicas 4 train_ddp.py                 # needs a Manager",
        "allranks run --replicas 2 --nproc-per-replica 4 train_hsdp.py",
        "allranks run --config job.yaml train.py                # all from one file",
    ),
    "record": (
        "allranks record -- python -m verl.trainer.main_ppo trainer.nnodes=1",
        'eval "$(allranks record --env)"    # then start the job in this shell',
        "allranks record -- allranks watch -- python train_grpo.py",
    ),
    "lighthouse": (
        "allranks lighthouse --bind 0.0.0.0:29510 --min-replicas 2",
        "allranks lighthouse status 127.0.0.1:29510 --json",
        "allranks lighthouse collect my-job    # by the name of a job on this node",
        "allranks lighthouse evict my-job replica-3 --reason 'bad GPU'",
        "allranks lighthouse readmit my-job replica-3",
    ),
    "watch": (
        "allranks watch -- torchrun --nproc-per-node 8 train.py",
        "allranks watch --pid 4711 --no-progress 120 -o captured/",
        "allranks watch --tree -- python train_grpo.py  # trainer, engines, servers",
    ),
    "slurm": (
        "allranks slurm submit --nodes 4 --gpus-per-node 8 train.py --lr 1e-4",
        "allranks slurm wrap train.py             # inside sbatch or salloc",
        "allranks slurm collect 12345 -o stacks/  # stacks of every node of a job",
    ),
    "drill": (
        "allranks drill --plan plan.yaml -- allranks run --replicas 4 train_ddp.py",
        "allranks drill --plan plan.yaml --ranks 2 -- train.py",
    ),
    "status": ("allranks status", "allranks status my-job --json"),
    "top": ("allranks top         # q quits", "allranks top my-job --interval 0.5"),
    "page": ("allranks page        # of the newest job on this node", "allranks page my-job --no-browser"),
    "goodput": (
        "allranks goodput my-job                   # across restarts and requeues",
        "allranks goodput my-job --since 7d --window 1d --gpu-hour 2.5",
        "allranks goodput allranks-incidents/ --html goodput.html",
    ),
    "slow": ("allranks slow my-job", "allranks slow dumps/ --json"),
    "advise": ("allranks advise my-job", "allranks advise allranks-incidents/ --since 7d --json"),
    "history": (
        "allranks history                          # nodes that fail again and again",
        "allranks history --slurm-exclude          # for sbatch --exclude",
        "allranks history --node node17 --week --json",
    ),
    "demo": ("allranks demo",),
    "frtrace": ("allranks frtrace dumps/", "allranks frtrace dumps/ -j --selected-ranks 0 1"),
    "doctor": (
        "allranks doctor                # before the job",
        "allranks doctor explain logs/  # after it",
        "allranks doctor compare node1.json node2.json",
    ),
    "checkpoint": (
        "allranks checkpoint ls /nvme/run-7",
        "allranks checkpoint show /nvme/run-7 --tensors",
        "allranks checkpoint verify /nvme/run-7/checkpoint_step_00000500",
        "allranks checkpoint copy /nvme/run-7 s3://bucket/run-7",
        "allranks checkpoint verify s3://bucket/run-7",
        "allranks checkpoint prune /nvme/run-7 --keep 3",
        "allranks checkpoint export /nvme/run-7 model.safetensors",
        "allranks checkpoint import model.safetensors /nvme/run-8 --step 0",
        "allranks checkpoint set-aside /nvme/run-7",
    ),
    "mcp": (
        "claude mcp add allranks -- allranks mcp  # or another MCP client",
        "allranks mcp --skill > .claude/skills/allranks/SKILL.md",
    ),
    "etcd": ("allranks etcd start", "allranks etcd status --json"),
    "config": (
        "allranks config check job.yaml",
        "allranks config show job.yaml",
        "allranks config schema > job.schema.json",
    ),
    "index": (
        "allranks index build a.jsonl b.jsonl -o tokens.idx",
        "allranks index show tokens.idx",
        "allranks index verify tokens.idx",
    ),
    "completion": (
        "allranks completion bash > ~/.local/share/bash-completion/completions/allranks",
        "allranks completion zsh > ~/.zfunc/_allranks",
        "allranks completion fish > ~/.config/fish/completions/allranks.fish",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Suggests similar arguments for an unknown one."""

    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches

        known = [flag for action in self._actions for flag in action.option_strings]
        choices = [name for action in self._actions for name in action.choices or ()]
        wrong = re.search(r"unrecognized arguments: (\S+)|invalid choice: '([^']*)'", message)
        word = (wrong[1] or wrong[2]) if wrong else ""
        missing = re.match(r"the following arguments are required: (\S+)$", message)
        if (
            missing
            and choices
            and not any(action.option_strings and action.choices for action in self._actions)
        ):
            message = f"give one of {', '.join(map(str, choices))}"
        number = re.match(r"argument (\S+): invalid (int|float) value: (.*)", message)
        if number:
            flag = number[1].split("/")[-1].rstrip(":")
            message = (
                f"{flag} takes {'a number' if number[2] == 'float' else 'a whole number'}, not {number[3]}"
            )
        near = get_close_matches(word.split("=")[0], [*known, *map(str, choices)], 2, 0.6) if word else []
        tail = f"; did you mean {' or '.join(near)}?" if near else ""
        lines = [f"{self.prog}: {message}{tail}"]
        if example := next(iter(_examples(self.prog)), ""):
            lines.append(f"For example: {example.partition('  #')[0].rstrip()}")
        self.exit(2, "\n".join([*lines, f"`{self.prog} --help` explains it.\n"]))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accepts paths on both sides of a flag. The sub-command's parser reports unknown words, since it has its flags."""
        found, unknown = self.parse_known_args(args, namespace)
        inner = self._inner(found)
        lists = [action.dest for action in inner._positionals._group_actions if action.nargs in ("+", "*")]
        if lists and not any(word.startswith("-") for word in unknown if word != "-"):
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
    """Has the program's own help: commands by purpose."""

    def format_help(self) -> str:
        return program_help()


def make_parser(chosen: str | None, *, alone: bool) -> argparse.ArgumentParser:
    """The parser. Only the module of the chosen sub-command is imported. `alone`: the command is the first word, so that the
    other commands are not needed."""
    parser = _Program(prog="allranks")
    parser.add_argument("--version", action="version", version=f"allranks {allranks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    names = [chosen] if alone and chosen in COMMANDS else list(COMMANDS)
    for name in names:
        module, text = COMMANDS[name]
        sub = subparsers.add_parser(name, help=text)
        if name == chosen:
            declare(sub, importlib.import_module(f"allranks.cli.{module}"))
            _add_examples(sub, text)
    return parser


def declare(parser: argparse.ArgumentParser, module: Any) -> None:
    """Adds the arguments of a command from its module: ACTIONS (name -> help, options class, function), or FLAGS (options classes or
    objects, each with optional names), EPILOG and USAGE. A module with `arrange_words` takes the words of another command."""
    parser.epilog, parser.usage = getattr(module, "EPILOG", None), getattr(module, "USAGE", None)
    for part in getattr(module, "FLAGS", ()):
        add_flags(parser, *(part if isinstance(part, tuple) else (part,)))
    if hasattr(module, "arrange_words"):
        parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    if actions := getattr(module, "ACTIONS", None):
        inner = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for name, (text, flags, _) in actions.items():
            add_flags(inner.add_parser(name, help=text), flags)


#: name -> (help, options class, function)
Actions = Mapping[str, tuple[str, type, Callable[[Any], int]]]


def run_action(actions: Actions, args: argparse.Namespace) -> int:
    """Runs the chosen action with its options."""
    _, flags, run = actions[args.action]
    return run(read_flags(flags, args))


def words_after(args: argparse.Namespace) -> list[str]:
    """The words of another command, without the leading dashes."""
    words: list[str] = args.words
    return words[1:] if words[:1] == ["--"] else words


def with_heading(options: type) -> tuple[type, tuple[str, ...]]:
    """The options of a class that have a heading in the help."""
    return options, tuple(one.name for one, meaning in meanings(options) if meaning.group)


def _examples(prog: str) -> tuple[str, ...]:
    """The examples of a command or one of its actions."""
    lines = EXAMPLES.get(prog.split()[1], ()) if " " in prog else ()
    return tuple(line for line in lines if prog in line)


def _add_examples(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds description, epilog and examples to the help of a command and of its actions."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(f"{about[0].upper()}{about[1:]}.", 80)
    examples = "examples:\n" + "\n".join(f"  {line}" for line in _examples(parser.prog))
    parser.epilog = f"{parser.epilog}\n{examples}" if parser.epilog else examples
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                _add_examples(action.choices[choice.dest], choice.help or "")


Options = TypeVar("Options")


def add_flags(parser: argparse.ArgumentParser, options: Any, names: Collection[str] = ()) -> None:
    """Adds a flag for every option of a class, or for those with these names, under their headings. An object instead of a class
    sets the defaults."""
    kinds = typing.get_type_hints(options if isinstance(options, type) else type(options))
    groups: dict[str, argparse._ArgumentGroup | argparse.ArgumentParser] = {
        **{group.title or "": group for group in parser._action_groups},
        "": parser,
    }
    for one, meaning in meanings(options):
        if names and one.name not in names:
            continue
        if meaning.group not in groups:
            groups[meaning.group] = parser.add_argument_group(meaning.group)
        spellings = flags_of(one.name, meaning)
        default = default_of(one) if isinstance(options, type) else getattr(options, one.name)
        settings = _settings(default, meaning, kinds[one.name])
        if meaning.argument and "choices" not in settings:
            settings["metavar"] = meaning.metavar or one.name.upper()
        if meaning.argument:
            parser.add_argument(one.name, **settings)
        else:
            groups[meaning.group].add_argument(*spellings, dest=one.name, default=None, **settings)


def flags_of(name: str, meaning: Meaning) -> tuple[str, ...]:
    """The spellings of an option on the command line."""
    if meaning.ms:
        name = f"{name.removesuffix('_s')}_ms"
        return (f"--{name.replace('_', '-')}", f"--{name}")
    return meaning.flags or (f"--{name.replace('_', '-')}",)


def takes_value(options: type) -> dict[str, bool]:
    """Every spelling of every flag, and whether a value follows it."""
    kinds = typing.get_type_hints(options)
    found = {}
    for one, meaning in meanings(options):
        for flag in () if meaning.argument else flags_of(one.name, meaning):
            found[flag] = bool not in _members(kinds[one.name])
            if kinds[one.name] == bool | None:
                found[flag.replace("--", "--no-", 1)] = False
    return found


def read_flags(
    options: type[Options], args: argparse.Namespace, base: Options | None = None, **more: Any
) -> Options:
    """The options: from `more`, else given flags, else `base` or the environment, else the defaults."""
    found = {} if base is not None else from_variables(options, os.environ)
    for one, meaning in meanings(options):
        value = getattr(args, one.name, None)
        if value is not None:
            found[one.name] = tuple(value) if isinstance(value, list) else value
            if isinstance(value, int | float) and (bound := missed(value, meaning)):
                flag = next(flag for flag in flags_of(one.name, meaning) if flag.startswith("--"))
                given = f"{value * 1000:g}" if meaning.ms else value
                raise ConfigurationError(f"{flag} ({given}) must {bound}", hint=meaning.help)
    return replace(options() if base is None else base, **{**found, **more})  # type: ignore[type-var]


def from_variables(options: type, environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that are set by environment variables."""
    kinds = typing.get_type_hints(options)
    found = {}
    for one, meaning in meanings(options):
        text = environment.get(meaning.environment, "") if meaning.environment else ""
        kind = _kind(kinds[one.name])
        if text:
            try:
                found[one.name] = kind(text)
            except ValueError:
                problem = f"{meaning.environment}={text!r} is not a valid {kind.__name__}"
                raise InputError(problem, hint=meaning.help) from None
    return found


def _settings(default: Any, meaning: Meaning, hint: Any) -> dict[str, Any]:
    """The settings of a flag for argparse."""
    text = meaning.help + (f", or ${meaning.environment}" if meaning.environment else "")
    if bool in _members(hint):
        if default is True:
            return {"action": "store_false", "help": f"do not {text}"}
        optional = default is None and not meaning.flags
        return {"action": argparse.BooleanOptionalAction if optional else "store_true", "help": text}
    kind = _seconds if meaning.ms else _kind(hint)
    if default not in (None, "", ()) and not meaning.required:
        shown = default * 1000 if meaning.ms else default
        text += f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"
    found: dict[str, Any] = {"type": kind, "help": text.replace("%", "%%")}
    if meaning.choices:
        found["choices"] = meaning.choices
    else:
        found["metavar"] = (
            meaning.metavar or ("" if meaning.ms else _UNITS.get(meaning.unit)) or _METAVARS.get(kind, "TEXT")
        )
    many = any(typing.get_origin(member) is tuple for member in _members(hint))
    if meaning.argument and not (meaning.required and not many):
        found["nargs"] = meaning.nargs or ("?" if not many else "+" if meaning.required else "*")
    elif many:
        found |= {"nargs": meaning.nargs} if meaning.nargs else {"action": "append"}
    if meaning.required and not meaning.argument:
        found["required"] = True
    return found


def _seconds(milliseconds: str) -> float:
    return float(milliseconds) / 1000


_UNITS = {"s": "S", "MB": "MB"}
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", _seconds: "MS"}


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union without None; a plain type alone."""
    whole = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(kind for kind in whole if kind is not type(None))


def _kind(hint: Any) -> Callable[[str], Any]:
    """The type that converts the text of one value."""
    kind = _members(hint)[-1]
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind if kind in (int, float, Path) else str
