"""Reads checkpoints that plain torch.distributed.checkpoint wrote, without running what they may hold.

DCP's `.metadata` is a pickle. It goes through an unpickler that knows DCP's own plain types and refuses every
other global; the entries are loaded weights-only. Sizes and offsets are checked against the files.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from allranks.errors import CheckpointLoadError, CheckpointValidationError

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA_MODULE, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


def is_dcp(path: Path) -> bool:
    """Whether a folder was written by plain DCP."""
    return (path / ".metadata").is_file()


def read_dcp(folder: Path) -> dict[str, Any]:
    """The nested state dict of a DCP folder, whole CPU tensors."""
    metadata = read_metadata(folder)
    flat = {
        name: _read_tensor(folder, name, entry, metadata)
        if isinstance(entry, TensorStorageMetadata)
        else _read_item(folder, metadata.storage_data[MetadataIndex(name)])
        for name, entry in metadata.state_dict_metadata.items()
    }
    return _nested(flat, metadata.planner_data or {})


def read_metadata(folder: Path) -> Metadata:
    """DCP's `.metadata`; CheckpointValidationError when it asks for anything but DCP's plain types."""
    path = folder / ".metadata"
    try:
        found = _PlainTypes(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError as error:
        raise CheckpointLoadError("No such file", tier="NVME", path=str(path)) from error
    except CheckpointValidationError:
        raise
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise CheckpointLoadError(
            f"damaged: {type(error).__name__}: {error}", tier="NVME", path=str(path)
        ) from error
    if not isinstance(found, Metadata):
        raise CheckpointLoadError(f"it holds a {type(found).__name__}", tier="NVME", path=str(path))
    return found


class _PlainTypes(pickle.Unpickler):
    """Refuses every global but DCP's own data types and torch dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        raise _refused(f"{module}.{name}")


def _enum_member(kind: Any, name: Any) -> Any:
    """Stands in for the getattr of Pythons that pickle enums by name (3.11.2): members, nothing else."""
    if kind is _MEM_FORMAT_ENCODING and isinstance(name, str) and name in _MEM_FORMAT_ENCODING.__members__:
        return _MEM_FORMAT_ENCODING[name]
    raise _refused(f"getattr({kind!r}, {name!r})")


def _refused(what: str) -> CheckpointValidationError:
    return CheckpointValidationError(
        f"its .metadata asks for {what}, which no checkpoint needs: refused", invalid_keys=(what,)
    )


def _read_tensor(folder: Path, name: str, entry: TensorStorageMetadata, metadata: Metadata) -> torch.Tensor:
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        piece = _read_item(folder, metadata.storage_data[MetadataIndex(name, chunk.offsets)])
        view = whole
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        view.copy_(piece)
    return whole


def _read_item(folder: Path, info: Any) -> Any:
    path = (folder / info.relative_path).resolve()
    if folder.resolve() not in path.parents:
        raise CheckpointValidationError(
            f"'{info.relative_path}' leads out of the checkpoint", path=str(folder)
        )
    with path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    if len(data) != info.length:
        raise CheckpointValidationError(
            f"{path.name} is cut short", invalid_keys=(path.name,), path=str(folder)
        )
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _nested(flat: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """DCP's flat names put back into the nesting they came from; list positions become keys."""
    whole: dict[str, Any] = {}
    for name, value in flat.items():
        path = paths.get(name, (name,))
        at = whole
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return whole
