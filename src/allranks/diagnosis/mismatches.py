"""Calls that differ → findings: what did not fit, or who left the program of the others; who is the odd one, by which
evidence; and a send and its receive that disagree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from allranks.diagnosis.alignment import CallDifference
from allranks.diagnosis.context import Context, parted, place, ranks_wait
from allranks.diagnosis.job import GroupView
from allranks.diagnosis.kinds import say
from allranks.diagnosis.match import Exchange, Mismatch
from allranks.diagnosis.odd_rank import judge
from allranks.diagnosis.p2p import P2PMismatch
from allranks.diagnosis.waits import Blocked
from allranks.model.diagnosis import Finding
from allranks.model.formatting import count, ranks_text

#: So often a rank has made a call that it makes in rounds.
MIN_ROUNDS = 3
#: As sure as this at most where the files of other ranks might tell otherwise.
TURNABLE = 0.6
#: And where calls before may be lost.
LOST = 0.75
_ASPECTS = {
    "type_mismatch": "operations",
    "size_mismatch": "sizes",
    "dtype_mismatch": "dtypes",
    "root_mismatch": "roots",
    "reduce_op_mismatch": "reduce operations",
}


@dataclass(frozen=True)
class _Story:
    """Ranks that left the program of the others; `mismatch` or `blocked` is what came of it."""

    context: Context
    group: GroupView
    difference: CallDifference
    mismatch: Mismatch | None = None
    blocked: Blocked | None = None

    def finding(self) -> Finding:
        context, found, group = self.context, self.difference, self.group
        guilty = tuple(sorted(found.ranks))
        lanes = group.lanes.items()
        others = tuple(r for r, lane in lanes if r not in guilty and lane.row(found.seq) >= 0)
        maker = found.reference if found.kind == "skipped" else found.rank
        at = self._place(maker, found.seq)
        rows = {rank: group.lanes[rank].row(found.seq) for rank in (*guilty, *others)}
        absent = len(group.members) - len(group.lanes)
        turned = absent and len(others) - len(guilty) < absent
        sure = min(TURNABLE, found.confidence) if turned else found.confidence
        if found.kind == "swapped" and context.forgetful(group.lanes):
            sure = min(LOST, sure)  # behind a call that was skipped or added a short ring may look swapped
        facts = {
            "at": at,
            "rank": str(found.rank),
            "either": found.either or found.loop,
            "reason": found.reason,
        }
        facts |= {"others": ranks_text(others) if others else "", "called": self._called(others)}
        facts |= {"seq": str(found.seq), "label": group.label, "sides": self._sides(), **self._since()}
        op = context.job.op(maker, group.lanes[maker].row(found.seq))
        facts |= {"made": say("call", op=op, seq=str(found.seq), label=group.label)}
        facts["open"] = self.mismatch is not None and group.lanes[found.rank].last == found.seq
        facts |= {"more": count(found.count - 1, "call") if found.count > 1 else ""}
        facts |= self._both() if found.kind == "swapped" else {}
        made = [(rank, rows[rank]) for rank in guilty if rows[rank] >= 0]
        stacks = (*context.stacks(made), *context.stacks((rank, rows[rank]) for rank in others))
        return replace(
            context.root(found.kind, guilty, None, sure, **facts),
            group=group.label,
            sequence=found.seq,
            where=at,
            waiting=context.waiting_but(guilty),
            waited_s=context.waited_in(group),
            stacks=stacks,
            met_another=self.mismatch is not None,
        )

    def _sides(self) -> str:
        """What each side passed, where that did not fit."""
        mismatch = self.mismatch
        if mismatch is None:
            return ""
        if mismatch.seq == self.difference.seq:
            return "\n".join(f"{ranks_text(those)}: {text}" for text, those in mismatch.classes[:6])
        return say("by_chance", seq=mismatch.seq, sides=_against(mismatch))

    def _called(self, others: tuple[int, ...]) -> str:
        """ "ranks 1, 2 called all_reduce at train.py:9", the largest party of them."""
        parties: dict[str, list[int]] = {}
        for rank in others:
            parties.setdefault(self._op_at(rank, self.difference.seq), []).append(rank)
        if not parties:
            return ""
        text, those = max(parties.items(), key=lambda item: (len(item[1]), -min(item[1])))
        return f"{ranks_text(those)} called {text}"

    def _op_at(self, rank: int, seq: int) -> str:
        row = self.group.lanes[rank].row(seq)
        return say("op_at", op=self.context.job.op(rank, row), at=self._place(rank, seq))

    def _place(self, rank: int, seq: int) -> str:
        """Where a rank made a call: of an extra one, where its stack parts from that of the other side."""
        job, lanes, found = self.context.job, self.group.lanes, self.difference
        other = found.reference if rank in found.ranks else found.rank
        frames, theirs = (job.frames(each, lanes[each].row(seq)) for each in (rank, other))
        return place(parted(frames, theirs) if found.kind == "extra" else frames)

    def _both(self) -> dict[str, object]:
        """Two calls of one group in another order; which threads made them, where that differs."""
        rank, seq = self.difference.rank, self.difference.seq
        trace, last = self.context.job.ranks[rank].trace, seq + self.difference.count
        rows = [self.group.lanes[rank].row(number) for number in (seq, last)]
        threads = [int(trace.calls["thread"][row]) for row in rows]
        names = [trace.threads[thread] for thread in threads if trace.threads.get(thread)]
        one, two = self._op_at(rank, seq), self._op_at(rank, last)
        named = " and ".join(names) if len(names) == 2 else ""
        facts = {"one": one, "two": two, "last_seq": str(last), "names": named}
        return facts | {"threads": threads[0] != threads[1]}

    def _since(self) -> dict[str, object]:
        """Where the hang shows, if that is later than where it began."""
        mismatch, blocked, found = self.mismatch, self.blocked, self.difference
        if mismatch is not None and mismatch.seq > found.seq:
            sides = {rank: text for text, those in mismatch.classes for rank in those}
            named = mismatch.cause == "type_mismatch"
            mine, theirs = (sides.get(r, "") if named else "" for r in (found.rank, found.reference))
            return {"met": str(mismatch.seq), "met_mine": mine, "met_theirs": theirs}
        if blocked is not None and (blocked.seq > found.seq or blocked.group != self.group.index):
            call = self.context.call(blocked)
            failed, waits = self.context.failure(blocked, call), ranks_wait(blocked.waiters)
            return {"failed_since": failed, "wait_since": say("waits_in", waits=waits, call=call)}
        return {}


def left_program(
    context: Context, group: GroupView, difference: CallDifference, blocked: Blocked | None = None
) -> Finding:
    """The finding about one rank; `blocked` is the call in which others wait since."""
    return _Story(context, group, difference, None, blocked).finding()


def _against(mismatch: Mismatch) -> str:
    return " against ".join(f"{text} on {ranks_text(those)}" for text, those in mismatch.classes[:3])


def explain_mismatch(context: Context, mismatch: Mismatch) -> Finding:
    """The finding of the first collective of a group that does not fit."""
    group = context.job.groups[mismatch.group]
    culprit = judge(context.job, mismatch)
    if culprit.kind != "changed":
        return _Story(context, group, culprit, mismatch).finding()
    rows = dict(mismatch.rows) or {
        rank: group.lanes[rank].row(mismatch.seq) for _, ranks in mismatch.classes for rank in ranks
    }
    guilty = [(rank, rows[rank]) for rank in culprit.ranks if rows.get(rank, -1) >= 0]
    others = [(rank, row) for rank, row in rows.items() if rank not in culprit.ranks]
    at, elsewhere = _lines_apart(context, guilty[0], others) if guilty else ("", "")
    kind, facts = _facts(context, mismatch, culprit, rows)
    if elsewhere and kind == "other_operation":
        facts |= _rounds(context, group, culprit, rows, elsewhere)
    # Calls of two lines are the consequence of an earlier one, which a short ring has lost.
    sure = min(LOST, culprit.confidence) if elsewhere and context.forgetful(rows) else culprit.confidence
    absent = [rank for rank in group.members if rank not in group.lanes]
    facts |= {"at": at, "label": group.label, "sides": _evidence(mismatch, culprit, at, elsewhere)}
    facts |= {"certain": culprit.confidence > 0.5 and not elsewhere, "lines_of_all": _lines(context, rows)}
    facts |= {"both_lines": _lines(context, rows, " and ")}
    facts |= {"dumps": say("dump_of", ranks=ranks_text(absent)) if absent else ""}
    return replace(
        context.root(kind, culprit.ranks, None, sure, mismatch.cause, **facts),
        group=group.label,
        sequence=mismatch.seq,
        where=at,
        waiting=context.waiting_but(culprit.ranks),
        waited_s=context.waited_in(group),
        stacks=(*context.stacks(guilty), *context.stacks(others)),
        met_another=True,
    )


def _facts(
    context: Context, mismatch: Mismatch, culprit: CallDifference, rows: dict[int, int]
) -> tuple[str, dict[str, object]]:
    """(kind, facts) of a call that does not fit."""
    first = culprit.ranks[0] if culprit.ranks else next(iter(rows))
    part = say("in_batch", part=mismatch.part) if mismatch.part else ""
    facts: dict[str, object] = {"op": context.job.op(first, rows[first]), "seq": mismatch.seq, "part": part}
    if mismatch.exchange is not None:
        return "other_splits", facts | _exchange_facts(mismatch.exchange, culprit)
    mine = next((text for text, ranks in mismatch.classes if first in ranks and culprit.ranks), "")
    theirs = [(text, ranks) for text, ranks in mismatch.classes if not set(ranks) & set(culprit.ranks)][:1]
    if not theirs:
        aspect = _ASPECTS[mismatch.cause]
        return "no_majority", facts | {"aspect": aspect, "classes": _against(mismatch)}
    facts |= {"mine": mine, "theirs": theirs[0][0], "those": ranks_text(theirs[0][1])}
    return "other_operation" if mismatch.cause == "type_mismatch" else "other_arguments", facts


def _exchange_facts(exchange: Exchange, culprit: CallDifference) -> dict[str, object]:
    """The first pair that disagrees, from the side of the guilty rank."""
    involved = (pair for pair in exchange.pairs if {pair.giver, pair.taker} & set(culprit.ranks))
    pair, rest = next(involved, exchange.pairs[0]), len(exchange.pairs) - 1
    return {
        "takes": culprit.ranks == (pair.taker,) != (pair.giver,),
        "gives": culprit.ranks == (pair.giver,),
        "giver": str(pair.giver),
        "taker": str(pair.taker),
        "given": str(pair.given),
        "expected": str(pair.expected),
        "more": count(rest, "more pair") if rest else "",
        "disagree": "disagree" if rest > 1 else "disagrees",
    }


def _lines_apart(context: Context, mine: tuple[int, int], others: list[tuple[int, int]]) -> tuple[str, str]:
    """(where a rank made its call, a line from which the others made theirs if none made it there): of callers, where both
    came through one line of a helper."""
    frames = context.job.frames(*mine)
    theirs = [context.job.frames(*other) for other in others]
    pairs = [(place(parted(frames, other)), place(parted(other, frames))) for other in theirs]
    lines = {line for _, line in pairs} - {""}
    at = pairs[0][0] if pairs else place(frames)
    return at, min(lines) if at and lines and all(one != two for one, two in pairs) else ""


def _rounds(
    context: Context, group: GroupView, culprit: CallDifference, rows: dict[int, int], elsewhere: str
) -> dict[str, object]:
    """How often a single rank has made the call in which all others wait, where that is less often than they."""
    others = {rank: row for rank, row in rows.items() if rank not in culprit.ranks}
    first, row = next(iter(others.items()))
    stack = int(context.job.ranks[first].stack[row])
    if len(culprit.ranks) != 1 or not stack or any(group.lanes[rank].wrapped for rank in rows):
        return {}

    def made(rank: int, end: int) -> int:
        view = context.job.ranks[rank]
        return int(np.count_nonzero((view.stack[:end] == stack) & (view.group[:end] == group.index)))

    (odd,) = culprit.ranks
    own, theirs = made(odd, rows[odd]), {made(rank, row + 1) for rank, row in others.items()}
    if own < MIN_ROUNDS or len(theirs) != 1 or own >= min(theirs):
        return {}
    call = int(context.job.ranks[odd].stack[rows[odd]])
    known = any(
        bool((view.stack == call)[: rows.get(rank)].any()) for rank, view in context.job.ranks.items()
    )
    missed = count(min(theirs) - own, "call")  # of a call that is new, perhaps none: only this rank makes it
    return {"new": not known, "made": own, "elsewhere": elsewhere, "rounds": min(theirs), "missed": missed}


def _evidence(mismatch: Mismatch, culprit: CallDifference, at: str, elsewhere: str) -> str:
    """What each side passed, and who is the odd one by which evidence; one line each."""
    found = [f"{ranks_text(ranks)}: {text}" for text, ranks in mismatch.classes[:6]] + [culprit.reason]
    found += [say("called_from", at=at, elsewhere=elsewhere)] if elsewhere else []
    return "\n".join(
        [*found, say("also", number=mismatch.also, one=mismatch.also == 1)] if mismatch.also else found
    )


def _lines(context: Context, rows: dict[int, int], between: str = " with ") -> str:
    """The lines that a tie is about, with the ranks that called from each; "" where there is only one."""
    lines: dict[str, list[int]] = {}
    for rank, row in rows.items():
        lines.setdefault(place(context.job.frames(rank, row)), []).append(rank)
    if len(lines) < 2 or "" in lines:
        return ""
    return between.join(f"{line} ({ranks_text(ranks)})" for line, ranks in list(lines.items())[:4])


def explain_p2p(context: Context, mismatch: P2PMismatch) -> Finding:
    """A send and its receive that disagree, or that wait for each other's tag."""
    job, label = context.job, context.job.groups[mismatch.group].label
    ends = [(mismatch.source, mismatch.send_row), (mismatch.target, mismatch.recv_row)]
    tags = mismatch.aspect == "tag"
    odd = [end for end in ends if (_tag_is_odd if tags else _changed)(context, *end)]
    guilty = odd if len(odd) == 1 else ends
    sent, taken = _ends(context, mismatch, ends)
    facts = {"source": str(mismatch.source), "target": str(mismatch.target), "label": label}
    facts |= {"number": str(mismatch.number), "sent": sent, "taken": taken}
    sure = (0.9 if odd else 0.8) if tags else 0.85 if len(odd) == 1 else 0.7
    ranks = tuple(sorted(rank for rank, _ in guilty))
    found = context.root(
        "tags_differ" if tags else "message_differs", ranks, None, sure, odd=len(odd) == 1, **facts
    )
    waited = [b for b in context.blocked if b.p2p is not None and (b.p2p.rank, b.p2p.row) in ends and tags]
    first = next(end for end in ends if end in guilty)
    return replace(
        found,
        group=label,
        where=place(job.frames(*first)),
        waited_s=context.waited(waited[0]) if waited else None,
        stacks=context.stacks([*guilty, *(end for end in ends if end not in guilty)] if tags else ends),
    )


def _ends(context: Context, mismatch: P2PMismatch, ends: list[tuple[int, int]]) -> tuple[str, str]:
    """What the sender sends and what the receiver expects."""
    job = context.job
    at = [place(job.frames(rank, row)) for rank, row in ends]
    sent, taken = (job.shapes(rank, row) for rank, row in ends)
    if mismatch.aspect == "tag":
        sides = [str(int(job.ranks[rank].trace.calls["tag"][row])) for rank, row in ends]
    elif mismatch.aspect == "size":
        sizes = (sent.inputs or sent.outputs, taken.outputs or taken.inputs)
        sides = [str(list(map(list, each))) for each in sizes]
    else:
        dtypes = (sent.input_dtypes or sent.output_dtypes, taken.output_dtypes or taken.input_dtypes)
        sides = ["/".join(each) for each in dtypes]
    return say("op_at", op=sides[0], at=at[0]), say("op_at", op=sides[1], at=at[1])


def _tag_is_odd(context: Context, rank: int, row: int) -> bool:
    """Whether the step from the rank's previous tag with this partner to this one is unlike all steps before."""
    view = context.job.ranks[rank]
    calls = view.trace.calls[: row + 1]
    same = (calls["peer"] == calls["peer"][row]) & (view.family[: row + 1] == view.family[row])
    steps = np.diff(calls["tag"][same & (calls["group"] == calls["group"][row])].astype(np.int64))
    return len(steps) > 1 and not bool((steps[:-1] == steps[-1]).any())


def _changed(context: Context, rank: int, row: int) -> bool:
    """Whether the message differs from the rank's previous one at the same line with this partner."""
    view = context.job.ranks[rank]
    calls, now = view.trace.calls[:row], view.trace.calls[row]
    alike = (
        (view.stack[:row] == view.stack[row]) & (calls["peer"] == now["peer"]) & (calls["op"] == now["op"])
    )
    before = np.flatnonzero(alike)[-1:]
    return bool(len(before)) and bool(view.sig[before[0]] != view.sig[row])
