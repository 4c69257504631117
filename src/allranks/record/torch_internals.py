"""Every name of torch that is not public, and what is lost where a version of torch lacks it. Runs in the rank.

Other files of `record` use torch's public names and this file. `missing` is asked when recording starts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

Backend = c10d.Backend
#: Functions of c10d that are handed a process group by C++'s users: the registry of names, and two of DDP's set-up.
REGISTER, UNREGISTER = "_register_process_group", "_unregister_process_group"
UNREGISTER_ALL, RESOLVE = "_unregister_all_process_groups", "_resolve_process_group"
DDP_FUNCTIONS = ("_broadcast_coalesced", "_verify_params_across_processes")
#: Methods around a batch of calls that is sent at once.
START_BATCH, END_BATCH = "_start_coalescing", "_end_coalescing"
#: Methods that C++'s trampoline looks up on a Python subclass of ProcessGroup, over the versions of torch.
TRAMPOLINE = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall_base", "all_to_all_single", "barrier", "send", "recv",
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single",
)  # fmt: skip
#: Classes of options by method: what `_fast.c` can read. MOVED are methods of (output, input, options).
MOVED = {
    "_allgather_base": c10d.AllgatherOptions, "all_gather_single": c10d.AllgatherOptions,
    "_reduce_scatter_base": c10d.ReduceScatterOptions, "reduce_scatter_single": c10d.ReduceScatterOptions,
}  # fmt: skip
FAST: dict[str, Any] = {"allreduce": c10d.AllreduceOptions, "broadcast": c10d.BroadcastOptions, **MOVED}

CPP_CALLS = "calls made by C++ (DDP, functional collectives)"
#: What is not recorded without some names: (where they are, the names).
NEEDED: dict[str, tuple[str, tuple[str, ...]]] = {
    CPP_CALLS: ("c10d", (REGISTER, UNREGISTER, RESOLVE, "Reducer")),
    "calls made by C++ on other backends": (
        "ProcessGroup", ("_device_types", "_get_backend", "_register_backend", "_set_group_name", "_set_group_desc")
    ),
    "which calls belong to one batch": ("ProcessGroup", (START_BATCH, END_BATCH)),
    "members and backends of groups": ("world", ("pg_group_ranks", "pg_map", "pg_names")),
}  # fmt: skip


def missing(needed: dict[str, tuple[str, tuple[str, ...]]] = NEEDED) -> list[str]:
    """What this version of torch does not let us record, as sentences; [] when nothing is lost."""
    world = getattr(distributed_c10d, "_world", None)
    places = {"c10d": c10d, "ProcessGroup": c10d.ProcessGroup, "world": world}
    lost = []
    for what, (place, names) in needed.items():
        absent = [name for name in names if not hasattr(places[place], name)]
        if absent:
            lost.append(f"{what} (torch has no {', '.join(absent)})")
    return lost


# -- process groups ---------------------------------------------------------------------------------------------


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a group, in its own order, as far as torch knows them."""
    mapping = _of_world("pg_group_ranks").get(group)
    if mapping:
        return tuple(sorted(mapping, key=mapping.__getitem__))
    listed = getattr(getattr(group, "options", None), "global_ranks_in_group", None)
    return tuple(int(rank) for rank in listed or ())


def group_backend(group: Any) -> str:
    """The backend that a group was made with, "" when torch does not know."""
    config = _of_world("pg_map").get(group)
    return str(config[0]) if config and config[0] != "undefined" else ""


def named_groups() -> list[tuple[str, Any]]:
    """Groups that exist already, by name."""
    return [(name, group) for group, name in _of_world("pg_names").items()]


def _of_world(table: str) -> dict[Any, Any]:
    found: dict[Any, Any] = getattr(getattr(distributed_c10d, "_world", None), table, {})
    return found


def backends(group: Any) -> list[tuple[Any, Any]]:
    """(device, backend) of a group; [] while it is unfinished."""
    return [(device, group._get_backend(device)) for device in getattr(group, "_device_types", [])]


def group_timeout(group: Any) -> timedelta | None:
    """The timeout of a group or of one of its backends."""
    candidates = [group]
    with contextlib.suppress(Exception):  # a property of an unfinished C++ group may raise anything
        candidates += [backend for _, backend in backends(group)]
    found = (getattr(getattr(candidate, "options", None), "_timeout", None) for candidate in candidates)
    return next((value for value in found if isinstance(value, timedelta)), None)


def make_like(group: Any, proxy: Any) -> None:
    """Gives `proxy`, a Python subclass of ProcessGroup, the backends and the name of `group`."""
    for device, backend in backends(group):
        proxy._register_backend(device, _backend_type(str(backend.name())), backend)
    with contextlib.suppress(Exception):  # not every version has it
        proxy._set_default_backend(_backend_type(str(group._get_backend_name())))
    proxy._set_group_name(group.group_name)
    proxy._set_group_desc(group.group_desc)
    if getattr(group, "bound_device_id", None) is not None:
        proxy.bound_device_id = group.bound_device_id


def _backend_type(name: str) -> Any:
    kinds = c10d.ProcessGroup.BackendType
    return getattr(kinds, name.upper(), kinds.CUSTOM)


def work_classes() -> list[Any]:
    """Classes of Work that have a wait() of their own."""
    kinds = [kind for kind in vars(c10d).values() if isinstance(kind, type) and issubclass(kind, c10d.Work)]
    return [kind for kind in kinds if "wait" in vars(kind)]


def homes_of(function: str) -> tuple[Any, list[Any]]:
    """A function of c10d and the modules of torch that have taken it by name; (None, []) when there is none."""
    original = getattr(c10d, function, None)
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch.distributed") and m]
    return original, [
        m for m in (c10d, *modules) if original is not None and vars(m).get(function) is original
    ]


def own_rings() -> dict[str, Callable[..., Any]]:
    """torch's own recorders: NCCL's (CUDA builds), then the one of gloo and others."""
    names = ("_dump_nccl_trace", "_dump_fr_trace")
    return {name: getattr(c10d, name) for name in names if hasattr(c10d, name)}


# -- CUDA -------------------------------------------------------------------------------------------------------


def cuda_graph() -> Any:
    """The class whose methods begin and end the capture of a CUDA graph; None without CUDA."""
    graph = getattr(torch._C, "_CUDAGraph", None)
    return graph if graph is not None and "capture_begin" in vars(graph) else None


def current_stream_key() -> tuple[int, int, int] | None:
    """What identifies the current stream, its device in the middle; None while it is captured."""
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    return key


# -- the compiler -----------------------------------------------------------------------------------------------
# While compiled code runs, dynamo looks at every Python frame that starts, also at those that C++ starts on its own:
# our wrappers under a functional collective would be compiled, or fail to be. Code objects are marked to be skipped
# through torch's C interface, which costs nothing later and does not import the compiler.


def leave_graph(function: Any) -> None:
    """Code that is compiled leaves the graph at this function, as it did at the one that it wraps."""
    function._torchdynamo_disable = True


def hide_from_compiler(*modules: ModuleType) -> None:
    """Marks every function and method of these modules, and what they define inside."""
    skip = _skipper()
    for module in modules if skip is not None else ():
        for code in _codes(module):
            with contextlib.suppress(Exception):  # another version of torch: it is compiled, or it is not
                skip(code)


def _skipper() -> Any:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    c: Any = eval_frame
    if hasattr(c, "set_code_exec_strategy"):
        skip = c._FrameExecStrategy(c._FrameAction.SKIP, c._FrameAction.SKIP)  # this frame and those below
        return lambda code: c.set_code_exec_strategy(code, skip)
    return getattr(c, "skip_code", None)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@contextlib.contextmanager
def no_inductor() -> Iterator[None]:
    """The first dump of torch's own ring with stacks looks for `torch._inductor`, which imports 800 modules: an empty
    stand-in takes its place for the time of the dump unless it is there already."""
    if "torch._inductor" in sys.modules or "_inductor" in vars(torch):
        yield
        return
    stand_in = type(sys)("_inductor")
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:  # the real one may have come meanwhile
            del vars(torch)["_inductor"]
