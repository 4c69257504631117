"""Single entries of a dump, compared two by two: torchfrtrace's `Op` and `match_one_event`. Pure.

For scripts that use these names. `build_db` and the command compare whole jobs (`problems.py`): two entries alone do
not tell which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from allranks.errors import InputError
from allranks.frtrace.types import MatchInfo, MatchState

#: As torchfrtrace knows them.
_COLLECTIVES = """
    _all_gather_base _broadcast_oop _reduce_oop _reduce_scatter_base ALLGATHER_coalesced
    REDUCE_SCATTER_coalesced all_gather all_gather_into_tensor_coalesced all_gather_single all_gather_v
    all_reduce all_reduce_barrier all_to_all all_to_all_single all_to_all_v_single allgather_coalesced
    allreduce_coalesced barrier broadcast gather new_window reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor_coalesced reduce_scatter_v scatter split
"""
COLLECTIVES = set(_COLLECTIVES.split())
P2P = {"send", "recv"}
BATCH_ENDS = {"coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"}
#: Operations of which every rank has its own input sizes, or its own output sizes.
EXCHANGES = {"all_to_all", "all_to_all_single"}
OWN_INPUTS, OWN_OUTPUTS = EXCHANGES | {"scatter"}, EXCHANGES | {"gather"}
#: Operations whose one output is the inputs of all ranks, and the other way round.
JOINING = {"all_gather", "_all_gather_base", "all_gather_into_tensor_coalesced"}
PARTING = {"reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"}


class Op:
    """The operation of one entry ("nccl:broadcast", "nccl:send 1->2", "nccl:recv 3<-0")."""

    def __init__(self, event: Mapping[str, Any], memberships: Mapping[str, set[Any]], pg_name: str) -> None:
        self.profiling_name: str = event["profiling_name"]
        library, _, rest = self.profiling_name.rpartition(":")
        self.type, _, ends = rest.partition(" ")
        if not library or self.type not in COLLECTIVES | P2P | BATCH_ENDS:
            raise InputError(f"{self.profiling_name!r} is no operation that torchfrtrace knows")
        self.state: str = event["state"]
        self.pg_name = pg_name
        self.original_pg_name, self.pg_desc = event["process_group"]
        self.pg_size = len(memberships[pg_name])
        sized = self.type in COLLECTIVES | P2P
        self.input_sizes: Any = event["input_sizes"] if sized else None
        self.output_sizes: Any = event["output_sizes"] if sized else None
        self.input_dtypes, self.output_dtypes = event["input_dtypes"], event["output_dtypes"]
        self.collective_seq_id, self.p2p_seq_id = event["collective_seq_id"], event["p2p_seq_id"]
        self.time_created_ns = event["time_created_ns"]
        self.collective_frames = event.get("frames", [])
        self._members = sorted(memberships[pg_name])
        self._ends = _ends(self.type, ends)

    @property
    def src(self) -> int | None:
        """The sender's rank in the group; None for a recv from anybody."""
        return self._ends[0]

    @property
    def dst(self) -> int:
        """The receiver's rank in the group."""
        return self._ends[1]

    def __repr__(self) -> str:
        ends = ""
        if self.type in P2P:
            source, target = (None if rank is None else self._members[rank] for rank in self._ends)
            ends = f"s={source} d={target}, "
        return f"{self.type}({ends}input_sizes={self.input_sizes}, state={self.state})"

    def match(self, other: Op) -> MatchInfo:
        """How another rank's entry fits to this one."""
        if self.type in P2P:
            return MatchInfo(
                MatchState.FULLY_MATCHED if self._meets(other) else MatchState.SIZE_OR_SYNTAX_MISMATCH
            )
        if self.type in BATCH_ENDS and self.type not in COLLECTIVES:
            same = self.type == other.type
            return MatchInfo(MatchState.FULLY_MATCHED if same else MatchState.SIZE_OR_SYNTAX_MISMATCH)
        if self.type != other.type:
            return MatchInfo(
                MatchState.COLLECTIVE_TYPE_MISMATCH,
                f"Expected collective type: '{self.type}' does not match found collective type: '{other.type}'",
            )
        misfit = self._size_misfit(other)
        if misfit:
            return MatchInfo(MatchState.SIZE_OR_SYNTAX_MISMATCH, misfit)
        if self.dtype_mismatch(other):
            found = "/".join(
                str(set(d)) for d in (self.output_dtypes, other.input_dtypes, other.output_dtypes)
            )
            text = f"Expected dtypes: '{set(self.input_dtypes)}' does not match found dtype: '{found}'"
            return MatchInfo(MatchState.COLLECTIVE_DTYPE_MISMATCH, text)
        if self.state != other.state:
            return MatchInfo(MatchState.COLLECTIVE_STATE_MISMATCH, state_text(self.state, other.state))
        return MatchInfo(MatchState.UNDECIDED if self.type in EXCHANGES else MatchState.FULLY_MATCHED)

    def _meets(self, other: Op) -> bool:
        """Whether a send and a recv are the two ends of one transfer."""
        anybody = self.src is None or other.src is None
        if {self.type, other.type} != P2P or self.dst != other.dst or not (anybody or self.src == other.src):
            return False
        sent, received = (self, other) if self.type == "send" else (other, self)
        return bool(sent.input_sizes == received.output_sizes)

    def _size_misfit(self, other: Op) -> str:
        """What is wrong with the sizes of two entries of one operation; "" when nothing is."""
        sides = (
            ("input", OWN_INPUTS, self.input_sizes, other.input_sizes),
            ("output", OWN_OUTPUTS, self.output_sizes, other.output_sizes),
        )
        for side, own, want, have in sides:
            if self.type not in own and want != have:
                return f"Expected {side} sizes: '{want}' does not match found {side} sizes: '{have}'"
        if self.type in {"all_reduce", "allreduce_coalesced"} and self.input_sizes != other.output_sizes:
            return f"Expected input sizes: '{self.input_sizes}' does not match found output sizes: '{other.output_sizes}'"
        if self.type in JOINING | PARTING:
            given, taken = prod(other.input_sizes[0]), prod(other.output_sizes[0])
            if self.type in JOINING and not self._holds_all(other.output_sizes, self.input_sizes):
                return f"Found input numel '{given} * pg size {self.pg_size}' does not match output numel '{taken}'"
            if self.type in PARTING and not self._holds_all(other.input_sizes, self.output_sizes):
                return f"Found input numel '{given}' does not match output numel '{taken} * pg size {self.pg_size}'"
        return ""

    def _holds_all(self, whole: Sequence[Sequence[int]], part: Sequence[Sequence[int]]) -> bool:
        """Whether `whole` has room for the parts of all ranks: as one tensor, or as a list of one for each."""
        parts = self.pg_size * sum(map(prod, part))
        listed = len(whole) == self.pg_size * len(part) and sum(map(prod, whole)) == parts
        return listed or prod(whole[0]) == self.pg_size * prod(part[0])

    def dtype_mismatch(self, other: Op) -> bool:
        """Whether dtypes differ where both sides move something; a root's side may be empty elsewhere."""

        def differ(one: Sequence[str], two: Sequence[str], *sizes: Sequence[Sequence[int]]) -> bool:
            return set(one) != set(two) and all(size and size[0] for size in sizes)

        return (
            (
                self.type not in {"scatter", "gather", "broadcast"}
                and differ(self.input_dtypes, self.output_dtypes, self.input_sizes, self.output_sizes)
            )
            or (
                self.type not in {"scatter", "broadcast"}
                and differ(self.input_dtypes, other.input_dtypes, self.input_sizes, other.input_sizes)
            )
            or (
                self.type != "gather"
                and differ(self.output_dtypes, other.output_dtypes, self.output_sizes, other.output_sizes)
            )
        )


def _ends(op: str, text: str) -> tuple[int | None, int]:
    """(sender, receiver) of "1->2", "2<-1" or "2<-?"; (-1, -1) for collectives."""
    if op not in P2P:
        return -1, -1
    one, arrow, two = text.partition("->" if op == "send" else "<-")
    if op == "recv" and one.isdigit() and two == "?":
        return None, int(one)
    if not (arrow and one.isdigit() and two.isdigit()):
        raise InputError(f"a {op} names its two ends as in 'send 1->2', not {text!r}")
    return (int(one), int(two)) if op == "send" else (int(two), int(one))


def state_text(want: str, have: str) -> str:
    """The words for two states of one collective."""
    return f"Expected state: '{want}' does not match found state: '{have}'"


def match_one_event(
    event_a: Mapping[str, Any], event_b: Mapping[str, Any], memberships: Mapping[str, set[Any]], pg_name: str
) -> MatchInfo:
    """How two entries of one collective fit together, the first taken for right."""
    return Op(event_a, memberships, pg_name).match(Op(event_b, memberships, pg_name))


def check_size_alltoall(alltoall_cases: Sequence[Mapping[str, Any]]) -> tuple[bool, int, int]:
    """(whether all ranks give something else than all ranks take, elements given, elements taken)."""
    given, taken = (
        sum(prod(case[side][0]) for case in alltoall_cases) for side in ("input_sizes", "output_sizes")
    )
    return given != taken, given, taken


def format_frame(frame: Mapping[str, Any]) -> str:
    """ "train at train.py:10"."""
    return f"{frame['name']} at {frame['filename']}:{frame['line']}"


def format_frames(frames: Sequence[Mapping[str, Any]]) -> str:
    """A stack, one frame per line."""
    return "\n".join(map(format_frame, frames))


def get_version_detail(version: str) -> tuple[int, int]:
    """(2, 10) of "2.10"."""
    parts = version.split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise InputError(f"a version is two numbers with a dot, not {version!r}")
    return int(parts[0]), int(parts[1])
