"""The file of a token index, read through one memory map: opening costs the same for a megabyte and a terabyte.

header   4096 bytes, ends with its own CRC-32
tokens   total_tokens of token_bytes each (little-endian uint16 or uint32)
starts   num_documents + 1 int64: the first token of each document, then total_tokens
offsets  num_documents int64: where the document stands in its file (byte of the plain text; row of Parquet)
files    num_documents uint32: which file
checks   uint32 CRC-32 of every BLOCK bytes between the header and here
meta     JSON: provenance
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from allranks.errors import DataLoadingError

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
        """The header page."""
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


class TokenIndexFile:
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
            build = f"allranks index build FILES -o {name} --tokenizer tokenizer.json"
            raise DataLoadingError(
                "Token index file not found", name, hint=f"build it first: {build}"
            ) from None
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
        view = self._view
        #: All tokens, in the order of files and documents; read from the disk as they are touched.
        self.tokens = view(self.dtype, head.total_tokens, HEADER_BYTES)
        self._starts = view(np.dtype("<i8"), head.num_documents + 1, head.starts_offset)
        self._offsets = view(np.dtype("<i8"), head.num_documents, head.offsets_offset)
        self._files = view(np.dtype("<u4"), head.num_documents, head.files_offset)
        blocks = -(-(head.checks_offset - HEADER_BYTES) // BLOCK)
        self._checks = view(np.dtype("<u4"), blocks, head.checks_offset)
        if self._sample_check:
            self._check_samples()

    def _view(self, dtype: Any, count: int, offset: int) -> Array:
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

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
        """The tokens of one document."""
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

    def __enter__(self) -> TokenIndexFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path = state["path"]
        self._sample_check = False
        self._open()
