"""`allranks config check|show|schema`: is this job file right, what does it amount to, what may it hold."""

from __future__ import annotations

import argparse
import json

from allranks.cli.terminal import use_color


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser("check", help="report every problem of a job file, with line and column")
    check.add_argument("file", help="the job's YAML file")
    check.add_argument("--s3", action="store_true", help="also ask the object store for access")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    show = verbs.add_parser("show", help="print the whole configuration, defaults filled in")
    show.add_argument("file", help="the job's YAML file")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    schema = verbs.add_parser("schema", help="print the JSON Schema of job files, for editors")
    schema.add_argument("--json", action="store_true", help="(the schema is always JSON)")


def main(args: argparse.Namespace) -> int:
    """0: the file is right; 1: it has errors; 2: it cannot be read."""
    if args.verb == "check":
        return _check(args)
    if args.verb == "show":
        return _show(args)
    from allranks.elastic import config

    print(json.dumps(config.json_schema(), indent=2))
    return 0


def _check(args: argparse.Namespace) -> int:
    from allranks.elastic.config import ConfigProblem, validate_config

    result = validate_config(args.file, validate_s3=args.s3)
    if args.json:
        found = {"errors": list(map(_facts, result.errors)), "warnings": list(map(_facts, result.warnings))}
        print(json.dumps({"schema": 1, "file": args.file, "valid": result.valid, **found}))
        return 0 if result.valid else 1
    for kind, problems in (("error", result.errors), ("warning", result.warnings)):
        for problem in problems:
            place = args.file
            message = str(problem)
            if isinstance(problem, ConfigProblem):
                place = f"{args.file}:{problem.line}:{problem.column}" if problem.line else args.file
                message = f"{problem.path}: {problem.message}" if problem.path else problem.message
            print(f"{place}: {_coloured(kind)}: {message}")
    print(_verdict(args.file, len(result.errors), len(result.warnings)))
    return 0 if result.valid else 1


def _show(args: argparse.Namespace) -> int:
    from allranks.elastic.config import load_config

    values = load_config(args.file).model_dump(mode="json")
    if args.json:
        print(json.dumps(values, indent=2))
        return 0
    import yaml

    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    return 0


def _facts(problem: str) -> dict[str, object]:
    """Of a ConfigProblem, its place too."""
    names = ("path", "line", "column")
    found = {"message": getattr(problem, "message", str(problem)), "path": "", "line": None, "column": None}
    return found | {name: getattr(problem, name) for name in names if hasattr(problem, name)}


def _coloured(kind: str) -> str:
    return f"\x1b[{31 if kind == 'error' else 33}m{kind}\x1b[0m" if use_color() else kind


def _verdict(file: str, errors: int, warnings: int) -> str:
    if not errors and not warnings:
        return f"{file}: ok"
    parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
    return f"{file}: {', '.join(parts)}{'' if errors else '; usable'}"
