"""Mismatches → findings: what did not fit, who is the odd one, and by which evidence."""

from __future__ import annotations

import numpy as np

from allranks.diagnose.context import Context
from allranks.diagnose.culprit import Culprit, judge
from allranks.diagnose.exchange import Exchange
from allranks.diagnose.explain_divergence import explain_divergence
from allranks.diagnose.job import GroupView
from allranks.diagnose.match import Mismatch
from allranks.diagnose.p2p import P2PMismatch
from allranks.diagnose.phrasing import place, ranks_text, who
from allranks.model.diagnosis import Finding

WORDS = {
    "type_mismatch": "different operations",
    "size_mismatch": "different sizes",
    "dtype_mismatch": "different dtypes",
    "root_mismatch": "different roots",
    "reduce_op_mismatch": "different reduce operations",
}


def explain_mismatch(context: Context, mismatch: Mismatch) -> Finding:
    """The finding of the first collective of a group that does not fit."""
    group = context.job.groups[mismatch.group]
    guilt = judge(context.job, mismatch)
    if guilt.divergence is not None:
        return explain_divergence(context, group, guilt.divergence, guilt.ranks, mismatch)
    rows = dict(mismatch.rows) or {
        rank: group.lanes[rank].row(mismatch.seq) for _, ranks in mismatch.classes for rank in ranks
    }
    guilty = [(rank, rows[rank]) for rank in guilt.ranks if rows.get(rank, -1) >= 0]
    others = [(rank, row) for rank, row in rows.items() if rank not in guilt.ranks]
    at = place(context.job.frames(*guilty[0])) if guilty else ""
    cause, sentence = _say(context, group, mismatch, guilt, rows, at)
    evidence = [f"{ranks_text(ranks)}: {text}" for text, ranks in mismatch.classes[:6]] + [guilt.reason]
    lines = {place(context.job.frames(rank, row)) for rank, row in others} - {""}
    elsewhere = guilt.shift is None and bool(at and lines) and at not in lines
    if elsewhere:
        evidence.append(
            f"it called from {at}, the others from {sorted(lines)[0]}: it may be a call that only it makes"
        )
    if mismatch.also:
        evidence.append(
            f"{mismatch.also} later collectives of the group do not fit either: they follow from this one"
        )
    waiting = tuple(sorted({rank for b in context.blocked for rank in b.rows} - set(guilt.ranks)))
    began = [b for b in context.blocked if b.group == mismatch.group]
    return Finding(
        cause, guilt.ranks, sentence, "root", group.label, mismatch.seq, guilt.confidence, at, waiting,
        context.waited(began[0]) if began else None, (*context.stacks(guilty), *context.stacks(others)),
        tuple(evidence), _missing(group), (_advice(cause, at) if guilt.confidence > 0.5 and not elsewhere else _compare(context, rows, at),),
    )  # fmt: skip


def _say(
    context: Context, group: GroupView, mismatch: Mismatch, guilt: Culprit, rows: dict[int, int], at: str
) -> tuple[str, str]:
    subject = who(context.job, guilt.ranks)
    number = f"{f'(call {mismatch.part} of a batch) ' if mismatch.part else ''}#{mismatch.seq} of group {group.label}"
    first = guilt.ranks[0] if guilt.ranks else next(iter(rows))
    op = context.job.op(first, rows[first])
    where = f" at {at}" if at else ""
    if guilt.shift is not None and guilt.shift.extra:
        return "extra_collective", (
            f"{subject} made an extra {op} {number}{where}; the other ranks never make it, and from there on its calls "
            f"are {guilt.shift.count} behind theirs"
        )
    if guilt.shift is not None:
        usual = mismatch.classes[0][1][0]
        op, at = context.job.op(usual, rows[usual]), place(context.job.frames(usual, rows[usual]))
        return (
            "missing_rank",
            f"{subject} never entered {op} {number}{f' ({at})' if at else ''}: it skipped it and went on",
        )
    if mismatch.exchange is not None:
        return mismatch.cause, _say_exchange(mismatch.exchange, guilt, subject, f"in {op} {number}{where}")
    mine = next((text for text, ranks in mismatch.classes if guilt.ranks and guilt.ranks[0] in ranks), "")
    theirs = next(
        ((text, ranks) for text, ranks in mismatch.classes if not set(ranks) & set(guilt.ranks)), None
    )
    if theirs is None:
        sides = " against ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in mismatch.classes[:3])
        return mismatch.cause, f"{WORDS[mismatch.cause]} in {op} {number}: {sides}"
    if mismatch.cause == "type_mismatch":
        return (
            mismatch.cause,
            f"{subject} called {mine} {number}{where}, where {ranks_text(theirs[1])} called {theirs[0]}",
        )
    return mismatch.cause, (
        f"{subject} called {op} {number}{where} with {mine}, where {ranks_text(theirs[1])} had {theirs[0]}"
    )


def _say_exchange(exchange: Exchange, guilt: Culprit, subject: str, call: str) -> str:
    """The first pair that disagrees, from the side of the guilty rank."""
    pair = next(
        (pair for pair in exchange.pairs if {pair.giver, pair.taker} & set(guilt.ranks)), exchange.pairs[0]
    )
    rest = len(exchange.pairs) - 1
    more = (
        f" ({rest} more pair{'s' if rest > 1 else ''} of ranks disagree{'' if rest > 1 else 's'})"
        if rest
        else ""
    )
    if guilt.ranks == (pair.taker,) != (pair.giver,):
        return f"{subject} expects {pair.expected} elements of rank {pair.giver} {call}, which gives it {pair.given}{more}"
    giver = subject if guilt.ranks == (pair.giver,) else f"rank {pair.giver}"
    return f"{giver} gives rank {pair.taker} {pair.given} elements {call}, but rank {pair.taker} expects {pair.expected}{more}"


def explain_p2p(context: Context, mismatch: P2PMismatch) -> Finding:
    """A send and its receive that disagree."""
    job = context.job
    sent, taken = (
        job.shapes(mismatch.source, mismatch.send_row),
        job.shapes(mismatch.target, mismatch.recv_row),
    )
    label = job.groups[mismatch.group].label
    if mismatch.aspect == "tag":
        return _explain_tags(context, mismatch)
    if mismatch.aspect == "size":
        what = f"sends {list(map(list, sent.inputs or sent.outputs))}, the other expects {list(map(list, taken.outputs or taken.inputs))}"
    else:
        what = f"sends {'/'.join(sent.input_dtypes or sent.output_dtypes)}, the other expects {'/'.join(taken.output_dtypes or taken.input_dtypes)}"
    guilty = _p2p_odd(context, mismatch)
    at = place(job.frames(mismatch.source, mismatch.send_row))
    sentence = f"message #{mismatch.number} from rank {mismatch.source} to rank {mismatch.target} of group {label} does not fit: one {what}"
    return Finding(
        "p2p_mismatch", guilty, sentence, "root", label, None, 0.85 if len(guilty) == 1 else 0.7, at, (), None,
        context.stacks([(mismatch.source, mismatch.send_row), (mismatch.target, mismatch.recv_row)]), (), (),
        ("send and receive the same number of elements of the same dtype",),
    )  # fmt: skip


def _explain_tags(context: Context, mismatch: P2PMismatch) -> Finding:
    """A message sent and a receive that wait for each other's tag."""
    job, label = context.job, context.job.groups[mismatch.group].label
    ends = ((mismatch.source, mismatch.send_row), (mismatch.target, mismatch.recv_row))
    tags = [int(job.ranks[rank].trace.calls["tag"][row]) for rank, row in ends]
    odd = [(rank, row) for rank, row in ends if _tag_is_odd(context, rank, row)]
    guilty = odd if len(odd) == 1 else list(ends)
    at = place(job.frames(*guilty[0]))
    lines = [place(job.frames(rank, row)) for rank, row in ends]
    sentence = (
        f"rank {mismatch.source} sends to rank {mismatch.target} with tag {tags[0]}{f' at {lines[0]}' if lines[0] else ''}, "
        f"rank {mismatch.target} receives with tag {tags[1]}{f' at {lines[1]}' if lines[1] else ''} (group {label}): "
        "the tags differ, so the message never arrives"
    )
    waited = [b for b in context.blocked if b.p2p is not None and (b.p2p.rank, b.p2p.row) in ends]
    evidence = (
        ("its tag does not continue the order of its earlier tags, the other's does",)
        if len(odd) == 1
        else ()
    )
    return Finding(
        "p2p_mismatch", tuple(sorted(rank for rank, _ in guilty)), sentence, "root", label, None, 0.9 if odd else 0.8, at, (),
        context.waited(waited[0]) if waited else None, context.stacks([*guilty, *(end for end in ends if end not in guilty)]),
        evidence, (), ("use the same tag at both ends",),
    )  # fmt: skip


def _tag_is_odd(context: Context, rank: int, row: int) -> bool:
    """Whether the step from the rank's previous tag with this partner to this one is unlike all steps before."""
    view = context.job.ranks[rank]
    calls = view.trace.calls[: row + 1]
    same = (calls["peer"] == calls["peer"][row]) & (view.family[: row + 1] == view.family[row])
    steps = np.diff(calls["tag"][same & (calls["group"] == calls["group"][row])].astype(np.int64))
    return len(steps) > 1 and not bool((steps[:-1] == steps[-1]).any())


def _p2p_odd(context: Context, mismatch: P2PMismatch) -> tuple[int, ...]:
    """The end whose call differs from its previous one at the same line; both when that does not tell."""
    changed = []
    for rank, row in ((mismatch.source, mismatch.send_row), (mismatch.target, mismatch.recv_row)):
        view = context.job.ranks[rank]
        calls = view.trace.calls
        same = [r for r in range(row) if view.stack[r] == view.stack[row] and calls["peer"][r] == calls["peer"][row]
                and calls["op"][r] == calls["op"][row]][-1:]  # fmt: skip
        if same and view.sig[same[0]] != view.sig[row]:
            changed.append(rank)
    return tuple(changed) if len(changed) == 1 else tuple(sorted((mismatch.source, mismatch.target)))


def _missing(group: GroupView) -> tuple[str, ...]:
    absent = [rank for rank in group.members if rank not in group.lanes]
    return (f"the dump of {ranks_text(absent)}",) if absent else ()


def _compare(context: Context, rows: dict[int, int], at: str) -> str:
    """Advice on a tie: nobody knows which of the ranks is wrong."""
    lines: dict[str, list[int]] = {}
    for rank, row in rows.items():
        lines.setdefault(place(context.job.frames(rank, row)), []).append(rank)
    if len(lines) < 2 or "" in lines:
        return f"look at {at or 'the line above'}: what it passes must not depend on the rank"
    those = [f"{line} ({ranks_text(ranks)})" for line, ranks in list(lines.items())[:4]]
    return f"compare {' with '.join(those)}: all ranks of the group must make the same call here"


def _advice(cause: str, at: str) -> str:
    line = at or "the line above"
    if cause in ("extra_collective", "missing_rank"):
        return f"make the call on all ranks of the group, or on none: look for a condition on the rank around {line}"
    return f"look at {line}: what it passes must not depend on the rank"
