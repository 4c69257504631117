"""What a checkpoint consists of, as two small kinds of JSON file. Pure, without torch.

`manifest.json` is written last: without a valid one a checkpoint does not exist. It names every file with its
size and the sha256 of every index. One index per rank (`rank-00000.json`) names every shard that rank wrote
with place and checksum, and holds the state that is not tensors. Both are read back through the same checks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from operator import add, le
from typing import Any, NamedTuple

from allranks.checkpoint.checksum import ALGORITHMS
from allranks.checkpoint.layout import ITEM_BYTES, Shard
from allranks.errors import CheckpointDamaged, CheckpointValidationError

MANIFEST = "manifest.json"
SCHEMA = 2  # 2 adds `job`; what names none is written as 1, which earlier versions read
_HEAD = b'{"checksum": "sha256:'


class StoredShard(NamedTuple):
    """A shard and where its bytes are. `file` is relative to the checkpoint (`../` leads into an older one)."""

    shard: Shard
    file: str
    start: int
    checksum: str


#: What each row of an index says about a shard; rows instead of objects read twice as fast.
_COLUMNS = [*Shard._fields, *StoredShard._fields[1:]]


@dataclass(frozen=True)
class DataFile:
    """One safetensors file: its size, and its header (up to the first tensor byte) with checksum."""

    file: str
    bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class Index:
    """What one rank wrote. `common` is the skeleton shared by all ranks (None: as rank 0's), `own` its own."""

    rank: int
    algorithm: str
    files: tuple[DataFile, ...]
    shards: tuple[StoredShard, ...]
    common: Any = None
    own: Any = None


@dataclass(frozen=True)
class Part:
    """An index file as the manifest knows it, and the bytes of data beside it."""

    rank: int
    index: str
    index_bytes: int
    index_sha256: str
    data_bytes: int
    references: tuple[str, ...] = ()  # data files of older checkpoints that hold unchanged tensors


@dataclass(frozen=True)
class Manifest:
    """The head of a checkpoint. `ranks` wrote it; `world_size` may be larger where each node has its own disk.

    `job` is the name of the job that saved it, "" if it has none.
    """

    step: int
    epoch: int
    world_size: int
    timestamp: float
    attempt: str
    parts: tuple[Part, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    schema: int = 1
    job: str = ""

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor files written for this checkpoint."""
        return sum(part.data_bytes for part in self.parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose parts are here."""
        return tuple(part.rank for part in self.parts)


def part_name(rank: int, suffix: str, attempt: str = "") -> str:
    """The file name of one rank's part; `attempt` keeps two savers apart where there is no rename."""
    return f"rank-{rank:05d}{'-' + attempt if attempt else ''}.{suffix}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes: JSON whose first member is the sha256 of the second."""
    raw = asdict(manifest)
    job = raw.pop("job")
    return _seal(_dump({**raw, "schema": 2, "job": job} if job else raw))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Reads and checks a manifest; any difference from what was written raises CheckpointDamaged."""
    raw = _unseal(data, path)
    try:
        if raw["schema"] > SCHEMA:
            raise CheckpointValidationError(
                f"schema {raw['schema']} is newer than {SCHEMA}", path=path, hint="upgrade allranks"
            )
        check_manifest(raw)
        return Manifest(**{**raw, "parts": tuple(_part(part) for part in raw["parts"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"not a manifest: {error}", path=path) from error


def encode_index(index: Index) -> bytes:
    """The bytes of an index file. Shards become text one by one: thousands of lists would double the helper."""
    head = _dump(
        {
            "rank": index.rank,
            "algorithm": index.algorithm,
            "files": [asdict(file) for file in index.files],
            "common": index.common,
            "own": index.own,
            "columns": _COLUMNS,
        }
    )
    rows = ",".join(_dump(_row(stored)) for stored in index.shards)
    return _seal(f'{head[:-1]},"shards":[{rows}]}}')


def decode_index(data: bytes, path: str) -> Index:
    """Reads and checks an index file."""
    raw = _unseal(data, path)
    try:
        if raw["columns"] != _COLUMNS:
            raise CheckpointValidationError(
                f"unknown columns {raw['columns']}", path=path, hint="upgrade allranks"
            )
        check_index(raw)
        columns = check_rows(raw["shards"], {file["file"]: file["bytes"] for file in raw["files"]})
        return Index(
            raw["rank"],
            raw["algorithm"],
            tuple(DataFile(**file) for file in raw["files"]),
            _stored(columns),
            raw["common"],
            raw["own"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"not an index: {error}", path=path) from error


def _part(raw: dict[str, Any]) -> Part:
    return Part(**{**raw, "references": tuple(raw["references"])})


def _row(stored: StoredShard) -> list[Any]:
    """A shard as the columns say; null for the offsets and sizes of a whole tensor."""
    shard = stored.shard
    place = [None, None] if shard.whole else [shard.offsets, shard.sizes]
    return [shard.name, shard.dtype, shard.shape, *place, shard.bytes, shard.view, *stored[1:]]


def _stored(columns: list[tuple[Any, ...]]) -> tuple[StoredShard, ...]:
    """Shards out of their columns; no offsets and sizes stand for a whole tensor."""
    names, dtypes, shapes, offsets, sizes, lengths, views, *places = columns
    zeros = [(0,) * rank for rank in range(max(map(len, shapes), default=0) + 1)]
    starts: Iterable[Any] = map(zeros.__getitem__, map(len, shapes))
    pieces: Iterable[Any] = shapes
    if any(offset is not None for offset in offsets):
        starts = [zero if o is None else tuple(o) for zero, o in zip(starts, offsets, strict=True)]
        pieces = [shape if s is None else tuple(s) for shape, s in zip(shapes, sizes, strict=True)]
    # tuple's constructor: a named tuple's own takes twice as long
    shards = map(_new_shard, zip(names, dtypes, shapes, starts, pieces, lengths, views, strict=True))
    return tuple(map(_new_stored, zip(shards, *places, strict=True)))


_new_shard = partial(tuple.__new__, Shard)
_new_stored = partial(tuple.__new__, StoredShard)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _seal(body: str) -> bytes:
    text = body.encode()
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + b'", "body": ' + text + b"}\n"


def _unseal(data: bytes, path: str) -> dict[str, Any]:
    """The body, if every byte is as it was written."""
    start = len(_HEAD) + 64 + len(b'", "body": ')
    body = data[start:-2]
    digest = hashlib.sha256(body).hexdigest().encode()
    if data[:start] != _HEAD + digest + b'", "body": ' or data[-2:] != b"}\n":
        raise CheckpointDamaged(
            "its checksum does not match: damaged or cut short",
            path=path,
            invalid_keys=(path.rsplit("/", 1)[-1],),
        )
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"not JSON: {error}", path=path) from error
    if not isinstance(parsed, dict):
        raise CheckpointDamaged("not an object", path=path)
    return parsed


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
