"""`allranks diagnose PATH…`: why the job hangs, from dumps of any origin."""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.terminal import at_work, use_color
from allranks.errors import InputError

if TYPE_CHECKING:  # heavy: numpy comes with them
    from allranks.load import LoadResult
    from allranks.model.diagnosis import Diagnosis, FileNote
    from allranks.model.trace import RankTrace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="folders, files or URLs: black boxes, torch or torchcomms dumps, stack captures, in any mix",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout (docs/contracts.md)")
    out.add_argument(
        "--html", metavar="FILE", help="write one self-contained page: timeline, groups, stacks, search"
    )
    out.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write a trace for ui.perfetto.dev; FILE.gz is gzipped, FILE.json is for chrome://tracing",
    )
    out.add_argument("-o", "--output", metavar="FILE", help="also write the JSON object to this file")
    out.add_argument(
        "-j",
        "--just_print_entries",
        action="store_true",
        help="print all recorded calls, one column per rank, and no verdict",
    )
    out.add_argument(
        "--print_stack_trace",
        "--stacks",
        dest="print_stack_trace",
        action="store_true",
        help="whole stacks, not only the user's frames",
    )
    out.add_argument(
        "--mismatch_cap",
        type=int,
        default=10,
        metavar="N",
        help="list at most N findings that follow from the root cause (default 10)",
    )
    out.add_argument("--force", action="store_true", help="overwrite existing files")
    out.add_argument("-v", "--verbose", action="store_true", help="also list groups and every file")
    what = parser.add_argument_group("what to look at")
    what.add_argument(
        "--attempt", type=int, metavar="N", help="which attempt of the job (default: the newest)"
    )
    what.add_argument("--selected-ranks", nargs="+", type=int, metavar="R", help="only these ranks")
    what.add_argument(
        "--pg-filters", nargs="+", metavar="NAME", help="only groups with this name or description"
    )
    what.add_argument(
        "--allow-incomplete-ranks", action="store_true", help="a rank without a file is not held to be dead"
    )
    what.add_argument("-p", "--prefix", help="file name up to the rank's digits (default: found out)")
    what.add_argument(
        "--transform-ft",
        action="store_true",
        help="torchft: number ranks over all replicas; needs --group-world-size",
    )
    what.add_argument("--group-world-size", type=int, metavar="N", help="ranks per replica, for --transform-ft")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """0 nothing wrong, 1 fault found (or unclear), 2 could not run."""
    _check(args)
    loaded = _load(args)
    traces = _transformed(args, loaded.traces)
    if args.just_print_entries:
        return _print_entries(args, traces)
    result = _judge_incident(args) or _diagnose(args, loaded, traces)
    _write_files(args, result, traces)  # before stdout, which may be closed
    _print(args, result)
    if not result.ranks and result.verdict is None:
        return 2
    return 0 if result.status == "ok" else 1


def _diagnose(args: argparse.Namespace, loaded: LoadResult, traces: list[RankTrace]) -> Diagnosis:
    from allranks.api.extra_evidence import find_evidence, is_post_mortem, taken_ns, with_evidence
    from allranks.diagnose import DiagnoseOptions, diagnose

    boxes = any(trace.kind.startswith("black box") for trace in traces)
    ended = boxes and is_post_mortem(traces)
    options = DiagnoseOptions(
        now_ns=taken_ns(traces, args.paths) if boxes and not ended else 0,
        ended=ended,
        pg_filters=frozenset(args.pg_filters or ()),
        allow_incomplete_ranks=args.allow_incomplete_ranks or bool(args.selected_ranks),
        consequences=max(0, args.mismatch_cap),
    )
    evidence = find_evidence(loaded, traces, args.paths)
    if not traces and not evidence.seen and not args.json:
        raise InputError("no dump among the files could be read", hint="\n".join(_unreadable(evidence.files)))
    with at_work(f"comparing the calls of {len(traces):,} ranks"):
        return with_evidence(
            diagnose(traces, evidence.files, stacks=evidence.seen, options=options), evidence
        )


def _judge_incident(args: argparse.Namespace) -> Diagnosis | None:
    """The folder of an incident is judged by the code that judged it then; None when something else is asked for."""
    chosen = (args.attempt, args.selected_ranks, args.pg_filters, args.prefix)
    whole = all(value is None for value in chosen) and not (args.transform_ft or args.allow_incomplete_ranks)
    folder = Path(args.paths[0])
    if len(args.paths) != 1 or not whole or not (folder / "observed.json").is_file():
        return None
    from allranks.incidents.judge import judge_folder

    missing: list[str] = []
    result = judge_folder(folder, missing)[0]
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)
    return result


def _check(args: argparse.Namespace) -> None:
    if args.transform_ft and not args.group_world_size:
        raise InputError("--transform-ft needs --group-world-size N, the number of ranks in one replica")
    for name in (args.html, args.perfetto, args.output):
        if name and not args.force and Path(name).is_file() and Path(name).stat().st_size:
            raise InputError(f"{name} exists", hint="use --force to overwrite it, or another name")


def _load(args: argparse.Namespace) -> LoadResult:
    from allranks.load import LoadOptions, load_paths

    bar = _Bar(sys.stderr.isatty())
    options = LoadOptions(
        attempt=args.attempt,
        prefix=args.prefix,
        ranks=frozenset(args.selected_ranks) if args.selected_ranks else None,
        progress=bar.show,
        allow_nothing=True,
    )
    try:
        loaded = load_paths(args.paths, options)
    finally:
        bar.clear()
    return loaded


def _unreadable(files: list[FileNote]) -> list[str]:
    lines = [f"  {note.path}: {note.status}, {note.note or note.kind}" for note in files[:20]]
    return lines + ([f"  … and {len(files) - 20} more"] if len(files) > 20 else [])


def _transformed(args: argparse.Namespace, traces: list[RankTrace]) -> list[RankTrace]:
    if not args.transform_ft:
        return traces
    from allranks.diagnose.replicas import transform_ft

    return [transform_ft(trace, args.group_world_size) for trace in traces]


def _print_entries(args: argparse.Namespace, traces: list[RankTrace]) -> int:
    from allranks.report import entries

    for line in entries.render(traces, pg_filters=args.pg_filters or (), with_stacks=args.print_stack_trace):
        print(line)
    return 0


def _print(args: argparse.Namespace, result: Diagnosis) -> None:
    if args.json:
        from allranks.report import as_json

        print(as_json.render(result))
        return
    from allranks.report import text

    for line in text.render(result, text.TextOptions(use_color(), args.print_stack_trace, args.verbose)):
        print(line)


def _write_files(args: argparse.Namespace, result: Diagnosis, traces: list[RankTrace]) -> None:
    if args.output:
        from allranks.report import as_json

        _write(args.output, [as_json.render(result), "\n"])
    if args.html:
        from allranks.report import html

        _write(args.html, html.render(result, traces, time.time()))
    if args.perfetto:
        _write(args.perfetto, _trace(args.perfetto, result, traces))


def _trace(name: str, result: Diagnosis, traces: list[RankTrace]) -> Iterable[str | bytes]:
    """The name chooses the format: Chrome's for .json and .json.gz, else Perfetto's own."""
    if name.removesuffix(".gz").endswith(".json"):
        from allranks.report import chrome_trace

        return chrome_trace.render(result, traces)
    from allranks.report import perfetto

    return perfetto.render(result, traces)


def _write(name: str, parts: Iterable[str | bytes]) -> None:
    """A file that is there as a whole or not at all; gzipped when its name says so."""
    target = Path(name)
    draft = (
        target.with_name(f".{target.name}.{os.getpid()}")
        if not target.exists() or target.is_file()
        else target
    )
    try:
        with (
            at_work(f"writing {name}"),
            gzip.open(draft, "wb", 5) if name.endswith(".gz") else draft.open("wb") as file,
        ):
            for part in parts:
                file.write(part if isinstance(part, bytes) else part.encode("utf-8", "replace"))
        if draft != target:
            draft.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {name}: {error.strerror}") from error
    print(f"wrote {name}", file=sys.stderr)


class _Bar:
    """A progress line on a terminal; silent elsewhere."""

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._shown = False

    def show(self, done: int, total: int) -> None:
        if self._visible and total >= 32:
            filled = 30 * done // max(1, total)
            print(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {done:,}/{total:,} files",
                end="",
                file=sys.stderr,
                flush=True,
            )
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
