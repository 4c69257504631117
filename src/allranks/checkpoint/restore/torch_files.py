"""Reads what torch itself wrote, without running what it may hold: `.pt` files, and folders of plain DCP.

A `.pt` file is unpickled with nothing but tensors and plain containers by default. DCP's `.metadata` is a pickle, too: it
goes through an unpickler that knows DCP's own plain types and refuses every other global; the entries are loaded
weights-only. Sizes and offsets are checked against the files.
"""

from __future__ import annotations

import io
import logging
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.state import REQUIRED_KEYS, CheckpointState, StateDict
from allranks.checkpoint.tensors import narrowed
from allranks.errors import AllranksError, CheckpointLoadError, CheckpointValidationError

log = logging.getLogger("allranks.checkpoint")
SECURITY_WARNING = (
    "SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution: '%s' is unpickled, "
    "and whatever code it holds runs. Only do this with files you made yourself."
)


def is_legacy(path: Path) -> bool:
    """Whether a path is a single file, as torch.save makes them."""
    return path.is_file() and path.suffix in {".pt", ".pth", ".ckpt", ".bin"}


def load_legacy(path: Path, config: CheckpointLoadConfig, tier: str = "NVME") -> CheckpointState:
    """Loads one; needs `trusted_source=True` for a file that holds more than tensors and plain containers."""
    raw = read_legacy(path, config, tier)
    if not isinstance(raw, Mapping):
        raise CheckpointLoadError(f"it holds a {type(raw).__name__}, not a dict", tier=tier, path=str(path))
    if config.validate_structure:
        check_structure(raw, str(path), tier)
    return CheckpointState.from_dict(raw)


def read_legacy(path: Path, config: CheckpointLoadConfig, tier: str = "NVME") -> Any:
    """The content of a `.pt` file, by the rules of the config."""
    if config.trusted_source or not config.safe_mode:
        if not config.trusted_source and config.warn_on_unsafe:
            log.warning(SECURITY_WARNING, path)
        return _load(path, tier, weights_only=False)
    try:
        return _load(path, tier, weights_only=True)
    except CheckpointLoadError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError) and config.warn_on_unsafe:
            log.warning(SECURITY_WARNING + " It was refused.", path)
        raise


def check_structure(raw: Mapping[str, object], path: str, tier: str) -> None:
    """The keys people rely on, and their types."""
    missing = tuple(key for key in REQUIRED_KEYS if key not in raw)
    if missing:
        wrong = CheckpointValidationError("required keys are missing", missing, tier=tier, path=path)
        raise CheckpointLoadError(
            f"Missing required keys: {set(missing)}",
            tier=tier,
            path=path,
            hint=f"a bare state_dict? Make a checkpoint of it: allranks checkpoint import '{path}' STORE",
        ) from wrong
    invalid = [k for k in REQUIRED_KEYS if not isinstance(raw[k], int if k == "step" else Mapping)]
    if invalid:
        raise CheckpointValidationError("keys of the wrong type", (), tuple(invalid), tier=tier, path=path)


def _numpy_types() -> list[object]:
    """What an array of numbers is pickled with: the state of numpy's generator is one, also in our own exports."""
    make: object = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [
        *((make, name) for name in names),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"),
    ]


def _load(path: Path, tier: str, weights_only: bool) -> Any:
    copies = "a .pt file has no checksums of its own: take another copy of it, or an older one"
    with damage_of(path, tier, copies):
        try:
            _refuse_packed(path, path.stat().st_size, str(path))
            with torch.serialization.safe_globals(_numpy_types()):
                return torch.load(path, map_location="cpu", weights_only=weights_only)
        except FileNotFoundError as error:
            hint = f"what is there: ls '{path.parent}'"
            raise CheckpointLoadError("No such file", tier=tier, path=str(path), hint=hint) from error
        except pickle.UnpicklingError as error:
            raise CheckpointLoadError(
                "it holds more than tensors and plain containers, and loading that runs code",
                tier=tier,
                path=str(path),
                hint="if you made this file yourself: CheckpointLoadConfig(trusted_source=True), or on the command line "
                "--trusted-source",
            ) from error


def _refuse_packed(file: Path | io.BytesIO, size: int, path: str) -> None:
    """torch.save stores its entries as they are; torch.load unpacks whatever it is given, to any size."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        if not _is_zip(file):
            return  # an older format, or damage: torch says which
        hint = "take another copy of it, or an older one"
        raise CheckpointLoadError(f"it is a damaged zip file: {error}", path=path, hint=hint) from error
    packed = next((entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED), "")
    if packed or sum(entry.file_size for entry in entries) > size:
        raise CheckpointLoadError(
            f"its entry '{packed or entries[0].filename}' unpacks to more than the file holds: torch.save makes no such file",
            path=path,
            hint=f"if you packed it yourself, unpack it and pack it again without compression: unzip '{path}'; zip -0 -r",
        )


def _is_zip(file: Path | io.BytesIO) -> bool:
    """As torch decides it: torch reads some zip files whose end Python's reader refuses."""
    with open(file, "rb") if isinstance(file, Path) else io.BytesIO(file.getvalue()) as begin:
        return begin.read(4) == b"PK\x03\x04"


@contextmanager
def damage_of(path: Path, tier: str = "", hint: str = "") -> Iterator[None]:
    """Whatever torch and pickle raise for a damaged file (RuntimeError, EOFError, KeyError …), as one error."""
    try:
        yield
    except AllranksError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointLoadError(
            f"damaged, cut short, or something else ({type(error).__name__}: {first})",
            tier=tier,
            path=str(path),
            hint=hint or f"was it copied to the end? Compare its size with the original: ls -l '{path}'",
        ) from error


_METADATA_TYPES = (
    "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING"
)
_ALLOWED = {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_TYPES.split()} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}

_MAX_DEPTH = 8


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()


def read_dcp(folder: Path) -> StateDict:
    """The nested state dict of a DCP folder, whole CPU tensors."""
    with damage_of(folder):
        metadata = read_metadata(folder)
        flat: StateDict = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                flat[name] = _read_item(folder, metadata.storage_data[MetadataIndex(name)])
                continue
            flat[name] = whole = torch.empty(entry.size, dtype=entry.properties.dtype)
            for chunk in entry.chunks:
                piece = _read_item(folder, metadata.storage_data[MetadataIndex(name, chunk.offsets)])
                narrowed(whole, chunk.offsets, chunk.sizes).copy_(piece)
        return _nested(flat, metadata.planner_data or {})


def read_metadata(folder: Path) -> Metadata:
    """DCP's `.metadata`; CheckpointValidationError when it asks for anything but DCP's plain types."""
    path = folder / ".metadata"
    with damage_of(path, "NVME"):
        found = _PlainTypes(path.read_bytes()).load()
    if not isinstance(found, Metadata):
        raise CheckpointLoadError(f"it holds a {type(found).__name__}", tier="NVME", path=str(path))
    return found


#: C's unpickler in Python: its memo is a dict, where one opcode with a large number makes C take gigabytes.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


def _flat(load: Any) -> Any:
    """An opcode that makes a tuple: deeply nested ones overflow the stack of whoever uses them as a key."""

    def load_flat(self: _PlainTypes) -> None:
        load(self)
        made = self.stack[-1]
        inner = (self.depths.get(id(item), (0,))[0] for item in made if type(item) is tuple)
        depth = 1 + max(inner, default=0)
        if depth > _MAX_DEPTH:
            raise _refused("tuples inside one another")
        self.depths[id(made)] = depth, made

    return load_flat


class _PlainTypes(_PythonUnpickler):
    """Refuses every global but DCP's own data types and torch dtypes, and what takes memory before it looks at what there is."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.depths: dict[int, tuple[Any, ...]] = {}  # id of a tuple: its depth, and itself

    _tuples = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    dispatch = {
        **_PythonUnpickler.dispatch,
        **{code[0]: _flat(_PythonUnpickler.dispatch[code[0]]) for code in _tuples},
    }
    for _code in (pickle.BYTEARRAY8, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_code[0]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module in ("builtins", "__builtin__") and name == "getattr":
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        raise _refused(f"{module}.{name}")


def _enum_member(kind: Any, name: object) -> _MEM_FORMAT_ENCODING:
    """Stands in for the getattr of Pythons that pickle enums by name (3.11.2): members, nothing else."""
    if kind is _MEM_FORMAT_ENCODING and isinstance(name, str) and name in _MEM_FORMAT_ENCODING.__members__:
        return _MEM_FORMAT_ENCODING[name]
    raise _refused(f"getattr({kind!r}, {name!r})")


def _refused(what: str) -> CheckpointValidationError:
    return CheckpointValidationError(
        f"its .metadata asks for {what}, which no checkpoint needs: refused", invalid_keys=(what,)
    )


def _read_item(folder: Path, info: Any) -> Any:
    path = (folder / info.relative_path).resolve()
    if folder.resolve() not in path.parents:
        problem = f"'{info.relative_path}' leads out of the checkpoint"
        raise CheckpointValidationError(problem, path=str(folder))
    with path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    if len(data) != info.length:
        name = path.name
        raise CheckpointValidationError(f"{name} is cut short", invalid_keys=(name,), path=str(folder))
    _refuse_packed(io.BytesIO(data), len(data), str(path))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _nested(flat: StateDict, paths: Mapping[str, Sequence[str]]) -> StateDict:
    """DCP's flat names put back into the nesting they came from; list positions become keys."""
    whole: StateDict = {}
    for name, value in flat.items():
        path = paths.get(name, (name,))
        at = whole
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return whole
