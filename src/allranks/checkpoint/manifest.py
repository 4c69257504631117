"""What a checkpoint consists of, as two small kinds of JSON file. Pure, without torch.

`manifest.json` is written last: without a valid one a checkpoint does not exist. It names every file with its
size and the sha256 of every index. One index per rank (`rank-00000.json`) names every shard that rank wrote
with place and checksum, and holds the state that is not tensors. Both are read back through the same checks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from allranks.checkpoint.checks import check_index, check_manifest, check_rows
from allranks.checkpoint.layout import Shard
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
            "rank": index.rank, "algorithm": index.algorithm, "files": [asdict(file) for file in index.files],
            "common": index.common, "own": index.own, "columns": _COLUMNS,
        }
    )  # fmt: skip
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
            raw["rank"], raw["algorithm"], tuple(DataFile(**file) for file in raw["files"]),
            _stored(columns), raw["common"], raw["own"],
        )  # fmt: skip
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
