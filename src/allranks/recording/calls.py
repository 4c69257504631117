"""The arguments of each method of a process group: its inputs, outputs, root, peer and operator. Runs in the rank.

The table CALLS covers all overloads of torch's pybind signatures. `_fast.c` uses it to read the most common form of a call,
`read_call` reads every form. model/torch_dump.py maps our names of ops to torch's.

Our code inside a call of the program runs in an `ErrorGuard`, so that its errors do not reach the program.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks.blackbox.layout import Item

if TYPE_CHECKING:
    import torch

    from allranks.blackbox.file_writer import Box

#: torch's C++ names of dtypes, as in its own recorder.
_NAMES_TEXT = (
    "float32:Float float64:Double float16:Half bfloat16:BFloat16 int64:Long int32:Int int16:Short "
    "int8:Char uint8:Byte bool:Bool uint16:UInt16 uint32:UInt32 uint64:UInt64 "
    "complex32:ComplexHalf complex64:ComplexFloat complex128:ComplexDouble"
)
_NAMES = dict(word.split(":") for word in _NAMES_TEXT.split())


def dtype_name(dtype: object) -> str:
    """ "Float" for torch.float32; float8 variants keep their long name, as in torch."""
    text = str(dtype).removeprefix("torch.")
    return _NAMES.get(text, text.replace("float8", "Float8"))


class Call(NamedTuple):
    """One call, read from its arguments. `root` and `peer` are group-local; -1 none."""

    inputs: Any = ()
    outputs: Any = ()
    reduce_op: int = 0
    root: int = -1
    peer: int = -1
    p2p: bool = False
    input_splits: Any = ()
    output_splits: Any = ()
    timeout_ms: int = 0
    tag: int = -1  # of a send or recv


Args = tuple[object, ...]
Kwargs = dict[str, object]
Function = Callable[..., Any]
_NO_TIME = timedelta(0)  # torch's options have -1 ms without a timeout


def flat(tensors: object) -> list[torch.Tensor]:
    """The tensors of a tensor, a list, or a list of lists."""
    if not isinstance(tensors, (list, tuple)):
        return [tensors] if tensors is not None else []
    if len(tensors) == 1 and not isinstance(tensors[0], (list, tuple)):
        return list(tensors)
    found: list[torch.Tensor] = []
    for item in tensors:
        found += flat(item) if isinstance(item, (list, tuple)) else [item]
    return found


def intern_shapes(
    box: Box, inputs: Any, outputs: Any, input_splits: Any = (), output_splits: Any = ()
) -> tuple[int, int, int]:
    """Interns sizes and dtypes of a call; (id in the box, elements in, elements out)."""
    sides = (inputs, outputs)
    payload: list[object] = [[list(t.shape) for t in side] for side in sides]
    payload += [[dtype_name(t.dtype) for t in side] for side in sides]
    payload += [list(input_splits), list(output_splits)]
    elements_in, elements_out = (sum(t.numel() for t in side) for side in sides)
    return box.intern(Item.SHAPES, payload) if any(sides) else 0, elements_in, elements_out


def reduce_number(options: Any) -> int:
    """Index into REDUCE_OPS of an options object, a ReduceOp or a RedOpType; 1 (sum) is torch's default."""
    if options is None:
        return 1
    try:
        number = (
            hash(options.reduceOp) if hasattr(options, "reduceOp") else int(getattr(options, "op", options))
        )
    except (TypeError, ValueError):
        return 10
    return number + 1 if 0 <= number <= 8 else 10


def _timeout(options: object, args: Args, kwargs: Kwargs) -> int:
    """The call's own timeout in milliseconds; 0 for none."""
    value = getattr(options, "timeout", None)
    if value is None:
        value = kwargs.get("timeout") or (args[-1] if args else None)
    return int(value.total_seconds() * 1000) if isinstance(value, timedelta) and value > _NO_TIME else 0


def _root(options: object) -> int:
    if isinstance(options, int):
        return options
    return int(getattr(options, "rootRank", 0))


class Method(NamedTuple):
    """A method of ProcessGroup and Backend."""

    op: str  # our name
    arguments: str  # the meaning of its arguments, in order: keys of _NAMES_OF
    options: str = ""  # torch's class of `opts` as passed by torch.distributed; "": read in Python
    reduces: bool = False
    rooted: bool = False
    p2p: bool = False


_BOTH = ("tensors", "tensor", "arg0")  # of an in-place collective, or of a send or receive
#: Meaning of an argument -> its names in all methods.
_NAMES_OF = {
    "both": _BOTH,
    "out": ("output_tensors", "output_lists", "outputs", "output", "output_tensor", "outputTensor", *_BOTH),
    "in": ("input_tensors", "input_list", "inputs", "input", "inputTensor", "input_tensor", *_BOTH),
    "out_splits": ("output_split_sizes",),
    "in_splits": ("input_split_sizes",),
    "options": ("opts", "root", "op"),  # or a plain root or operator instead
    "operator": ("op",),  # after a plain root
    "peer": ("dstRank", "srcRank"),
    "tag": ("tag", "arg1"),
}
_ALLGATHER = ("out in options", "AllgatherOptions")
_SCATTERED = ("out in options", "ReduceScatterOptions", True)
_SPLIT = ("out in out_splits in_splits options", "AllToAllOptions")
CALLS: dict[str, Method] = {
    "allreduce": Method("all_reduce", "both options", "AllreduceOptions", reduces=True),
    "allreduce_coalesced": Method("allreduce_coalesced", "both options", reduces=True),
    "broadcast": Method("broadcast", "both options", "BroadcastOptions", rooted=True),
    "reduce": Method("reduce", "both options operator", "ReduceOptions", reduces=True, rooted=True),
    "allgather": Method("all_gather", *_ALLGATHER),
    "_allgather_base": Method("all_gather_into_tensor", *_ALLGATHER),
    "all_gather_single": Method("all_gather_into_tensor", *_ALLGATHER),
    "allgather_coalesced": Method("all_gather_coalesced", "out in options"),
    "allgather_into_tensor_coalesced": Method("all_gather_into_tensor_coalesced", *_ALLGATHER),
    "all_gather_single_coalesced": Method("all_gather_into_tensor_coalesced", *_ALLGATHER),
    "gather": Method("gather", "out in options", "GatherOptions", rooted=True),
    "scatter": Method("scatter", "out in options", "ScatterOptions", rooted=True),
    "reduce_scatter": Method("reduce_scatter", *_SCATTERED),
    "_reduce_scatter_base": Method("reduce_scatter_tensor", *_SCATTERED),
    "reduce_scatter_single": Method("reduce_scatter_tensor", *_SCATTERED),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter_tensor_coalesced", *_SCATTERED),
    "reduce_scatter_single_coalesced": Method("reduce_scatter_tensor_coalesced", *_SCATTERED),
    "alltoall": Method("all_to_all", "out in options", "AllToAllOptions"),
    "alltoall_base": Method("all_to_all_single", *_SPLIT),
    "all_to_all_single": Method("all_to_all_single", *_SPLIT),
    "send": Method("send", "in peer tag", p2p=True),
    "recv": Method("recv", "out peer tag", p2p=True),
    "recv_anysource": Method("recv", "out tag", p2p=True),
    "barrier": Method("barrier", "options", "BarrierOptions"),
    "monitored_barrier": Method("monitored_barrier", "options"),
}


def read_call(method: Method, args: Args, kwargs: Kwargs) -> Call:
    """Reads a call of a method, in any form."""
    arguments = method.arguments.split()
    given: dict[str, Any] = dict(zip(arguments, args, strict=False))
    for what in arguments[len(args) :]:
        given[what] = next((kwargs[name] for name in _NAMES_OF[what] if name in kwargs), None)
    options = given.get("options")
    operator = given.get("operator", options) if isinstance(options, int) else options
    if "both" in given:
        inputs = outputs = flat(given["both"])
    else:
        inputs, outputs = flat(given.get("in")), flat(given.get("out"))
    return Call(
        inputs,
        outputs,
        reduce_number(operator) if method.reduces else 0,
        _root(options) if method.rooted else -1,
        int(given.get("peer", -1)),
        method.p2p,
        given.get("in_splits") or (),
        given.get("out_splits") or (),
        _timeout(options, args, kwargs),
        int(given["tag"] or 0) & 0x7FFFFFFF if method.p2p else -1,  # a row has 31 bits
    )


class ErrorGuard:
    """Runs our code inside the program. `on_error` gets its exceptions and must not raise."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self.active = True  # False: nothing is run any more

    def __call__(self, step: Function, *args: object) -> Any:
        """The result of a step; None if it failed or the guard is inactive."""
        try:
            return step(*args) if self.active else None
        except Exception as error:  # our own, or of a broken device
            self._on_error(error)
            return None

    def hold(self, step: Function) -> Function:
        """Wraps a step in this guard."""
        return lambda *args: self(step, *args)

    def around(
        self,
        original: Function,
        before: Callable[[Args, Kwargs], Any],
        after: Callable[[Any, Any], object] | None = None,
        failed: Callable[[Any, BaseException], object] | None = None,
    ) -> Function:
        """`original` with steps around it. The result of `before(args, kwargs)` is passed to `after(known, result)` or
        `failed(known, error)`, which are skipped if it is None."""
        guard = self

        def wrapper(*args: object, **kwargs: object) -> object:
            known = guard(before, args, kwargs)
            if known is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if failed is not None:
                    guard(failed, known, error)
                raise
            if after is not None:
                guard(after, known, result)
            return result

        return wrapper
