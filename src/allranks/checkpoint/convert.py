"""Exports a checkpoint to one file, and imports one from a file or a folder of Hugging Face's Trainer."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.restore.into_state import damage_of, read_legacy, read_state
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.state import CheckpointState, StateDict, state_of
from allranks.checkpoint.stores import StoreSpec, checkpoint_name, open_store, split_address
from allranks.checkpoint.stores.backends import Backend
from allranks.checkpoint.stores.listing import has_manifest
from allranks.checkpoint.tensors import flatten
from allranks.errors import InputError
from allranks.model.files import replacing


def export_checkpoint(
    address: str,
    out: str | Path,
    options: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Writes one `.safetensors` file (the model) or one `.pt` file (the whole state; plain containers and tensors).

    Returns the names of the model's tensors. Overwrites an existing file only with `force`.
    """
    target = Path(out)
    if target.suffix not in {".pt", ".safetensors"}:
        raise InputError(
            f"cannot export to '{target}'", hint="use the suffix .safetensors (model) or .pt (whole state)"
        )
    if target.exists() and not force:
        raise InputError(f"'{target}' already exists", hint="--force overwrites it")
    base, name = split_address(address)
    with (
        contextlib.closing(open_store(StoreSpec(base, dict(options or {})))) as store,
        opened(store, name, progress) as checkpoint,
    ):
        state = read_state(checkpoint, 0)
    _need_room(state, target)
    with replacing(target) as draft:
        _write(state, draft, target.suffix)
    return list(state.model_state_dict)


def _need_room(state: CheckpointState, target: Path) -> None:
    """Raises ENOSPC early: torch and safetensors report a full disk as a problem with the file."""
    tensors = flatten(state.to_dict() if target.suffix == ".pt" else state.model_state_dict).tensors
    needed = sum(tensor.nbytes for tensor in tensors.values())
    if needed > shutil.disk_usage(target.absolute().parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def import_checkpoint(
    source: str | Path,
    store: str,
    *,
    step: int | None = None,
    name: str | None = None,
    config: CheckpointLoadConfig | None = None,
    options: Mapping[str, str] | None = None,
    force: bool = False,
) -> str:
    """Converts a `.pt` file, a `.safetensors` file or a folder of Hugging Face's Trainer; returns the checkpoint's path.

    A bare state_dict becomes a state with a model only. Replaces an existing checkpoint only with `force`.
    """
    path = Path(source)
    raw = _read(path, config or CheckpointLoadConfig())
    if not isinstance(raw, Mapping):
        raise InputError(f"'{path}' contains a {type(raw).__name__}, not a dict of tensors")
    state = state_of(raw)
    model = state.model_state_dict
    if model and not any(isinstance(value, torch.Tensor) for value in model.values()):
        raise InputError(
            f"'{path}' contains {', '.join(map(repr, list(raw)[:8]))}: none of them is the state_dict of a model",
            hint='save it as {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": N}',
        )
    if step is not None:
        state.step = step
    backend = Backend(StoreSpec(store, dict(options or {})))
    target = name or checkpoint_name(state.step)
    if not force and has_manifest(backend.store, target):
        raise InputError(f"'{backend.store.path_of(target)}' already exists", hint="--force replaces it")
    return backend.save(state, target)


def _read(path: Path, config: CheckpointLoadConfig) -> Any:
    if (path / ".metadata").is_file():
        raise InputError(
            f"'{path}' is a folder of plain DCP, whose .metadata is a pickle: reading it may run code",
            hint="if you trust it, convert it to a .pt file and import that: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch '{path}' state.pt",
        )
    if path.is_dir():
        return _read_trainer(path, config)
    if not path.is_file():
        raise InputError(f"no such file or folder: '{path}'", hint=f"check the path: ls '{path.parent}'")
    if path.suffix != ".safetensors":
        return read_legacy(path, config)
    from safetensors.torch import load_file

    with damage_of(path):
        return load_file(str(path))


def _read_trainer(folder: Path, config: CheckpointLoadConfig) -> StateDict:
    """Reads the output of Hugging Face's Trainer or `save_pretrained`: weights, optimizer, scheduler, step."""
    model: StateDict = {}
    for file in _weight_files(folder):
        model.update(_read(file, config))
    state: StateDict = {"model": model}
    for part, name in (("optimizer", "optimizer.pt"), ("lr_scheduler", "scheduler.pt")):
        if (folder / name).is_file():
            state[part] = read_legacy(folder / name, config)
    facts = folder / "trainer_state.json"
    if facts.is_file():
        with damage_of(facts):
            known = json.loads(facts.read_text())
            state.update(step=known["global_step"], epoch=known["epoch"])
    return state


def _weight_files(folder: Path) -> list[Path]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            with damage_of(index):
                return [
                    folder / Path(file).name
                    for file in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
                ]
    raise InputError(
        f"'{folder}' is not a folder of Hugging Face's Trainer",
        hint="give a .pt file, a .safetensors file or a folder with model.safetensors; to copy an allranks checkpoint: "
        "allranks checkpoint copy",
    )


def _write(state: CheckpointState, path: Path, kind: str) -> None:
    if kind == ".pt":
        torch.save(state.to_dict(), path)
        return
    from safetensors.torch import save_file

    tensors = {
        name: value.contiguous()
        for name, value in state.model_state_dict.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, str(path), metadata={"format": "pt", "step": str(state.step)})
