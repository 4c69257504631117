"""The file of a token index. Pure: bytes in, bytes out.

header   4096 bytes, ends with its own CRC-32
tokens   total_tokens of token_bytes each (little-endian uint16 or uint32)
starts   num_documents + 1 int64: the first token of each document, then total_tokens
offsets  num_documents int64: where the document stands in its file (byte of the plain text; row of Parquet)
files    num_documents uint32: which file
checks   uint32 CRC-32 of every BLOCK bytes between the header and here
meta     JSON: provenance
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from allranks.errors import DataLoadingError

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
        head = _FIELDS.pack(
            MAGIC, self.version, self.token_bytes, self.total_tokens, self.num_documents, self.num_files,
            self.checks_offset, self.meta_offset, self.file_bytes, self.meta_bytes, self.meta_crc,
        )  # fmt: skip
        page = head.ljust(HEADER_BYTES - 4, b"\0")
        return page + struct.pack("<I", zlib.crc32(page))

    @staticmethod
    def from_bytes(page: bytes, path: str = "") -> IndexHeader:
        """Reads a header page; says what is wrong with it."""
        if page[: len(MAGIC)] != MAGIC:
            raise DataLoadingError("not a token index (bad magic number)", path, hint=REBUILD)
        if len(page) < HEADER_BYTES:
            raise DataLoadingError(
                f"token index is truncated: {len(page)} bytes of header", path, hint=REBUILD
            )
        if zlib.crc32(page[: HEADER_BYTES - 4]) != struct.unpack_from("<I", page, HEADER_BYTES - 4)[0]:
            raise DataLoadingError(
                "token index is corrupted: its header fails its checksum", path, hint=REBUILD
            )
        fields = _FIELDS.unpack_from(page)
        _, version, token_bytes, tokens, documents, files, checks, meta, size, meta_bytes, meta_crc = fields
        if version != VERSION:
            raise DataLoadingError(f"token index has version {version}, this release reads {VERSION}", path)
        return IndexHeader(
            token_bytes, tokens, documents, files, checks, meta, size, meta_bytes, meta_crc, version
        )


REBUILD = "build it again: allranks index build FILES -o INDEX --force"
