"""What each method of a process group moves: which arguments are its inputs, outputs, root, partner, operator.

Runs in the rank. The table follows torch's pybind signatures, all overloads: `opts` objects, plain operators and
roots, single tensors and lists. Ops have readable names of their own; model/torch_dump.py maps them to torch's.

What of ours runs inside a call of the program goes through an `ErrorGuard`: an error of ours never reaches the program.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks.blackbox.layout import Item

if TYPE_CHECKING:
    import torch

    from allranks.blackbox.file_writer import Box

#: torch's C++ names of dtypes, as its own recorder writes them.
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


Args = tuple[object, ...]  # of a call, by position
Kwargs = dict[str, object]
Function = Callable[..., Any]  # of torch, or what we put in its place
Reader = Callable[[Args, Kwargs], Call]
ANY_SOURCE = -1
_NO_TIME = timedelta(0)  # torch's options hold -1 ms when nobody set a timeout


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
    """(id in the box, elements in, elements out) of the sizes and dtypes of a call's tensors."""
    sides = (inputs, outputs)
    payload: list[object] = [[list(t.shape) for t in side] for side in sides]
    payload += [[dtype_name(t.dtype) for t in side] for side in sides]
    payload += [list(input_splits), list(output_splits)]
    elements_in, elements_out = (sum(t.numel() for t in side) for side in sides)
    return box.intern(Item.SHAPES, payload) if any(sides) else 0, elements_in, elements_out


def _argument(args: Args, kwargs: Kwargs, index: int, *names: str) -> Any:
    if len(args) > index:
        return args[index]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _options(args: Args, kwargs: Kwargs, index: int, *names: str) -> Any:
    return _argument(args, kwargs, index, "opts", *names)


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
    """The call's own timeout in milliseconds; 0 when it has none."""
    value = getattr(options, "timeout", None)
    if value is None:
        value = kwargs.get("timeout") or (args[-1] if args else None)
    return int(value.total_seconds() * 1000) if isinstance(value, timedelta) and value > _NO_TIME else 0


def _root(options: object) -> int:
    if isinstance(options, int):
        return options
    return int(getattr(options, "rootRank", 0))


def _reduced(args: Args, kwargs: Kwargs) -> Call:
    tensors = flat(_argument(args, kwargs, 0, "tensors", "tensor"))
    options = _options(args, kwargs, 1, "op")
    return Call(tensors, tensors, reduce_number(options), timeout_ms=_timeout(options, args, kwargs))


def _broadcast(args: Args, kwargs: Kwargs) -> Call:
    tensors = flat(_argument(args, kwargs, 0, "tensors", "tensor"))
    options = _options(args, kwargs, 1, "root")
    return Call(tensors, tensors, root=_root(options), timeout_ms=_timeout(options, args, kwargs))


def _reduce(args: Args, kwargs: Kwargs) -> Call:
    tensors = flat(_argument(args, kwargs, 0, "tensors", "tensor"))
    options = _options(args, kwargs, 1, "root")
    operator = _argument(args, kwargs, 2, "op") if isinstance(options, int) else options
    return Call(
        tensors, tensors, reduce_number(operator), _root(options), timeout_ms=_timeout(options, args, kwargs)
    )


def _moved(args: Args, kwargs: Kwargs) -> Call:
    outputs = _argument(
        args, kwargs, 0, "output_tensors", "output_lists", "outputs", "output", "output_tensor"
    )
    inputs = _argument(args, kwargs, 1, "input_tensors", "input_list", "inputs", "input", "input_tensor")
    options = _options(args, kwargs, 2)
    return Call(flat(inputs), flat(outputs), timeout_ms=_timeout(options, args, kwargs))


def _rooted(args: Args, kwargs: Kwargs) -> Call:
    moved = _moved(args, kwargs)
    return moved._replace(root=_root(_options(args, kwargs, 2, "root")))


def _scattered(args: Args, kwargs: Kwargs) -> Call:
    outputs = _argument(args, kwargs, 0, "output_tensors", "outputs", "output", "outputTensor")
    inputs = _argument(args, kwargs, 1, "input_tensors", "inputs", "input", "inputTensor", "input_tensor")
    options = _options(args, kwargs, 2, "op")
    return Call(
        flat(inputs), flat(outputs), reduce_number(options), timeout_ms=_timeout(options, args, kwargs)
    )


def _split(args: Args, kwargs: Kwargs) -> Call:
    outputs = _argument(args, kwargs, 0, "output", "output_tensor")
    inputs = _argument(args, kwargs, 1, "input", "input_tensor")
    return Call(
        flat(inputs),
        flat(outputs),
        output_splits=_argument(args, kwargs, 2, "output_split_sizes") or (),
        input_splits=_argument(args, kwargs, 3, "input_split_sizes") or (),
        timeout_ms=_timeout(_options(args, kwargs, 4), args, kwargs),
    )


def _tag(args: Args, kwargs: Kwargs, index: int, name: str = "tag") -> int:
    """The tag of a send or recv, cut to the 31 bits that a row has."""
    return int(_argument(args, kwargs, index, name) or 0) & 0x7FFFFFFF


def _send(args: Args, kwargs: Kwargs) -> Call:
    tensors = flat(_argument(args, kwargs, 0, "tensors"))
    return Call(
        tensors, (), peer=int(_argument(args, kwargs, 1, "dstRank")), p2p=True, tag=_tag(args, kwargs, 2)
    )


def _recv(args: Args, kwargs: Kwargs) -> Call:
    tensors = flat(_argument(args, kwargs, 0, "tensors"))
    return Call(
        (), tensors, peer=int(_argument(args, kwargs, 1, "srcRank")), p2p=True, tag=_tag(args, kwargs, 2)
    )


def _recv_any(args: Args, kwargs: Kwargs) -> Call:
    tensors = flat(_argument(args, kwargs, 0, "arg0"))
    return Call((), tensors, peer=ANY_SOURCE, p2p=True, tag=_tag(args, kwargs, 1, "arg1"))


def _barrier(args: Args, kwargs: Kwargs) -> Call:
    return Call(timeout_ms=_timeout(_options(args, kwargs, 0), args, kwargs))


#: method of ProcessGroup and Backend -> (our name of the op, reader of its arguments).
CALLS: dict[str, tuple[str, Reader]] = {
    "allreduce": ("all_reduce", _reduced),
    "allreduce_coalesced": ("allreduce_coalesced", _reduced),
    "broadcast": ("broadcast", _broadcast),
    "reduce": ("reduce", _reduce),
    "allgather": ("all_gather", _moved),
    "_allgather_base": ("all_gather_into_tensor", _moved),
    "all_gather_single": ("all_gather_into_tensor", _moved),
    "allgather_coalesced": ("all_gather_coalesced", _moved),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", _moved),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", _moved),
    "gather": ("gather", _rooted),
    "scatter": ("scatter", _rooted),
    "reduce_scatter": ("reduce_scatter", _scattered),
    "_reduce_scatter_base": ("reduce_scatter_tensor", _scattered),
    "reduce_scatter_single": ("reduce_scatter_tensor", _scattered),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", _scattered),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", _scattered),
    "alltoall": ("all_to_all", _moved),
    "alltoall_base": ("all_to_all_single", _split),
    "all_to_all_single": ("all_to_all_single", _split),
    "send": ("send", _send),
    "recv": ("recv", _recv),
    "recv_anysource": ("recv", _recv_any),
    "barrier": ("barrier", _barrier),
    "monitored_barrier": ("monitored_barrier", _barrier),
}


class ErrorGuard:
    """Runs steps of ours; `on_error` gets what they raise, and must not raise itself."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self.active = True  # False: no step is run any more

    def __call__(self, step: Function, *args: object) -> Any:
        """What a step returns; None when it failed, or none is run any more."""
        try:
            return step(*args) if self.active else None
        except Exception as error:  # ours, or of a device that is broken; never the program's
            self._on_error(error)
            return None

    def hold(self, step: Function) -> Function:
        """The same step, for others to call."""
        return lambda *args: self(step, *args)

    def around(
        self,
        original: Function,
        before: Callable[[Args, Kwargs], Any],
        after: Callable[[Any, Any], object] | None = None,
        failed: Callable[[Any, BaseException], object] | None = None,
    ) -> Function:
        """`original` with a step before and after it. `before(args, kwargs)` gives what `after(it, result)` and
        `failed(it, error)` need; when it gives None there is nothing to do afterwards."""
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
