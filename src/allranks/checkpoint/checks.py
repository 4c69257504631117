"""Whether what a sealed manifest or index says can be true: types, ranges and file names. Pure, without torch.

A seal proves that bytes are as they were written, not that a sane program wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add, le
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


def check_rows(rows: Sequence[Any], files: Mapping[str, int]) -> list[tuple[Any, ...]]:
    """The shards of an index as columns, once they were found right; `files` are its data files with their sizes.

    There are as many rows as tensors: whole columns are checked first, rows one by one only where that is not enough.
    """
    try:
        columns = list(zip(*rows, strict=True))
        fine = not columns or _whole_tensors(columns, files)
    except (KeyError, TypeError, ValueError):  # not ten columns, other types, or files of other checkpoints
        fine = False
    if fine:
        return columns or [()] * 10
    for row in rows:
        _check_row(row, files)
    return [
        tuple(map(tuple, column)) if at == 2 else column for at, column in enumerate(zip(*rows, strict=True))
    ]


def _whole_tensors(columns: list[tuple[Any, ...]], files: Mapping[str, int]) -> bool:
    """Whether these are whole tensors as most are; their shapes become tuples."""
    names, dtypes, shapes, offsets, sizes, lengths, views, homes, starts, sums = columns
    if set(map(type, chain(names, views, sums))) != {str} or set(map(type, shapes)) != {list}:
        return False
    if set(map(type, chain(lengths, starts, chain.from_iterable(shapes)))) != {int}:
        return False
    if not set(offsets) == set(sizes) == {None} or set(views) != {""} or min(starts) < 0:
        return False
    columns[2] = tuple(map(tuple, shapes))
    kinds = set(zip(columns[2], dtypes, lengths, strict=True))  # few, whatever the number of tensors
    right = (
        min(shape, default=0) >= 0 and math.prod(shape) * ITEM_BYTES[kind] == length < 1 << 63
        for shape, kind, length in kinds
    )
    return all(right) and all(map(le, map(add, starts, lengths), map(files.__getitem__, homes)))


def _check_row(row: Any, files: Mapping[str, int]) -> None:
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
    if start + length > files.get(file, 1 << 63):
        raise ValueError(f"{name}: bytes {start} to {start + length} of {file}, which has {files[file]}")


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
