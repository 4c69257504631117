"""What each operation demands of its members: which calls belong together, and what must be equal. Pure tables."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Family(IntEnum):
    """Calls of one family can meet in one collective; those of different families cannot."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SPARSE = 10
    COALESCED = 11
    SEND = 12
    RECV = 13
    P2P_BATCH = 14
    MONITORED_BARRIER = 15
    OTHER = 16  # first of the codes for names we do not know: each name is its own family


#: The names of each family's operations, as torch, NCCL, gloo and torchcomms spell them.
_NAMES = {
    Family.ALL_REDUCE: "all_reduce allreduce_coalesced all_reduce_coalesced",
    Family.BROADCAST: "broadcast _broadcast_oop",
    Family.REDUCE: "reduce _reduce_oop",
    Family.ALL_GATHER: "all_gather _all_gather_base all_gather_single all_gather_into_tensor all_gather_v "
    "all_gather_into_tensor_coalesced ALLGATHER_coalesced all_gather_coalesced",
    Family.REDUCE_SCATTER: "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_v "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced REDUCE_SCATTER_coalesced",
    Family.ALL_TO_ALL: "all_to_all all_to_all_single all_to_all_base alltoall alltoall_base all_to_all_v_single",
    Family.GATHER: "gather gather_single",
    Family.SCATTER: "scatter",
    Family.BARRIER: "barrier all_reduce_barrier",
    Family.MONITORED_BARRIER: "monitored_barrier",
    Family.SPARSE: "sparse_all_reduce",
    Family.COALESCED: "coalesced",
    Family.SEND: "send isend",
    Family.RECV: "recv irecv recv_any_source recvAnySource",
    Family.P2P_BATCH: "batch_op_issue",
}
_FAMILIES = {name: family for family, names in _NAMES.items() for name in names.split()}

#: Families in which nobody can finish before everybody has entered.
SYNCHRONISING = frozenset(
    {Family.ALL_REDUCE, Family.ALL_GATHER, Family.REDUCE_SCATTER, Family.ALL_TO_ALL}
    | {Family.BARRIER, Family.MONITORED_BARRIER}
)
ROOTED = frozenset({Family.BROADCAST, Family.REDUCE, Family.GATHER, Family.SCATTER})
REDUCING = frozenset({Family.ALL_REDUCE, Family.REDUCE, Family.REDUCE_SCATTER})
#: One tensor per rank of equal length: an uneven variant does not exist.
EVEN_ONLY = frozenset(
    {"_all_gather_base", "all_gather_into_tensor", "all_gather_single"}
    | {"_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single"}
)
#: One call with several tensors, each of which is a collective of its own.
TENSOR_BY_TENSOR = frozenset(
    {"allreduce_coalesced", "all_reduce_coalesced"}
    | {"all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
)

_SYNCHRONISING = np.isin(np.arange(int(Family.OTHER) + 1), [int(family) for family in SYNCHRONISING])


def is_synchronising(codes: np.ndarray) -> np.ndarray:
    """Per family code: whether nobody can finish such a call before everybody has entered it."""
    found: np.ndarray = _SYNCHRONISING[np.minimum(codes, int(Family.OTHER))]
    return found


def is_p2p(codes: np.ndarray) -> np.ndarray:
    """Per family code: whether it is a send, a receive, or a batch of them."""
    found: np.ndarray = (codes >= int(Family.SEND)) & (codes <= int(Family.P2P_BATCH))
    return found


def families(names: tuple[str, ...]) -> np.ndarray:
    """The family code of every name of a table; unknown names get codes of their own, from OTHER up."""
    codes = np.zeros(max(1, len(names)), np.int32)
    others: dict[str, int] = {}
    for index, name in enumerate(names):
        family = _FAMILIES.get(name)
        if family is not None:
            codes[index] = family
        elif name:
            codes[index] = others.setdefault(name, int(Family.OTHER) + len(others))
    return codes


_DTYPES_OF = {
    16: "ComplexDouble",
    8: "Double Long ComplexFloat UInt64",
    4: "Float Int UInt32",
    2: "Half BFloat16 Short UInt16",
    1: "Byte Char Bool Float8_e4m3fn Float8_e5m2",
}
_DTYPE_BYTES = {name: size for size, names in _DTYPES_OF.items() for name in names.split()}


def input_bytes(elements: int, dtypes: tuple[str, ...]) -> int:
    """Bytes of the input of a call; unknown dtypes count as four bytes an element."""
    return elements * max((_DTYPE_BYTES.get(dtype, 4) for dtype in dtypes), default=4)
