"""Every private name of torch that allranks uses, with what it costs when a version of torch does not have it.

`recording/torch_internals.py` calls those of the recorder; `manager/` and `launch/` call theirs. Nothing else may use one:
tests/record/test_versions.py compares this list with the source and with the installed torch, name by name.
"""

from __future__ import annotations

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
    f"{_PYTHON}._get_default_store": ("", "Manager raises AttributeError where a replica has several ranks"),
    "torch._C._distributed_c10d.ProcessGroupGloo._Options": ("", "Manager has no gloo"),
    "torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout": ("", "Manager has no gloo"),
    "torch._C._distributed_c10d.Backend._set_sequence_number_for_group": ("", "Manager has no NCCL"),
    "torch._C._distributed_c10d.ProcessGroupGloo._Options._devices": ("", "Manager has no gloo"),
    "torch._C._distributed_c10d.Backend.Options._timeout": ("", "Manager has no gloo and no NCCL"),
    "torch._C._distributed_c10d.ProcessGroupNCCL._comm_ptr": (
        "",
        "a group beside another is made without waiting",
    ),
    "torch._C._cuda_getDevice": ("", "calls without a Work are recorded as over at once"),
    "torch._C._cuda_getCurrentRawStream": ("", "calls without a Work are recorded as over at once"),
    "torch._C._CUDAGraph": ("", "calls under the capture of a graph look as if they never ended"),
    "torch._C._dynamo.eval_frame": ("", "our wrappers may be compiled into a graph"),
    "torch.autograd.Variable._execution_engine": ("", "Manager's DDP raises AttributeError"),
    "torch.distributed.checkpoint._nested_dict": (
        "",
        "checkpoints of torch.distributed.checkpoint cannot be read",
    ),
    "torch.distributed.tensor._utils": ("", "checkpoints raise ImportError where tensors are sharded"),
    "torch._foreach_copy_": ("", "Manager's DDP copies buffers one by one"),
}
