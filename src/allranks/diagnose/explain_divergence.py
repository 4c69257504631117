"""Divergence → finding: which call a rank skipped, added or made in another order, and where everybody is now."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.diagnose.cells import Mismatch
from allranks.diagnose.context import Context
from allranks.diagnose.divergence import Divergence
from allranks.diagnose.job import GroupView
from allranks.diagnose.phrasing import count, place, ranks_text, ranks_wait, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding

#: As sure as this at most where the files of other ranks might tell otherwise.
TURNABLE = 0.6
CAUSES = {"skipped": "missing_rank", "extra": "extra_collective", "swapped": "order_inversion"}


def explain_divergence(
    context: Context,
    group: GroupView,
    divergence: Divergence,
    ranks: tuple[int, ...],
    mismatch: Mismatch | None = None,
    blocked: Blocked | None = None,
) -> Finding:
    """The finding. `mismatch` or `blocked` is what came of it."""
    return _Telling(context, group, divergence, ranks, mismatch, blocked).finding()


@dataclass(frozen=True)
class _Telling:
    context: Context
    group: GroupView
    divergence: Divergence
    ranks: tuple[int, ...]  # all that left the program there
    mismatch: Mismatch | None
    blocked: Blocked | None

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks that made a call of this number and are not guilty."""
        lanes = self.group.lanes.items()
        return tuple(r for r, lane in lanes if r not in self.ranks and lane.row(self.divergence.seq) >= 0)

    def finding(self) -> Finding:
        """The finding."""
        context, seq = self.context, self.divergence.seq
        maker = self.divergence.reference if self.divergence.kind == "skipped" else self.divergence.rank
        at = place(context.job.frames(maker, self.group.lanes[maker].row(seq)))
        rows = {rank: self.group.lanes[rank].row(seq) for rank in (*self.ranks, *self.others)}
        guilty = [(rank, rows[rank]) for rank in self.ranks if rows[rank] >= 0]
        return Finding(
            CAUSES[self.divergence.kind],
            self.ranks,
            self._sentence(maker, at) + self._now(),
            "root",
            self.group.label,
            seq,
            self._sure(),
            at,
            context.waiting_but(self.ranks),
            context.waited_in(self.group),
            (*context.stacks(guilty), *context.stacks((rank, rows[rank]) for rank in self.others)),
            self._evidence(),
            advice=(_advice(self.divergence, at),),
        )

    def _sure(self) -> float:
        """The confidence; lower where ranks without a file might turn the majority."""
        absent = len(self.group.members) - len(self.group.lanes)
        turned = absent and len(self.others) - len(self.ranks) < absent
        return min(TURNABLE, self.divergence.confidence) if turned else self.divergence.confidence

    def _sentence(self, maker: int, at: str) -> str:
        found, subject = self.divergence, who(self.context.job, self.ranks)
        if found.kind == "swapped":
            return self._swapped()
        op = self.context.job.op(maker, self.group.lanes[maker].row(found.seq))
        call = f"{op} #{found.seq} of group {self.group.label}{f' at {at}' if at else ''}"
        call += f" and {count(found.count - 1, 'call')} behind it" if found.count > 1 else ""
        if found.kind == "skipped":
            makers = ranks_text(self.others) if self.others else "the others"
            return f"{subject} skipped {call}, which {makers} made, and went on"
        either = " (an extra call, or one of them has left its loop early)" if found.either else ""
        return f"{subject} made an extra {call}, where {self._called()}{either}"

    def _evidence(self) -> tuple[str, ...]:
        mismatch = self.mismatch
        if mismatch is None:
            return (self.divergence.reason,)
        if mismatch.seq == self.divergence.seq:
            each = (f"{ranks_text(those)}: {text}" for text, those in mismatch.classes[:6])
            return (self.divergence.reason, *each)
        sides = " against ".join(f"{text} on {ranks_text(those)}" for text, those in mismatch.classes[:3])
        return (self.divergence.reason, f"their calls fitted by chance until #{mismatch.seq}: {sides}")

    def _called(self) -> str:
        """ "ranks 1, 2 called all_reduce at train.py:9", the largest party of them."""
        parties: dict[str, list[int]] = {}
        for rank in self.others:
            row = self.group.lanes[rank].row(self.divergence.seq)
            at = place(self.context.job.frames(rank, row))
            text = f"{self.context.job.op(rank, row)}{f' at {at}' if at else ''}"
            parties.setdefault(text, []).append(rank)
        if not parties:
            return "the others do not make it"
        text, those = max(parties.items(), key=lambda item: (len(item[1]), -min(item[1])))
        return f"{ranks_text(those)} called {text}"

    def _swapped(self) -> str:
        """Two calls of one group in another order; which threads made them, where that differs."""
        job, rank, seq = self.context.job, self.divergence.rank, self.divergence.seq
        trace, last = job.ranks[rank].trace, seq + self.divergence.count
        rows = [self.group.lanes[rank].row(number) for number in (seq, last)]
        texts = [
            f"{job.op(rank, row)}{f' at {at}' if (at := place(job.frames(rank, row))) else ''}"
            for row in rows
        ]
        text = (
            f"{who(job, self.ranks)} made {texts[0]} (#{seq}) before {texts[1]} (#{last}) of group {self.group.label}, "
            f"{ranks_text(self.others)} the other way round"
        )
        threads = [int(trace.calls["thread"][row]) for row in rows]
        if threads[0] == threads[1]:
            return text
        names = [trace.threads[thread] for thread in threads if trace.threads.get(thread)]
        named = f" ({' and '.join(names)})" if len(names) == 2 else ""
        return f"{text}: two threads{named} use one group, and nothing orders their calls"

    def _now(self) -> str:
        """Where the hang shows, if that is later than where it began."""
        mismatch, blocked, found = self.mismatch, self.blocked, self.divergence
        if mismatch is not None and mismatch.seq > found.seq:
            mine = next((text for text, those in mismatch.classes if found.rank in those), "")
            theirs = next((text for text, those in mismatch.classes if found.reference in those), "")
            if mine and theirs and mismatch.cause == "type_mismatch":
                return f"; at #{mismatch.seq} it called {mine} where they called {theirs}"
            return f"; at #{mismatch.seq} their calls no longer fit"
        if blocked is not None and (blocked.seq > found.seq or blocked.group != self.group.index):
            failure = self.context.failure(blocked)
            if failure:
                return f"; {failure.replace('the call', self.context.call(blocked))}"
            return f"; now {ranks_wait(blocked.waiters)} in {self.context.call(blocked)}"
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
