"""`allranks config check|show|schema`: checks a job file, prints it with defaults, or prints its schema."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from allranks.cli.parser import Actions, run_action
from allranks.cli.terminal import answer, harmless, use_color
from allranks.model.options import argument, option


@dataclass(frozen=True)
class FileFlags:
    file: str = argument("", "the job's YAML file", required=True)
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class CheckFlags(FileFlags):
    s3: bool = option(False, "also ask the object store for access")


@dataclass(frozen=True)
class SchemaFlags:
    """No options: the schema is always JSON."""


def main(args: argparse.Namespace) -> int:
    """0: the file is valid; 1: it has errors; 2: it cannot be read."""
    return run_action(ACTIONS, args)


def _schema(flags: SchemaFlags) -> int:
    from allranks.elastic import config

    print(json.dumps(config.json_schema(), indent=2))
    return 0


def _show(flags: FileFlags) -> int:
    from allranks.elastic.config import load_config
    from allranks.model.parsing import hide_secrets

    values = hide_secrets(load_config(flags.file).to_dict())
    if flags.json:
        print(json.dumps(values, indent=2))
        return 0
    import yaml

    print(harmless(yaml.safe_dump(values, sort_keys=False, allow_unicode=True)), end="")
    return 0


def _check(flags: CheckFlags) -> int:
    from allranks.elastic.config import ConfigProblem, validate_config

    result = validate_config(flags.file, validate_s3=flags.s3)
    kinds = {"error": result.errors, "warning": result.warnings}
    facts: dict[str, object] = {"schema": 1, "file": flags.file, "valid": result.valid}
    lines, counts = [], []
    for kind, found in kinds.items():
        problems = [one if isinstance(one, ConfigProblem) else ConfigProblem(one) for one in found]
        facts[f"{kind}s"] = [problem.to_dict() for problem in problems]
        shown = f"\x1b[{31 if kind == 'error' else 33}m{kind}\x1b[0m" if use_color() else kind
        for problem in problems:
            place = f"{flags.file}:{problem.line}:{problem.column}" if problem.line else flags.file
            path = f"{problem.path}: " if problem.path else ""
            lines.append(f"{place}: {shown}: {path}{problem.message}")
        counts += [f"{len(found)} {kind}{'s' * (len(found) != 1)}"] if found else []
    lines.append(f"{flags.file}: {', '.join(counts) or 'ok'}{'; usable' if counts and result.valid else ''}")
    answer(flags.json, facts, lines)
    return 0 if result.valid else 1


ACTIONS: Actions = {
    "check": ("report every problem of a job file, with line and column", CheckFlags, _check),
    "show": ("print the whole configuration, defaults filled in, secrets left out (***)", FileFlags, _show),
    "schema": ("print the JSON Schema of job files, for editors", SchemaFlags, _schema),
}
