"""Private APIs of torch that the recorder uses; allranks/torch_private.py lists the names. Runs in the rank.

Other files of `recording` use only torch's public API and this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp, distributed_c10d

from allranks.recording.calls import Method
from allranks.recording.options import TORCH_ERRORS
from allranks.torch_private import C10D, PRIVATE, RECORDED

Backend = c10d.Backend
Torch: TypeAlias = Any  # an object of torch without a stable type
#: Functions of c10d that pass a process group to C++: the registry of names, and two functions of DDP's setup.
REGISTER, UNREGISTER = "_register_process_group", "_unregister_process_group"
UNREGISTER_ALL, RESOLVE = "_unregister_all_process_groups", "_resolve_process_group"
DDP_FUNCTIONS = ("_broadcast_coalesced", "_verify_params_across_processes")
#: Methods around a batch of calls.
START_BATCH, END_BATCH = "_start_coalescing", "_end_coalescing"
#: Methods that C++ looks up on a Python subclass of ProcessGroup, in all versions of torch.
_TRAMPOLINE_TEXT = (
    "allreduce allreduce_coalesced broadcast allgather allgather_into_tensor_coalesced "
    "all_gather_single_coalesced reduce_scatter reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced alltoall_base all_to_all_single barrier send recv "
    "_allgather_base _reduce_scatter_base all_gather_single reduce_scatter_single"
)
TRAMPOLINE = tuple(_TRAMPOLINE_TEXT.split())
CPP_CALLS = "calls made by C++ (DDP, functional collectives)"
#: Before 2.7, C++ drops the Python part of a Work returned by a proxy, and then waits forever.
FIRST_WITH_PROXIES = (2, 7)


def version() -> tuple[int, ...]:
    """(2, 15) for "2.15.0+cu132"."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def missing(private: dict[str, tuple[str, str]] = PRIVATE) -> list[str]:
    """What cannot be recorded with this version of torch, as sentences; [] if everything can."""
    lost: dict[str, list[str]] = {}
    for name, (_, what) in private.items():
        found: Torch = c10d
        for word in name.removeprefix(f"{C10D}.").split(".") if name.startswith(C10D) else ():
            found = getattr(found, word, None)
        if found is None and what in RECORDED:
            lost.setdefault(what, []).append(name.rpartition(".")[2])
    return [f"{what} (torch has no {', '.join(names)})" for what, names in lost.items()]


class Replaced(list[tuple[object, str, object, Torch]]):
    """Replaced attributes: (owner, name, replacement, original)."""

    def put(self, owner: object, name: str, ours: object, original: object) -> None:
        setattr(owner, name, ours)
        self.append((owner, name, ours, original))

    def restore(self) -> None:
        """Restores the originals, unless other code has wrapped them since."""
        while self:
            owner, name, ours, original = self.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)


# -- process groups ---------------------------------------------------------------------------------------------


def describe_group(
    group: c10d.ProcessGroup, world_size: int, members: tuple[int, ...] = ()
) -> tuple[str, str, tuple[int, ...], str]:
    """(name, description, global ranks, backend) of a ProcessGroup or a bare Backend, as far as known.

    `members` are the ranks of a split group, which torch does not expose.
    """
    name = _text(group, "group_name") or _text(options_of(group), "group_name")
    return name, _text(group, "group_desc"), members or _ranks(group, world_size), _backend_name(group)


def _text(group: Torch, attribute: str) -> str:
    try:
        return str(getattr(group, attribute, "") or "")
    except TORCH_ERRORS:  # an unfinished group
        return ""


def _ranks(group: c10d.ProcessGroup, world_size: int) -> tuple[int, ...]:
    """Global ranks of a group, in group order; () unknown."""
    if mapping := _of_world("pg_group_ranks").get(group):
        return tuple(sorted(mapping, key=mapping.__getitem__))
    if listed := getattr(options_of(group), "global_ranks_in_group", None):
        return tuple(int(rank) for rank in listed)
    try:
        size = int(group.size())
    except TORCH_ERRORS:  # an unfinished group
        return ()
    if world_size < 0 and distributed_c10d.is_initialized():
        world_size = distributed_c10d.get_world_size()
    return tuple(range(size)) if size == world_size or world_size < 0 else ()


def _backend_name(group: c10d.ProcessGroup) -> str:
    """ "nccl", "gloo", …; "cpu:gloo,cuda:nccl" for a group with several backends."""
    try:
        config = _of_world("pg_map").get(group)
        if config and config[0] not in ("", "undefined"):
            return str(config[0])
        names = {str(device.type): str(backend.name()) for device, backend in backends(group)}
        if len(set(names.values())) > 1:
            return ",".join(f"{device}:{name}" for device, name in sorted(names.items()))
        return next(iter(names.values()), "") or str(group.name())
    except TORCH_ERRORS:  # an unfinished group
        return ""


def group_store(group: c10d.ProcessGroup) -> Torch:
    """The store of a group; KeyError if torch does not know the group."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _of_world("pg_map")[group][1]


def named_groups() -> list[tuple[str, c10d.ProcessGroup]]:
    """Existing groups, by name."""
    return [(name, group) for group, name in _of_world("pg_names").items()]


def _of_world(table: str) -> dict[Torch, Torch]:
    found: dict[Torch, Torch] = getattr(getattr(distributed_c10d, "_world", None), table, {})
    return found


def backends(group: c10d.ProcessGroup) -> list[tuple[Torch, Torch]]:
    """The (device, backend) pairs of a group; [] while it is unfinished."""
    return [(device, group._get_backend(device)) for device in getattr(group, "_device_types", [])]


def options_of(group: Torch) -> Torch:
    """The options of a group or a backend, or None.

    In torch 2.15, `options` of a Python backend without any recurses infinitely, which kills a process of Python 3.12.
    """
    inherited = getattr(Backend, "options", None)
    if inherited is not None and getattr(type(group), "options", None) is inherited:
        return None
    return getattr(group, "options", None)


def timeout_ms(group: c10d.ProcessGroup) -> int:
    """The timeout of a group or of one of its backends in milliseconds; 0 unknown."""
    candidates = [group]
    with contextlib.suppress(*TORCH_ERRORS):  # an unfinished group
        candidates += [backend for _, backend in backends(group)]
    found = (getattr(options_of(candidate), "_timeout", None) for candidate in candidates)
    return next((int(t.total_seconds() * 1000) for t in found if isinstance(t, timedelta)), 0)


def make_like(group: c10d.ProcessGroup, proxy: c10d.ProcessGroup) -> None:
    """Sets backends and name of `proxy`, a Python subclass of ProcessGroup, to those of `group`.

    C++ finds a backend by device or by type, and must find the same one in both groups. Raises if that is impossible.
    """
    default = _backend_type(str(group._get_backend_name()))
    _bind_device(group, proxy)
    for device, backend in backends(group):
        proxy._register_backend(device, _type_in(group, device, backend, default), backend)
    proxy._set_default_backend(default)
    proxy._set_group_name(group.group_name)
    proxy._set_group_desc(group.group_desc)


def check_like(group: c10d.ProcessGroup, proxy: c10d.ProcessGroup) -> None:
    """Raises unless C++ finds the same backends in both groups."""
    same = all(proxy._get_backend(device) is backend for device, backend in backends(group))
    if not same or proxy._get_backend_name() != group._get_backend_name():
        raise LookupError(f"a proxy of {group.group_name} finds another backend")
    if hasattr(group, "_has_hooks") and group._has_hooks() != proxy._has_hooks():
        raise LookupError(f"a proxy of {group.group_name} has other hooks")


def _type_in(group: c10d.ProcessGroup, device: Torch, backend: Torch, default: Torch) -> Torch:
    """The type under which a group keeps a backend. It cannot be derived from the name: "nccl" may be a custom type, and the
    backend of a custom type may be named "gloo"."""
    likely = [default, _backend_type(str(backend.name()))]
    for kind in (*likely, *c10d.ProcessGroup.BackendType.__members__.values()):
        probe = c10d.ProcessGroup(group.rank(), group.size())
        _bind_device(group, probe)
        probe._register_backend(device, kind, backend)
        with contextlib.suppress(RuntimeError):  # the group has no backend of this type
            if group._backend_id(kind) == probe._backend_id(kind):
                return kind
    raise LookupError(f"group {group.group_name} keeps its backend {backend.name()} under no known type")


def _bind_device(group: c10d.ProcessGroup, other: c10d.ProcessGroup) -> None:
    """Copies the bound device, which a backend takes over when it is registered."""
    if getattr(group, "bound_device_id", None) is not None:
        other.bound_device_id = group.bound_device_id


def _backend_type(name: str) -> Torch:
    kinds = c10d.ProcessGroup.BackendType
    return getattr(kinds, name.upper(), kinds.CUSTOM)


def work_classes() -> list[Torch]:
    """Classes of Work with their own wait()."""
    kinds = [kind for kind in vars(c10d).values() if isinstance(kind, type) and issubclass(kind, c10d.Work)]
    return [kind for kind in kinds if "wait" in vars(kind)]


def homes_of(function: str) -> tuple[Torch, list[Torch]]:
    """A function of c10d and the modules of torch that have imported it by name; (None, []) if it does not exist."""
    original = getattr(c10d, function, None)
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch.distributed") and m]
    return original, [
        m for m in (c10d, *modules) if original is not None and vars(m).get(function) is original
    ]


def own_rings() -> dict[str, Callable[..., Torch]]:
    """torch's own recorders: "nccl" (CUDA builds), "fr" for gloo, and "fr-NAME" for other backends (torch 2.15)."""
    found = {"nccl": c10d._dump_nccl_trace} if hasattr(c10d, "_dump_nccl_trace") else {}
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is not None:
        found["fr"] = dump
        if "backend:" in (dump.__doc__ or ""):
            found |= {f"fr-{name}": functools.partial(dump, backend=name) for name in _ring_names()}
    return found


def _ring_names() -> list[str]:
    """Backends other than gloo that may have a ring: registered ones, and those of groups, whose names may differ."""
    names = {str(name).lower() for name in getattr(distributed_c10d.Backend, "backend_list", ())}
    for _, group in named_groups():
        with contextlib.suppress(*TORCH_ERRORS):  # the group is being destroyed
            names |= {str(backend.name()) for _, backend in backends(group)}
    return sorted(names - {"gloo", "undefined"})


def members_by_handles(handles: Torch, first: tuple[int, ...]) -> tuple[int, ...]:
    """Global ranks of a group after `reconfigure` with these handles, in the new order; () unknown.

    `first` are the ranks that the group was created with. A handle of gloo is gloo:RANK:UUID:FIRST RANK:…; only a list of
    handles has an order.
    """
    if not isinstance(handles, list):
        return ()
    places = []
    for handle in handles:
        words = str(handle).split(":")
        if words[0] != "gloo" or len(words) < 4 or not words[3].isdecimal():
            return ()
        places.append(int(words[3]))
    return tuple(first[place] if place < len(first) else place for place in places)


# -- CUDA -------------------------------------------------------------------------------------------------------


#: Methods that end the capture of a graph: torch 2.15 ends it in the second.
CAPTURE_ENDS = ("capture_end", "capture_end_pre")


def cuda_graph() -> Torch:
    """The class whose methods begin and end the capture of a CUDA graph; None without CUDA."""
    graph = getattr(torch._C, "_CUDAGraph", None)
    return graph if graph is not None and "capture_begin" in vars(graph) else None


def event_functions() -> tuple[Torch, ...] | None:
    """Arguments of `_fast.Markers`: torch's functions for "is CUDA initialized", device and stream, and the addresses of
    four functions of the CUDA driver. None without CUDA."""
    names = ("_cuda_getDevice", "_cuda_getCurrentRawStream")
    if torch.version.cuda is None or not all(hasattr(torch._C, name) for name in names):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        functions = [
            getattr(driver, name)
            for name in ("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamIsCapturing")
        ]
    except (OSError, AttributeError):
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return (torch.cuda.is_initialized, *(getattr(torch._C, name) for name in names), *addresses)


# -- the compiler -----------------------------------------------------------------------------------------------
# While compiled code runs, dynamo inspects every new Python frame, also those started by C++. Our wrappers inside a
# functional collective would be compiled, or fail to compile. So their code objects are marked to be skipped through torch's
# C interface, which has no later cost and does not import the compiler.


def leave_graph(function: Torch) -> None:
    """Makes compiled code break the graph at this function, as at the one that it wraps."""
    function._torchdynamo_disable = True


def below_frame(original: Callable[..., Torch], method: str) -> Callable[..., Torch]:
    """Calls `original` from a Python frame with the name `method` and a `self`.

    C++ takes our wrapper for an override in Python subclasses of ProcessGroup, and would call it recursively without such a
    frame.
    """

    def call(self: Torch, *args: Torch, **kwargs: Torch) -> Torch:
        return original(self, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=method)
    skip = _skipper()
    if skip is not None:
        with contextlib.suppress(*TORCH_ERRORS):
            skip(call.__code__)
    call.__doc__ = original.__doc__
    call.__name__ = method
    return call


def hide_from_compiler(*modules: ModuleType) -> None:
    """Marks every function and method of these modules, including nested ones, to be skipped by the compiler."""
    skip = _skipper()
    for module in modules if skip is not None else ():
        for code in _codes(module):
            with contextlib.suppress(*TORCH_ERRORS):  # not supported by this version of torch
                skip(code)


def _skipper() -> Torch:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    c: Torch = eval_frame
    if hasattr(c, "set_code_exec_strategy"):
        skip = c._FrameExecStrategy(c._FrameAction.SKIP, c._FrameAction.SKIP)  # this frame and its callees
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
    """Replaces `torch._inductor` by an empty module during a dump, unless it is imported: the first dump of torch's ring with
    stacks would import its 800 modules."""
    if "torch._inductor" in sys.modules or "_inductor" in vars(torch):
        yield
        return
    stand_in = type(sys)("_inductor")
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:  # else the real one was imported meanwhile
            del vars(torch)["_inductor"]


VALUE_AT = 16  # in a pybind object: after the reference count and the type
BYTES = 64  # of the C++ value that are searched
NOWHERE = -1  # as in _fast.c

#: The arguments of a method for `_fast.c`: their number, including `self`, then the positions of outputs, inputs, their splits,
#: options, peer and tag; 0 for none.
Form = tuple[int, ...]
#: (type, offset of the pointer to the value, offsets in the value of reduce operator, root and timeout in ms).
Layout = tuple[Torch, int, int, int, int]
_PLACES = (("out", "both"), ("in",), ("out_splits",), ("in_splits",), ("options",), ("peer",), ("tag",))
_NO_OPTIONS: Layout = (type(None), 0, NOWHERE, NOWHERE, NOWHERE)
READ_IN_PYTHON: tuple[Form, Layout] = ((0,) * 8, _NO_OPTIONS)


def form_of(method: Method) -> tuple[Form, Layout]:
    """How `_fast.c` reads a call in torch.distributed's form; READ_IN_PYTHON if it cannot."""
    words = [word for word in method.arguments.split() if word != "operator"]
    layout = layout_of(getattr(c10d, method.options)) if method.options else _NO_OPTIONS
    if layout is None or not (method.options or "peer" in words):
        return READ_IN_PYTHON
    places = [next((words.index(name) + 1 for name in names if name in words), 0) for names in _PLACES]
    return (len(words) + 1, *places), layout


@functools.cache
def layout_of(options: Torch) -> Layout | None:
    """The offsets of the fields of this options class; None if one cannot be found."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _layout(options, memory)
    except (
        *TORCH_ERRORS,
        OSError,
        struct.error,
    ):  # another version of torch or pybind, or /proc/self/mem is restricted
        return None
    finally:
        os.close(memory)


def _layout(options: Torch, memory: int) -> Layout | None:
    operators = [getattr(ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "BXOR", "PRODUCT")]
    waits = [12_345, 67, 9_876_543]
    places = [
        _find(
            options,
            memory,
            "reduceOp",
            [(operator, struct.pack("B", hash(operator))) for operator in operators],
        ),
        _find(options, memory, "rootRank", [(root, struct.pack("q", root)) for root in (71, 0, 70_003)]),
        _find(
            options, memory, "timeout", [(timedelta(milliseconds=ms), struct.pack("q", ms)) for ms in waits]
        ),
    ]
    wanted = [hasattr(options(), name) for name in ("reduceOp", "rootRank", "timeout")]
    found = all((place != NOWHERE) == has for place, has in zip(places, wanted, strict=True))
    return (options, VALUE_AT, *places) if found and wanted[2] else None


def _find(options: Torch, memory: int, field: str, samples: Iterable[tuple[Torch, bytes]]) -> int:
    """The unique offset of the bytes of a field, from samples of its values; NOWHERE if there is none."""
    if not hasattr(options(), field):
        return NOWHERE
    places: set[int] | None = None
    for value, bits in samples:
        for _ in range(2):
            sample = options()
            setattr(sample, field, value)
            here = set(_places(_value_bytes(sample, memory), bits))
            places = here if places is None else places & here
    return places.pop() if places is not None and len(places) == 1 else NOWHERE


def _value_bytes(sample: Torch, memory: int) -> bytes:
    (address,) = struct.unpack("Q", os.pread(memory, 8, id(sample) + VALUE_AT))
    return os.pread(memory, BYTES, address)


def _places(data: bytes, bits: bytes) -> Iterable[int]:
    step = len(bits)
    return (at for at in range(0, len(data) - step + 1, step) if data[at : at + step] == bits)
