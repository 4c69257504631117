"""`allranks diagnose PATH…`: finds out why a job hangs, from dumps of any kind."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags
from allranks.cli.terminal import ProgressBar, at_work, check_target, fold, use_color, write_whole
from allranks.errors import InputError
from allranks.model.options import argument, check_options, option

if TYPE_CHECKING:  # heavy: numpy comes with them
    from allranks.load import LoadResult
    from allranks.model.diagnosis import Diagnosis
    from allranks.model.trace import RankTrace

_output, _reading = partial(option, group="output"), partial(option, group="what to read")


@dataclass(frozen=True)
class DiagnoseFlags:
    """The files to read and to write."""

    paths: tuple[str, ...] = argument(
        (),
        "folders, files or URLs: black boxes, torch or torchcomms dumps, stack captures, in any mix; or the name of a job that was recorded here",
        metavar="PATH",
        required=True,
    )
    json: bool = _output(False, "one JSON object on stdout (docs/reference/json.md)")
    html: str = _output("", "write one self-contained page: timeline, groups, stacks, search", metavar="FILE")
    perfetto: str = _output(
        "",
        "write a trace for ui.perfetto.dev; FILE.gz is gzipped",
        metavar="FILE",
    )
    output: str = _output("", "also write the JSON object to this file", flags="-o --output", metavar="FILE")
    just_print_entries: bool = _output(
        False,
        "print all recorded calls, one column per rank, and no verdict",
        flags="-j --just_print_entries",
    )
    print_stack_trace: bool = _output(
        False, "whole stacks, not only the user's frames", flags="--print_stack_trace --stacks"
    )
    mismatch_cap: int = _output(
        10, "list at most this many findings that follow from the root cause", flags="--mismatch_cap"
    )
    force: bool = _output(False, "overwrite existing files")
    verbose: bool = _output(False, "also list groups and every file", flags="-v --verbose")
    attempt: int | None = _reading(None, "which attempt of the job (default: the newest)")
    selected_ranks: tuple[int, ...] = _reading((), "only these ranks", metavar="R", nargs="+")
    pg_filters: tuple[str, ...] = _reading(
        (), "only groups with this name or description", metavar="NAME", nargs="+"
    )
    allow_incomplete_ranks: bool = _reading(False, "do not report a rank without a file as dead")
    prefix: str | None = _reading(
        None, "file name up to the rank's digits (default: detected)", flags="-p --prefix"
    )
    transform_ft: bool = _reading(False, "torchft: number ranks over all replicas; needs --group-world-size")
    group_world_size: int = _reading(0, "ranks per replica, for --transform-ft", at_least=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.transform_ft and not self.group_world_size:
            raise InputError("--transform-ft needs --group-world-size N, the number of ranks in one replica")


FLAGS = (DiagnoseFlags,)


def main(args: argparse.Namespace) -> int:
    """0 nothing wrong, 1 fault found (or unclear), 2 could not run."""
    options = read_flags(DiagnoseFlags, args)
    for name in (options.html, options.perfetto, options.output):
        check_target(name, options.force)
    args.paths = [job_or_path(path) for path in args.paths]
    if all(os.path.isfile(os.path.join(path, "processes.json")) for path in args.paths):
        from allranks.cli.stacks import show_tree
        from allranks.stacktraces.tree import read_looks

        return show_tree(read_looks(args.paths), options.html, options.json)
    all_calls = bool(options.just_print_entries or options.html or options.perfetto)
    loaded = _load(args.paths, options, all_calls)
    if not options.verbose:
        loaded = _without_own_files(args.paths, loaded)
    traces = _transformed(options, loaded.traces)
    if options.just_print_entries:
        from allranks.report.text import render_entries

        shown = render_entries(traces, pg_filters=options.pg_filters, with_stacks=options.print_stack_trace)
        print("\n".join(shown))
        return 0
    result = _diagnose(args.paths, options, loaded, traces)
    failures = _write_files(options, result, traces)  # before stdout, which may be closed
    _print(options, result)
    if failures:
        sys.stdout.flush()
        raise InputError("; ".join(failures))
    if not result.ranks and not result.findings and result.status != "ok":
        return 2
    return 0 if result.status == "ok" else 1


def _diagnose(
    paths: list[str], options: DiagnoseFlags, loaded: LoadResult, traces: list[RankTrace]
) -> Diagnosis:
    from allranks.diagnosis.verdict import DiagnoseOptions
    from allranks.incidents.judge import judge_dumps

    how = DiagnoseOptions(
        pg_filters=frozenset(options.pg_filters),
        allow_incomplete_ranks=options.allow_incomplete_ranks or bool(options.selected_ranks),
        consequences=max(0, options.mismatch_cap),
        whole=lambda: _transformed(options, _load(paths, options, all_calls=True).traces),
    )
    chosen = (options.attempt, options.prefix) != (None, None) or options.selected_ranks or options.pg_filters
    with at_work(f"comparing the calls of {len(traces):,} ranks"):
        part = bool(chosen or options.transform_ft or options.allow_incomplete_ranks)
        found = judge_dumps(loaded, traces, paths, how, chosen=part)
    if not traces and not options.json and all(note.status != "ok" for note in found.files):
        lines = [f"  {note.path}: {note.status}, {note.note or note.kind}" for note in found.files[:20]]
        lines += [f"  … and {len(found.files) - 20} more"] if len(found.files) > 20 else []
        hint = "\n".join(lines)
        if not found.files:
            asked = "Give the folder that holds the dumps, or the name of a job that was recorded here."
            raise InputError(f"{', '.join(paths)}: there are no files in it", hint=asked)
        if all(note.status == "unreadable" for note in found.files):
            rights = "Run this as the user who wrote them: `ls -l` shows who that is."
            raise InputError("no file may be read by this user", hint=f"{hint}\n{rights}")
        kinds = "Dumps are files of torch's flight recorder, black boxes (*.box) and archives of them. Logs: `allranks doctor explain PATH` finds the first cause in them."
        raise InputError("no dump among the files could be read", hint=f"{hint}\n{kinds}")
    return found


def _without_own_files(paths: list[str], loaded: LoadResult) -> LoadResult:
    """Drops notes about other files of `allranks run` in the folder of a job."""
    from allranks.incidents.job_overview import JOB_FILE

    if not all((Path(path) / JOB_FILE).is_file() for path in paths):
        return loaded
    dumps = [note for note in loaded.files if note.status != "skipped" or note.path.endswith(".box")]
    return replace(loaded, files=dumps)


def job_or_path(name: str) -> str:
    """A path unchanged; for the name of a job of this node, the folder of its black boxes."""
    if name == "-":
        raise InputError(
            "standard input is not read: dumps are several files", hint="Give their folder, or an archive."
        )
    if "/" in name or os.path.lexists(name):
        if not os.path.isdir(name):
            return name
        from allranks.incidents.folder import one_incident

        return str(one_incident(Path(name)))
    from allranks.incidents.job_overview import find_job

    try:
        return str(find_job(name))
    except InputError as error:
        raise InputError(f"{name}: no such file, folder or job", hint=error.hint) from None


def _load(paths: list[str], options: DiagnoseFlags, all_calls: bool) -> LoadResult:
    from allranks.diagnosis.verdict import LARGE_JOB
    from allranks.load import LoadOptions, load_paths

    bar = ProgressBar()
    how = LoadOptions(
        attempt=options.attempt,
        prefix=options.prefix,
        ranks=frozenset(options.selected_ranks) or None,
        progress=lambda done, total: (
            bar.show(done, total, f"{done:,}/{total:,} files") if total >= 32 else None
        ),
        allow_nothing=not options.selected_ranks,
        newest_calls=0 if all_calls else LARGE_JOB,
    )
    try:
        return load_paths(paths, how)
    finally:
        bar.clear()


def _transformed(options: DiagnoseFlags, traces: list[RankTrace]) -> list[RankTrace]:
    if not options.transform_ft:
        return traces
    from allranks.load.choice import transform_ft

    return [transform_ft(trace, options.group_world_size) for trace in traces]


def _print(options: DiagnoseFlags, result: Diagnosis) -> None:
    from allranks.report import as_json, text

    if options.json:
        print(as_json.render(result))
        return
    how = text.TextOptions(use_color(), options.print_stack_trace, options.verbose)
    for line in text.render(result, how):
        print("\n".join(fold(line)))


def _write_files(options: DiagnoseFlags, result: Diagnosis, traces: list[RankTrace]) -> list[str]:
    """Writes the requested files; returns errors, so that the verdict is still printed."""
    from allranks.report import as_json

    wanted: list[tuple[str, Iterable[str | bytes]]] = []
    if options.output:
        wanted.append((options.output, [as_json.render(result), "\n"]))
    if options.html:
        from allranks.report import html

        wanted.append((options.html, html.render(result, traces, time.time())))
    if options.perfetto:
        from allranks.report import perfetto

        wanted.append((options.perfetto, perfetto.render(result, traces)))
    failures = []
    for name, parts in wanted:
        try:
            write_whole(name, parts)
        except InputError as error:
            failures.append(str(error))
    return failures
