"""Reads `.pt` files without running what they may hold: unpickled with nothing but tensors and plain containers by default."""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.state import REQUIRED_KEYS, CheckpointState
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
            _refuse_packed(path)
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


def _refuse_packed(path: Path) -> None:
    """torch.save stores its entries as they are; torch.load unpacks whatever it is given, to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        with open(
            path, "rb"
        ) as file:  # as torch decides it: it reads some zip files whose end Python refuses
            if file.read(4) != b"PK\x03\x04":
                return  # an older format, or damage: torch says which
        hint = "take another copy of it, or an older one"
        raise CheckpointLoadError(f"it is a damaged zip file: {error}", path=str(path), hint=hint) from error
    packed = next((entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED), "")
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointLoadError(
            f"its entry '{packed or entries[0].filename}' unpacks to more than the file holds: torch.save makes no such file",
            path=str(path),
            hint=f"if you packed it yourself, unpack it and pack it again without compression: unzip '{path}'; zip -0 -r",
        )


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
