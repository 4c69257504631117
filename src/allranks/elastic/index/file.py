"""The file of a token index: read through one memory map (opening costs the same for a megabyte and a terabyte), and written
so that a build killed at any moment continues where it was.

header   4096 bytes, ends with its own CRC-32
tokens   total_tokens of token_bytes each (little-endian uint16 or uint32)
starts   num_documents + 1 int64: the first token of each document, then total_tokens
offsets  num_documents int64: where the document stands in its file (byte of the plain text; row of Parquet)
files    num_documents uint32: which file
checks   uint32 CRC-32 of every BLOCK bytes between the header and here
meta     JSON: provenance

While it is being built:

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
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from allranks.checkpoint.stores.file_store import sync_folder
from allranks.errors import DataLoadingError, InputError

Array: TypeAlias = np.ndarray[Any, Any]
MAGIC = b"ALRTOKN1"
VERSION = 1
HEADER_BYTES = 4096
BLOCK = 1 << 20
_FIELDS = struct.Struct("<8sIIQQQQQQII")  # without the CRC that follows


@dataclass(frozen=True)
class IndexHeader:
    """`file_bytes` is the size of the whole file: a truncated one is known at a glance."""

    token_bytes: int
    total_tokens: int
    num_documents: int
    num_files: int
    checks_offset: int
    meta_offset: int
    file_bytes: int
    meta_bytes: int
    meta_crc: int
    version: int = VERSION

    @property
    def starts_offset(self) -> int:
        """8-byte aligned, after the tokens."""
        return -(-(HEADER_BYTES + self.total_tokens * self.token_bytes) // 8) * 8

    @property
    def offsets_offset(self) -> int:
        return self.starts_offset + 8 * (self.num_documents + 1)

    @property
    def files_offset(self) -> int:
        return self.offsets_offset + 8 * self.num_documents

    def to_bytes(self) -> bytes:
        page = _FIELDS.pack(MAGIC, self.version, *astuple(self)[:-1]).ljust(HEADER_BYTES - 4, b"\0")
        return page + struct.pack("<I", zlib.crc32(page))

    @staticmethod
    def from_bytes(page: bytes, path: str = "") -> IndexHeader:
        """Reads a header page; says what is wrong with it."""
        if page[: len(MAGIC)] != MAGIC:
            raise _unusable("not a token index (bad magic number)", path)
        if len(page) < HEADER_BYTES:
            raise _unusable(f"token index is truncated: {len(page)} bytes of header", path)
        if zlib.crc32(page[: HEADER_BYTES - 4]) != struct.unpack_from("<I", page, HEADER_BYTES - 4)[0]:
            raise _unusable("token index is corrupted: its header fails its checksum", path)
        _, version, *fields = _FIELDS.unpack_from(page)
        if version != VERSION:
            raise DataLoadingError(f"token index has version {version}, this release reads {VERSION}", path)
        return IndexHeader(*fields)


REBUILD = "build it again: allranks index build FILES -o INDEX --force"


def _unusable(what: str, path: str) -> DataLoadingError:
    return DataLoadingError(what, path, hint=REBUILD)


@dataclass(frozen=True)
class Damage:
    """A block whose bytes do not match their checksum."""

    block: int
    offset: int


class TokenIndexFile(AbstractContextManager["TokenIndexFile"]):
    """An open index. Opening checks header, size, provenance and three sample blocks; `verify` checks all.

    Can be pickled to worker processes: they open the file themselves.
    """

    def __init__(self, path: str | Path, *, sample_check: bool = True) -> None:
        self.path = Path(path)
        self._sample_check = sample_check
        self._open()

    def _open(self) -> None:
        name = str(self.path)
        try:
            with self.path.open("rb") as file:
                page = file.read(HEADER_BYTES)
                self.header = IndexHeader.from_bytes(page, name)
                size = file.seek(0, 2)
                if size != self.header.file_bytes:
                    what = f"token index is truncated: {size} bytes of {self.header.file_bytes}"
                    raise _unusable(what, name)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            hint = f"build it first: allranks index build FILES -o {name} --tokenizer tokenizer.json"
            raise DataLoadingError("Token index file not found", name, hint=hint) from None
        except IsADirectoryError:
            raise DataLoadingError("is a folder, not a token index", name) from None
        except PermissionError as error:
            raise DataLoadingError(str(error.strerror), name) from None
        head = self.header
        raw = self._map[head.meta_offset : head.meta_offset + head.meta_bytes]
        if zlib.crc32(raw) != head.meta_crc:
            raise _unusable("token index is corrupted: its provenance fails its checksum", name)
        self.meta: dict[str, Any] = json.loads(raw)
        self.dtype = np.dtype("<u2" if head.token_bytes == 2 else "<u4")
        view = partial(np.frombuffer, self._map)
        #: All tokens, in the order of files and documents; read from the disk as they are touched.
        self.tokens = view(self.dtype, head.total_tokens, HEADER_BYTES)
        self._starts = view("<i8", head.num_documents + 1, head.starts_offset)
        self._offsets = view("<i8", head.num_documents, head.offsets_offset)
        self._files = view("<u4", head.num_documents, head.files_offset)
        blocks = -(-(head.checks_offset - HEADER_BYTES) // BLOCK)
        self._checks = view("<u4", blocks, head.checks_offset)
        if self._sample_check:
            self._check_samples()

    @property
    def total_tokens(self) -> int:
        return self.header.total_tokens

    @property
    def num_documents(self) -> int:
        return self.header.num_documents

    @property
    def num_files(self) -> int:
        return self.header.num_files

    @property
    def files(self) -> list[str]:
        """The files that the index was built from."""
        return [entry["path"] for entry in self.meta["files"]]

    @property
    def fingerprint(self) -> str:
        """Names the content: the same tokens in the same order have the same fingerprint."""
        crc = zlib.crc32(self._checks.tobytes()) if len(self._checks) else 0
        return f"{self.total_tokens:x}-{self.num_documents:x}-{crc:08x}"

    def __len__(self) -> int:
        return self.header.total_tokens

    def __getitem__(self, where: int | slice) -> Any:
        """Tokens by place: a number or an array that is a view of the file."""
        return self.tokens[where]

    def document(self, number: int) -> Array:
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        return self.tokens[int(self._starts[number]) : int(self._starts[number + 1])]

    def find_position(self, token: int) -> tuple[int, int, int]:
        """(file, offset in it, first token) of the document that holds a token."""
        if token < 0 or token >= self.total_tokens:
            raise ValueError(f"token {token} exceeds total tokens ({self.total_tokens})")
        number = int(np.searchsorted(self._starts, np.int64(token), side="right")) - 1
        return int(self._files[number]), int(self._offsets[number]), int(self._starts[number])

    def verify(self) -> Iterator[Damage]:
        """Reads everything and yields every damaged block."""
        for block in range(len(self._checks)):
            if not self._intact(block):
                yield Damage(block, HEADER_BYTES + block * BLOCK)

    def _check_samples(self) -> None:
        last = len(self._checks) - 1
        for block in sorted({0, last // 2, last}) if last >= 0 else []:
            if not self._intact(block):
                place = HEADER_BYTES + block * BLOCK
                raise DataLoadingError(
                    f"token index is corrupted: the block at byte {place} fails its checksum",
                    str(self.path),
                    hint=f"see all damage: allranks index verify {self.path}\n{REBUILD}",
                )

    def _intact(self, block: int) -> bool:
        start = HEADER_BYTES + block * BLOCK
        end = min(start + BLOCK, self.header.checks_offset)
        with memoryview(self._map) as view:
            return zlib.crc32(view[start:end]) == int(self._checks[block])

    def close(self) -> None:
        """Drops the arrays; the map is released when the last view that somebody holds is gone."""
        for name in ("tokens", "_starts", "_offsets", "_files", "_checks"):
            setattr(self, name, None)
        try:
            self._map.close()
        except BufferError:
            pass

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path = state["path"]
        self._sample_check = False
        self._open()


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
        keep = 0
        if lines[0] == json.dumps(self.request, sort_keys=True).encode():
            self.position, keep = self._replay(lines)
            self.resumed = self.position.tokens > 0 or self.position.documents > 0
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
        sync_folder(self.path.parent)
        self.close()
        for name in (".docs", ".journal"):
            self._part(name).unlink(missing_ok=True)
        return header

    def close(self) -> None:
        """Closes the files; what is done stays for a later build."""
        self._files.close()

    def _part(self, suffix: str = "") -> Path:
        return self.path.with_name(f"{self.path.name}.partial{suffix}")

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
