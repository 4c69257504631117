"""Mismatches → findings: what did not fit, who is the odd one, and by which evidence."""

from __future__ import annotations

import numpy as np

from allranks.diagnose.cells import Exchange, Mismatch
from allranks.diagnose.context import Context
from allranks.diagnose.culprit import Culprit, judge
from allranks.diagnose.divergence import DivergenceStory
from allranks.diagnose.job import GroupView
from allranks.diagnose.p2p import P2PMismatch
from allranks.diagnose.phrasing import count, place, ranks_text, who
from allranks.model.diagnosis import Finding

#: So often a rank has made a call that it makes in rounds.
MIN_ROUNDS = 3
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
    culprit = judge(context.job, mismatch)
    if culprit.divergence is not None:
        return DivergenceStory(context, group, culprit.divergence, culprit.ranks, mismatch).finding()
    rows = dict(mismatch.rows) or {
        rank: group.lanes[rank].row(mismatch.seq) for _, ranks in mismatch.classes for rank in ranks
    }
    guilty = [(rank, rows[rank]) for rank in culprit.ranks if rows.get(rank, -1) >= 0]
    others = [(rank, row) for rank, row in rows.items() if rank not in culprit.ranks]
    at = place(context.job.frames(*guilty[0])) if guilty else ""
    cause, sentence = _say(context, group, mismatch, culprit, rows, at)
    elsewhere = _elsewhere(context, others, at)
    if elsewhere and cause == "type_mismatch":
        sentence += _rounds(context, group, culprit, rows, elsewhere)
    certain = culprit.confidence > 0.5 and not elsewhere
    # Calls of two lines are the consequence of an earlier one, which a short ring has lost.
    sure = min(0.75, culprit.confidence) if elsewhere and context.forgetful(rows) else culprit.confidence
    absent = [rank for rank in group.members if rank not in group.lanes]
    return Finding(
        cause,
        culprit.ranks,
        sentence,
        "root",
        group.label,
        mismatch.seq,
        sure,
        at,
        context.waiting_but(culprit.ranks),
        context.waited_in(group),
        (*context.stacks(guilty), *context.stacks(others)),
        _evidence(mismatch, culprit, at, elsewhere),
        (f"the dump of {ranks_text(absent)}",) if absent else (),
        (_advice(cause, at) if certain else _compare(context, rows, at),),
        met_another=True,
    )


def _elsewhere(context: Context, others: list[tuple[int, int]], at: str) -> str:
    """A line from which the others called, if none of them called from this one."""
    lines = {place(context.job.frames(rank, row)) for rank, row in others} - {""}
    return min(lines) if at and lines and at not in lines else ""


def _rounds(
    context: Context, group: GroupView, culprit: Culprit, rows: dict[int, int], elsewhere: str
) -> str:
    """How often a single rank has made the call in which all others wait, where that is once less than they; else ""."""
    others = {rank: row for rank, row in rows.items() if rank not in culprit.ranks}
    first, row = next(iter(others.items()))
    stack = int(context.job.ranks[first].stack[row])
    if len(culprit.ranks) != 1 or not stack or any(group.lanes[rank].wrapped for rank in rows):
        return ""

    def made(rank: int, end: int) -> int:
        view = context.job.ranks[rank]
        return int(np.count_nonzero((view.stack[:end] == stack) & (view.group[:end] == group.index)))

    (odd,) = culprit.ranks
    own, theirs = made(odd, rows[odd]), {made(rank, row + 1) for rank, row in others.items()}
    if own < MIN_ROUNDS or len(theirs) != 1 or own >= min(theirs):
        return ""
    missed = min(theirs) - own
    return (
        f"; it had made {own} calls at {elsewhere}, where they make call {min(theirs)}: it skipped {count(missed, 'call')} there "
        "(a backward, say), or left its loop early"
    )


def _evidence(mismatch: Mismatch, culprit: Culprit, at: str, elsewhere: str) -> tuple[str, ...]:
    found = [f"{ranks_text(ranks)}: {text}" for text, ranks in mismatch.classes[:6]] + [culprit.reason]
    if elsewhere:
        found.append(f"it called from {at}, the others from {elsewhere}: it may be a call that only it makes")
    if mismatch.also:
        found.append(
            f"{mismatch.also} later collectives of the group do not fit either: they follow from this one"
        )
    return tuple(found)


def _say(
    context: Context, group: GroupView, mismatch: Mismatch, culprit: Culprit, rows: dict[int, int], at: str
) -> tuple[str, str]:
    """(cause, sentence)."""
    job, subject = context.job, who(context.job, culprit.ranks)
    number = f"{f'(call {mismatch.part} of a batch) ' if mismatch.part else ''}#{mismatch.seq} of group {group.label}"
    first = culprit.ranks[0] if culprit.ranks else next(iter(rows))
    op, where = job.op(first, rows[first]), f" at {at}" if at else ""
    if mismatch.exchange is not None:
        return mismatch.cause, _say_exchange(mismatch.exchange, culprit, subject, f"in {op} {number}{where}")
    mine = next((text for text, ranks in mismatch.classes if first in ranks and culprit.ranks), "")
    theirs = [(text, ranks) for text, ranks in mismatch.classes if not set(ranks) & set(culprit.ranks)][:1]
    if not theirs:
        sides = " against ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in mismatch.classes[:3])
        return mismatch.cause, f"{WORDS[mismatch.cause]} in {op} {number}: {sides}"
    text, those = theirs[0]
    if mismatch.cause == "type_mismatch":
        return (
            mismatch.cause,
            f"{subject} called {mine} {number}{where}, where {ranks_text(those)} called {text}",
        )
    return (
        mismatch.cause,
        f"{subject} called {op} {number}{where} with {mine}, where {ranks_text(those)} had {text}",
    )


def _say_exchange(exchange: Exchange, culprit: Culprit, subject: str, call: str) -> str:
    """The first pair that disagrees, from the side of the guilty rank."""
    involved = (pair for pair in exchange.pairs if {pair.giver, pair.taker} & set(culprit.ranks))
    pair = next(involved, exchange.pairs[0])
    rest = len(exchange.pairs) - 1
    more = f" ({count(rest, 'more pair')} of ranks disagree{'' if rest > 1 else 's'})" if rest else ""
    if culprit.ranks == (pair.taker,) != (pair.giver,):
        return f"{subject} expects {pair.expected} elements of rank {pair.giver} {call}, which gives it {pair.given}{more}"
    giver = subject if culprit.ranks == (pair.giver,) else f"rank {pair.giver}"
    return f"{giver} gives rank {pair.taker} {pair.given} elements {call}, but rank {pair.taker} expects {pair.expected}{more}"


def explain_p2p(context: Context, mismatch: P2PMismatch) -> Finding:
    """A send and its receive that disagree."""
    job, source, target = context.job, mismatch.source, mismatch.target
    if mismatch.aspect == "tag":
        return _explain_tags(context, mismatch)
    sent, taken = job.shapes(source, mismatch.send_row), job.shapes(target, mismatch.recv_row)
    label = job.groups[mismatch.group].label
    if mismatch.aspect == "size":
        sides = [
            list(map(list, sizes)) for sizes in (sent.inputs or sent.outputs, taken.outputs or taken.inputs)
        ]
        what = f"sends {sides[0]}, rank {target} expects {sides[1]}"
    else:
        dtypes = (sent.input_dtypes or sent.output_dtypes, taken.output_dtypes or taken.input_dtypes)
        what = f"sends {'/'.join(dtypes[0])}, rank {target} expects {'/'.join(dtypes[1])}"
    guilty = _p2p_odd(context, mismatch)
    ends = [(source, mismatch.send_row), (target, mismatch.recv_row)]
    number = f"message #{mismatch.number} from rank {source} to rank {target} of group {label}"
    return Finding(
        "p2p_mismatch",
        guilty,
        f"{number} does not fit: rank {source} {what}",
        "root",
        label,
        confidence=0.85 if len(guilty) == 1 else 0.7,
        where=place(job.frames(*next(end for end in ends if end[0] in guilty))),
        stacks=context.stacks(ends),
        advice=("send and receive the same number of elements of the same dtype",),
    )


def _explain_tags(context: Context, mismatch: P2PMismatch) -> Finding:
    """A message sent and a receive that wait for each other's tag."""
    job, label = context.job, context.job.groups[mismatch.group].label
    ends = [(mismatch.source, mismatch.send_row), (mismatch.target, mismatch.recv_row)]
    odd = [end for end in ends if _tag_is_odd(context, *end)]
    guilty = odd if len(odd) == 1 else ends
    texts = []
    for rank, row in ends:
        at = place(job.frames(rank, row))
        texts.append(f"with tag {int(job.ranks[rank].trace.calls['tag'][row])}{f' at {at}' if at else ''}")
    sentence = (
        f"rank {mismatch.source} sends to rank {mismatch.target} {texts[0]}, rank {mismatch.target} receives {texts[1]} "
        f"(group {label}): the tags differ, so the message never arrives"
    )
    waited = [b for b in context.blocked if b.p2p is not None and (b.p2p.rank, b.p2p.row) in ends]
    reason = "its tag does not continue the order of its earlier tags, the other's does"
    return Finding(
        "p2p_mismatch",
        tuple(sorted(rank for rank, _ in guilty)),
        sentence,
        "root",
        label,
        confidence=0.9 if odd else 0.8,
        where=place(job.frames(*guilty[0])),
        waited_s=context.waited(waited[0]) if waited else None,
        stacks=context.stacks([*guilty, *(end for end in ends if end not in guilty)]),
        evidence=(reason,) if len(odd) == 1 else (),
        advice=("use the same tag at both ends",),
    )


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
        calls = view.trace.calls[:row]
        now = view.trace.calls[row]
        alike = (
            (view.stack[:row] == view.stack[row])
            & (calls["peer"] == now["peer"])
            & (calls["op"] == now["op"])
        )
        before = np.flatnonzero(alike)[-1:]
        if len(before) and view.sig[before[0]] != view.sig[row]:
            changed.append(rank)
    return tuple(changed) if len(changed) == 1 else tuple(sorted((mismatch.source, mismatch.target)))


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
