"""What the recorder calls of torch that is not public; allranks/torch_private.py lists the names. Runs in the rank.

Other files of `recording` use torch's public names and this file. `missing` is asked when recording starts.
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
Torch: TypeAlias = Any  # something of torch that has no type of its own, or another one in each version
#: Functions of c10d that are handed a process group by C++'s users: the registry of names, and two of DDP's set-up.
REGISTER, UNREGISTER = "_register_process_group", "_unregister_process_group"
UNREGISTER_ALL, RESOLVE = "_unregister_all_process_groups", "_resolve_process_group"
DDP_FUNCTIONS = ("_broadcast_coalesced", "_verify_params_across_processes")
#: Methods around a batch of calls that is sent at once.
START_BATCH, END_BATCH = "_start_coalescing", "_end_coalescing"
#: Methods that C++'s trampoline looks up on a Python subclass of ProcessGroup, over the versions of torch.
_TRAMPOLINE_TEXT = (
    "allreduce allreduce_coalesced broadcast allgather allgather_into_tensor_coalesced "
    "all_gather_single_coalesced reduce_scatter reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced alltoall_base all_to_all_single barrier send recv "
    "_allgather_base _reduce_scatter_base all_gather_single reduce_scatter_single"
)
TRAMPOLINE = tuple(_TRAMPOLINE_TEXT.split())
CPP_CALLS = "calls made by C++ (DDP, functional collectives)"
#: Before 2.7 C++ lets go of the Python half of a Work that a proxy gives it, and then waits for ever.
FIRST_WITH_PROXIES = (2, 7)


def version() -> tuple[int, ...]:
    """(2, 15) of "2.15.0+cu132"."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def missing(private: dict[str, tuple[str, str]] = PRIVATE) -> list[str]:
    """What this version of torch does not let us record, as sentences; [] when nothing is lost."""
    lost: dict[str, list[str]] = {}
    for name, (_, what) in private.items():
        found: Torch = c10d
        for word in name.removeprefix(f"{C10D}.").split(".") if name.startswith(C10D) else ():
            found = getattr(found, word, None)
        if found is None and what in RECORDED:
            lost.setdefault(what, []).append(name.rpartition(".")[2])
    return [f"{what} (torch has no {', '.join(names)})" for what, names in lost.items()]


class Replaced(list[tuple[object, str, object, Torch]]):
    """What we have put in the place of something: (owner, name, ours, the original)."""

    def put(self, owner: object, name: str, ours: object, original: object) -> None:
        setattr(owner, name, ours)
        self.append((owner, name, ours, original))

    def restore(self) -> None:
        """Puts everything back, unless somebody else has wrapped it since."""
        while self:
            owner, name, ours, original = self.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)


# -- process groups ---------------------------------------------------------------------------------------------


def describe_group(
    group: c10d.ProcessGroup, world_size: int, members: tuple[int, ...] = ()
) -> tuple[str, str, tuple[int, ...], str]:
    """(name, description, global ranks, backend) of a ProcessGroup or a bare Backend, as far as it tells.

    `members` are its ranks as far as we know them ourselves: torch does not tell those of a group that was split off.
    """
    name = _text(group, "group_name") or _text(options_of(group), "group_name")
    return name, _text(group, "group_desc"), members or _ranks(group, world_size), _backend_name(group)


def _text(group: Torch, attribute: str) -> str:
    try:
        return str(getattr(group, attribute, "") or "")
    except TORCH_ERRORS:  # a property of an unfinished C++ group may raise anything
        return ""


def _ranks(group: c10d.ProcessGroup, world_size: int) -> tuple[int, ...]:
    """Global ranks of a group, in its own order; () unknown."""
    if mapping := _of_world("pg_group_ranks").get(group):
        return tuple(sorted(mapping, key=mapping.__getitem__))
    if listed := getattr(options_of(group), "global_ranks_in_group", None):
        return tuple(int(rank) for rank in listed)
    try:
        size = int(group.size())
    except TORCH_ERRORS:  # as above
        return ()
    if world_size < 0 and distributed_c10d.is_initialized():
        world_size = distributed_c10d.get_world_size()
    return tuple(range(size)) if size == world_size or world_size < 0 else ()


def _backend_name(group: c10d.ProcessGroup) -> str:
    """ "nccl", "gloo", …; "cpu:gloo,cuda:nccl" for a group that has several."""
    try:
        config = _of_world("pg_map").get(group)  # what it was made with
        if config and config[0] not in ("", "undefined"):
            return str(config[0])
        names = {str(device.type): str(backend.name()) for device, backend in backends(group)}
        if len(set(names.values())) > 1:
            return ",".join(f"{device}:{name}" for device, name in sorted(names.items()))
        return next(iter(names.values()), "") or str(group.name())
    except TORCH_ERRORS:  # as above
        return ""


def group_store(group: c10d.ProcessGroup) -> Torch:
    """Where its members meet; KeyError for a group that torch does not know."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _of_world("pg_map")[group][1]


def named_groups() -> list[tuple[str, c10d.ProcessGroup]]:
    """Groups that exist already, by name."""
    return [(name, group) for group, name in _of_world("pg_names").items()]


def _of_world(table: str) -> dict[Torch, Torch]:
    found: dict[Torch, Torch] = getattr(getattr(distributed_c10d, "_world", None), table, {})
    return found


def backends(group: c10d.ProcessGroup) -> list[tuple[Torch, Torch]]:
    """(device, backend) of a group; [] while it is unfinished."""
    return [(device, group._get_backend(device)) for device in getattr(group, "_device_types", [])]


def options_of(group: Torch) -> Torch:
    """Of a group or a backend; None where it has none. A backend that is written in Python and has none asks itself without an
    end (torch 2.15), and with Python 3.12 that ends the process."""
    inherited = getattr(Backend, "options", None)
    if inherited is not None and getattr(type(group), "options", None) is inherited:
        return None
    return getattr(group, "options", None)


def timeout_ms(group: c10d.ProcessGroup) -> int:
    """The timeout of a group or of one of its backends in milliseconds; 0 unknown."""
    candidates = [group]
    with contextlib.suppress(*TORCH_ERRORS):  # a property of an unfinished C++ group may raise anything
        candidates += [backend for _, backend in backends(group)]
    found = (getattr(options_of(candidate), "_timeout", None) for candidate in candidates)
    return next((int(t.total_seconds() * 1000) for t in found if isinstance(t, timedelta)), 0)


def make_like(group: c10d.ProcessGroup, proxy: c10d.ProcessGroup) -> None:
    """Gives `proxy`, a Python subclass of ProcessGroup, the backends and the name of `group`.

    C++ finds a backend by its device or by its type, and must find the same one in both groups. Raises where that is
    impossible: the caller then uses the group itself.
    """
    default = _backend_type(str(group._get_backend_name()))
    _bind_device(group, proxy)
    for device, backend in backends(group):
        proxy._register_backend(device, _type_in(group, device, backend, default), backend)
    proxy._set_default_backend(default)
    proxy._set_group_name(group.group_name)
    proxy._set_group_desc(group.group_desc)


def check_like(group: c10d.ProcessGroup, proxy: c10d.ProcessGroup) -> None:
    """Raises unless C++ finds the same in both groups."""
    same = all(proxy._get_backend(device) is backend for device, backend in backends(group))
    if not same or proxy._get_backend_name() != group._get_backend_name():
        raise LookupError(f"a proxy of {group.group_name} finds another backend")
    # each asks its default backend
    if hasattr(group, "_has_hooks") and group._has_hooks() != proxy._has_hooks():
        raise LookupError(f"a proxy of {group.group_name} has other hooks")


def _type_in(group: c10d.ProcessGroup, device: Torch, backend: Torch, default: Torch) -> Torch:
    """The type under which a group keeps a backend. Its name does not say: "nccl" may be a custom type, and the backend
    of a custom type may be called "gloo"."""
    likely = [default, _backend_type(str(backend.name()))]
    for kind in (*likely, *c10d.ProcessGroup.BackendType.__members__.values()):
        probe = c10d.ProcessGroup(group.rank(), group.size())
        _bind_device(group, probe)
        probe._register_backend(device, kind, backend)
        with contextlib.suppress(RuntimeError):  # the group has none of this type
            if group._backend_id(kind) == probe._backend_id(kind):
                return kind
    raise LookupError(f"group {group.group_name} keeps its backend {backend.name()} under no known type")


def _bind_device(group: c10d.ProcessGroup, other: c10d.ProcessGroup) -> None:
    """Before a backend is registered, which then takes the device from its group."""
    if getattr(group, "bound_device_id", None) is not None:
        other.bound_device_id = group.bound_device_id


def _backend_type(name: str) -> Torch:
    kinds = c10d.ProcessGroup.BackendType
    return getattr(kinds, name.upper(), kinds.CUSTOM)


def work_classes() -> list[Torch]:
    """Classes of Work that have a wait() of their own."""
    kinds = [kind for kind in vars(c10d).values() if isinstance(kind, type) and issubclass(kind, c10d.Work)]
    return [kind for kind in kinds if "wait" in vars(kind)]


def homes_of(function: str) -> tuple[Torch, list[Torch]]:
    """A function of c10d and the modules of torch that have taken it by name; (None, []) when there is none."""
    original = getattr(c10d, function, None)
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch.distributed") and m]
    return original, [
        m for m in (c10d, *modules) if original is not None and vars(m).get(function) is original
    ]


def own_rings() -> dict[str, Callable[..., Torch]]:
    """torch's own recorders: "nccl" (CUDA builds), "fr" of gloo, and "fr-NAME" of each other backend (torch 2.15)."""
    found = {"nccl": c10d._dump_nccl_trace} if hasattr(c10d, "_dump_nccl_trace") else {}
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is not None:
        found["fr"] = dump
        if "backend:" in (dump.__doc__ or ""):
            found |= {f"fr-{name}": functools.partial(dump, backend=name) for name in _ring_names()}
    return found


def _ring_names() -> list[str]:
    """Backends other than gloo that may have a ring: those that a program can name, and those of its groups, which may
    call themselves otherwise."""
    names = {str(name).lower() for name in getattr(distributed_c10d.Backend, "backend_list", ())}
    for _, group in named_groups():
        with contextlib.suppress(*TORCH_ERRORS):  # a group that is half gone
            names |= {str(backend.name()) for _, backend in backends(group)}
    return sorted(names - {"gloo", "undefined"})


def members_by_handles(handles: Torch, first: tuple[int, ...]) -> tuple[int, ...]:
    """Global ranks of a group that is reconfigured with these handles, in its new order; () unknown. `first` are those
    that it was made with. gloo's handle is gloo:RANK:UUID:FIRST RANK:…, and only a list says the order."""
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


#: Methods that end the capture of a graph: torch 2.15 ends it in the second, and does other things before it is whole.
CAPTURE_ENDS = ("capture_end", "capture_end_pre")


def cuda_graph() -> Torch:
    """The class whose methods begin and end the capture of a CUDA graph; None without CUDA."""
    graph = getattr(torch._C, "_CUDAGraph", None)
    return graph if graph is not None and "capture_begin" in vars(graph) else None


def event_functions() -> tuple[Torch, ...] | None:
    """What `_fast.Markers` needs: torch's answers to "is CUDA in use, which device, which stream", and the addresses of
    four functions of CUDA's driver. None without CUDA."""
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
# While compiled code runs, dynamo looks at every Python frame that starts, also at those that C++ starts on its own:
# our wrappers under a functional collective would be compiled, or fail to be. Code objects are marked to be skipped
# through torch's C interface, which costs nothing later and does not import the compiler.


def leave_graph(function: Torch) -> None:
    """Code that is compiled leaves the graph at this function, as it did at the one that it wraps."""
    function._torchdynamo_disable = True


def below_frame(original: Callable[..., Torch], method: str) -> Callable[..., Torch]:
    """`original` for subclasses of ProcessGroup in Python that leave it as it is. What C++ finds there it takes for a method of
    theirs, as ours is none of pybind's, and it would call that without an end but for a frame of this name with `self`."""

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
    """Marks every function and method of these modules, and what they define inside."""
    skip = _skipper()
    for module in modules if skip is not None else ():
        for code in _codes(module):
            with contextlib.suppress(*TORCH_ERRORS):  # another version of torch: it is compiled, or it is not
                skip(code)


def _skipper() -> Torch:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    c: Torch = eval_frame
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


VALUE_AT = 16  # in a pybind object: behind the reference count and the type
BYTES = 64  # of the C++ value that are looked at; our fields are at its front
NOWHERE = -1  # as in _fast.c

#: Which argument of a method is what, as `_fast.c` takes it: how many, `self` included; then the places of outputs, inputs, their
#: splits, options, peer and tag, 0 for none.
Form = tuple[int, ...]
#: (type, address of the value, then reduce operator, root, timeout in ms in the value).
Layout = tuple[Torch, int, int, int, int]
_PLACES = (("out", "both"), ("in",), ("out_splits",), ("in_splits",), ("options",), ("peer",), ("tag",))
_NO_OPTIONS: Layout = (type(None), 0, NOWHERE, NOWHERE, NOWHERE)  # of a method that takes none
READ_IN_PYTHON: tuple[Form, Layout] = ((0,) * 8, _NO_OPTIONS)


def form_of(method: Method) -> tuple[Form, Layout]:
    """How `_fast.c` reads a call in the form in which torch.distributed makes it; READ_IN_PYTHON where it cannot."""
    words = [word for word in method.arguments.split() if word != "operator"]
    layout = layout_of(getattr(c10d, method.options)) if method.options else _NO_OPTIONS
    if layout is None or not (method.options or "peer" in words):
        return READ_IN_PYTHON
    places = [next((words.index(name) + 1 for name in names if name in words), 0) for names in _PLACES]
    return (len(words) + 1, *places), layout


@functools.cache
def layout_of(options: Torch) -> Layout | None:
    """The places of the fields of this options class; None when one of them cannot be found."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _layout(options, memory)
    # another torch or pybind, a kernel that hides our memory from us
    except (*TORCH_ERRORS, OSError, struct.error):
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
    """The one place where these bytes appear when the field has these values; NOWHERE when there is no such place."""
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
