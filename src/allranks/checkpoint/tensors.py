"""Splits a nested state dict into tensors and a JSON skeleton, and joins them again, without pickle.

`flatten` replaces tensors and numpy arrays by their names; all other values become typed JSON. `unflatten` restores the
same types. A value that JSON cannot represent raises Unstorable with its path. Nothing is copied.
"""

from __future__ import annotations

import base64
import ctypes
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch

Json: TypeAlias = Any  # any value that json.dumps accepts
_NESTED = (dict, list)


class Unstorable(TypeError):
    """A value that is neither a tensor nor representable as JSON."""


@dataclass(frozen=True)
class Flat:
    """`skeleton` is JSON in which `{"$tensor": name}` stands for `tensors[name]` (not copied, on any device)."""

    skeleton: Json
    tensors: dict[str, torch.Tensor]


def flatten(state: object, prefix: str = "") -> Flat:
    """Splits a nested state. Tensor names are paths joined by dots; a number is added to a name that is taken."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _encode(state, (prefix,) if prefix else (), tensors)
    return Flat(skeleton, tensors)


def unflatten(skeleton: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Joins a skeleton and its tensors; KeyError if a tensor is missing."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) if type(item) in _NESTED else item for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        [(tag, body)] = skeleton.items()
        if tag == "$tensor":
            return tensors[body]
        if tag.startswith("$"):
            return _decode_tagged(tag, body, tensors)
    return {key: unflatten(item, tensors) for key, item in skeleton.items()}


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of the bytes of a contiguous CPU tensor. The tensor must outlive the view."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"need a contiguous CPU tensor, got {tensor.device} with strides {tensor.stride()}")
    length = tensor.nbytes
    if length == 0:
        return memoryview(bytearray())
    block = (ctypes.c_char * length).from_address(tensor.data_ptr())
    return memoryview(block).cast("B")


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def tensor_names(skeleton: Json, tags: tuple[str, ...] = ("$tensor", "$ndarray")) -> list[str]:
    """Every tensor name in a skeleton, in order. `tags=("$ndarray",)` selects numpy arrays."""
    found: list[str] = []
    _collect(skeleton, tags, found)
    return found


def _collect(value: Json, tags: tuple[str, ...], found: list[str]) -> None:
    if isinstance(value, dict):
        for tag in tags:
            if tag in value:
                found.append(value[tag])
                return
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        if type(item) in _NESTED:
            _collect(item, tags, found)


def _encode(value: object, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Json:
    if isinstance(value, torch.Tensor):
        if problem := _problem_of(value):
            raise Unstorable(f"the tensor at '{'.'.join(path)}' cannot be saved or loaded: {problem}")
        return {"$tensor": _keep(value.detach(), path, tensors)}
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.ndarray):
        return {"$ndarray": _keep(_from_numpy(value, path), path, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_encode(item, (*path, str(at)), tensors) for at, item in enumerate(value)]
        if isinstance(value, list):
            return items
        if type(value) not in _SEQUENCES:
            raise _unstorable(value, path)  # a named tuple would be restored as a plain one
        return {_SEQUENCES[type(value)]: items}
    return _encode_scalar(value, path)


def _encode_mapping(
    value: Mapping[Any, object], path: tuple[str, ...], tensors: dict[str, torch.Tensor]
) -> Json:
    counts = type(value) is Counter  # a MultiStepLR's milestones
    plain = not counts and all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain:
        return {key: _encode(item, (*path, key), tensors) for key, item in value.items()}
    pairs = [
        [_encode_key(key, path), _encode(item, (*path, str(key)), tensors)] for key, item in value.items()
    ]
    return {"$counter" if counts else "$dict": pairs}


def _encode_key(key: object, path: tuple[str, ...]) -> Json:
    inside: dict[str, torch.Tensor] = {}
    encoded = _encode(key, path, inside)
    if inside:  # a tensor is hashed by identity
        raise _unstorable(key, path)
    return encoded


def _encode_scalar(value: object, path: tuple[str, ...]) -> Json:
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        return {"$numpy": [value.dtype.str, repr(value.item())]}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, (int, float)):  # a subclass, such as IntEnum
        return int(value) if isinstance(value, int) else float(value)
    raise _unstorable(value, path)


def _problem_of(tensor: torch.Tensor) -> str:
    """Why the bytes of a tensor cannot be stored; "" if they can."""
    for one in local_parts(tensor):
        if one.is_meta:
            return "it is on the meta device and has no data"
        if one.is_nested or one.layout is not torch.strided or one.is_quantized:
            kind = "nested" if one.is_nested else "quantized" if one.is_quantized else one.layout
            return f"it is {kind}; save its parts or a dense copy (to_dense, dequantize)"
        if type(one) is not torch.Tensor and hasattr(type(one), "__tensor_flatten__"):
            return f"it is a {type(one).__qualname__}, which consists of other tensors: save those"
    return ""


def _from_numpy(value: np.ndarray, path: tuple[str, ...]) -> torch.Tensor:
    try:
        native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
        return torch.from_numpy(native).reshape(value.shape)
    except TypeError as error:
        raise _unstorable(value, path) from error


def _keep(tensor: torch.Tensor, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> str:
    name = base = ".".join(path) or "tensor"
    number = 2
    while name in tensors:
        name, number = f"{base}#{number}", number + 1
    tensors[name] = tensor
    return name


def _unstorable(value: object, path: tuple[str, ...]) -> Unstorable:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return Unstorable(
        f"cannot store a value of type {kind} at '{'.'.join(path)}': only tensors, numpy arrays, numbers, "
        "strings, bytes, None and nested dicts, lists, tuples and sets of them can be saved (nothing is pickled)"
    )


def _decode_tagged(tag: str, body: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if tag == "$ndarray":
        return tensors[body].numpy()
    if tag in ("$dict", "$counter"):
        found = {unflatten(key, tensors): unflatten(item, tensors) for key, item in body}
        return Counter(found) if tag == "$counter" else found
    for kind, its_tag in _SEQUENCES.items():
        if tag == its_tag:
            return kind(unflatten(item, tensors) for item in body)
    if tag not in _DECODERS:
        raise ValueError(f"unknown type tag {tag!r}: written by a newer version of allranks?")
    return _DECODERS[tag](body)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return found


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}") from error


def _numpy_scalar(dtype: str, text: str) -> np.generic:
    kind = np.dtype(dtype)
    if kind.kind not in "biuf":
        raise ValueError(f"unknown numpy scalar type {dtype!r}")
    value = text == "True" if kind.kind == "b" else float(text) if kind.kind == "f" else int(text)
    made: np.generic = kind.type(value)
    return made


_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "$dtype": _dtype,
    "$device": _device,
    "$size": torch.Size,
    "$numpy": lambda pair: _numpy_scalar(*pair),
    "$path": PurePath,
}


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, without importing its module."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def local_chunk(like: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, offsets) of this rank's chunk of a DTensor, or of an object with its shape, mesh and placements."""
    from allranks import torch_private  # imports torch.distributed

    sizes, offsets = torch_private.local_chunk(like)
    return tuple(sizes), tuple(offsets)


def as_dtensor(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A DTensor with this rank's chunk and the layout of another one."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors behind a DTensor, a ShardedTensor or a plain tensor."""
    if is_dtensor(tensor):
        return [tensor.to_local()]
    if type(tensor).__name__ == "ShardedTensor":
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def storages_of(tensor: torch.Tensor) -> list[int]:
    """Identifies the storages of a tensor: equal numbers mean the same storage, even an empty one."""
    return [one.untyped_storage()._cdata for one in local_parts(tensor) if one.layout is torch.strided]


def local_offsets(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """The offsets of each local part in the whole tensor."""
    if is_dtensor(tensor):
        return [local_chunk(tensor)[1]]
    if type(tensor).__name__ == "ShardedTensor":
        return [tuple(shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    return [(0,) * tensor.dim()]
