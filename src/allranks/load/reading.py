"""One source → Raw or a note, by its content and never by its name alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from allranks.load.blackbox import HeapCache, read_box
from allranks.load.layout import Irregular
from allranks.load.regular import MIN_BYTES, LayoutCache, shrink
from allranks.load.result import LoadOptions, Raw, Unreadable
from allranks.load.ring import BytesFile, OpenFile
from allranks.load.sources import GZIP, ZSTD, Source, read_all, unwrap
from allranks.load.tables import Tables
from allranks.load.torch_dump import read_dump
from allranks.load.unpickle import read_pickle
from allranks.model.blackbox import MAGIC

HEAD_BYTES = 512


@dataclass
class Reader:
    """What is shared between the files of one load."""

    options: LoadOptions
    tables: Tables = field(default_factory=Tables)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: LayoutCache = field(default_factory=LayoutCache)
    heap: HeapCache = field(init=False)

    def __post_init__(self) -> None:
        self.heap = HeapCache(self.tables)

    def read(self, source: Source) -> Raw:
        """The content of one file. Raises Unreadable, with the note as its message."""
        if source.problem:
            raise Unreadable(source.problem, skip=source.problem == "not a regular file")
        try:
            return self._read(source)
        except OSError as error:
            raise Unreadable(f"cannot be read: {error.strerror or error}") from error

    def _read(self, source: Source) -> Raw:
        if source.data is not None:
            return self._read_known(source, source.data[:HEAD_BYTES])
        fd = os.open(source.location, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(fd, HEAD_BYTES, 0)
            if head.startswith(MAGIC):
                return read_box(OpenFile(fd), self.heap, self.options.max_box_bytes)
        finally:
            os.close(fd)
        return self._read_known(source, head)

    def _read_known(self, source: Source, head: bytes) -> Raw:
        """Reads a source whose first bytes are known."""
        if not head:
            raise Unreadable("empty file")
        if head.startswith(MAGIC) and source.data is not None:
            return read_box(BytesFile(source.data), self.heap, self.options.max_box_bytes)
        if not _promising(head):
            raise _foreign(source.path, head)
        return self.read_bytes(source.path, read_all(source, self.options.max_file_bytes))

    def read_bytes(self, path: str, data: bytes) -> Raw:
        """The content of a file that is in memory; compressed bytes are unwrapped first."""
        data, problem = unwrap(data, self.options.max_file_bytes)
        try:
            raw = self._read_plain(path, data)
        except Unreadable as error:
            if problem:
                raise Unreadable(problem, kind=error.kind) from error
            raise
        if problem:
            raw.damaged = True
            raw.notes = (problem, *raw.notes)
        return raw

    def _read_plain(self, path: str, data: bytes) -> Raw:
        if data.startswith(MAGIC):
            return read_box(BytesFile(data), self.heap, self.options.max_box_bytes)
        if data[:1] == b"\x80":
            return self._read_pickle(data)
        if data.lstrip()[:1] == b"{":
            return self._read_json(path, data)
        raise _foreign(path, data) if data else Unreadable("empty file")

    def _read_pickle(self, data: bytes) -> Raw:
        if len(data) >= MIN_BYTES:
            try:
                regular = shrink(data, self.layouts)
                small = read_pickle(regular.small)
                if small.whole:
                    return read_dump(small.value, self.tables, self.members, "pickle", regular.expand)
            except (Irregular, Unreadable):
                pass  # the plain way reads everything, and says what is wrong
        unpickled = read_pickle(data)
        try:
            raw = read_dump(unpickled.value, self.tables, self.members, "pickle")
        except Unreadable as error:
            if unpickled.problem:
                foreign = unpickled.value is not None and b"pg_config" not in data[:65536]
                skip = foreign and not unpickled.problem.startswith("cut short")
                raise Unreadable(unpickled.problem, kind="pickle", skip=skip) from error
            raise
        if unpickled.problem:
            raw.damaged = True
            raw.notes = (f"{unpickled.problem}; {len(raw.calls)} calls were read", *raw.notes)
        return raw

    def _read_json(self, path: str, data: bytes) -> Raw:
        value: Any
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            value = None
        if value is None:
            return self._salvage_json(path, data)
        if isinstance(value, dict) and is_stacks(value):
            raise Unreadable("stacks", kind="stacks", skip=True)
        return read_dump(value, self.tables, self.members, "json")

    def _salvage_json(self, path: str, data: bytes) -> Raw:
        """A JSON file that is cut short: the whole entries before the cut."""
        value = read_cut_json(data)
        if value is None:
            raise Unreadable("JSON that cannot be read", kind="json", skip=b'"pg_config"' not in data)
        raw = read_dump(value, self.tables, self.members, "json")
        raw.damaged = True
        raw.notes = (f"cut short after {len(data)} bytes; {len(raw.calls)} calls were read", *raw.notes)
        return raw


def read_cut_json(data: bytes) -> dict[str, Any] | None:
    """What a truncated torch JSON dump still holds; None when it is no such thing."""
    import json  # only here: msgspec reads whole files

    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {}
    for key in ("version", "pg_config", "pg_status", "comm_lib_version"):
        at = text.find(f'"{key}":')
        if at >= 0:
            try:
                found[key] = decoder.raw_decode(text[at + len(key) + 3 :].lstrip())[0]
            except (ValueError, RecursionError):
                pass
    at = text.find('"entries":')
    if at < 0:
        return found if "version" in found and "pg_config" in found else None
    position = text.find("[", at) + 1
    entries: list[Any] = []
    while position > 0:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    found["entries"] = entries
    return found


def is_stacks(value: dict[str, Any]) -> bool:
    """Whether a JSON object is one of our stack bundles or captures, which `stacks` reads."""
    return "ranks" in value and (
        "stacks" in str(value.get("kind", "")) or "stacks" in value or "hung" in value
    )


def _promising(head: bytes) -> bool:
    """Whether the first bytes can begin anything that we read."""
    return head[:1] == b"\x80" or head.startswith((GZIP, ZSTD)) or head.lstrip()[:1] == b"{"


def _is_traceback(head: bytes) -> bool:
    """Whether this is what faulthandler writes."""
    return b"(most recent call first)" in head and head.lstrip().startswith(
        (b"Thread 0x", b"Current thread 0x")
    )


def _foreign(path: str, head: bytes) -> Unreadable:
    """What a file is that we do not read."""
    name = os.path.basename(path)
    if ".pyspy" in name or ".proc." in name or name.endswith(".progress.jsonl") or _is_traceback(head):
        return Unreadable("a stack capture: `allranks stacks` reads it", kind="stacks", skip=True)
    kinds = ((b"\x7fELF", "ELF core or program"), (b"PK\x03\x04", "zip archive"), (b"#!", "script"))
    for magic, kind in kinds:
        if head.startswith(magic):
            return Unreadable("not a dump", kind=kind, skip=True)
    text = all(byte >= 32 or byte in b"\t\r\n\x1b" for byte in head[:256])
    return Unreadable("not a dump", kind="text" if text else "unknown", skip=True)
