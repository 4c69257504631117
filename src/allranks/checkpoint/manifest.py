"""What a checkpoint consists of: one data file per rank, and two small kinds of JSON file. Pure, without torch.

A data file is a safetensors file whose image lies ready in shared memory. The header is padded so that tensor bytes start
on a page: the image in memory is the file on disk, and can be written past the page cache without another copy.
`__metadata__` carries the offsets of each shard under the keys torch's own HuggingFaceStorageReader looks for, so plain DCP
can read and reshard it.

`manifest.json` is written last: without a valid one a checkpoint does not exist. It names every file with its
size and the sha256 of every index. One index per rank (`rank-00000.json`) names every shard that rank wrote
with place and checksum, and holds the state that is not tensors. Both are read back through the same checks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from allranks.checkpoint.checksum import ALGORITHMS
from allranks.errors import CheckpointDamaged, CheckpointValidationError

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
    seen: dict[str, int] = {}
    keys = []
    for shard in ordered:
        count = seen[shard.name] = seen.get(shard.name, 0) + 1
        keys.append(shard.name if count == 1 else f"{shard.name}@{count}")
    header = _header(ordered, keys)
    placed, start = [], len(header)
    for shard, key in zip(ordered, keys, strict=True):
        placed.append(Placed(shard, start, key))
        start += shard.bytes
    return FileLayout(header, tuple(placed), start)


def padded(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


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


MANIFEST = "manifest.json"
SCHEMA = 1
IS_NEWER, UPGRADE = "is newer than", "upgrade allranks"
_HEAD = b'{"checksum": "sha256:'


class StoredShard(NamedTuple):
    """A shard and where its bytes are. `file` is relative to the checkpoint."""

    shard: Shard
    file: str
    start: int
    checksum: str


@dataclass(frozen=True)
class DataFile:
    """One safetensors file: its size, and its header (up to the first tensor byte) with checksum."""

    file: str
    bytes: int
    header_bytes: int
    header_checksum: str


#: The part of a state that is not tensors, as typed JSON (see tensors.py); None: there is none here.
Skeleton: TypeAlias = dict[str, Any] | None


@dataclass(frozen=True)
class Index:
    """What one rank wrote. `common` is the skeleton shared by all ranks (None: as rank 0's), `own` its own."""

    rank: int
    algorithm: str
    files: tuple[DataFile, ...]
    shards: tuple[StoredShard, ...]
    common: Skeleton = None
    own: Skeleton = None


@dataclass(frozen=True)
class Part:
    """An index file as the manifest knows it, and the bytes of data beside it."""

    rank: int
    index: str
    index_bytes: int
    index_sha256: str
    data_bytes: int


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
    metrics: Mapping[str, object] = field(default_factory=dict)
    schema: int = SCHEMA
    job: str = ""

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor files written for this checkpoint."""
        return sum(part.data_bytes for part in self.parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(part.rank for part in self.parts)


def part_name(rank: int, suffix: str, attempt: str = "") -> str:
    """The file name of one rank's part; `attempt` keeps two savers apart where there is no rename."""
    return f"rank-{rank:05d}{'-' + attempt if attempt else ''}.{suffix}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes: JSON whose first member is the sha256 of the second."""
    return _seal(_dump(asdict(manifest)))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Reads and checks a manifest; any difference from what was written raises CheckpointDamaged."""
    raw = _unseal(data, path)
    try:
        if raw["schema"] > SCHEMA:
            raise CheckpointValidationError(
                f"schema {raw['schema']} {IS_NEWER} {SCHEMA}", path=path, hint=UPGRADE
            )
        check_manifest(raw)
        return Manifest(**{**raw, "parts": tuple(Part(**part) for part in raw["parts"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"not a manifest: {error}", path=path) from error


def encode_index(index: Index) -> bytes:
    """The bytes of an index file. Shards become text one by one: thousands of lists would double the helper."""
    files = [asdict(file) for file in index.files]
    state = {"common": index.common, "own": index.own}
    head = _dump({"rank": index.rank, "algorithm": index.algorithm, "files": files, **state})
    return _seal(f'{head[:-1]},"shards":[{",".join(map(_dump, index.shards))}]}}')


def decode_index(data: bytes, path: str) -> Index:
    """Reads and checks an index. msgspec is imported here: the helper process never needs it."""
    from allranks.model.parsing import convert, from_json

    body = _body(data, path)
    try:
        try:
            index = from_json(body, Index)
        except ValueError:  # half a surrogate pair in a name: json.loads is more lenient
            index = convert(json.loads(body), Index)
        check_index(index)
        return index
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"not an index: {error}", path=path) from error


def bytes_of_index(data: bytes, path: str) -> int:
    """The bytes of its data files, of an index of our own, without a look at the rest."""
    return sum(file["bytes"] for file in _unseal(data, path)["files"])


_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _seal(body: str) -> bytes:
    text = body.encode()
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + b'", "body": ' + text + b"}\n"


def _body(data: bytes, path: str) -> bytes:
    """The sealed text, if every byte is as it was written."""
    start = len(_HEAD) + 64 + len(b'", "body": ')
    body = data[start:-2]
    digest = hashlib.sha256(body).hexdigest().encode()
    if data[:start] != _HEAD + digest + b'", "body": ' or data[-2:] != b"}\n":
        damage = "its checksum does not match: damaged or cut short"
        raise CheckpointDamaged(damage, path=path, invalid_keys=(path.rsplit("/", 1)[-1],))
    return body


def _unseal(data: bytes, path: str) -> dict[str, Any]:
    try:
        parsed = json.loads(_body(data, path))
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"not JSON: {error}", path=path) from error
    if not isinstance(parsed, dict):
        raise CheckpointDamaged("not an object", path=path)
    return parsed


_KINDS: dict[str, type | tuple[type, ...]] = {
    "timestamp": (int, float),
    "attempt": str,
    "metrics": dict,
    "job": str,
    "parts": list,
}


def check_manifest(raw: Mapping[str, Any]) -> None:
    """TypeError or ValueError names the first thing that cannot be."""
    for name in ("step", "epoch", "world_size"):
        _count(name, raw[name])
    for name, kind in _KINDS.items():
        _kind(name, raw[name], kind)
    for part in raw["parts"]:
        _kind("part", part, dict)
        for name in ("rank", "index_bytes", "data_bytes"):
            _count(name, part[name])
        _plain_name("index", part["index"])
        _kind("index_sha256", part["index_sha256"], str)


def check_index(index: Index) -> None:
    """The same for an index. There are as many shards as tensors, but few kinds of them."""
    _count("rank", index.rank)
    if index.algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {index.algorithm!r:.80}")
    sizes = {}
    for file in index.files:
        _plain_name("file", file.file)
        if not 0 <= file.header_bytes <= file.bytes:
            raise ValueError(f"header_bytes {file.header_bytes} of a file of {file.bytes}")
        sizes[file.file] = file.bytes
    for kind in {shard[1:] for shard, *_ in index.shards}:
        _check_kind(*kind)
    for shard, home, start, _ in index.shards:
        if start < 0 or start + shard.bytes > sizes[home]:
            where = f"bytes {start} to {start + shard.bytes} of {home}"
            raise ValueError(f"{shard.name}: {where}, which has {sizes[home]}")


def _check_kind(
    dtype: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    length: int,
    view: str,
) -> None:
    """Whether a shard like this can be."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r:.80}")
    for number in (*shape, *offsets, *sizes, length):
        _count("size", number)
    if not len(offsets) == len(sizes) == len(shape) or any(
        o + s > w for o, s, w in zip(offsets, sizes, shape, strict=True)
    ):
        raise ValueError(f"piece {offsets} + {sizes} of {shape}")
    if view and dtype != "U8":
        raise ValueError(f"{view!r:.80} is stored as {dtype}, not as bytes")
    if not view and length != math.prod(sizes) * ITEM_BYTES[dtype]:
        raise ValueError(f"{length} bytes for {sizes} of {dtype}")


def _kind(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.80}")


def _count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{name} is {value!r:.80}, not a count")


def _plain_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or "/" in value or "\0" in value or value in (".", ".."):
        raise ValueError(f"{name} is {value!r:.80}, not a file name")
