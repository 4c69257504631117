"""Checkpoints in one `.pt` file, as torch.save writes them: read with nothing but tensors by default."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.state import REQUIRED_KEYS, CheckpointState
from allranks.errors import CheckpointLoadError, CheckpointValidationError

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


def check_structure(raw: Mapping[str, Any], path: str, tier: str) -> None:
    """The keys people rely on, and their types."""
    missing = tuple(key for key in REQUIRED_KEYS if key not in raw)
    if missing:
        wrong = CheckpointValidationError("required keys are missing", missing, tier=tier, path=path)
        raise CheckpointLoadError(
            f"Missing required keys: {set(missing)}", tier=tier, path=path,
            hint=f"a bare state_dict? Make a checkpoint of it: allranks checkpoint import '{path}' STORE",
        ) from wrong  # fmt: skip
    invalid = []
    if not isinstance(raw["step"], int):
        invalid.append("step")
    invalid += [key for key in REQUIRED_KEYS[1:] if not isinstance(raw[key], Mapping)]
    if invalid:
        raise CheckpointValidationError("keys of the wrong type", (), tuple(invalid), tier=tier, path=path)


def _numpy_types() -> list[Any]:
    """What an array of numbers is pickled with: the state of numpy's generator is one, also in our own exports."""
    make: Any = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [
        *((make, name) for name in names),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"),
    ]


def _load(path: Path, tier: str, weights_only: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_numpy_types()):
            return torch.load(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError as error:
        raise CheckpointLoadError(
            "No such file", tier=tier, path=str(path), hint=f"what is there: ls '{path.parent}'"
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointLoadError(
            "it holds more than tensors and plain containers, and loading that runs code", tier=tier, path=str(path),
            hint="if you made this file yourself: CheckpointLoadConfig(trusted_source=True)",
        ) from error  # fmt: skip
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError … for damaged files
        raise CheckpointLoadError(
            f"damaged or not a checkpoint ({type(error).__name__}: {_first_line(error)})", tier=tier, path=str(path),
            hint="a .pt file has no checksums of its own: take another copy of it, or an older one",
        ) from error  # fmt: skip


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
