"""The files of a checkpoint: one data file and one index per rank, and a manifest. No torch, no I/O.

A data file is a safetensors file. Its header is padded so that tensor bytes start on a page: the image in shared memory
is the file on disk, and can be written with O_DIRECT without another copy. `__metadata__` holds the offsets of each shard
under the keys that torch's HuggingFaceStorageReader expects, so plain DCP can read and reshard the file.

`manifest.json` is written last; without a valid one there is no checkpoint. It lists every index with its size and sha256.
The index of a rank (`rank-00000.json`) lists every shard that the rank wrote, with offset and checksum, and holds the part
of the state that is not tensors.
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
    """A rectangular piece of a tensor. `shape` belongs to the whole tensor, `offsets` and `sizes` to the piece.

    `dtype` is the safetensors name. A torch dtype that safetensors lacks is stored as bytes and named in `view`; `sizes`
    still counts elements then. A tuple costs a third of an object, and there is one per tensor.
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
    """A shard and the offset of its bytes in the file."""

    shard: Shard
    start: int
    key: str  # its name in the safetensors header: the tensor's, with a number if the file holds several shards of it


@dataclass(frozen=True)
class FileLayout:
    """One data file: `header` (with its length word, padded to a page), then the shards without gaps."""

    header: bytes
    placed: tuple[Placed, ...]
    bytes: int


def lay_out(shards: Sequence[Shard]) -> FileLayout:
    """Orders shards by descending element size, so that each is aligned without gaps."""
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
    """A shard, its file (relative to the checkpoint), offset and checksum."""

    shard: Shard
    file: str
    start: int
    checksum: str


@dataclass(frozen=True)
class DataFile:
    """One safetensors file: its size, and size and checksum of its header (up to the first tensor byte)."""

    file: str
    bytes: int
    header_bytes: int
    header_checksum: str


#: The part of a state that is not tensors, as typed JSON (see tensors.py); None if absent.
Skeleton: TypeAlias = dict[str, Any] | None


@dataclass(frozen=True)
class Index:
    """What one rank wrote. `common` is the skeleton shared by all ranks (None: same as rank 0), `own` the rank's own."""

    rank: int
    algorithm: str
    files: tuple[DataFile, ...]
    shards: tuple[StoredShard, ...]
    common: Skeleton = None
    own: Skeleton = None


@dataclass(frozen=True)
class Part:
    """The manifest's entry for one index file, with the size of its data files."""

    rank: int
    index: str
    index_bytes: int
    index_sha256: str
    data_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The manifest. `ranks` wrote the checkpoint; `world_size` is larger if each node has its own disk.

    `job` is the name of the job that saved it; "" if the job has no name.
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
    """The file name of one rank's part; `attempt` separates two savers in stores without rename."""
    return f"rank-{rank:05d}{'-' + attempt if attempt else ''}.{suffix}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file: JSON whose first member is the sha256 of the second."""
    return _seal(_dump(asdict(manifest)))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Parses and checks a manifest; CheckpointDamaged if any byte differs from what was written."""
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
    """The bytes of an index file. Shards are encoded one by one: thousands of lists would double the helper's memory."""
    files = [asdict(file) for file in index.files]
    state = {"common": index.common, "own": index.own}
    head = _dump({"rank": index.rank, "algorithm": index.algorithm, "files": files, **state})
    return _seal(f'{head[:-1]},"shards":[{",".join(map(_dump, index.shards))}]}}')


def decode_index(data: bytes, path: str) -> Index:
    """Parses and checks an index. Imports msgspec here because the helper process does not need it."""
    from allranks.model.parsing import convert, from_json

    body = _body(data, path)
    try:
        try:
            index = from_json(body, Index)
        except ValueError:  # json.loads accepts half a surrogate pair in a name
            index = convert(json.loads(body), Index)
        check_index(index)
        return index
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"not an index: {error}", path=path) from error


def bytes_of_index(data: bytes, path: str) -> int:
    """The size of the data files that an index lists; the rest is not checked."""
    return sum(file["bytes"] for file in _unseal(data, path)["files"])


_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _seal(body: str) -> bytes:
    text = body.encode()
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + b'", "body": ' + text + b"}\n"


def _body(data: bytes, path: str) -> bytes:
    """The body of a sealed file; CheckpointDamaged if its checksum does not match."""
    start = len(_HEAD) + 64 + len(b'", "body": ')
    body = data[start:-2]
    digest = hashlib.sha256(body).hexdigest().encode()
    if data[:start] != _HEAD + digest + b'", "body": ' or data[-2:] != b"}\n":
        damage = "checksum mismatch: damaged or truncated"
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
    """Raises TypeError or ValueError for the first invalid field."""
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
    """Raises TypeError or ValueError for the first invalid field. Equal kinds of shards are checked once."""
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
    """Raises if the fields of a shard contradict each other."""
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
