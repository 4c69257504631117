"""`allranks config check|show|schema`: is this job file right, what does it amount to, what may it hold."""

from __future__ import annotations

import argparse
import json

from allranks.cli.terminal import answer, harmless, use_color


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser("check", help="report every problem of a job file, with line and column")
    check.add_argument("file", help="the job's YAML file")
    check.add_argument("--s3", action="store_true", help="also ask the object store for access")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    show = verbs.add_parser(
        "show", help="print the whole configuration, defaults filled in, secrets left out (***)"
    )
    show.add_argument("file", help="the job's YAML file")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    schema = verbs.add_parser("schema", help="print the JSON Schema of job files, for editors")
    schema.add_argument("--json", action="store_true", help="(the schema is always JSON)")


def main(args: argparse.Namespace) -> int:
    """0: the file is right; 1: it has errors; 2: it cannot be read."""
    if args.verb == "check":
        return _check(args)
    from allranks.elastic import config
    from allranks.model.parsing import hide_secrets

    if args.verb == "schema":
        print(json.dumps(config.json_schema(), indent=2))
        return 0
    values = hide_secrets(config.load_config(args.file).to_dict())
    if args.json:
        print(json.dumps(values, indent=2))
        return 0
    import yaml

    print(harmless(yaml.safe_dump(values, sort_keys=False, allow_unicode=True)), end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    from allranks.elastic.config import ConfigProblem, validate_config

    result = validate_config(args.file, validate_s3=args.s3)
    kinds = {"error": result.errors, "warning": result.warnings}
    facts: dict[str, object] = {"schema": 1, "file": args.file, "valid": result.valid}
    lines, counts = [], []
    for kind, found in kinds.items():
        problems = [one if isinstance(one, ConfigProblem) else ConfigProblem(one) for one in found]
        facts[f"{kind}s"] = [problem.to_dict() for problem in problems]
        shown = f"\x1b[{31 if kind == 'error' else 33}m{kind}\x1b[0m" if use_color() else kind
        for problem in problems:
            place = f"{args.file}:{problem.line}:{problem.column}" if problem.line else args.file
            path = f"{problem.path}: " if problem.path else ""
            lines.append(f"{place}: {shown}: {path}{problem.message}")
        counts += [f"{len(found)} {kind}{'s' * (len(found) != 1)}"] if found else []
    lines.append(f"{args.file}: {', '.join(counts) or 'ok'}{'; usable' if counts and result.valid else ''}")
    answer(args.json, facts, lines)
    return 0 if result.valid else 1
