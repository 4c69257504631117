"""`allranks doctor`: checks a node before a job, compares nodes (`compare`), and finds the first cause in logs (`explain`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer, fold, use_color
from allranks.doctor import Check, DoctorOptions, run_checks
from allranks.errors import InputError
from allranks.model.formatting import count
from allranks.model.options import argument, option
from allranks.model.parsing import printable, without_secrets

if TYPE_CHECKING:
    from allranks.doctor.explain import Explanation, Match

_MARKS = {
    "ok": ("ok", "32"),
    "warning": ("warning", "33"),
    "problem": ("PROBLEM", "31"),
}


@dataclass(frozen=True)
class DoctorFlags:
    what: tuple[str, ...] = argument(
        (),
        "explain LOG…: find the first cause in logs (files, folders, - for standard input); compare ANSWER…: "
        "show differences between nodes, from their `doctor --json`",
        metavar="explain LOG | compare ANSWER",
    )
    config: Path | None = option(None, "also check the folders and services of this job file", metavar="FILE")
    json: bool = option(False, "print one JSON object")


FLAGS = (DoctorFlags, DoctorOptions)


def main(args: argparse.Namespace) -> int:
    """0 nothing wrong, 1 problem or cause found, 2 could not run."""
    commands = {"explain": _explain, "compare": _compare}
    flags = read_flags(DoctorFlags, args)
    if flags.what and flags.what[0] not in commands:
        raise InputError(
            f"unknown word {flags.what[0]!r}",
            hint="Use `allranks doctor`, `allranks doctor explain LOG…` or `allranks doctor compare ANSWER…`.",
        )
    return commands[flags.what[0]](flags) if flags.what else _check(flags, read_flags(DoctorOptions, args))


def _check(flags: DoctorFlags, options: DoctorOptions) -> int:
    if flags.config:
        options = _with_config(options, flags.config)
    from allranks.doctor.nodes import read_facts
    from allranks.doctor.services import clock_offset_s

    return _report(run_checks(options), flags.json, read_facts(clock_offset_s(options)) if flags.json else {})


def _compare(flags: DoctorFlags) -> int:
    from allranks.doctor.nodes import compare, read_files

    if len(flags.what) < 2:
        hint = "srun -N 4 allranks doctor --json | allranks doctor compare -"
        raise InputError("no answers were given", hint=hint)
    return _report(compare(read_files(flags.what[1:], sys.stdin)), flags.json)


def _report(found: list[Check], as_json: bool, facts: Mapping[str, object] | None = None) -> int:
    hide = without_secrets
    found = [replace(one, name=hide(one.name), detail=hide(one.detail), hint=hide(one.hint)) for one in found]
    problems = sum(check.status == "problem" for check in found)
    more = {} if facts is None else {"facts": facts}
    shape = {"schema": 1, "problems": problems, "checks": [asdict(check) for check in found], **more}
    answer(as_json, shape, render_checks(found, colour=use_color()))
    return 1 if problems else 0


def _with_config(options: DoctorOptions, path: Path) -> DoctorOptions:
    """Adds the folders, the bucket and the etcd of a job file."""
    from allranks.elastic.config import load_config

    config = load_config(path)
    checkpoint, elastic = config.checkpoint, config.elastic
    changes: dict[str, object] = {}
    if checkpoint.nvme_path:
        changes["checkpoint_folders"] = (*options.checkpoint_folders, str(checkpoint.nvme_path))
    if checkpoint.s3_bucket:
        changes["s3"] = f"{checkpoint.s3_bucket}/{checkpoint.s3_prefix}".rstrip("/")
    if checkpoint.s3_endpoint_url and not options.s3_endpoint:
        changes["s3_endpoint"] = str(checkpoint.s3_endpoint_url)
    if elastic.rdzv_backend.startswith("etcd"):
        changes["etcd"] = elastic.rdzv_endpoint
    return replace(options, **changes)  # type: ignore[arg-type]


def render_checks(found: list[Check], colour: bool) -> Iterator[str]:
    """The table, with problems last, just above the prompt."""
    order = {"ok": 1, "warning": 2, "problem": 3}
    width = max((len(check.name) for check in found), default=0)
    skipped = [
        f"{check.name} ({check.detail.removeprefix('none given (').removesuffix(')')})"
        for check in found
        if check.status == "skipped"
    ]
    if skipped:
        yield from fold(f"not checked: {', '.join(skipped)}")
    for check in sorted((one for one in found if one.status in order), key=lambda c: order[c.status]):
        mark, code = _MARKS[check.status]
        shown = f"\x1b[{code}m{mark:>8}\x1b[0m" if colour else f"{mark:>8}"
        yield f"{shown}  {check.name:<{width}}  {check.detail}"
        if check.hint and check.status in ("warning", "problem"):
            yield f"{'':>8}  {'':<{width}}  → {check.hint}"
    number = Counter(check.status for check in found)
    yield (
        f"{number['problem']} problem{'s' * (number['problem'] != 1)}, "
        f"{number['warning']} warning{'s' * (number['warning'] != 1)}, {number['ok']} ok, {number['skipped']} skipped"
    )


def _explain(flags: DoctorFlags) -> int:
    from allranks.doctor.explain import explain, parse_line, read_lines

    paths = flags.what[1:]
    if not paths:
        hint = "allranks doctor explain LOG… (files, folders, or - for standard input)"
        raise InputError("no log was given", hint=hint)
    if paths == ("-",):
        lines = (parse_line("-", number, text.rstrip("\n")) for number, text in enumerate(sys.stdin, 1))
        found = explain(lines)
    else:
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            raise InputError(f"no such file or folder: {', '.join(missing)}")
        unreadable: list[tuple[str, str]] = []
        found = explain(read_lines([Path(path) for path in paths], unreadable))
        found = replace(found, unreadable=tuple(unreadable))
        if not found.lines:
            bad = "; ".join(f"cannot read {path}: {why}" for path, why in unreadable)
            raise InputError(bad or f"there is no line of a log in {', '.join(paths)}")
    answer(flags.json, _as_json(found), map(printable, render_explanation(found)))
    return 1 if found.first and found.first.pattern.level != "warning" else 0


def render_explanation(found: Explanation) -> Iterator[str]:
    """The first cause, then its consequences and other matches."""
    if found.first is None:
        yield f"no known failure in {count(found.lines, 'line')}"
    else:
        line = found.first.line
        who = f"rank {line.rank}, " if line.rank is not None else ""
        yield found.first.cause
        yield f"  first seen: {who}{line.path}:{line.number}"
        yield f"  > {line.text.strip()[:300]}"
        yield f"  what to do: {found.first.hint}"
    for path, why in found.unreadable:
        yield f"not read to its end: {path}: {why}"
    for match, times in found.others:
        word = "also" if match.pattern.level != "symptom" else "followed from it"
        yield f"{word}: {match.pattern.id.replace('_', ' ')}, {count(times, 'time')}, first at {match.line.path}:{match.line.number}"


def _as_json(found: Explanation) -> dict[str, object]:
    def one(match: Match, count: int | None = None) -> dict[str, object]:
        line, pattern = match.line, match.pattern
        facts = {"id": pattern.id, "level": pattern.level, "cause": match.cause, "hint": match.hint}
        place = {"rank": line.rank, "path": line.path, "line": line.number, "text": line.text.strip()[:1000]}
        return {**facts, **place, "count": count}

    unreadable = [{"path": path, "reason": why} for path, why in found.unreadable]
    first = one(found.first) if found.first else None
    others = [one(match, count) for match, count in found.others]
    return {"schema": 1, "lines": found.lines, "unreadable": unreadable, "first": first, "others": others}
