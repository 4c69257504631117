"""Everything a rule may look at, the small questions all rules ask, and the short texts of their sentences. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from allranks.diagnosis.alignment import broken_habit, step_keys, usual_next
from allranks.diagnosis.job import Family, GroupView, Job, Now, RankCalls
from allranks.diagnosis.kinds import CAUSES, KINDS, fill, lines, say
from allranks.diagnosis.p2p import P2PMismatch, P2PWait
from allranks.diagnosis.waits import Blocked, Graph, Patience, waited_s
from allranks.model.diagnosis import Diagnosis, Finding, RankNow
from allranks.model.formatting import count, duration, ranks_text, rename
from allranks.model.stack_advice import LOOK_FOR
from allranks.model.stacks import PLAIN_VERBS, is_user_file
from allranks.model.trace import Frame, State, World

#: A ring that has wrapped with fewer calls has lost the rounds that tell who left his.
SHORT_RING = 64
#: So many calls of an earlier round tell which of several calls comes next.
ROUND = 256
_ENDS = {Now.DONE: "finished", Now.LEFT: "finished", Now.FAILED: "failed", Now.OPEN: "not finished"}
Stacks = tuple[tuple[tuple[int, ...], tuple[Frame, ...]], ...]
#: Files of torch and of the machinery around a call; not a project of the user's in a folder called torch or accelerate.
_INTERNAL = re.compile(
    r"(?:(?:site|dist)-packages|lib|pytorch)/torch/|(?:^|/)torch/(?:_|overrides\.py|(?:distributed|nn|autograd|utils|optim)/)"
    r"|(?:(?:site|dist)-packages|torchft|accelerate/src)/(?:torchft|accelerate)/|/allranks/recording/|/deepspeed/comm"
    r"|<frozen|/contextlib\.py|/threading\.py|/multiprocessing/|^<|\.so(?![a-z])|\.cpp$"
)
_VERBS = {**PLAIN_VERBS, "interrupted": "was interrupted"}
#: Errors that a rank gets because another one has gone.
_SECONDARY = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|[Tt]imed? ?out|aborted|remote (?:worker|process)|ncclRemoteError"
)


def is_secondary(text: str) -> bool:
    """Whether an error is the consequence of another rank's."""
    return _SECONDARY.search(text) is not None


@lru_cache(1 << 14)
def is_internal(frame: Frame) -> bool:
    """Frames of torch and the standard machinery around a call: never where the user looks first."""
    return _INTERNAL.search(frame.file.replace("\\", "/")) is not None


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code; of a library when there is none; None without a stack."""
    return next(iter(user_frames(frames)), None)


def user_frames(frames: Sequence[Frame], limit: int = 6) -> tuple[Frame, ...]:
    """The frames of the user's own code, innermost first; of a library when there are none."""
    own = [frame for frame in frames if not is_internal(frame)]
    outside = [frame for frame in own if is_user_file(frame.file.replace("\\", "/"))]
    return tuple((outside or own or frames)[:limit])


def place(frames: Sequence[Frame]) -> str:
    """ "train.py:44 in sync_stats", or "" when unknown."""
    frame = user_frame(frames)
    if frame is None:
        return ""
    text = f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line}"
    return text if frame.name in ("", "<module>") else f"{text} in {frame.name}"


def parted(frames: Sequence[Frame], others: Sequence[Frame]) -> Sequence[Frame]:
    """The stack from the first frame of the user's code on that the other stack has not: a helper of both says nothing."""
    mine, theirs = user_frames(frames, len(frames)), user_frames(others, len(others))
    first = next((at for at, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), 0)
    return mine[first:]


def ranks_wait(ranks: Iterable[int]) -> str:
    """ "rank 5 waits", "ranks 0, 2 wait"."""
    ordered = set(ranks)
    return f"{ranks_text(ordered)} wait{'s' if len(ordered) == 1 else ''}"


def who(job: Job, ranks: Iterable[int]) -> str:
    """Ranks with the host of a single one: "rank 5 (node7)"."""
    ordered = sorted(set(ranks))
    hosts = {job.host(rank) for rank in ordered} - {""}
    text = ranks_text(ordered)
    return f"{text} ({hosts.pop()})" if len(hosts) == 1 and len(ordered) <= 8 else text


def call_text(job: Job, rank: int, row: int, seq: int, label: str) -> str:
    """ "all_reduce #1042 of group dp_0"."""
    return f"{job.op(rank, row) or 'collective'} #{seq} of group {label}"


def line_in(text: str) -> str:
    """The line of code that a recorded error names: "train.py:9" of "exception: ValueError (train.py:9): …"; else ""."""
    found = re.search(r"\((?:sys\.exit at )?([\w.\-]+\.py:\d+)\)", text)
    return found[1] if found else ""


def polls(now: RankNow) -> bool:
    """Whether a rank looks for a change that perhaps another rank should make."""
    return now.evidence.startswith("looks again and again")


def doing(now: RankNow) -> dict[str, object]:
    """What a rank does by its stacks, and which rank holds the lock that it waits for."""
    verb = "looks again and again for a change" if polls(now) else _VERBS.get(now.cause, "")
    known = bool(verb) and now.cause != "unknown"
    held_by, find = "" if now.held_by is None else now.held_by, LOOK_FOR.get(now.cause, "")
    return {"doing": verb if known else "is", "busy": known, "find": find, "held_by": held_by}


def with_names(found: Diagnosis, worlds: Sequence[World]) -> Diagnosis:
    """The same diagnosis with roles and numbers in its sentences; unchanged in a job of one world."""
    if not worlds:
        return found

    def all_of(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(rename(one, worlds) for one in texts)

    def tell(finding: Finding) -> Finding:
        return replace(
            finding,
            sentence=rename(finding.sentence, worlds),
            wrong_if=rename(finding.wrong_if, worlds),
            evidence=all_of(finding.evidence),
            missing_evidence=all_of(finding.missing_evidence),
            advice=all_of(finding.advice),
            stack_labels=all_of(finding.stack_labels),
        )

    verdict = tell(found.verdict) if found.verdict is not None else None
    findings = tuple(map(tell, found.findings))
    return replace(
        found, verdict=verdict, findings=findings, summary=all_of(found.summary), worlds=tuple(worlds)
    )


@dataclass(frozen=True)
class Context:
    """The aligned job, what is blocked in it, and what is known from outside."""

    job: Job
    patience: Patience
    blocked: tuple[Blocked, ...]
    graph: Graph
    seen: dict[int, RankNow] = field(default_factory=dict)
    p2p_mismatches: tuple[P2PMismatch, ...] = ()
    copied: bool = False
    _began: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def group(self, blocked: Blocked) -> GroupView:
        return self.job.groups[blocked.group]

    def began_ns(self, blocked: Blocked) -> int:
        """When the first waiter entered."""
        if blocked.index not in self._began:
            calls = ((self.job.ranks[rank].trace.calls, row) for rank, row in blocked.rows.items())
            self._began[blocked.index] = min(int(rows["created_ns"][row]) for rows, row in calls)
        return self._began[blocked.index]

    @cached_property
    def lacking(self) -> dict[int, list[Blocked]]:
        """rank -> the blocked calls that lack it, in order; made once, because a job may lack very many ranks."""
        found: dict[int, list[Blocked]] = {}
        for blocked in self.blocked:
            for rank in {*blocked.missing, *blocked.absent}:
                found.setdefault(rank, []).append(blocked)
        return found

    def first_for(self, rank: int) -> Blocked:
        """Of the blocked calls that lack this rank the one that comes first in its rounds; without rounds the one that has been
        waited in longest."""
        calls, view = self.lacking[rank], self.job.ranks.get(rank)
        if len(calls) > 1 and view is not None:
            keys, at = step_keys(view), self._first_rows.get(rank, len(view.sig))
            usual = usual_next(keys, at)
            for row in range(int(usual[-1]), at)[:ROUND] if len(usual) else ():
                for blocked in calls:
                    if _is_part(view, row, blocked):
                        return blocked
        return min(calls, key=self.age)

    def age(self, blocked: Blocked) -> tuple[int, int]:
        """Sorts calls by how long they have been waited in, the longest first."""
        return self.began_ns(blocked), blocked.index

    def first_open(self, rank: int) -> int:
        """The row of the first call that the rank is blocked in, -1 when there is none."""
        return self._first_rows.get(rank, -1)

    @cached_property
    def _first_rows(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for blocked in self.blocked:
            for rank, row in blocked.rows.items():
                found[rank] = min(row, found.get(rank, row))
        return found

    @cached_property
    def left_round(self) -> dict[int, int]:
        """rank -> row of the call that it had always made where, in all rounds before, it made another one than now. Ranks
        that wait nowhere count with their last call: where all go on to something new, nobody has left its round."""
        found = {}
        for rank, view in self.job.ranks.items():
            row = self._first_rows.get(rank, len(view.sig) - 1)
            usual = broken_habit(view, row) if row > 0 else None
            if usual is not None:
                found[rank] = usual
        return found

    def call(self, blocked: Blocked) -> str:
        """ "all_reduce #5 of group tp_1", or "send to rank 3 (group pp)"."""
        rank, row = min(blocked.rows.items())
        label = self.group(blocked).label
        if blocked.p2p is not None:
            return p2p_text(blocked.p2p, label)
        if len({self.job.op(rank, row) for rank, row in blocked.rows.items()}) > 1:
            return f"call #{blocked.seq} of group {label}"
        return call_text(self.job, rank, row, blocked.seq, label)

    def failure(self, blocked: Blocked, call: str = "the call") -> str:
        """ "the call timed out on ranks 0, 2": where it is known to have failed; "" when nowhere. Calls that were put
        away, finished or not, are not meant."""
        states = {
            rank: int(self.job.ranks[rank].trace.calls["state"][row])
            for rank, row in blocked.rows.items()
            if self.job.ranks[rank].now[row] == Now.FAILED
        }
        if not states:
            return ""
        verb = "failed"
        if set(states.values()) == {int(State.TIMED_OUT)}:
            # A dump says that such a call was put away, not why.
            told = all(self.job.ranks[r].trace.is_box or self._outlived(r, blocked.rows[r]) for r in states)
            verb = "timed out" if told else "failed or timed out"
        return f"{call} {verb} on {ranks_text(states)}"

    def _outlived(self, rank: int, row: int) -> bool:
        """Whether the dump was made after the call's time was over."""
        view = self.job.ranks[rank]
        limit_ns = int(view.trace.calls["timeout_ms"][row]) * 10**6
        return 0 < limit_ns <= view.snapshot_ns - int(view.trace.calls["created_ns"][row])

    def place(self, blocked: Blocked) -> str:
        """The line where most of the waiters wait."""
        stacks = self.stacks(blocked.rows.items())
        return place(stacks[0][1]) if stacks else ""

    def at(self, blocked: Blocked) -> str:
        """ " at train.py:9", true of all who wait; " from train.py:9 and train.py:12" where they differ; "" unknown."""
        lines = list(dict.fromkeys(place(frames) for _, frames in self.stacks(blocked.rows.items())))
        if len(lines) < 2:
            return f" at {lines[0]}" if lines and lines[0] else ""
        return f" from {' and '.join(lines[:3])}"

    def stacks(self, rows: Iterable[tuple[int, int]]) -> Stacks:
        """(ranks, stack) of calls, equal stacks together, largest first; calls without a stack are left out."""
        by_stack: dict[int, list[int]] = {}
        for rank, row in rows:
            number = int(self.job.ranks[rank].stack[row])
            if number:
                by_stack.setdefault(number, []).append(rank)
        ordered = sorted(by_stack.items(), key=lambda item: (-len(item[1]), sorted(item[1])))
        return tuple((tuple(sorted(ranks)), self.job.tables.stacks[number]) for number, ranks in ordered)

    def waited(self, blocked: Blocked) -> float | None:
        return waited_s(self.job, blocked)

    def waited_in(self, group: GroupView) -> float | None:
        """How long the first blocked call of a group has been waited in; None when it has none."""
        began = [blocked for blocked in self.blocked if blocked.group == group.index]
        return self.waited(began[0]) if began else None

    def waiting_but(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """All ranks that wait in any call, without these."""
        return tuple(sorted({rank for blocked in self.blocked for rank in blocked.rows} - set(ranks)))

    def forgetful(self, ranks: Iterable[int]) -> bool:
        """Whether a ring of these ranks has wrapped and holds too few calls to know what they used to do."""
        calls = (self.job.ranks[rank].trace.calls for rank in ranks if rank in self.job.ranks)
        return any(0 < len(rows) < SHORT_RING and int(rows["begin"][0]) > 1 for rows in calls)

    def last_call(self, rank: int) -> str:
        """What a rank did last, as a sentence part; "" without calls."""
        view = self.job.ranks.get(rank)
        if view is None or not len(view.trace.calls):
            return ""
        row = len(view.trace.calls) - 1
        call, number, family = view.trace.calls[row], int(view.group[row]), int(view.family[row])
        frame = user_frame(self.job.frames(rank, row))
        p2p = family in (Family.SEND, Family.RECV)
        return say(
            "last_call",
            op=self.job.op(rank, row),
            p2p=p2p,
            number=not p2p,
            direction="to" if family == Family.SEND else "from",
            peer=f"rank {int(call['peer'])}" if call["peer"] >= 0 else "",
            seq=int(call["seq"]),
            label=self.job.groups[number].label if number >= 0 else "?",
            at=place((frame,)) if frame is not None and not is_internal(frame) else "",
            state=_ENDS.get(Now(int(view.now[row])), ""),
        )

    def now_in(self, rank: int) -> str:
        """The last call of a rank, as a sentence part, if it has not finished it; else ""."""
        text, sign = self.last_call(rank), f" ({_ENDS[Now.OPEN]})"
        return text.removesuffix(sign) if text.endswith(sign) else ""

    def last_calls(self, ranks: tuple[int, ...]) -> str:
        """A line for each of these ranks: what it did last."""
        last = {rank: self.last_call(rank) for rank in ranks[:4]}
        return "\n".join(say("last_call_of", rank=rank, text=text) for rank, text in last.items() if text)

    def where_now(self, ranks: tuple[int, ...]) -> str:
        """A line for each of these ranks that still run and have no stack: how to see where it is."""
        unseen = (rank for rank in ranks[:2] if rank not in self.seen or not self.seen[rank].where)
        running = [rank for rank in unseen if rank in self.job.ranks and not self.job.ended]
        headers = {rank: self.job.ranks[rank].trace.header for rank in running}
        return "\n".join(say("where_now", rank=r, pid=h.pid or "", host=h.host) for r, h in headers.items())

    def entered(self, blocked: Blocked) -> str:
        """What a lacking rank should have done: a receive is not entered by its sender."""
        wait, call = blocked.p2p, self.call(blocked)
        if wait is None:
            return say("entered", call=call)
        return say("entered", call=call, waiter=wait.rank, receive=wait.sends, send=not wait.sends)

    def waiting_text(self, blocked: Blocked, guilty: tuple[int, ...]) -> str:
        """ "7 ranks have waited 31 s": all that wait for the guilty, directly or not, as long as the first of them."""
        failed = {rank for rank, row in blocked.rows.items() if self.job.ranks[rank].now[row] == Now.FAILED}
        behind = self.alive({*self.waiters_behind(guilty), *blocked.waiters} - set(guilty)) - failed
        it = "them" if len(guilty) > 1 else "it"
        if (blocked.rows and len(failed) == len(blocked.rows)) or not behind:
            return self.failure(blocked) or say("waits_for_it", number=count(0, "rank"), wait="wait", it=it)
        wait, one, number = self.waited(blocked), len(behind) == 1, count(len(behind), "rank")
        verbs = {"wait": "waits" if one else "wait", "has": "has" if one else "have"}
        text = say("waits_for_it", number=number, wait=verbs["wait"], it=it)
        if wait is not None:
            text = say(
                "waited", number=number, has=verbs["has"], wait=duration(wait), at_most=self.at_most(blocked)
            )
        return f"{text}; {self.failure(blocked)}" if failed else text

    def at_most(self, blocked: Blocked) -> bool:
        """Whether the end of a wait is the time of files that may be copies: it lasted as long as that, or less."""
        return self.copied or any(self.job.ranks[rank].trace.header.dated for rank in blocked.rows)

    def alive(self, ranks: Iterable[int]) -> set[int]:
        """These ranks without those whose program is known to have ended, unless all have: the others do not wait any more."""
        ended = {rank for rank, view in self.job.ranks.items() if view.trace.progress.closed}
        return set(ranks) - ended if not self.job.ended and len(ended) < len(self.job.ranks) else set(ranks)

    def root(
        self,
        kind: str,
        ranks: tuple[int, ...],
        blocked: Blocked | None = None,
        sure: float = 0.0,
        cause: str = "",
        /,
        **facts: object,
    ) -> Finding:
        """A root cause in the words of the table, with what is known of the blocked call that shows it."""
        found = in_words(kind, ranks, sure, cause, Facts(self, blocked, ranks, facts))
        if blocked is None:
            return found
        sequence, label = blocked.seq if blocked.seq >= 0 else None, self.group(blocked).label
        found = replace(found, group=label, sequence=sequence, where=self.place(blocked))
        return replace(found, waiting=self.waiters_behind(ranks), waited_s=self.waited(blocked))

    def warning(self, kind: str, **facts: object) -> Finding:
        """Nobody's fault, in the words of the table."""
        return replace(self.root(kind, (), None, **facts), severity="warning")

    def waiters_behind(self, sink: Iterable[int]) -> tuple[int, ...]:
        """All ranks that wait for the sink, directly or through others."""
        nodes = set(sink)
        return tuple(sorted(node for node in self.graph.behind(nodes) - nodes if node >= 0))


def _is_part(view: RankCalls, row: int, blocked: Blocked) -> bool:
    """Whether a call of a rank is of the kind that it owes to a blocked one: of its group, or a message to or from its waiter."""
    wait, family = blocked.p2p, int(view.family[row])
    if int(view.group[row]) != blocked.group:
        return False
    if wait is None:
        return not Family.SEND <= family <= Family.P2P_BATCH
    owed = Family.RECV if wait.sends else Family.SEND
    return family == owed and int(view.trace.calls["peer"][row]) == wait.rank


def in_words(
    kind: str, ranks: tuple[int, ...], sure: float, cause: str, facts: Mapping[str, object]
) -> Finding:
    """A root cause in the words of the table, and nothing else."""
    row = KINDS[kind]
    cause = cause or row.cause
    return Finding(
        cause,
        ranks,
        fill(row.sentence, facts),
        "root",
        confidence=sure or row.sure,
        evidence=lines(row.evidence, facts),
        missing_evidence=lines(row.ask, facts),
        advice=lines(row.advice, facts),
        wrong_if=CAUSES[cause].wrong_if,
        kind=kind,
    )


class Facts(dict[str, object]):
    """The facts of one finding: those that a rule gives, and those that follow from the call and the ranks, when asked for."""

    def __init__(
        self, context: Context, blocked: Blocked | None, ranks: tuple[int, ...], given: dict[str, object]
    ) -> None:
        super().__init__(given)
        self._context, self._blocked, self._ranks = context, blocked, ranks

    def __missing__(self, name: str) -> object:
        of_ranks, of_call = _OF_RANKS.get(name), _OF_CALL.get(name)
        value: object = ""
        if of_ranks is not None:
            value = of_ranks(self._context, self._ranks)
        elif of_call is not None and self._blocked is not None:
            value = of_call(self._context, self._blocked, self._ranks)
        self[name] = value
        return value


_OF_RANKS: dict[str, Callable[[Context, tuple[int, ...]], object]] = {
    "pipe": lambda context, ranks: "|",
    "who": lambda context, ranks: who(context.job, ranks),
    "ranks": lambda context, ranks: ranks_text(ranks),
    "rank": lambda context, ranks: str(ranks[0]),
    "it": lambda context, ranks: "it" if len(ranks) == 1 else "they",
    "it_is": lambda context, ranks: "it is" if len(ranks) == 1 else "they are",
    "its": lambda context, ranks: "its" if len(ranks) == 1 else "their",
    "does": lambda context, ranks: "does" if len(ranks) == 1 else "do",
    "last": lambda context, ranks: context.last_call(ranks[0]) if len(ranks) == 1 else "",
    "now_in": lambda context, ranks: context.now_in(ranks[0]) if len(ranks) == 1 else "",
    "lasts": lambda context, ranks: context.last_calls(ranks),
    "where_now": lambda context, ranks: context.where_now(ranks),
}
_OF_CALL: dict[str, Callable[[Context, Blocked, tuple[int, ...]], object]] = {
    "call": lambda context, call, ranks: context.call(call),
    "at": lambda context, call, ranks: context.place(call),
    "lines": lambda context, call, ranks: context.at(call),
    "label": lambda context, call, ranks: context.group(call).label,
    "entered": lambda context, call, ranks: context.entered(call),
    "entered_by": lambda context, call, ranks: ranks_text(call.waiters),
    "waits": lambda context, call, ranks: ranks_wait(call.waiters),
    "waiting": lambda context, call, ranks: context.waiting_text(call, ranks),
    "failure": lambda context, call, ranks: context.failure(call),
    "failed_call": lambda context, call, ranks: context.failure(call, context.call(call) + context.at(call)),
    "wait": lambda context, call, ranks: _at_most(context, call) + _seconds(context.waited(call)),
    "later": lambda context, call, ranks: (
        "" if call.failed or context.at_most(call) else _seconds(context.waited(call))
    ),
    "passed": lambda context, call, ranks: ranks_text(call.passed),
}


def _at_most(context: Context, call: Blocked) -> str:
    return "at most " if context.at_most(call) and context.waited(call) is not None else ""


def _seconds(wait: float | None) -> str:
    return duration(wait) if wait is not None else ""


def p2p_text(wait: P2PWait, label: str) -> str:
    """ "send to rank 3 of group pp"."""
    verb = "send to" if wait.sends else "recv from"
    if wait.peer < 0:
        return f"{verb} any rank of group {label}"
    number = f" #{wait.number}" if wait.number else ""
    return f"{verb} rank {wait.peer}{number} of group {label}"


def latest_stack(context: Context, rank: int) -> tuple[tuple[Frame, ...], str]:
    """The stack of a rank's latest call that has one, and what it is: the rank may be elsewhere by now."""
    view = context.job.ranks.get(rank)
    known = np.flatnonzero(view.stack).tolist() if view is not None else []
    if view is None or not known:
        return (), ""
    over = view.now[known[-1]] in (Now.DONE, Now.LEFT)
    return context.job.frames(rank, known[-1]), "last finished call" if over else "last call"
