"""The file format of a token index, which is memory-mapped: opening takes the same time for a megabyte and a terabyte.

tokens   total_tokens of token_bytes each (little-endian uint16 or uint32)
starts   num_documents + 1 int64: the first token of each document, then total_tokens; 8-byte aligned
offsets  num_documents int64: position of the document in its file (byte offset in uncompressed text; row in Parquet)
files    num_documents uint32: index of the file
checks   uint32 CRC-32 of every BLOCK bytes of the parts above
facts    JSON: the sizes above, and the source of the index
tail     offset of the facts, their CRC-32, MAGIC
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from allranks.errors import DataLoadingError

Array: TypeAlias = np.ndarray[Any, Any]
MAGIC = b"ALRTOKN2"
BLOCK = 1 << 20
TAIL = struct.Struct("<QI8s")
REBUILD = "build it again: allranks index build FILES -o INDEX --force"


@dataclass(frozen=True)
class IndexHeader:
    """The sizes of an index."""

    token_bytes: int
    total_tokens: int
    num_documents: int
    num_files: int

    @property
    def starts_offset(self) -> int:
        return -(-self.total_tokens * self.token_bytes // 8) * 8

    @property
    def offsets_offset(self) -> int:
        return self.starts_offset + 8 * (self.num_documents + 1)

    @property
    def files_offset(self) -> int:
        return self.offsets_offset + 8 * self.num_documents

    @property
    def checks_offset(self) -> int:
        return self.files_offset + 4 * self.num_documents


@dataclass(frozen=True)
class Damage:
    """A block whose bytes do not match their checksum."""

    block: int
    offset: int


class TokenIndexFile(AbstractContextManager["TokenIndexFile"]):
    """An open index. Opening checks the facts and three sample blocks; `verify` checks all blocks.

    Can be pickled: worker processes open the file themselves.
    """

    def __init__(self, path: str | Path, *, sample_check: bool = True) -> None:
        self.path = Path(path)
        self._open(sample_check)

    def _open(self, sample_check: bool) -> None:
        name = str(self.path)
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < TAIL.size:
                    raise _unusable("not a token index, or truncated (no tail)", name)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            hint = f"build it first: allranks index build FILES -o {name} --tokenizer tokenizer.json"
            raise DataLoadingError("Token index file not found", name, hint=hint) from None
        except IsADirectoryError:
            raise DataLoadingError("this is a folder, not a token index", name) from None
        except PermissionError as error:
            raise DataLoadingError(str(error.strerror), name) from None
        begin, crc, magic = TAIL.unpack_from(self._map, len(self._map) - TAIL.size)
        facts = self._map[begin : -TAIL.size]
        if magic != MAGIC:
            raise _unusable("not a token index, or truncated (bad magic number)", name)
        if zlib.crc32(facts) != crc:
            raise _unusable("token index is corrupted: checksum mismatch in its facts", name)
        self.meta: dict[str, Any] = json.loads(facts)
        self.header = head = IndexHeader(**self.meta.pop("sizes"))
        self.dtype = np.dtype("<u2" if head.token_bytes == 2 else "<u4")
        view = partial(np.frombuffer, self._map)
        #: All tokens, in the order of files and documents; read from disk on access.
        self.tokens = view(self.dtype, head.total_tokens)
        self._starts = view("<i8", head.num_documents + 1, head.starts_offset)
        self._offsets = view("<i8", head.num_documents, head.offsets_offset)
        self._files = view("<u4", head.num_documents, head.files_offset)
        self._checks = view("<u4", -(-head.checks_offset // BLOCK), head.checks_offset)
        last = len(self._checks) - 1
        for block in sorted({0, last // 2, last}) if sample_check else []:
            if not self._intact(block):
                raise DataLoadingError(
                    f"token index is corrupted: checksum mismatch in the block at byte {block * BLOCK}",
                    name,
                    hint=f"list all damage: allranks index verify {name}\n{REBUILD}",
                )

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
        """Identifies the content: the same tokens in the same order have the same fingerprint."""
        return f"{self.total_tokens:x}-{self.num_documents:x}-{zlib.crc32(self._checks.tobytes()):08x}"

    def __len__(self) -> int:
        return self.header.total_tokens

    def __getitem__(self, where: int | slice) -> Any:
        """Tokens by position: a number, or an array that is a view of the file."""
        return self.tokens[where]

    def document(self, number: int) -> Array:
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        return self.tokens[int(self._starts[number]) : int(self._starts[number + 1])]

    def find_position(self, token: int) -> tuple[int, int, int]:
        """(file, offset in the file, first token) of the document that contains a token."""
        if token < 0 or token >= self.total_tokens:
            raise ValueError(f"token {token} exceeds total tokens ({self.total_tokens})")
        number = int(np.searchsorted(self._starts, np.int64(token), side="right")) - 1
        return int(self._files[number]), int(self._offsets[number]), int(self._starts[number])

    def verify(self) -> Iterator[Damage]:
        """Reads the whole file and yields every damaged block."""
        for block in range(len(self._checks)):
            if not self._intact(block):
                yield Damage(block, block * BLOCK)

    def _intact(self, block: int) -> bool:
        end = min((block + 1) * BLOCK, self.header.checks_offset)
        with memoryview(self._map) as view:
            return zlib.crc32(view[block * BLOCK : end]) == int(self._checks[block])

    def close(self) -> None:
        """Drops the arrays; the map is released with the last view of it."""
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
        self._open(False)


def _unusable(what: str, path: str) -> DataLoadingError:
    return DataLoadingError(what, path, hint=REBUILD)


class IndexWriter:
    """Writes an index document by document, with 20 bytes of memory for each document."""

    def __init__(self, file: BinaryIO, token_bytes: int) -> None:
        self._file, self._token_bytes = file, token_bytes
        self._block, self._crc, self._checks = 0, 0, array("I")
        self._starts, self._offsets, self._files = array("q", [0]), array("q"), array("I")

    def append(self, tokens: Array, file: int, offset: int) -> None:
        """Adds one document."""
        self._write(tokens.tobytes())
        self._starts.append(self._starts[-1] + len(tokens))
        self._offsets.append(offset)
        self._files.append(file)

    @property
    def tokens(self) -> int:
        return self._starts[-1]

    @property
    def documents(self) -> int:
        return len(self._offsets)

    def finish(self, facts: dict[str, object], num_files: int) -> IndexHeader:
        """Adds the tables, the checksums and the facts, and syncs the file."""
        header = IndexHeader(self._token_bytes, self.tokens, self.documents, num_files)
        self._write(bytes(header.starts_offset - self.tokens * self._token_bytes))
        for table in (self._starts, self._offsets, self._files):
            self._write(table.tobytes())
        if self._block:
            self._checks.append(self._crc)
        text = json.dumps({"sizes": vars(header), **facts}, sort_keys=True).encode()
        self._file.write(self._checks.tobytes())
        self._file.write(text + TAIL.pack(self._file.tell(), zlib.crc32(text), MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        return header

    def _write(self, data: bytes) -> None:
        """Writes data and updates the checksum of each block."""
        self._file.write(data)
        at = 0
        while at < len(data):
            piece = data[at : at + BLOCK - self._block]
            self._crc, self._block = zlib.crc32(piece, self._crc), self._block + len(piece)
            at += len(piece)
            if self._block == BLOCK:
                self._checks.append(self._crc)
                self._crc = self._block = 0
