"""Divergence → finding: which call a rank skipped, added or made in another order, and where everybody is now."""

from __future__ import annotations

from allranks.diagnose.context import Context
from allranks.diagnose.divergence import Divergence
from allranks.diagnose.job import GroupView
from allranks.diagnose.match import Mismatch
from allranks.diagnose.phrasing import count, place, ranks_text, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding

CAUSES = {"skipped": "missing_rank", "extra": "extra_collective", "swapped": "order_inversion"}


def explain_divergence(
    context: Context, group: GroupView, divergence: Divergence, ranks: tuple[int, ...],
    mismatch: Mismatch | None = None, blocked: Blocked | None = None,
) -> Finding:  # fmt: skip
    """The finding. `mismatch` or `blocked` is what came of it."""
    skipped = divergence.kind == "skipped"
    maker = divergence.reference if skipped else divergence.rank
    row = group.lanes[maker].row(divergence.seq)
    op, at = context.job.op(maker, row), place(context.job.frames(maker, row))
    subject, call = (
        who(context.job, ranks),
        f"{op} #{divergence.seq} of group {group.label}{f' at {at}' if at else ''}",
    )
    others = tuple(
        rank for rank, lane in group.lanes.items() if rank not in ranks and lane.row(divergence.seq) >= 0
    )
    if skipped:
        more = f" and {count(divergence.count - 1, 'call')} behind it" if divergence.count > 1 else ""
        sentence = f"{subject} skipped {call}{more}, which {_made_by(context, group, divergence.seq, others)}, and went on"
    elif divergence.kind == "extra":
        more = f" and {count(divergence.count - 1, 'call')} behind it" if divergence.count > 1 else ""
        sentence = (
            f"{subject} made an extra {call}{more}, where {_called(context, group, divergence.seq, others)}"
        )
        if divergence.either:
            sentence += " (an extra call, or one of them has left its loop early)"
    else:
        sentence = _swapped(context, group, divergence, ranks, others)
    evidence = [divergence.reason]
    if mismatch is not None and mismatch.seq > divergence.seq:
        sides = " against ".join(f"{text} on {ranks_text(those)}" for text, those in mismatch.classes[:3])
        evidence.append(f"their calls fitted by chance until #{mismatch.seq}: {sides}")
    elif mismatch is not None:
        evidence += [f"{ranks_text(those)}: {text}" for text, those in mismatch.classes[:6]]
    sentence += _now(context, group, divergence, ranks, others, mismatch, blocked)
    waiting = tuple(sorted({rank for b in context.blocked for rank in b.rows} - set(ranks)))
    began = [b for b in context.blocked if b.group == group.index]
    rows = {rank: group.lanes[rank].row(divergence.seq) for rank in (*ranks, *others)}
    guilty = [(rank, rows[rank]) for rank in ranks if rows[rank] >= 0]
    return Finding(
        CAUSES[divergence.kind], ranks, sentence, "root", group.label, divergence.seq, divergence.confidence, at, waiting,
        context.waited(began[0]) if began else None,
        (*context.stacks(guilty), *context.stacks((rank, rows[rank]) for rank in others)), tuple(evidence), (),
        (_advice(divergence, at),),
    )  # fmt: skip


def _made_by(context: Context, group: GroupView, seq: int, others: tuple[int, ...]) -> str:
    """ "ranks 0, 2 made", of those that did the same as the reference."""
    return f"{ranks_text(others)} made" if others else "the others made"


def _called(context: Context, group: GroupView, seq: int, others: tuple[int, ...]) -> str:
    """ "ranks 1, 2 called all_reduce at train.py:9", the largest party of them."""
    parties: dict[str, list[int]] = {}
    for rank in others:
        row = group.lanes[rank].row(seq)
        at = place(context.job.frames(rank, row))
        parties.setdefault(f"{context.job.op(rank, row)}{f' at {at}' if at else ''}", []).append(rank)
    if not parties:
        return "the others do not make it"
    text, those = max(parties.items(), key=lambda item: (len(item[1]), -min(item[1])))
    return f"{ranks_text(those)} called {text}"


def _swapped(
    context: Context,
    group: GroupView,
    divergence: Divergence,
    ranks: tuple[int, ...],
    others: tuple[int, ...],
) -> str:
    """Two calls of one group in another order; which threads made them, where that differs."""
    job, rank, seq = context.job, divergence.rank, divergence.seq
    texts, threads = [], []
    for number in (seq, seq + divergence.count):
        row = group.lanes[rank].row(number)
        at = place(job.frames(rank, row))
        thread = int(job.ranks[rank].trace.calls["thread"][row])
        threads.append(thread)
        texts.append(f"{job.op(rank, row)}{f' at {at}' if at else ''}")
    both = f"{texts[0]} (#{seq}) before {texts[1]} (#{seq + divergence.count})"
    text = f"{who(job, ranks)} made {both} of group {group.label}, {ranks_text(others)} the other way round"
    if threads[0] != threads[1]:
        names = [name for thread in threads if (name := _thread_name(context, rank, thread))]
        told = f" ({' and '.join(names)})" if len(names) == 2 else ""
        text += f": two threads{told} use one group, and nothing orders their calls"
    return text


def _thread_name(context: Context, rank: int, thread: int) -> str:
    names: dict[int, str] = getattr(context.job.ranks[rank].trace, "threads", {})
    return names.get(thread, "")


def _now(
    context: Context, group: GroupView, divergence: Divergence, ranks: tuple[int, ...], others: tuple[int, ...],
    mismatch: Mismatch | None, blocked: Blocked | None,
) -> str:  # fmt: skip
    """Where the hang shows, if that is later than where it began."""
    if mismatch is not None and mismatch.seq > divergence.seq:
        mine = next((text for text, those in mismatch.classes if divergence.rank in those), "")
        theirs = next((text for text, those in mismatch.classes if divergence.reference in those), "")
        if mine and theirs and mismatch.cause == "type_mismatch":
            return f"; at #{mismatch.seq} it called {mine} where they called {theirs}"
        return f"; at #{mismatch.seq} their calls no longer fit"
    if blocked is not None and (blocked.seq > divergence.seq or blocked.group != group.index):
        one = "s" if len(blocked.waiters) == 1 else ""
        return f"; now {ranks_text(blocked.waiters)} wait{one} in {context.call(blocked)}"
    return ""


def _advice(divergence: Divergence, at: str) -> str:
    line = at or "that line"
    if divergence.kind == "swapped":
        return f"make these calls in one order on all ranks; a thread beside the training loop needs a group of its own ({line})"
    if divergence.kind == "skipped":
        return f"look for a condition, exception or early end of a loop that lets rank {divergence.rank} pass {line}"
    return (
        f"make the call on all ranks of the group, or on none: look for a condition on the rank around {line}"
    )
