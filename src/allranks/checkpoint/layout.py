"""The layout of one rank's data file: a safetensors file whose image lies ready in shared memory.

Pure, without torch. The header is padded so that tensor bytes start on a page: the image in memory is the file
on disk, and can be written past the page cache without another copy. `__metadata__` carries the offsets of each
shard under the keys torch's own HuggingFaceStorageReader looks for, so plain DCP can read and reshard it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PAGE_BYTES = 4096

#: safetensors name -> bytes per element
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class Shard(NamedTuple):
    """A rectangular piece of a tensor. `shape` is the whole tensor's, `offsets` and `sizes` the piece's.

    A tuple, since there are as many as tensors: made and kept at a third of an object's cost. `dtype` is the
    safetensors name; `view` names the torch dtype where safetensors has none (stored as bytes, `sizes` then still
    count elements), and is empty otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int
    view: str = ""

    @property
    def whole(self) -> bool:
        """Whether the piece is the whole tensor."""
        return self.sizes == self.shape


@dataclass(frozen=True, slots=True)
class Placed:
    """A shard and where its bytes start, counted from the first byte of the file."""

    shard: Shard
    start: int
    key: str  # its name in the safetensors header: the tensor's, unless the file holds two shards of it


@dataclass(frozen=True)
class FileLayout:
    """One data file: `header` (length word included, padded to a page), then the shards without gaps."""

    header: bytes
    placed: tuple[Placed, ...]
    bytes: int


def lay_out(shards: Sequence[Shard]) -> FileLayout:
    """Places shards by falling element size, so that each starts aligned without gaps between them."""
    ordered = sorted(shards, key=lambda shard: -ITEM_BYTES[shard.dtype])
    keys = _keys(ordered)
    header = _header(ordered, keys)
    placed, start = [], len(header)
    for shard, key in zip(ordered, keys, strict=True):
        placed.append(Placed(shard, start, key))
        start += shard.bytes
    return FileLayout(header, tuple(placed), start)


def parse_header(head: bytes) -> tuple[int, dict[str, object]]:
    """(bytes before the tensors, header object) of a safetensors file's beginning; ValueError if it is none."""
    if len(head) < 8:
        raise ValueError(f"{len(head)} bytes are too few for a safetensors header")
    length = int.from_bytes(head[:8], "little")
    if length > len(head) - 8:
        raise ValueError(f"header of {length} bytes, but only {len(head) - 8} there")
    parsed = json.loads(head[8 : 8 + length])
    if not isinstance(parsed, dict):
        raise ValueError("safetensors header is not an object")
    return 8 + length, parsed


def padded(length: int) -> int:
    """The next multiple of a page."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _keys(shards: Sequence[Shard]) -> list[str]:
    seen: dict[str, int] = {}
    keys = []
    for shard in shards:
        seen[shard.name] = seen.get(shard.name, 0) + 1
        keys.append(shard.name if seen[shard.name] == 1 else f"{shard.name}@{seen[shard.name]}")
    return keys


def _header(shards: Sequence[Shard], keys: Sequence[str]) -> bytes:
    sharding = {key: {"saved_offsets": list(shard.offsets)} for shard, key in zip(shards, keys, strict=True)}
    entries: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding),
            "writer": "allranks",
        }
    }
    start = 0
    for shard, key in zip(shards, keys, strict=True):
        sizes = [shard.bytes] if shard.view else list(shard.sizes)
        entries[key] = {"dtype": shard.dtype, "shape": sizes, "data_offsets": [start, start + shard.bytes]}
        start += shard.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (padded(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text
