"""`allranks index build|show|verify`: makes and inspects token indexes."""

from __future__ import annotations

import argparse
import glob
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from allranks.cli.parser import Actions, run_action
from allranks.cli.terminal import ProgressBar, answer
from allranks.errors import InputError
from allranks.model.formatting import count
from allranks.model.options import argument, option

if TYPE_CHECKING:
    from allranks.elastic.index import BuildProgress


@dataclass(frozen=True)
class BuildFlags:
    files: tuple[str, ...] = argument(
        (), ".jsonl, .txt (also .gz, .zst) or .parquet; patterns allowed", metavar="FILE"
    )
    data_files: tuple[str, ...] = option((), "the same as FILE", nargs="+", metavar="FILE")
    output: str = option("", "the index to write", flags="-o --output", metavar="INDEX", required=True)
    tokenizer: str = option("bytes", "a tokenizer.json, a Hugging Face name, or bytes")
    text_key: str = option("text", "key or column that holds the text")
    append_eos: bool = option(False, "end each document with the end-of-text token")
    eos_id: int | None = option(None, "end each document with this token")
    skip_bad: bool = option(False, "leave out records that cannot be read, and count them")
    force: bool = option(False, "overwrite INDEX")
    json: bool = option(False, "print one JSON object at the end")


@dataclass(frozen=True)
class IndexFlags:
    index: str = argument("", "the index file", metavar="INDEX", required=True)
    json: bool = option(False, "print one JSON object")


def main(args: argparse.Namespace) -> int:
    """0: done; 1: damage found (verify); 2: could not run."""
    return run_action(ACTIONS, args)


def _show(args: IndexFlags) -> int:
    from allranks.elastic.index import TokenIndexFile

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
        f"{args.index}: {facts['total_tokens']:,} tokens, {count(index.num_documents, 'document')}",
        f"tokenizer   {facts['tokenizer']['name']} ({facts['tokenizer']['digest']})",
        f"built       {facts['created']} by allranks {facts['allranks']}",
        f"fingerprint {facts['fingerprint']}",
        *(f"file        {entry['path']} ({entry['size']:,} bytes)" for entry in facts["files"]),
    ]
    answer(args.json, facts, lines)
    return 0


def _build(args: BuildFlags) -> int:
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
    line = f"{result.path} is up to date: {done.tokens:,} tokens"
    if result.fresh:
        skipped = f", {done.skipped:,} records left out" if done.skipped else ""
        line = f"Wrote {result.path}: {done.tokens:,} tokens of {count(done.documents, 'document')}{skipped}"
    answer(args.json, facts, line)
    return 0


def _expanded(patterns: list[str]) -> tuple[str, ...]:
    """Expands patterns; each file once."""
    found: list[str] = []
    for pattern in patterns:
        names = sorted(glob.glob(pattern)) if any(c in pattern for c in "*?[") else [pattern]
        if not names:
            raise InputError(f"no file matches {pattern}")
        found += [name for name in names if name not in found]
    if not found:
        raise InputError("no input files: allranks index build FILES -o INDEX")
    return tuple(found)


def _verify(args: IndexFlags) -> int:
    from allranks.elastic.index import TokenIndexFile

    with TokenIndexFile(args.index, sample_check=False) as index:
        damage = list(index.verify())
    facts = {"schema": 1, "index": args.index, "ok": not damage, "damage": [asdict(one) for one in damage]}
    lines = [f"{args.index}: block {d.block} at byte {d.offset} fails its checksum" for d in damage]
    answer(args.json, facts, lines or f"{args.index}: ok")
    return 1 if damage else 0


ACTIONS: Actions = {
    "build": ("tokenize text files into an index", BuildFlags, _build),
    "show": ("what an index holds and where it came from", IndexFlags, _show),
    "verify": ("check every block", IndexFlags, _verify),
}
