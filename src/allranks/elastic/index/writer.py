"""Writes an index so that a build killed at any moment continues where it was.

INDEX.partial          the tokens so far, at their final place
INDEX.partial.docs     16 bytes per document: place, length (int64 each)
INDEX.partial.journal  JSON lines: the request, then one line per finished block with a running CRC of the tokens

A line of the journal is true only if the bytes before it have its CRC: on resume they are read and compared, so
not even a power cut needs more than this. The finished file is renamed into place last.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from allranks.elastic.index.file import BLOCK, HEADER_BYTES, IndexHeader
from allranks.errors import InputError

log = logging.getLogger("allranks.elastic")
_CHUNK = 1 << 20


@dataclass
class Position:
    """How far a build has come."""

    file: int = 0  # the file that the next block belongs to
    resume: int = 0  # the `end` of the last block of that file
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    crc: int = 0  # of all token bytes so far
    per_file: list[int] = field(default_factory=list)  # documents of each file so far


@dataclass
class IndexWriter:
    """One build's files. `open` resumes or starts; `append` adds a block; `finish` makes the index."""

    path: Path
    token_bytes: int
    request: dict[str, object]
    position: Position = field(default_factory=Position)
    resumed: bool = False
    _tokens: BinaryIO = field(init=False)
    _docs: BinaryIO = field(init=False)
    _journal: BinaryIO = field(init=False)
    _files: ExitStack = field(default_factory=ExitStack)

    def open(self) -> None:
        """Takes the lock, and finds out how far an earlier build of the same request came."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._journal = self._files.enter_context(self._part(".journal").open("a+b"))
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InputError(f"another build is writing {self.path}") from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): start no second build of it", self.path, error.strerror)
        self._tokens = self._files.enter_context(_open(self._part()))
        self._docs = self._files.enter_context(_open(self._part(".docs")))
        self._journal.seek(0)
        lines = self._journal.read().split(b"\n")
        if lines[0] == self._request_line():
            self.position, keep = self._replay(lines)
            self.resumed = self.position.tokens > 0 or self.position.documents > 0
        else:
            keep = 0
        self._journal.truncate(keep)
        if not keep:
            self._line(self.request)
        self._tokens.truncate(HEADER_BYTES + self.position.tokens * self.token_bytes)
        self._tokens.seek(0, os.SEEK_END)
        self._docs.truncate(self.position.documents * 16)
        self._docs.seek(0, os.SEEK_END)

    def append(self, file: int, end: int, tokens: bytes, lengths: bytes, places: bytes, skipped: int) -> None:
        """Adds one block; after it the journal says so."""
        count = len(lengths) // 8
        self._tokens.write(tokens)
        pairs = array("q", bytes(16 * count))
        pairs[0::2], pairs[1::2] = array("q", places), array("q", lengths)
        self._docs.write(pairs.tobytes())
        self._tokens.flush()
        self._docs.flush()
        here = self.position
        here.crc = zlib.crc32(tokens, here.crc)
        here.tokens += len(tokens) // self.token_bytes
        here.documents += count
        here.skipped += skipped
        here.file, here.resume = file, end
        here.per_file.extend([0] * (file + 1 - len(here.per_file)))
        here.per_file[file] += count
        state = [file, end, here.tokens, here.documents, here.skipped, here.crc, here.per_file[file]]
        self._line(state)

    def finish(self, meta: dict[str, object], num_files: int) -> IndexHeader:
        """Adds tables, checksums and provenance, syncs, and renames into place."""
        here, out = self.position, self._tokens
        header = IndexHeader(self.token_bytes, here.tokens, here.documents, num_files, 0, 0, 0, 0, 0)
        out.write(b"\0" * (header.starts_offset - out.tell()))
        self._write_tables(out, num_files)
        checks_offset = out.tell()
        out.flush()
        checks = array("I", _checksums(out, checks_offset))
        out.seek(checks_offset)
        out.write(checks.tobytes())
        text = json.dumps(meta, sort_keys=True).encode()
        meta_offset = out.tell()
        out.write(text)
        header = replace(
            header,
            checks_offset=checks_offset,
            meta_offset=meta_offset,
            file_bytes=meta_offset + len(text),
            meta_bytes=len(text),
            meta_crc=zlib.crc32(text),
        )
        out.truncate(header.file_bytes)
        out.seek(0)
        out.write(header.to_bytes())
        out.flush()
        os.fsync(out.fileno())
        os.rename(self._part(), self.path)
        _sync_folder(self.path.parent)
        self.close()
        for name in (".docs", ".journal"):
            self._part(name).unlink(missing_ok=True)
        return header

    def close(self) -> None:
        """Closes the files; what is done stays for a later build."""
        self._files.close()

    def _part(self, suffix: str = "") -> Path:
        return self.path.with_name(f"{self.path.name}.partial{suffix}")

    def _request_line(self) -> bytes:
        return json.dumps(self.request, sort_keys=True).encode()

    def _line(self, value: object) -> None:
        self._journal.seek(0, os.SEEK_END)
        self._journal.write(json.dumps(value, sort_keys=True).encode() + b"\n")
        self._journal.flush()

    def _replay(self, lines: list[bytes]) -> tuple[Position, int]:
        """The last position whose bytes are really there, and how much of the journal to keep."""
        here, keep = Position(), len(lines[0]) + 1
        docs_size = os.fstat(self._docs.fileno()).st_size
        self._tokens.seek(HEADER_BYTES)
        for line in lines[1:-1]:
            try:
                file, end, tokens, documents, skipped, crc, in_file = json.loads(line)
            except ValueError:
                break
            if _running_crc(self._tokens, (tokens - here.tokens) * self.token_bytes, here.crc) != crc:
                break
            if documents * 16 > docs_size:
                break
            per_file = here.per_file + [0] * (file + 1 - len(here.per_file))
            per_file[file] = in_file
            here = Position(file, end, tokens, documents, skipped, crc, per_file)
            keep += len(line) + 1
        return here, keep

    def _write_tables(self, out: BinaryIO, num_files: int) -> None:
        """starts, offsets and files, streamed from the documents' own file."""
        total = 0
        for pairs in self._pairs():
            starts = array("q")
            for length in pairs[1::2]:
                starts.append(total)
                total += length
            out.write(starts.tobytes())
        out.write(struct.pack("<q", total))
        for pairs in self._pairs():
            out.write(pairs[0::2].tobytes())
        for file in range(num_files):
            left = self.position.per_file[file] if file < len(self.position.per_file) else 0
            while left:
                count = min(left, _CHUNK)
                out.write(array("I", [file]).tobytes() * count)
                left -= count

    def _pairs(self) -> Iterator[array[int]]:
        self._docs.flush()
        self._docs.seek(0)
        while chunk := self._docs.read(_CHUNK * 16):
            yield array("q", chunk)


def _open(path: Path) -> BinaryIO:
    """For reading and writing, keeping what is there."""
    return path.open("r+b" if path.exists() else "w+b")


def _running_crc(file: BinaryIO, size: int, crc: int) -> int | None:
    """The CRC continued over the next `size` bytes; None when they are not all there."""
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            return None
        crc = zlib.crc32(chunk, crc)
        size -= len(chunk)
    return crc


def _checksums(file: BinaryIO, end: int) -> Iterator[int]:
    """One CRC per block between the header and `end`."""
    file.seek(HEADER_BYTES)
    left = end - HEADER_BYTES
    while left > 0:
        chunk = file.read(min(BLOCK, left))
        left -= len(chunk)
        yield zlib.crc32(chunk)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
