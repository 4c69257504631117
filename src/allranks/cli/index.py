"""`allranks index build|show|verify`: makes and inspects token indexes."""

from __future__ import annotations

import argparse
import glob
from dataclasses import asdict
from typing import TYPE_CHECKING

from allranks.cli.terminal import ProgressBar, answer
from allranks.errors import InputError

if TYPE_CHECKING:
    from allranks.elastic.index import BuildProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the three verbs."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    build = verbs.add_parser("build", help="tokenize text files into an index")
    build.add_argument(
        "files", nargs="*", metavar="FILE", help=".jsonl, .txt (also .gz, .zst) or .parquet; patterns allowed"
    )
    build.add_argument("--data-files", nargs="+", default=[], metavar="FILE", help="the same as FILE")
    build.add_argument("-o", "--output", required=True, metavar="INDEX", help="the index to write")
    build.add_argument(
        "--tokenizer", default="bytes", help="a tokenizer.json, a Hugging Face name, or bytes (default)"
    )
    build.add_argument("--text-key", default="text", help="key or column that holds the text (default: text)")
    build.add_argument(
        "--append-eos", action="store_true", help="end each document with the end-of-text token"
    )
    build.add_argument("--eos-id", type=int, help="end each document with this token")
    build.add_argument(
        "--skip-bad", action="store_true", help="leave out records that cannot be read, and count them"
    )
    build.add_argument("--force", action="store_true", help="overwrite INDEX")
    build.add_argument("--json", action="store_true", help="print one JSON object at the end")
    for verb, text in (
        ("show", "what an index holds and where it came from"),
        ("verify", "check every block"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("index", metavar="INDEX")
        sub.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """0: done; 1: damage found (verify); 2: could not run."""
    if args.verb == "build":
        return _build(args)
    from allranks.elastic.index import TokenIndexFile

    if args.verb == "verify":
        return _verify(args)
    with TokenIndexFile(args.index) as index:
        facts = {
            "schema": 1,
            "index": args.index,
            "total_tokens": index.total_tokens,
            "documents": index.num_documents,
            "token_bytes": index.header.token_bytes,
            "fingerprint": index.fingerprint,
            **index.meta,
        }
    lines = [
        f"{args.index}: {facts['total_tokens']:,} tokens, {facts['documents']:,} documents",
        f"tokenizer   {facts['tokenizer']['name']} ({facts['tokenizer']['digest']})",
        f"built       {facts['created']} by allranks {facts['allranks']}",
        f"fingerprint {facts['fingerprint']}",
        *(f"file        {entry['path']} ({entry['size']:,} bytes)" for entry in facts["files"]),
    ]
    answer(args.json, facts, lines)
    return 0


def _build(args: argparse.Namespace) -> int:
    from allranks.elastic.index import BuildRequest, build_index

    text = (args.tokenizer, args.text_key, args.append_eos, args.eos_id, args.skip_bad)
    files = _expanded([*args.files, *args.data_files])
    request = BuildRequest(files, args.output, *text, args.force)
    bar = ProgressBar()

    def show(now: BuildProgress) -> None:
        speed = now.bytes_done / max(now.elapsed_s, 1e-6)
        left = (now.bytes_total - now.bytes_done) / speed if speed > 0 else 0.0
        text = f"{now.tokens / 1e6:,.1f} M tokens  {speed / 1e6:.1f} MB/s  {left:.0f} s left"
        bar.show(now.bytes_done, now.bytes_total, text)

    try:
        result = build_index(request, show)
    finally:
        bar.clear()
    done = result.progress
    facts = {"schema": 1, "index": result.path, "total_tokens": done.tokens, "documents": done.documents}
    facts |= {"skipped": done.skipped, "bytes": done.bytes_total, "elapsed_s": round(done.elapsed_s, 3)}
    facts |= {"fresh": result.fresh}
    said = f"{result.path} is up to date: {done.tokens:,} tokens"
    if result.fresh:
        skipped = f", {done.skipped:,} records left out" if done.skipped else ""
        said = f"Wrote {result.path}: {done.tokens:,} tokens of {done.documents:,} documents{skipped}"
    answer(args.json, facts, said)
    return 0


def _expanded(patterns: list[str]) -> tuple[str, ...]:
    """Patterns that the shell left alone; sorted, each file once."""
    found: list[str] = []
    for pattern in patterns:
        names = sorted(glob.glob(pattern)) if any(c in pattern for c in "*?[") else [pattern]
        if not names:
            raise InputError(f"no file matches {pattern}")
        found += [name for name in names if name not in found]
    if not found:
        raise InputError("no input files: allranks index build FILES -o INDEX")
    return tuple(found)


def _verify(args: argparse.Namespace) -> int:
    from allranks.elastic.index import TokenIndexFile

    with TokenIndexFile(args.index, sample_check=False) as index:
        damage = list(index.verify())
    facts = {"schema": 1, "index": args.index, "ok": not damage, "damage": [asdict(one) for one in damage]}
    lines = [f"{args.index}: block {d.block} at byte {d.offset} fails its checksum" for d in damage]
    answer(args.json, facts, lines or f"{args.index}: ok")
    return 1 if damage else 0
