"""Problems as torchfrtrace would put them: one TraceProblem per block of its output. Built on `diagnose`. Pure.

Also single entries of a dump, compared two by two (`Op`, `match_one_event`), for scripts that use these names: two entries
alone do not tell which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from allranks.diagnose.align import align
from allranks.diagnose.cells import Cells, Mismatch
from allranks.diagnose.job import GroupView, Job
from allranks.diagnose.match import find_mismatches, suspect_seqs
from allranks.diagnose.p2p import match_p2p
from allranks.diagnose.verdict import DiagnoseOptions, diagnose
from allranks.diagnose.waits import Blocked, find_blocked, is_hung, usual_pause
from allranks.errors import InputError
from allranks.frtrace.types import MatchInfo, MatchState
from allranks.model.diagnosis import FileNote
from allranks.model.trace import Flag, RankTrace, State

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

    def __init__(self, event: Mapping[str, Any], memberships: Mapping[str, set[int]], pg_name: str) -> None:
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
        if misfit := self._size_misfit(other):
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
    event_a: Mapping[str, Any], event_b: Mapping[str, Any], memberships: Mapping[str, set[int]], pg_name: str
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
    return "\n".join(map(format_frame, frames))


def get_version_detail(version: str) -> tuple[int, int]:
    """(2, 10) of "2.10"."""
    parts = version.split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise InputError(f"a version is two numbers with a dot, not {version!r}")
    return int(parts[0]), int(parts[1])


#: Words for states, as torch writes them; it has none for the last two.
STATES = {state: state.name.lower() for state in State}
#: Collectives of a group that are compared behind its first problem; --mismatch_cap shows far fewer.
MAX_LATER = 1000
NOT_ALL = "Not all ranks joining collective, sequence number"


@dataclass(frozen=True)
class TraceProblem:
    """A collective that went wrong, seen from `rank`, whose call is `row`. `headline` has the sequence filled in."""

    headline: str
    group: int
    seq: int
    rank: int
    row: int
    expected: tuple[int, ...]
    missing: tuple[int, ...] = ()
    errors: tuple[tuple[int, MatchInfo], ...] = ()
    totals: tuple[int, int] | None = None
    involved: tuple[int, ...] = ()
    bare: bool = False  # the headline alone, without the lines of the collective
    later: bool = False  # of a group in which something went wrong before


@dataclass(frozen=True)
class Analysis:
    """An aligned job with its problems, the root cause first."""

    job: Job
    problems: tuple[TraceProblem, ...]


def analyse(traces: Sequence[RankTrace], files: Sequence[FileNote] = (), now_ns: int = 0) -> Analysis:
    """Finds what is really wrong: wrapped rings, point-to-point and uneven sizes accuse nobody."""
    damaged = frozenset(note.rank for note in files if note.status == "damaged" and note.rank is not None)
    job = align(traces, cut=damaged, now_ns=now_ns)
    mismatches = find_mismatches(job)
    waits, _ = match_p2p(job)
    patience = usual_pause(job)
    every = find_blocked(job, waits)
    hung = [replace(b, index=i) for i, b in enumerate(b for b in every if is_hung(job, b, patience))]
    diagnosis = diagnose(traces, files, options=DiagnoseOptions(now_ns=now_ns))
    named = {(finding.group, finding.sequence): set(finding.ranks) for finding in diagnosis.findings}
    found = [
        _mismatched(job, mismatch, named.get((job.groups[mismatch.group].label, mismatch.seq), set()))
        for mismatch in mismatches
    ]
    misfit = {mismatch.group: mismatch.seq for mismatch in mismatches}
    explained = [b for b in hung if b.missing or b.absent or b.seq < misfit.get(b.group, 1 << 62)]
    found += [
        _blocked(job, blocked) for blocked in sorted(explained, key=lambda b: (_began_ns(job, b), b.index))
    ]
    found += find_later(job, found)
    order = {(finding.group, finding.sequence): -i for i, finding in enumerate(reversed(diagnosis.findings))}
    found.sort(
        key=lambda problem: (order.get((job.groups[problem.group].label, problem.seq), 1), problem.later)
    )
    return Analysis(job, tuple(found))


def _began_ns(job: Job, blocked: Blocked) -> int:
    return min(int(job.ranks[rank].trace.calls["created_ns"][row]) for rank, row in blocked.rows.items())


def _blocked(job: Job, blocked: Blocked) -> TraceProblem:
    """A call that some ranks did not join, or that all joined and none finished."""
    rank, row = min(blocked.rows.items())
    group = job.groups[blocked.group]
    calls = job.ranks[rank].trace.calls
    seq = blocked.seq if blocked.p2p is None else int(calls["p2p_seq"][row])
    expected = group.members if blocked.p2p is None else tuple(sorted({rank, blocked.p2p.peer} - {-1}))
    involved = tuple(sorted({*blocked.rows, *blocked.missing, *blocked.absent}))
    problem = TraceProblem("", blocked.group, seq, rank, row, expected, involved=involved)
    if blocked.missing:
        return replace(problem, headline=f"{NOT_ALL}: {seq}", missing=blocked.missing)
    lacking = blocked.absent or blocked.unsure
    if lacking:
        headline = (
            f"We cannot decide what's wrong with this collective entry because we missed FR dumps from ranks ({set(lacking)}) "
            "so we don't have enough information. If you want to debug further use -j to dump all raw trace"
        )
    else:
        headline = "No errors found for this collective entry, There could be some other reasons why we see collective timeout."
    return replace(problem, bare=True, headline=headline)


def find_later(job: Job, first: Sequence[TraceProblem]) -> list[TraceProblem]:
    """What else is wrong in groups that have a problem: other calls, missing ranks, states, as they come.

    In groups in which nothing is wrong, states differ only by when each dump was taken: these are not looked at.
    """
    starts: dict[int, int] = {}
    for problem in first:
        starts[problem.group] = min(starts.get(problem.group, problem.seq), problem.seq)
    known = {(problem.group, problem.seq) for problem in first}
    found = []
    for index, start in sorted(starts.items()):
        group = job.groups[index]
        misfits = _misfits(job, group, start)
        for seq in range(start, min(group.last, start + MAX_LATER) + 1):
            later = misfits.get(seq) or _unequal(job, group, seq)
            if later is not None and (index, seq) not in known:
                found.append(replace(later, later=True))
    return found


def _misfits(job: Job, group: GroupView, start: int) -> dict[int, TraceProblem]:
    """Collectives behind `start` whose calls do not fit together, by sequence number."""
    suspects = suspect_seqs(job, group)
    suspects = suspects[(suspects > start) & (suspects <= start + MAX_LATER)]
    if not len(suspects):
        return {}
    cells = Cells.gather(job, group, suspects)
    mismatches = [cells.explain(int(column)) for column in cells.bad_columns()]
    return {mismatch.seq: _mismatched(job, mismatch, set()) for mismatch in mismatches}


def _unequal(job: Job, group: GroupView, seq: int) -> TraceProblem | None:
    """A collective that ranks have not joined or left in another state than the lowest rank; None when all is well."""
    rows = {rank: row for rank, lane in sorted(group.lanes.items()) if (row := lane.row(seq)) >= 0}
    if not rows:
        return None
    reference, row = next(iter(rows.items()))
    missing = tuple(rank for rank, lane in sorted(group.lanes.items()) if not lane.cut and lane.last < seq)
    problem = TraceProblem("", group.index, seq, reference, row, group.members, missing, involved=tuple(rows))
    if missing:
        involved = tuple(sorted({*rows, *missing}))
        return replace(problem, headline=f"{NOT_ALL}: {seq}", involved=involved)
    states = {rank: _state(job, rank, row) for rank, row in rows.items()}
    errors = tuple(
        (rank, MatchInfo(MatchState.COLLECTIVE_STATE_MISMATCH, state_text(states[reference], state)))
        for rank, state in states.items()
        if state and states[reference] and state != states[reference]
    )
    headline = f"Collective sequence number: {seq} has errors"
    return replace(problem, headline=headline, errors=errors) if errors else None


def _state(job: Job, rank: int, row: int) -> str:
    """The state of a call; "" where the library does not tell."""
    call = job.ranks[rank].trace.calls[row]
    unknowable = Flag.STATE_UNKNOWN | Flag.CAPTURED | Flag.COALESCED_PART
    return "" if int(call["flags"]) & unknowable else STATES[State(int(call["state"]))]


def _mismatched(job: Job, mismatch: Mismatch, guilty: set[int]) -> TraceProblem:
    """Calls that do not fit together; the largest class without a rank that `diagnose` blames is taken for right."""
    group = job.groups[mismatch.group]
    classes = sorted(mismatch.classes, key=lambda each: bool(guilty & set(each[1])))
    mismatch = replace(mismatch, classes=tuple(classes))
    reference = mismatch.classes[0][1][0]
    row = group.lanes[reference].row(mismatch.seq)
    involved = tuple(sorted(rank for _, ranks in mismatch.classes for rank in ranks))
    problem = TraceProblem("", mismatch.group, mismatch.seq, reference, row, group.members, involved=involved)
    if mismatch.aspect == "split":
        headline = f"Input/output mismatch in the collective sequence number: {mismatch.seq}"
        return replace(problem, headline=headline, totals=_totals(job, group, mismatch.seq))
    errors = tuple(
        (rank, _match_info(job, mismatch, group, reference, rank))
        for _, ranks in mismatch.classes[1:]
        for rank in ranks
    )
    return replace(problem, headline=f"Collective sequence number: {mismatch.seq} has errors", errors=errors)


def _totals(job: Job, group: GroupView, seq: int) -> tuple[int, int]:
    rows = [(job.ranks[rank].trace.calls, lane.row(seq)) for rank, lane in group.lanes.items()]
    known = [calls[row] for calls, row in rows if row >= 0]
    return sum(int(call["in_numel"]) for call in known), sum(int(call["out_numel"]) for call in known)


def _match_info(job: Job, mismatch: Mismatch, group: GroupView, reference: int, rank: int) -> MatchInfo:
    """The disagreement of one rank with the reference, in torchfrtrace's words."""
    inside = dict(mismatch.rows)  # of a coalesced batch
    one, two = (inside.get(r, group.lanes[r].row(mismatch.seq)) for r in (reference, rank))
    right, wrong = job.shapes(reference, one), job.shapes(rank, two)
    if mismatch.cause == "type_mismatch" and job.op(reference, one) != job.op(rank, two):
        text = f"collective type: '{job.op(reference, one)}' does not match found collective type: '{job.op(rank, two)}'"
        return MatchInfo(MatchState.COLLECTIVE_TYPE_MISMATCH, f"Expected {text}")
    if mismatch.cause == "dtype_mismatch":
        found = f"{_set(right.output_dtypes)}/{_set(wrong.input_dtypes)}/{_set(wrong.output_dtypes)}"
        text = f"Expected dtypes: '{_set(right.input_dtypes)}' does not match found dtype: '{found}'"
        return MatchInfo(MatchState.COLLECTIVE_DTYPE_MISMATCH, text)
    if mismatch.cause == "size_mismatch":
        side = "output" if mismatch.aspect == "output" else "input"
        want, have = (lists(s.outputs if side == "output" else s.inputs) for s in (right, wrong))
        text = f"Expected {side} sizes: '{want}' does not match found {side} sizes: '{have}'"
        return MatchInfo(MatchState.SIZE_OR_SYNTAX_MISMATCH, text)
    words = {member: text for text, ranks in mismatch.classes for member in ranks}
    text = f"Expected {words[reference]} does not match found {words[rank]}"
    return MatchInfo(MatchState.SIZE_OR_SYNTAX_MISMATCH, text)


def _set(words: tuple[str, ...]) -> str:
    return str(set(words)) if words else "set()"


def lists(sizes: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Sizes as torch prints them: [[4, 4]]."""
    return [list(size) for size in sizes]
