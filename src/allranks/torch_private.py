"""Every private name of torch that allranks uses, with the consequence if a version of torch lacks it.

The recorder uses them in recording/torch_internals.py, all other code through the functions here.
tests/record/test_versions.py compares the list with the source and with the installed torch.
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

Torch: TypeAlias = Any  # an object of torch without a stable type

CHECKED_WITH = ("2.13", "2.15")  # the recorder also with 2.5 to 2.10, see docs/compatibility.md

C10D = "torch._C._distributed_c10d"
_GROUP = f"{C10D}.ProcessGroup"
_PYTHON = "torch.distributed.distributed_c10d"
_CPP = "calls made by C++ are not recorded"
_BATCH = "calls of one batch are recorded as single calls"
RECORDED = (_CPP, _BATCH)  # reported when the recorder starts

#: name -> (parts of its signature that we rely on, consequence without it)
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
    f"{_GROUP}._has_hooks": ("", "a proxy is not tested before C++ gets it"),
    f"{_GROUP}._register_backend": ("backend_type", _CPP),
    f"{_GROUP}._set_default_backend": ("backend_type", _CPP),
    f"{_GROUP}._set_group_name": ("", _CPP),
    f"{_GROUP}._set_group_desc": ("", _CPP),
    f"{_GROUP}._start_coalescing": ("device", _BATCH),
    f"{_GROUP}._end_coalescing": ("device", _BATCH),
    f"{_PYTHON}._world": ("", "members and backends of some groups are not recorded"),
    f"{_PYTHON}._get_default_store": ("", "Manager raises an error if a replica has several ranks"),
    f"{C10D}.ProcessGroupGloo._Options": ("", "Manager has no gloo"),
    f"{C10D}.ProcessGroupGloo._set_default_timeout": (
        "",
        "a group's operations have the timeout of its creation",
    ),
    f"{C10D}.ProcessGroupGloo._Options._devices": ("", "Manager has no gloo"),
    f"{C10D}.Backend.Options._timeout": ("", "Manager has no gloo and no NCCL"),
    f"{C10D}.ProcessGroupNCCL._comm_ptr": (
        "",
        "a second group is created without waiting; groups are aborted",
    ),
    "torch._C._cuda_getDevice": ("", "calls without a Work are recorded as completed at once"),
    "torch._C._cuda_getCurrentRawStream": ("", "calls without a Work are recorded as completed at once"),
    "torch._C._CUDAGraph": ("", "calls during graph capture appear unfinished"),
    "torch._C._dynamo.eval_frame": ("", "our wrappers may be compiled into a graph"),
    "torch.autograd.Variable._execution_engine": ("", "Manager's DDP raises an error"),
    "torch.distributed.checkpoint._nested_dict": (
        "",
        "checkpoints of torch.distributed.checkpoint cannot be read",
    ),
    "torch.distributed.tensor._utils": ("", "checkpoints of sharded tensors raise ImportError"),
    "torch._foreach_copy_": ("", "Manager's DDP copies buffers one by one"),
    "torch._foreach_mul_": ("", "Manager's optimizer unscales gradients one by one"),
    "torch.amp.grad_scaler.GradScaler._found_inf_per_device": (
        "",
        "a discarded step may lower the scale in some replicas",
    ),
    "torch._inductor.async_compile._pool_set": ("", "a process exits before its compile workers"),
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": (
        "",
        "workers of a data loader exit with it",
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
    """The store of the default group."""
    store: dist.Store = _needed(c10d, "_get_default_store")()
    return store


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Registers a group for functional collectives."""
    _needed(c10d, "_register_process_group")(name, group)


def unregister_group(name: str) -> None:
    _needed(c10d, "_unregister_process_group")(name)


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed created the group, and it was not destroyed."""
    return group in getattr(getattr(c10d, "_world", None), "pg_map", {})


def gloo_options(device: object, limit_s: float) -> Torch:
    """Options of a gloo backend on a device."""
    options = _needed(dist.ProcessGroupGloo, "_Options")()
    options._devices = [device]
    return with_limit(options, limit_s)


def with_limit(options: Torch, limit_s: float) -> Torch:
    """Sets the timeout of a backend's operations in its options."""
    options._timeout = timedelta(seconds=limit_s)
    return options


def limit_operations(backend: Torch, limit_s: float) -> None:
    """Sets the timeout of operations of an existing gloo backend, which may differ from that of its creation."""
    if hasattr(backend, "_set_default_timeout"):
        backend._set_default_timeout(timedelta(seconds=limit_s))


def can_wait_until_connected(backend: Torch) -> bool:
    """Whether `communicator_of` waits for all members."""
    return hasattr(backend, "_comm_ptr")


def communicator_of(backend: Torch) -> int:
    """NCCL's communicator, after all members have connected; blocks with the GIL. 0 if torch does not expose it."""
    return int(backend._comm_ptr()) if hasattr(backend, "_comm_ptr") else 0


# -- tensors and autograd ---------------------------------------------------------------------------------------


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target, in one call if torch supports it."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def multiply_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiplies in place, in one call if torch supports it."""
    if hasattr(torch, "_foreach_mul_") and tensors:
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def forget_overflow(scaler: Torch, optimizer: Torch) -> None:
    """Resets what a GradScaler found in discarded gradients, so that its next `update` keeps the scale."""
    if hasattr(scaler, "_found_inf_per_device"):
        for found in scaler._found_inf_per_device(optimizer).values():
            found.zero_()


def after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the current backward pass."""
    _needed(torch.autograd.Variable, "_execution_engine").queue_callback(callback)


def local_chunk(like: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """(sizes, offsets) of this rank's chunk of a DTensor, or of an object with its shape, mesh and placements."""
    from torch.distributed.tensor import _utils

    find: Torch = _needed(_utils, "compute_local_shape_and_global_offset")
    sizes, offsets = find(like.shape, like.device_mesh, like.placements)
    return sizes, offsets


def flatten(state: Torch) -> tuple[dict[str, Torch], dict[str, Torch]]:
    """Flattens a nested state as torch.distributed.checkpoint does: (values by name, paths by name)."""
    from torch.distributed.checkpoint import _nested_dict

    values, paths = _needed(_nested_dict, "flatten_state_dict")(state)
    return values, paths


def unflatten(values: dict[str, Torch], paths: dict[str, Torch]) -> Torch:
    """The inverse of `flatten`."""
    from torch.distributed.checkpoint import _nested_dict

    return _needed(_nested_dict, "unflatten_state_dict")(values, paths)


# -- worker processes -------------------------------------------------------------------------------------------


def compile_workers() -> tuple[Callable[[], object], Callable[[], bool]] | None:
    """(shutdown function, is-running function) of the workers of torch.compile; None if it was not used."""
    inductor: Torch = sys.modules.get("torch._inductor.async_compile")
    if inductor is None:
        return None
    pools = getattr(inductor, "_pool_set", ())
    return inductor.shutdown_compile_workers, lambda: any(
        getattr(pool, "running", False) for pool in list(pools)
    )


def loader_workers(loader: Torch) -> list[Torch]:
    """The worker processes of a DataLoader; [] if it has none."""
    return list(getattr(getattr(loader, "_iterator", None), "_workers", ()))


def stop_loader(loader: Torch) -> None:
    """Stops the worker processes of a DataLoader."""
    stop = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
    if stop is not None:
        stop()
