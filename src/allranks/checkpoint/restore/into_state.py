"""Loads a checkpoint as a new state, or in place into a model and an optimizer. Also loads legacy `.pt` files.

By default a `.pt` file is unpickled with tensors and plain containers only, so no code in it runs.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.manifest import Index
from allranks.checkpoint.restore.opened_checkpoint import Opened, opened
from allranks.checkpoint.restore.tensor_reader import (
    fill,
    new_targets,
    reading_list,
    stored_dtype,
    targets_of,
)
from allranks.checkpoint.save.snapshot import StateSnapshot
from allranks.checkpoint.state import (
    FROM_THE_FIRST,
    PER_RANK,
    REQUIRED_KEYS,
    CheckpointState,
    StateDict,
    state_of,
)
from allranks.checkpoint.stores import Store, hint_for, reason_of
from allranks.checkpoint.tensors import flatten, storages_of, tensor_names, unflatten
from allranks.errors import AllranksError, CheckpointDamaged, CheckpointLoadError, CheckpointValidationError

log = logging.getLogger("allranks.checkpoint")
SECURITY_WARNING = (
    "SECURITY: Loading checkpoint with weights_only=False enables arbitrary code execution: unpickling '%s' runs "
    "any code in it. Only do this with files you made yourself."
)


@dataclass(eq=False, repr=False)
class Live:
    """The model, optimizer and scheduler that a restore writes into. `torn` while they are partly overwritten."""

    model: torch.nn.Module  # unwrapped
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: LRScheduler | None
    strict: bool
    torn: bool = False
    copies: frozenset[str] = frozenset()  # tensors of the state_dict that do not share the model's memory


def load_state(store: Store, name: str, rank: int) -> CheckpointState:
    """Loads one checkpoint of a store as a whole; raises CheckpointLoadError."""
    path = store.path_of(name)
    try:
        with opened(store, name) as checkpoint:
            return read_state(checkpoint, rank)
    except CheckpointValidationError as error:
        raise CheckpointLoadError(error.reason, tier=store.tier, path=path, hint=error.hint) from error
    except OSError as error:
        hint = hint_for(error, store.spec)
        raise CheckpointLoadError(reason_of(error), tier=store.tier, path=path, hint=hint) from error


def read_state(checkpoint: Opened, rank: int) -> CheckpointState:
    """The whole state in new CPU tensors, with the parts of all ranks in `rank_states`."""
    with _readable(checkpoint):
        common, own = skeletons(checkpoint, rank)
        names = [*tensor_names(common), *(name for part in own.values() for name in tensor_names(part))]
        targets = new_targets(checkpoint, names)
        state = _assemble(common, own, rank, {target.name: target.tensor for target in targets})
    fill(checkpoint, reading_list(checkpoint, targets))
    return state


def prepare_into(checkpoint: Opened, live: Live, rank: int) -> Callable[[], CheckpointState]:
    """Reads and verifies this rank's chunks into the live tensors; raises CheckpointValidationError.

    Call the result to load the rest of the state; it returns the state with the live tensors.
    """
    model = _model_tensors(live)
    with _readable(checkpoint):
        common, own = skeletons(checkpoint, rank)
        _check_optimizer(live, common)
        shapes = {name: stored[0][1].shard.shape for name, stored in checkpoint.table().items()}
        kept, remade = _model_targets(model, live, common, shapes)
        existing, new = _optimizer_targets(checkpoint, live, common)
        kept.update(existing)
        private = [name for part in own.values() for name in tensor_names(part)]
        outside = {k: value for k, value in common.items() if k not in ("model_state_dict", *PER_RANK)}
        others = [name for name in tensor_names(outside) if name not in kept and name not in new]
        rest = new_targets(checkpoint, [*remade, *others, *private])
        tensors = _NoneIfMissing({**kept, **new, **{target.name: target.tensor for target in rest}})
        state = _assemble(common, own, rank, tensors)
    items = reading_list(checkpoint, [*targets_of(kept), *targets_of(new), *rest])
    live.torn = True
    fill(checkpoint, items)

    def finish() -> CheckpointState:
        _install(live, state)
        live.torn = False
        return state

    return finish


@contextmanager
def _readable(checkpoint: Opened) -> Iterator[None]:
    """Converts Python's errors for a malformed skeleton into CheckpointDamaged."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointDamaged(
            f"its state cannot be read: {type(error).__name__}: {error}",
            invalid_keys=("common",),
            path=checkpoint.path,
        ) from error


def copy_into(snapshot: StateSnapshot, live: Live) -> Callable[[], CheckpointState]:
    """Checks that a memory snapshot has the chunks of this rank. Call the result to copy them into the live tensors."""
    model = _model_tensors(live)
    _check_optimizer(live, snapshot.common)
    kept, _ = _model_targets(model, live, snapshot.common, snapshot.shapes())
    views, offsets = snapshot.local_views(), snapshot.local_offsets()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, tensor in kept.items():
        there, targets = views.get(name, []), targets_of({name: tensor})
        wanted = [(target.offsets, target.tensor.shape) for target in targets]
        if wanted != list(zip(offsets.get(name, []), (view.shape for view in there), strict=True)):
            text = f"the snapshot has other elements of {name} than this rank needs: the world has changed"
            raise CheckpointValidationError(text, missing_keys=(name,), tier="MEMORY")
        pairs += zip((target.tensor for target in targets), there, strict=True)

    def finish() -> CheckpointState:
        live.torn = True
        for tensor, view in pairs:
            tensor.copy_(view)
        state = snapshot.to_state()
        _install(live, state)
        live.torn = False
        return state

    return finish


def skeletons(checkpoint: Opened, rank: int) -> tuple[StateDict, dict[int, StateDict]]:
    """(skeleton shared by all ranks, rank → its own skeleton). A rank that saved its own shared skeleton gets that one."""
    by_rank: dict[int, Index] = {index.rank: index for index in checkpoint.indexes}
    mine_first = sorted(checkpoint.indexes, key=lambda index: index.rank != rank)
    common = next((index.common for index in mine_first if index.common is not None), None)
    if common is None:
        raise CheckpointValidationError(
            "it contains tensors but no training state",
            missing_keys=("model_state_dict",),
            path=checkpoint.path,
        )
    return common, {number: index.own for number, index in by_rank.items() if index.own is not None}


def _assemble(
    common: StateDict, own: Mapping[int, StateDict], rank: int, tensors: Mapping[str, torch.Tensor]
) -> CheckpointState:
    rank_states = {number: unflatten(part, tensors) for number, part in own.items()}
    mine = rank_states.get(rank)
    if mine is None and rank_states:
        first = rank_states[min(rank_states)]
        mine = {name: first[name] for name in FROM_THE_FIRST if name in first}
    state = state_of({**unflatten(common, tensors), **(mine or {})})
    state.rank_states = rank_states
    return state


def _model_tensors(live: Live) -> dict[str, torch.Tensor]:
    """The tensors of the model's state_dict. Sets `live.copies`: some models copy their extra state for a state_dict."""
    tensors = flatten({"model_state_dict": live.model.state_dict()}).tensors
    own = {
        storage for one in (*live.model.parameters(), *live.model.buffers()) for storage in storages_of(one)
    }
    live.copies = frozenset(
        name for name, tensor in tensors.items() if not own.issuperset(storages_of(tensor))
    )
    return tensors


def _model_targets(
    tensors: dict[str, torch.Tensor], live: Live, common: StateDict, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(the live tensors to fill, the names of copies that were saved with another shape)."""
    saved = set(tensor_names({"model_state_dict": common.get("model_state_dict", {})}))
    missing, unexpected = tuple(set(tensors) - saved), tuple(saved - set(tensors))
    if live.strict and (missing or unexpected):
        raise CheckpointValidationError(
            "the model and the checkpoint do not match",
            missing,
            unexpected,
            hint="restore with strict=False to load the tensors that match",
        )
    kept = {name: tensor for name, tensor in tensors.items() if name in saved}
    other = [name for name, tensor in kept.items() if shapes.get(name, tensor.shape) != tuple(tensor.shape)]
    if wrong := [name for name in other if name not in live.copies]:
        shape = tuple(kept[wrong[0]].shape)
        text = f"{wrong[0]} was saved with shape {shapes[wrong[0]]}, but the model has shape {shape}"
        raise CheckpointValidationError(text, invalid_keys=tuple(wrong[:20]))
    return {name: tensor for name, tensor in kept.items() if name not in other}, other


def _check_optimizer(live: Live, common: StateDict) -> None:
    """Raises what the optimizer's load_state_dict would raise, before anything is changed."""
    saved = common.get("optimizer_state_dict", {})
    if live.optimizer is None or not isinstance(saved, dict) or not saved.get("param_groups"):
        return
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in live.optimizer.param_groups]
    if there != here:
        raise CheckpointValidationError(
            f"the optimizer has {here} parameters in its groups, the checkpoint has {there}",
            invalid_keys=("optimizer_state_dict",),
            hint="restore the model alone, or build the optimizer as it was saved",
        )


def _optimizer_targets(
    checkpoint: Opened, live: Live, common: StateDict
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The optimizer's tensors to fill: (existing ones, new ones with the sharding of their parameter)."""
    existing: dict[str, torch.Tensor] = {}
    new: dict[str, torch.Tensor] = {}
    if live.optimizer is None:
        return existing, new
    parameters = [p for group in live.optimizer.param_groups for p in group["params"]]
    table = checkpoint.table()
    for number, names in _optimizer_entries(common):
        if not 0 <= number < len(parameters):
            continue
        parameter = parameters[number]
        there = live.optimizer.state.get(parameter, {})
        for key, name in names.items():
            if name not in table:
                continue
            known, shard = there.get(key), table[name][0][1].shard
            if isinstance(known, torch.Tensor) and known.shape == shard.shape:
                existing[name] = known
            elif parameter.shape == shard.shape:
                new[name] = torch.empty_like(parameter, dtype=stored_dtype(shard), requires_grad=False)
    return existing, new


def _optimizer_entries(common: StateDict) -> Iterator[tuple[int, dict[str, str]]]:
    """(index of the parameter, key → tensor name) of the saved optimizer state."""
    saved = common.get("optimizer_state_dict", {})
    state = saved.get("state", {}) if isinstance(saved, dict) else {}
    for number, entries in state.get("$dict", ()):
        if isinstance(number, int) and isinstance(entries, dict):
            tensors = {k: v["$tensor"] for k, v in entries.items() if isinstance(v, dict) and "$tensor" in v}
            yield number, tensors


def _install(live: Live, state: CheckpointState) -> None:
    """Calls load_state_dict of model, optimizer and scheduler for the values that were not filled in place."""
    if live.copies or not all(isinstance(v, torch.Tensor) for v in state.model_state_dict.values()):
        live.model.load_state_dict(state.model_state_dict, strict=False)
    given = {"optimizer": live.optimizer, "lr_scheduler": live.lr_scheduler}
    if lost := [k for k, part in given.items() if part is not None and not getattr(state, f"{k}_state_dict")]:
        log.warning("step %d was saved without %s: not restored", state.step, " and ".join(lost))
    if live.optimizer is not None and state.optimizer_state_dict:
        live.optimizer.load_state_dict(state.optimizer_state_dict)
    if live.lr_scheduler is not None and state.lr_scheduler_state_dict:
        live.lr_scheduler.load_state_dict(state.lr_scheduler_state_dict)


class _NoneIfMissing(dict[str, torch.Tensor]):
    """Maps names of tensors that the live model lacks to None."""

    def __missing__(self, key: str) -> Any:
        return None


def is_legacy(path: Path) -> bool:
    """Whether a path is a file of torch.save, by its suffix."""
    return path.is_file() and path.suffix in {".pt", ".pth", ".ckpt", ".bin"}


def load_legacy(path: Path, config: CheckpointLoadConfig, tier: str = "NVME") -> CheckpointState:
    """Loads a `.pt` file; one with more than tensors and plain containers needs `trusted_source=True`."""
    raw = read_legacy(path, config, tier)
    if not isinstance(raw, Mapping):
        raise CheckpointLoadError(
            f"it contains a {type(raw).__name__}, not a dict", tier=tier, path=str(path)
        )
    if config.validate_structure:
        check_structure(raw, str(path), tier)
    return CheckpointState.from_dict(raw)


def read_legacy(path: Path, config: CheckpointLoadConfig, tier: str = "NVME") -> Any:
    """The content of a `.pt` file, unpickled as the config allows."""
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
    """Raises if a required key is missing or has the wrong type."""
    missing = tuple(key for key in REQUIRED_KEYS if key not in raw)
    if missing:
        wrong = CheckpointValidationError("required keys are missing", missing, tier=tier, path=path)
        raise CheckpointLoadError(
            f"Missing required keys: {set(missing)}",
            tier=tier,
            path=path,
            hint=f"a bare state_dict? Convert it: allranks checkpoint import '{path}' STORE",
        ) from wrong
    invalid = [k for k in REQUIRED_KEYS if not isinstance(raw[k], int if k == "step" else Mapping)]
    if invalid:
        raise CheckpointValidationError("keys of the wrong type", (), tuple(invalid), tier=tier, path=path)


def _numpy_types() -> list[object]:
    """The globals in a pickled numpy array: the state of numpy's random generator is one, also in our exports."""
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
            hint = f"check the path: ls '{path.parent}'"
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
    """Refuses compressed entries, which torch.save does not write: torch.load would unpack them to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        # the same test as in torch, which reads some zip files that Python refuses
        with open(path, "rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return  # an older format, or damage: torch decides
        hint = "take another copy of it, or an older one"
        raise CheckpointLoadError(f"it is a damaged zip file: {error}", path=str(path), hint=hint) from error
    packed = next((entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED), "")
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointLoadError(
            f"its entry '{packed or entries[0].filename}' unpacks to more than the file holds, which torch.save never writes",
            path=str(path),
            hint=f"if you compressed it yourself, pack it again without compression: unzip '{path}'; zip -0 -r",
        )


@contextmanager
def damage_of(path: Path, tier: str = "", hint: str = "") -> Iterator[None]:
    """Converts the errors of torch and pickle for a damaged file (RuntimeError, EOFError, KeyError …)."""
    try:
        yield
    except AllranksError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointLoadError(
            f"damaged, truncated, or not a checkpoint ({type(error).__name__}: {first})",
            tier=tier,
            path=str(path),
            hint=hint or f"was it copied completely? Compare its size with the original: ls -l '{path}'",
        ) from error
