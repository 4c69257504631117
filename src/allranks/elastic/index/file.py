"""Reads a token index through one memory map: opening costs the same for a megabyte and a terabyte."""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from allranks.elastic.index.layout import BLOCK, HEADER_BYTES, REBUILD, IndexHeader
from allranks.errors import DataLoadingError


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
                    raise DataLoadingError(
                        f"token index is truncated: {size} bytes of {self.header.file_bytes}",
                        name,
                        hint=REBUILD,
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise _not_found(name) from None
        except IsADirectoryError:
            raise DataLoadingError("is a folder, not a token index", name) from None
        except PermissionError as error:
            raise DataLoadingError(str(error.strerror), name) from None
        head = self.header
        raw = self._map[head.meta_offset : head.meta_offset + head.meta_bytes]
        if zlib.crc32(raw) != head.meta_crc:
            raise DataLoadingError(
                "token index is corrupted: its provenance fails its checksum", name, hint=REBUILD
            )
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

    def _view(self, dtype: np.dtype[Any], count: int, offset: int) -> np.ndarray[Any, Any]:
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

    def document(self, number: int) -> np.ndarray[Any, Any]:
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

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._sample_check = False
        self._open()


def _not_found(name: str) -> DataLoadingError:
    return DataLoadingError(
        "Token index file not found",
        name,
        hint=f"build it first: allranks index build FILES -o {name} --tokenizer tokenizer.json",
    )
