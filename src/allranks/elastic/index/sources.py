"""Cuts input files into blocks that can be tokenized independently, and reads the documents of a block.

Plain files are cut into byte ranges, which workers read themselves; compressed ones are one stream, read here
and handed out in pieces; Parquet is cut by row group. A block knows where it ends, so a build can continue there.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from allranks.errors import DataLoadingError, InputError, require

_MAX_LINE = 1 << 30


class Block(msgspec.Struct, frozen=True):
    """`data` is None where the worker reads [start, end) itself; of Parquet, `start` is the row group.

    `progress` is how many bytes of the input file (as it lies on the disk) are done after this block.
    """

    file: int
    path: str
    kind: str  # "jsonl" | "text" | "parquet"
    start: int
    end: int
    progress: int
    data: bytes | None = None


class Documents(msgspec.Struct):
    """Texts of a block with the place of each; `skipped` counts records that could not be used."""

    texts: list[str]
    places: list[int]
    skipped: int = 0


@dataclass(frozen=True)
class InputFile:
    """One input file."""

    path: str
    kind: str
    packing: str  # "" | "gz" | "zst"
    size: int
    modified_ns: int


_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
}


def read_source(path: str) -> InputFile:
    """What is known of a file; its name gives its kind."""
    where = Path(path)
    try:
        stat = where.stat()
    except OSError as error:
        raise DataLoadingError(error.strerror or str(error), path) from error
    if where.is_dir():
        raise DataLoadingError("is a folder: name its files, for example with a pattern", path)
    suffixes = [suffix.lower() for suffix in where.suffixes]
    packing = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}.get(suffixes[-1] if suffixes else "", "")
    plain = suffixes[-2] if packing and len(suffixes) > 1 else (suffixes[-1] if suffixes else "")
    kind = _KINDS.get(plain)
    if kind is None or (kind == "parquet" and packing):
        known = ", ".join(sorted(_KINDS))
        raise InputError(
            f"{path}: unknown kind of file; known are {known}, and .gz or .zst of the text kinds"
        )
    return InputFile(path, kind, packing, stat.st_size, stat.st_mtime_ns)


def content_crc32(path: str) -> int:
    """A checksum of the whole file: reading is fast beside tokenizing, and time stamps lie."""
    found = 0
    with open(path, "rb") as file:
        while piece := file.read(4 << 20):
            found = zlib.crc32(piece, found)
    return found


def cut(source: InputFile, number: int, block_bytes: int, resume: int = 0) -> Iterator[Block]:
    """The blocks of a file from `resume` on, which is the `end` of a block of the same cut (0: all)."""
    if source.kind == "parquet":
        groups = _parquet(source.path).metadata.num_row_groups
        for group in range(resume, groups):
            done = source.size * (group + 1) // groups
            yield Block(number, source.path, "parquet", group, group + 1, done)
    elif source.packing:
        yield from _cut_stream(source, number, block_bytes, resume)
    else:
        for start in range(resume, source.size, block_bytes):
            end = min(start + block_bytes, source.size)
            yield Block(number, source.path, source.kind, start, end, end)


def _cut_stream(source: InputFile, number: int, block_bytes: int, resume: int) -> Iterator[Block]:
    position, rest = 0, b""
    try:
        with open(source.path, "rb") as raw, _unpacked(raw, source.packing) as stream:
            while True:
                piece = stream.read(block_bytes)
                whole = rest + piece
                cut_at = len(whole) if not piece else whole.rfind(b"\n") + 1
                if not piece and not whole:
                    return
                if cut_at == 0:
                    if len(whole) > _MAX_LINE:
                        raise DataLoadingError(f"a line is longer than {_MAX_LINE} bytes", source.path)
                    rest = whole
                    continue
                end = position + cut_at
                if end > resume:
                    yield Block(number, source.path, source.kind, position, end, raw.tell(), whole[:cut_at])
                position, rest = end, whole[cut_at:]
                if not piece:
                    return
    except (OSError, EOFError, _zstd_error()) as error:
        raise DataLoadingError(
            f"cannot decompress after {position} bytes of text: {error}", source.path
        ) from error


def _unpacked(raw: BinaryIO, packing: str) -> io.BufferedIOBase:
    if packing == "gz":
        return gzip.GzipFile(fileobj=raw)
    zstandard = require("zstandard", feature="Reading .zst files", extra="data")
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(raw, read_across_frames=True)
    return io.BufferedReader(reader, 1 << 20)


def _zstd_error() -> type[Exception]:
    try:
        import zstandard

        kind: type[Exception] = zstandard.ZstdError
        return kind
    except ImportError:
        return OSError


def _parquet(path: str) -> Any:
    require("pyarrow", feature="Reading Parquet", extra="data")
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataLoadingError(f"not a Parquet file: {error}", path) from error


def read_documents(block: Block, text_key: str, skip_bad: bool) -> Documents:
    """The documents of a block: lines that begin in it, or the rows of its row group."""
    if block.kind == "parquet":
        return _rows(block, text_key)
    data, place = (block.data, block.start) if block.data is not None else _range(block)
    if place == 0 and data.startswith(codecs.BOM_UTF8):
        data, place = data[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
    found = Documents([], [])
    # of a record only the wanted field is decoded: the others are skipped, not built
    record = msgspec.defstruct("Record", [("text", str)], rename={"text": text_key})
    decode = msgspec.json.Decoder(record).decode
    for line in io.BytesIO(data):
        here, place = place, place + len(line)
        line = line.strip(b"\r\n") if block.kind == "text" else line.strip()
        if not line:
            continue
        try:
            text = decode(line).text if block.kind == "jsonl" else line.decode()  # type: ignore[attr-defined]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not skip_bad:
                raise _bad_record(block, line, text_key, here, error) from None
            found.skipped += 1
            continue
        found.texts.append(text)
        found.places.append(here)
    return found


def _range(block: Block) -> tuple[bytes, int]:
    """The bytes of the lines that begin in [start, end) of a plain file."""
    try:
        with open(block.path, "rb") as file:
            start = block.start
            if start:
                file.seek(start - 1)
                start += len(file.readline()) - 1
            if start >= block.end:
                return b"", start
            data = file.read(block.end - start)
            return data if data.endswith(b"\n") else data + file.readline(), start
    except OSError as error:
        raise DataLoadingError(error.strerror or str(error), block.path) from error


def _rows(block: Block, text_key: str) -> Documents:
    file = _parquet(block.path)
    names = file.schema_arrow.names
    if text_key not in names:
        raise _wrong_key(block.path, text_key, names)
    base = sum(file.metadata.row_group(i).num_rows for i in range(block.start))
    column = file.read_row_group(block.start, columns=[text_key]).column(0)
    found = Documents([], [])
    for i, text in enumerate(column.to_pylist()):
        if text is None:
            found.skipped += 1
        elif not isinstance(text, str):
            raise DataLoadingError(f"column {text_key!r} holds {type(text).__name__}, not text", block.path)
        else:
            found.texts.append(text)
            found.places.append(base + i)
    return found


def _bad_record(block: Block, line: bytes, text_key: str, place: int, error: Exception) -> DataLoadingError:
    """Why a record cannot be used, in words."""
    hint = "one JSON object per line is expected: fix the record, or leave such records out with --skip-bad"
    if isinstance(error, msgspec.ValidationError):
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError:
            record = None
        if isinstance(record, dict) and text_key not in record:
            return _wrong_key(block.path, text_key, list(record))
        if isinstance(record, dict):
            kind = type(record[text_key]).__name__
            return DataLoadingError(
                f"the record at byte {place} has {kind} in '{text_key}', not text", block.path, hint=hint
            )
        return DataLoadingError(f"the record at byte {place} is no JSON object", block.path, hint=hint)
    what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "not valid JSON"
    return DataLoadingError(f"the line at byte {place} is {what}: {error}", block.path, hint=hint)


def _wrong_key(path: str, text_key: str, keys: list[str]) -> DataLoadingError:
    likely = next(
        (key for key in ("text", "content", "body", "document", "raw_content") if key in keys), None
    )
    choice = likely or (keys[0] if keys else "KEY")
    return DataLoadingError(
        f"KeyError: '{text_key}'; the keys seen are {keys}",
        path,
        hint=f'say which one holds the text: --text-key {choice} (in a job file: data.text_key: "{choice}")',
    )
