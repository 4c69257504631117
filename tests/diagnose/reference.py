"""The matcher written as plainly as possible: dictionaries and loops, no arrays, no shortcuts. Slow, and easy to trust."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from allranks.model.trace import Flag, RankTrace, State

SAME_INPUT = {"all_reduce", "broadcast", "reduce", "gather"}
TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


@dataclass(frozen=True)
class Call:
    rank: int
    seq: int
    op: str
    given: int
    taken: int
    dtype: str
    root: int
    reduce_op: int
    state: str  # open, done, failed, left


Key = tuple[str, tuple[int, ...]]


def read(traces: list[RankTrace]) -> tuple[dict[Key, dict[int, dict[int, Call]]], set[tuple[Key, int]]]:
    """group → sequence number → rank → call, and the (group, rank) pairs whose ring has wrapped."""
    groups: dict[Key, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    wrapped = set()
    for trace in traces:
        rank = trace.header.rank
        assert rank is not None
        for group in trace.groups[1:]:
            key = (group.name, tuple(sorted(group.ranks)))
            groups[key]
            if trace.header.dropped:
                wrapped.add((key, rank))
        for row in trace.calls:
            if row["flags"] & Flag.P2P:
                continue
            group = trace.groups[row["group"]]
            shapes = trace.shapes[row["shapes"]]
            call = Call(
                rank, int(row["seq"]), trace.names[row["op"]], int(row["in_numel"]), int(row["out_numel"]),
                (shapes.input_dtypes or shapes.output_dtypes or ("",))[0], int(row["root"]), int(row["reduce_op"]),
                _state(row),
            )  # fmt: skip
            groups[(group.name, tuple(sorted(group.ranks)))][call.seq][rank] = call
    return dict(groups), wrapped


def _state(row: object) -> str:
    state, flags = row["state"], row["flags"]  # type: ignore[index]
    if state == State.COMPLETED:
        return "done"
    if state in (State.FAILED, State.TIMED_OUT):
        return "failed"
    if not flags & Flag.RETIRED:
        return "open"
    return "left" if flags & Flag.STATE_UNKNOWN else "failed"


def first_mismatch(members: tuple[int, ...], by_seq: dict[int, dict[int, Call]]) -> tuple[int, str] | None:
    """(sequence number, cause) of the first collective whose calls do not fit."""
    for seq in sorted(by_seq):
        calls = list(by_seq[seq].values())
        cause = _misfit(members, calls)
        if cause:
            return seq, cause
    return None


def _misfit(members: tuple[int, ...], calls: list[Call]) -> str:
    if len({c.op for c in calls}) > 1:
        return "type_mismatch"
    op = calls[0].op
    complete = len(calls) == len(members)
    if op in SAME_INPUT and len({c.given for c in calls}) > 1:
        return "size_mismatch"
    # The histories have one tensor on either side: uneven gathers and scatters need lists of them.
    if op in ("all_gather", "reduce_scatter") and len({(c.given, c.taken) for c in calls}) > 1:
        return "size_mismatch"
    if op == "all_to_all" and complete and sum(c.given for c in calls) != sum(c.taken for c in calls):
        return "size_mismatch"
    if len({c.dtype for c in calls if c.dtype}) > 1:
        return "dtype_mismatch"
    if op in ("broadcast", "reduce", "gather", "scatter") and len({c.root for c in calls if c.root >= 0}) > 1:
        return "root_mismatch"
    if (
        op in ("all_reduce", "reduce", "reduce_scatter")
        and len({c.reduce_op for c in calls if c.reduce_op}) > 1
    ):
        return "reduce_op_mismatch"
    return ""


def blocked_calls(
    traces: list[RankTrace],
) -> set[tuple[Key, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(group, sequence number, who waits, who never entered, who has no dump), for every blocked collective."""
    groups, wrapped = read(traces)
    present = {trace.header.rank for trace in traces}
    found = set()
    for key, by_seq in groups.items():
        members = key[1]
        last = {
            rank: max((s for s in by_seq if rank in by_seq[s]), default=-1)
            for rank in members
            if rank in present
        }
        trusted = [seq for rank, seq in last.items() if seq >= 0 or (key, rank) not in wrapped]
        lowest = min(trusted, default=1 << 60)
        stuck = {}
        for rank in last:
            mine = {seq: calls[rank] for seq, calls in by_seq.items() if rank in calls}
            done = max((seq for seq, call in mine.items() if call.state == "done"), default=-1)
            for seq in sorted(mine):
                call = mine[seq]
                alone = call.state == "left" and seq > lowest and call.op in TOGETHER
                if seq > done and (call.state in ("open", "failed") or alone):
                    stuck[rank] = seq
                    break
        for seq in set(stuck.values()):
            waiting = tuple(sorted(rank for rank, at in stuck.items() if at == seq))
            done_by = [call for call in by_seq[seq].values() if call.state == "done"]
            absent = tuple(sorted(r for r in members if r not in present))
            missing: tuple[int, ...] = ()
            if not (done_by and not absent and by_seq[seq][waiting[0]].op in TOGETHER):
                missing = tuple(
                    sorted(r for r, at in last.items() if at < seq and not (at < 0 and (key, r) in wrapped))
                )
            found.add((key, seq, waiting, missing, absent))
    return found


def idle_culprits(traces: list[RankTrace]) -> set[int]:
    """Ranks that somebody waits for, directly or not, and that wait for nobody themselves."""
    waits: dict[int, set[int]] = defaultdict(set)
    for _, _, waiting, missing, absent in blocked_calls(traces):
        for rank in waiting:
            waits[rank] |= set(missing) | set(absent)
    wanted = {rank for targets in waits.values() for rank in targets}
    busy = {rank for entry in blocked_calls(traces) for rank in entry[2]}
    return wanted - busy
