"""Every private name of torch that allranks uses, with what it costs when a version of torch does not have it, and the calls.

The recorder's calls are in recording/torch_internals.py, all others here; no other file may use a private name.
tests/record/test_versions.py compares the list with the source and with the installed torch, name by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from allranks.errors import ConfigurationError

Torch: TypeAlias = Any  # something of torch that has no type of its own, or another one in each version

CHECKED_WITH = (
    "2.13",
    "2.15",
)  # all of them; the recorder's also with 2.5 to 2.10, see docs/compatibility.md

C10D = "torch._C._distributed_c10d"
_GROUP = f"{C10D}.ProcessGroup"
_PYTHON = "torch.distributed.distributed_c10d"
_CPP = "calls made by C++ are not recorded"
_BATCH = "calls of one batch are recorded as single calls"
RECORDED = (_CPP, _BATCH)  # what the recorder says when it starts

#: name -> (words of its signature that we rely on, what is lost without it)
PRIVATE: dict[str, tuple[str, str]] = {
    f"{C10D}._register_process_group": ("", _CPP),
    f"{C10D}._unregister_process_group": ("", _CPP),
    f"{C10D}._unregister_all_process_groups": ("", _CPP),
    f"{C10D}._resolve_process_group": ("", _CPP),
    f"{C10D}._broadcast_coalesced": ("process_group", "DDP's broadcasts are not recorded"),
    f"{C10D}._verify_params_across_processes": ("process_group", "DDP's checks are not recorded"),
    f"{C10D}._dump_fr_trace": ("includeCollectives", "dumps come without torch's own ring"),
    f"{C10D}._dump_nccl_trace": ("includeCollectives", "dumps come without NCCL's ring"),
    f"{_GROUP}._backend_id": ("backend_type", _CPP),
    f"{_GROUP}._get_backend": ("device", _CPP),
    f"{_GROUP}._get_backend_name": ("", _CPP),
    f"{_GROUP}._device_types": ("", _CPP),
    f"{_GROUP}._has_hooks": ("", "a proxy is not tried out before C++ gets it"),
    f"{_GROUP}._register_backend": ("backend_type", _CPP),
    f"{_GROUP}._set_default_backend": ("backend_type", _CPP),
    f"{_GROUP}._set_group_name": ("", _CPP),
    f"{_GROUP}._set_group_desc": ("", _CPP),
    f"{_GROUP}._start_coalescing": ("device", _BATCH),
    f"{_GROUP}._end_coalescing": ("device", _BATCH),
    f"{_PYTHON}._world": ("", "members and backends of groups are recorded as far as the group tells"),
    f"{_PYTHON}._get_default_store": ("", "Manager raises an error where a replica has several ranks"),
    f"{C10D}.ProcessGroupGloo._Options": ("", "Manager has no gloo"),
    f"{C10D}.ProcessGroupGloo._set_default_timeout": (
        "",
        "a group's operations have the limit of its making",
    ),
    f"{C10D}.ProcessGroupGloo._Options._devices": ("", "Manager has no gloo"),
    f"{C10D}.Backend.Options._timeout": ("", "Manager has no gloo and no NCCL"),
    f"{C10D}.ProcessGroupNCCL._comm_ptr": (
        "",
        "a group beside another is made without waiting; groups are aborted",
    ),
    "torch._C._cuda_getDevice": ("", "calls without a Work are recorded as over at once"),
    "torch._C._cuda_getCurrentRawStream": ("", "calls without a Work are recorded as over at once"),
    "torch._C._CUDAGraph": ("", "calls under the capture of a graph look as if they never ended"),
    "torch._C._dynamo.eval_frame": ("", "our wrappers may be compiled into a graph"),
    "torch.autograd.Variable._execution_engine": ("", "Manager's DDP raises an error"),
    "torch.distributed.checkpoint._nested_dict": (
        "",
        "checkpoints of torch.distributed.checkpoint cannot be read",
    ),
    "torch.distributed.tensor._utils": ("", "checkpoints raise ImportError where tensors are sharded"),
    "torch._foreach_copy_": ("", "Manager's DDP copies buffers one by one"),
    "torch._foreach_mul_": ("", "Manager's optimizer unscales gradients one by one"),
    "torch.amp.grad_scaler.GradScaler._found_inf_per_device": (
        "",
        "a step that is given up may lower the scale in some replicas",
    ),
    "torch._inductor.async_compile._pool_set": ("", "a process ends before its compile workers"),
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": (
        "",
        "workers of a data loader end with it",
    ),
}


def _needed(owner: Torch, name: str) -> Torch:
    found = getattr(owner, name, None)
    if found is None:
        checked = " and ".join(CHECKED_WITH)
        raise ConfigurationError(f"torch {torch.__version__} has no {name}: use a version from {checked}")
    return found


# -- process groups ---------------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """Where the ranks of the default group met."""
    store: dist.Store = _needed(c10d, "_get_default_store")()
    return store


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Makes a group known to functional collectives."""
    _needed(c10d, "_register_process_group")(name, group)


def unregister_group(name: str) -> None:
    """The reverse."""
    _needed(c10d, "_unregister_process_group")(name)


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed made the group, and it was not destroyed."""
    return group in getattr(getattr(c10d, "_world", None), "pg_map", {})


def gloo_options(device: object, limit_s: float) -> Torch:
    """Of a gloo backend on that device."""
    options = _needed(dist.ProcessGroupGloo, "_Options")()
    options._devices = [device]
    return with_limit(options, limit_s)


def with_limit(options: Torch, limit_s: float) -> Torch:
    """The same options, with this limit of the backend's operations."""
    options._timeout = timedelta(seconds=limit_s)
    return options


def limit_operations(backend: Torch, limit_s: float) -> None:
    """Of a gloo backend that is made: its operations may take another time than its making."""
    if hasattr(backend, "_set_default_timeout"):
        backend._set_default_timeout(timedelta(seconds=limit_s))


def can_wait_until_connected(backend: Torch) -> bool:
    """Whether `communicator_of` does so."""
    return hasattr(backend, "_comm_ptr")


def communicator_of(backend: Torch) -> int:
    """NCCL's pointer, once all members have connected: the interpreter waits meanwhile. 0: this torch does not give it."""
    return int(backend._comm_ptr()) if hasattr(backend, "_comm_ptr") else 0


# -- tensors and autograd ---------------------------------------------------------------------------------------


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each source into its target, in one call where torch has it."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def multiply_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """In place, in one call where torch has it."""
    if hasattr(torch, "_foreach_mul_") and tensors:
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def forget_overflow(scaler: Torch, optimizer: Torch) -> None:
    """What a GradScaler found in gradients that are given up: its next `update` keeps the scale."""
    if hasattr(scaler, "_found_inf_per_device"):
        for found in scaler._found_inf_per_device(optimizer).values():
            found.zero_()


def after_backward(callback: Callable[[], None]) -> None:
    """Called at the end of the backward that runs now."""
    _needed(torch.autograd.Variable, "_execution_engine").queue_callback(callback)


def local_chunk(like: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """(sizes, offsets) of this rank's chunk of a DTensor, or of anything with its shape, mesh and placements."""
    from torch.distributed.tensor import _utils

    find: Torch = _needed(_utils, "compute_local_shape_and_global_offset")
    sizes, offsets = find(like.shape, like.device_mesh, like.placements)
    return sizes, offsets


def flatten(state: Torch) -> tuple[dict[str, Torch], dict[str, Torch]]:
    """A nested state as torch.distributed.checkpoint flattens it: (values by name, paths by name)."""
    from torch.distributed.checkpoint import _nested_dict

    values, paths = _needed(_nested_dict, "flatten_state_dict")(state)
    return values, paths


def unflatten(values: dict[str, Torch], paths: dict[str, Torch]) -> Torch:
    """The reverse."""
    from torch.distributed.checkpoint import _nested_dict

    return _needed(_nested_dict, "unflatten_state_dict")(values, paths)


# -- worker processes -------------------------------------------------------------------------------------------


def compile_workers() -> tuple[Callable[[], object], Callable[[], bool]] | None:
    """(end, still running) of the workers of torch.compile; None when it was not used."""
    inductor: Torch = sys.modules.get("torch._inductor.async_compile")
    if inductor is None:
        return None
    pools = getattr(inductor, "_pool_set", ())
    return inductor.shutdown_compile_workers, lambda: any(
        getattr(pool, "running", False) for pool in list(pools)
    )


def loader_workers(loader: Torch) -> list[Torch]:
    """The processes of a DataLoader; [] when it has none, or has not begun."""
    return list(getattr(getattr(loader, "_iterator", None), "_workers", ()))


def stop_loader(loader: Torch) -> None:
    """Ends the processes of a DataLoader."""
    stop = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
    if stop is not None:
        stop()
