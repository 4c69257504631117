"""`allranks convert`: dumps and black boxes into one another. Never overwrites without --force."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from allranks.errors import InputError

if TYPE_CHECKING:
    from allranks.model.trace import RankTrace

FORMS = ("box", "pickle", "json")
_ENDINGS = {".box": "box", ".json": "json", ".pickle": "pickle", ".pkl": "pickle"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", metavar="IN", help="a dump, a black box, an archive, or a folder of them")
    add("output", metavar="OUT", help="a file for one rank, a folder for several")
    add("--to", choices=FORMS, help="box (ours), pickle or json (torch's 2.10); default: OUT's ending")
    add("--attempt", type=int, metavar="N", help="which attempt, if there are several (default: newest)")
    add("--force", action="store_true", help="overwrite what is there")
    add("--json", action="store_true", help="print what was written as one JSON object")


def main(args: argparse.Namespace) -> int:
    """0 everything was converted, 1 some files were damaged or left out, 2 could not run."""
    import json

    from allranks.load import LoadOptions, load_paths

    form = args.to or _ENDINGS.get(os.path.splitext(args.output)[1].lower())
    if form is None:
        raise InputError(
            f"{args.output}: its ending names no format", hint="Add --to box, --to pickle or --to json."
        )
    result = load_paths([args.input], LoadOptions(attempt=args.attempt, number_unknown=True))
    many = len(result.traces) > 1 or os.path.isdir(args.output) or os.path.isdir(args.input)
    written = []
    for trace in result.traces:
        path = os.path.join(args.output, file_name_for(trace, form)) if many else args.output
        _write(path, encode(trace, form), args.force)
        written.append(path)
        if not args.json:
            print(f"Wrote {path}")
    bad = [note for note in result.files if note.status != "ok"]
    for note in bad:
        print(f"{note.path}: {note.status}: {note.note}", file=sys.stderr)
    if args.json:
        print(json.dumps({"schema": 1, "written": written, "left_out": [note.path for note in bad]}))
    return 1 if bad else 0


def encode(trace: RankTrace, form: str) -> bytes:
    if form == "box":
        from allranks.blackbox.file_writer import box_bytes

        return box_bytes(trace)
    from allranks.model.torch_dump import to_torch_json, to_torch_pickle

    return to_torch_pickle(trace) if form == "pickle" else to_torch_json(trace).encode()


def file_name_for(trace: RankTrace, form: str) -> str:
    """The name under which torch's tools and ours find the rank."""
    from allranks.blackbox.layout import file_name

    rank = trace.header.rank or 0
    if form == "box":
        return file_name(trace.header.job, trace.header.attempt, rank, trace.header.pid)
    return f"trace_{rank}" + (".json" if form == "json" else "")


def _write(path: str, data: bytes, force: bool) -> None:
    if os.path.exists(path) and not force:
        raise InputError(f"{path} is there already", hint="Add --force to overwrite it.")
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
