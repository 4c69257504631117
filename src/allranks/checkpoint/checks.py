"""Whether what a sealed manifest or index says can be true: types, ranges and file names. Pure, without torch.

A seal proves that bytes are as they were written, not that a sane program wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from allranks.checkpoint.checksum import ALGORITHMS
from allranks.checkpoint.layout import ITEM_BYTES


def check_manifest(raw: Mapping[str, Any]) -> None:
    """TypeError or ValueError names the first thing that cannot be."""
    for name in ("step", "epoch", "world_size"):
        _count(name, raw[name])
    _number("timestamp", raw["timestamp"])
    _kind("attempt", raw["attempt"], str)
    _kind("metrics", raw.get("metrics", {}), dict)
    _kind("job", raw.get("job", ""), str)
    _kind("parts", raw["parts"], list)
    for part in raw["parts"]:
        _kind("part", part, dict)
        for name in ("rank", "index_bytes", "data_bytes"):
            _count(name, part[name])
        _plain_name("index", part["index"])
        _kind("index_sha256", part["index_sha256"], str)
        _kind("references", part["references"], list)
        for file in part["references"]:
            _file("references", file)


def check_index(raw: Mapping[str, Any]) -> None:
    """The same for an index, without its rows."""
    _count("rank", raw["rank"])
    if raw["algorithm"] not in ALGORITHMS:
        raise ValueError(f"algorithm is {raw['algorithm']!r:.80}")
    for name in ("common", "own"):
        if raw[name] is not None:
            _kind(name, raw[name], dict)
    _kind("shards", raw["shards"], list)
    _kind("files", raw["files"], list)
    for file in raw["files"]:
        _kind("file", file, dict)
        _plain_name("file", file["file"])
        for name in ("bytes", "header_bytes"):
            _count(name, file[name])
        if file["header_bytes"] > file["bytes"]:
            raise ValueError(f"header_bytes {file['header_bytes']} of a file of {file['bytes']}")
        _kind("header_checksum", file["header_checksum"], str)


def check_row(row: Any) -> None:
    """One shard of an index."""
    name, dtype, shape, offsets, sizes, length, view, file, start, checksum = row
    for label, text in (("name", name), ("view", view), ("checksum", checksum)):
        _kind(label, text, str)
    _file("file", file)
    _count("bytes", length)
    _count("start", start)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r}")
    _counts("shape", shape)
    piece = shape
    if (offsets is None) != (sizes is None):
        raise ValueError(f"{name}: offsets {offsets!r:.80} and sizes {sizes!r:.80}")
    if offsets is not None:
        _counts("offsets", offsets)
        _counts("sizes", sizes)
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(o + s > w for o, s, w in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{name}: piece {offsets} + {sizes} of {shape}")
        piece = sizes
    if view and dtype != "U8":
        raise ValueError(f"{name}: {view!r:.80} is stored as {dtype}, not as bytes")
    if not view and length != math.prod(piece) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name}: {length} bytes for {piece} of {dtype}")


def _kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.80}, not a {kind.__name__}")


def _count(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{name} is {value!r:.80}, not a count")


def _counts(name: str, value: Any) -> None:
    _kind(name, value, list)
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise TypeError(f"{name} is {value!r:.80}, not a list of counts")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r:.80}, not a number")


def _plain_name(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or "/" in value or "\0" in value or value in (".", ".."):
        raise ValueError(f"{name} is {value!r:.80}, not a file name")


def _file(name: str, value: Any) -> None:
    """A file of this checkpoint, or `../OTHER/FILE` of another one of the same store."""
    _kind(name, value, str)
    for part in value.removeprefix("../").split("/", 1) if value.startswith("../") else [value]:
        _plain_name(name, part)
