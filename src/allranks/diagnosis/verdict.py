"""diagnose(): all steps in order, and the root cause first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from allranks.diagnosis.absent import explain_ranks, unread_ranks
from allranks.diagnosis.align import Doubt, align, forget_past_quorums, settle_states
from allranks.diagnosis.context import Context, line_in, ranks_wait, with_names
from allranks.diagnosis.cycles import explain_cycle
from allranks.diagnosis.entered import explain_alone, explain_call, find_survived
from allranks.diagnosis.job import GroupView
from allranks.diagnosis.kinds import say
from allranks.diagnosis.match import Mismatch, find_mismatches
from allranks.diagnosis.mismatches import explain_mismatch, explain_p2p
from allranks.diagnosis.odd_rank import judge
from allranks.diagnosis.p2p import match_p2p
from allranks.diagnosis.setup import explain_setup
from allranks.diagnosis.waits import Blocked, find_blocked, is_hung, is_paused, usual_pause, wait_graph
from allranks.diagnosis.weak_findings import ended_badly, find_warnings, quiet_roots
from allranks.model.diagnosis import Diagnosis, FileNote, Finding, GroupSummary, RankNow, Status
from allranks.model.formatting import count, ranks_text
from allranks.model.trace import RankTrace, State

#: In the note of a file that names a function to be called.
REFUSED = ", which was refused; no code was run"
#: Below this confidence the status is "unclear", not "fault".
SURE_ENOUGH = 0.4
#: What is left of the confidence when a wait may have lasted a moment or an hour.
UNTIMED = 0.6
#: As sure as this is a finding at most that the file of another rank might change.
LACKING_FILE = 0.75
#: Causes that rest on nothing but a wait.
WAITING = frozenset({"missing_rank", "not_started", "p2p_mismatch", "order_inversion"})
#: Jobs with more calls than this are examined by their newest calls first, at least so many of each rank; a verdict
#: of so much confidence settles it.
LARGE_JOB, MIN_WINDOW, SETTLED = 6_000_000, 128, 0.7
_INTERRUPTED = "exception: KeyboardInterrupt"


#: (ranks that wait for it, whether it comes before others of this weight, the finding)
Weighed = tuple[int, int, Finding]


@dataclass(frozen=True)
class DiagnoseOptions:
    """What the caller knows and wants."""

    now_ns: int = 0  # when live black boxes were read; 0: the traces are all there is
    quiet_s: float = 0.0  # the caller knows that nothing has moved for so long, and that it is too long
    copied: bool = False  # `now_ns` is the time of copies: what waits has waited for so long, or less
    ended: bool = False  # all processes are gone, and nothing tells since when
    pg_filters: frozenset[str] = frozenset()  # names or descriptions; empty: all groups
    allow_incomplete_ranks: bool = False  # a rank without a file is not evidence of its death
    consequences: int = 10  # how many folded findings to list
    whole: Callable[[], Iterable[RankTrace]] | None = None  # reads all calls, where traces lack older ones


def diagnose(
    traces: Iterable[RankTrace],
    files: Sequence[FileNote] = (),
    *,
    stacks: Iterable[RankNow] = (),
    options: DiagnoseOptions | None = None,
) -> Diagnosis:
    """The verdict on a job. Same input in any order gives the same answer.

    Of very large jobs the newest calls are examined first: they hold the hang. All calls are examined when these do
    not settle it.
    """
    options = options or DiagnoseOptions()
    seen = {now.rank: now for now in stacks}
    given, seen = _without_interrupts(list(traces), seen)
    every = forget_past_quorums(given)
    older = sum(trace.older for trace in every)
    worlds = given[0].header.worlds if given else ()
    if newest := _window(given, every, older):
        window = [t if len(t.calls) <= newest else replace(t, calls=t.calls[-newest:]) for t in every]
        result = _diagnose(window, files, seen, options)
        if result.verdict is not None and result.verdict.confidence >= SETTLED:
            examined = say("examined", number=newest)
            return with_names(replace(result, summary=(*result.summary, examined)), worlds)
    if older and options.whole is not None:
        every = forget_past_quorums(_without_interrupts(list(options.whole()), seen)[0])
    return with_names(_diagnose(every, files, seen, options), worlds)


def _without_interrupts(
    traces: list[RankTrace], seen: dict[int, RankNow]
) -> tuple[list[RankTrace], dict[int, RankNow]]:
    """Ctrl-C ends a rank from outside, as a kill does: it is not an error of its own, and tells where the rank was."""
    found = {
        t.header.rank: line_in(t.progress.closed)
        for t in traces
        if t.header.rank is not None and _INTERRUPTED in t.progress.closed
    }
    if not found:
        return traces, seen
    lines = {rank: RankNow(rank, "interrupted", line) for rank, line in found.items() if line}
    running = [
        replace(t, progress=replace(t.progress, closed="")) if t.header.rank in found else t for t in traces
    ]
    return running, {**lines, **seen}


def _window(given: list[RankTrace], every: list[RankTrace], older: int) -> int:
    """How many of the newest calls of each rank are examined first; 0: all at once."""
    calls = sum(len(trace.calls) for trace in every)
    newest = LARGE_JOB // max(1, len(every))
    forgot = older > 0 and calls < sum(len(trace.calls) for trace in given)
    return newest if calls + older > LARGE_JOB and newest >= MIN_WINDOW and not forgot else 0


@dataclass(frozen=True)
class Examined:
    """A job with what does not fit in it, and what is blocked."""

    context: Context
    every: tuple[Blocked, ...]  # all unfinished calls, hung or not
    mismatches: tuple[Mismatch, ...]
    doubts: tuple[Doubt, ...]
    damaged: frozenset[int]  # ranks


def examine(
    traces: Iterable[RankTrace],
    files: Sequence[FileNote],
    options: DiagnoseOptions,
    seen: dict[int, RankNow] | None = None,
) -> Examined:
    """All that is compared before anybody is blamed."""
    damaged = frozenset(note.rank for note in files if note.status == "damaged" and note.rank is not None)
    groups, now_ns, ended = options.pg_filters, options.now_ns, options.ended
    job, doubts = settle_states(align(traces, cut=damaged, now_ns=now_ns, pg_filters=groups, ended=ended))
    mismatches = find_mismatches(job)
    waits, p2p_mismatches = match_p2p(job)
    patience = usual_pause(job, options.quiet_s)
    every = find_blocked(job, waits)
    if options.allow_incomplete_ranks:
        every = [replace(b, absent=(), unsure=tuple(sorted(b.unsure + b.absent))) for b in every]
    hung = [replace(b, index=i) for i, b in enumerate(b for b in every if is_hung(job, b, patience))]
    graph = wait_graph(job, hung, p2p_mismatches)
    seen = {**unread_ranks(files, job.ranks), **(seen or {})}
    context = Context(job, patience, tuple(hung), graph, seen, tuple(p2p_mismatches), options.copied)
    return Examined(context, tuple(every), tuple(mismatches), tuple(doubts), damaged)


def _diagnose(
    traces: list[RankTrace], files: Sequence[FileNote], seen: dict[int, RankNow], options: DiagnoseOptions
) -> Diagnosis:
    found = examine(traces, files, options, seen)
    context, every = found.context, list(found.every)
    alone = _alone(context, every)
    roots = [alone] if alone is not None else _all_roots(found, options)
    warnings = find_warnings(context, every, found.damaged, options.allow_incomplete_ranks, roots)
    return _compose(context, roots, warnings, files, options)


def _alone(context: Context, every: list[Blocked]) -> Finding | None:
    """What the only dump tells, where there is one and it does not name the members of its groups."""
    if len(context.job.ranks) != 1 or not every:
        return None
    return explain_alone(context, every)


def _all_roots(found: Examined, options: DiagnoseOptions) -> list[Finding]:
    """Root causes from the calls; then from functions that set up groups, from errors, and from what is merely odd."""
    context, job = found.context, found.context.job
    roots = [_with_doubts(context, root, found.doubts) for root in _roots(context, found.mismatches)]
    if roots and set(roots[0].ranks) & set(job.missing_ranks):
        roots = [one for one in (ended_badly(context, primary=True), *roots) if one is not None]
    roots = [one for one in (explain_setup(context), find_survived(context), *roots) if one is not None]
    if options.ended:
        roots = [_at_the_end(root) for root in roots]
    if roots or (context.blocked and any(is_paused(job, rank) for rank in job.ranks)):
        return roots
    return quiet_roots(context, [d for d in found.doubts if not d.proven], options.allow_incomplete_ranks)


def _roots(context: Context, mismatches: Sequence[Mismatch]) -> list[Finding]:
    """Root causes, the one that most ranks wait for first."""
    weights = {mismatch.group: -1 for mismatch in mismatches}
    weighed: list[Weighed] = []
    lacking: dict[int, list[int]] = {}
    for sink in context.graph.sinks():
        calls = _calls_of(context, sink)
        if all(_misfits(context, b) for b in calls) or all(is_paused(context.job, node) for node in sink):
            continue
        hit = next((m.group for b in calls for m in mismatches if _explains(context, m, b)), None)
        if hit is not None:
            weights[hit] = max(weights[hit], context.graph.weight(sink))
        elif len(sink) == 1 and sink[0] >= 0:
            lacking.setdefault(context.first_for(sink[0]).index, []).append(sink[0])
        elif (failed := _failed_before(context, calls)) is not None:
            lacking.setdefault(failed.index, []).extend(calls[0].rows)
        elif (finding := _of_calls(context, sink)) is not None:
            weighed.append((context.graph.weight(sink), 0, finding))
    weighed += _of_absent(context, lacking, alone=not weighed)
    weighed += _mismatched(context, mismatches, weights)
    weighed.sort(key=_order)
    roots = [finding for _, _, finding in weighed]
    # a member that is known to have died is why others do not come
    if roots and roots[0].cause == "missing_rank":
        group, known = roots[0].group, context.job.ranks.keys()
        roots.sort(
            key=lambda one: (one.cause, one.group) != ("rank_died", group) or not known >= {*one.ranks}
        )
    return roots


def _failed_before(context: Context, calls: list[Blocked]) -> Blocked | None:
    """A call that these ranks had not come to and that failed at the others first: then theirs failed because those ended."""
    if len(calls) != 1 or not (end := _failed_ns(context, calls[0])):
        return None
    ranks = set(calls[0].rows)
    before = [b for b in context.blocked if ranks <= set(b.missing) and 0 < _failed_ns(context, b) < end]
    return min(before, key=context.age, default=None)


def _failed_ns(context: Context, blocked: Blocked) -> int:
    """When the call began to fail; 0 unless it failed on all ranks that entered it, and that is known."""
    calls = [(context.job.ranks[rank].trace.calls, row) for rank, row in blocked.rows.items()]
    if not calls or any(int(rows["state"][row]) != State.FAILED for rows, row in calls):
        return 0
    return min(int(rows["completed_ns"][row]) for rows, row in calls)


def _order(weighed: Weighed) -> tuple[bool, int, int, float, str, tuple[int, ...]]:
    """Sorts findings: those that are sure, that most ranks wait for, that come before others, then for a fixed order."""
    weight, first, finding = weighed
    unsure = finding.confidence < SURE_ENOUGH
    return unsure, -weight, -first, -finding.confidence, finding.group, finding.ranks


def _of_absent(context: Context, lacking: dict[int, list[int]], alone: bool) -> list[Weighed]:
    """Findings for ranks that lack in calls (by index). `alone`: nothing else was found; then, where these ranks have no file,
    those with one that wait for each other come first."""
    without_file = all(rank not in context.job.ranks for ranks in lacking.values() for rank in ranks)
    first = _circles(context) or _passed_over(context) if lacking and alone and without_file else []
    if first:
        return first
    found = [_lacking(context, context.blocked[index], sorted(ranks)) for index, ranks in lacking.items()]
    return list(chain.from_iterable(found))


def _passed_over(context: Context) -> list[Weighed]:
    """Messages that a rank with a file did not post although it went on to a collective that it waits in: it left them out."""
    found = []
    waiting = {rank for blocked in context.blocked if blocked.p2p is None for rank in blocked.rows}
    for blocked in context.blocked:
        peer = blocked.missing[0] if blocked.p2p is not None and len(blocked.missing) == 1 else -1
        if peer in waiting and context.job.ranks[peer].trace.is_hook:
            finding = replace(explain_ranks(context, blocked, (peer,)), cause="p2p_mismatch")
            found.append((context.graph.weight((peer,)), 1, finding))
    return found


def _circles(context: Context) -> list[Weighed]:
    """Ranks with a file that wait for each other: they would, even if those without a file came."""
    found = []
    for circle in context.graph.circles():
        messages = any(context.blocked[-1 - node].p2p is not None for node in circle if node < 0)
        finding = _of_calls(context, circle) if not messages else None
        if finding is not None:
            asked = (*finding.missing_evidence, say("file_of", ranks=ranks_text(context.job.missing_ranks)))
            sure = min(LACKING_FILE, finding.confidence)
            finding = replace(finding, confidence=sure, missing_evidence=asked)
            found.append((context.graph.weight(circle), 0, finding))
    return found


def _of_calls(context: Context, sink: tuple[int, ...]) -> Finding | None:
    """The finding for ranks and calls that wait for each other, or for one call that everybody entered."""
    if len(sink) > 1:
        return explain_cycle(context, sink)
    return explain_call(context, context.blocked[-1 - sink[0]])


def _mismatched(context: Context, mismatches: Sequence[Mismatch], weights: dict[int, int]) -> list[Weighed]:
    """Findings for calls, sends and receives that do not fit together."""
    found: list[Weighed] = [(weights[m.group], 1, explain_mismatch(context, m)) for m in mismatches]
    for p2p in context.p2p_mismatches:  # it comes before what follows from it: ranks that wait for either end
        weight = context.graph.weight((p2p.source, p2p.target)) if context.blocked else -1
        finding = explain_p2p(context, p2p)
        found.append((weight, int(len(finding.ranks) == 1), finding))
    return found


def _explains(context: Context, mismatch: Mismatch, blocked: Blocked) -> bool:
    """Whether a call is blocked because of a mismatch: it is that call, or nothing has fitted since."""
    if blocked.group != mismatch.group:
        return False
    if blocked.seq <= mismatch.seq or blocked.seq - mismatch.seq - 1 <= mismatch.also:
        return blocked.seq >= mismatch.seq
    if not (blocked.missing or blocked.absent):
        return (
            True  # the library did not notice: what does not fit stays in its buffers, and a later call hangs
        )
    return judge(context.job, mismatch).kind != "changed"


def _misfits(context: Context, blocked: Blocked) -> bool:
    """Whether the call is an end of a send and receive that do not fit, which is reported as such."""
    wait = blocked.p2p
    if wait is None:
        return False
    end = (wait.rank, wait.row)
    return any(end in ((m.source, m.send_row), (m.target, m.recv_row)) for m in context.p2p_mismatches)


def _lacking(context: Context, blocked: Blocked, ranks: list[int]) -> list[Weighed]:
    """Findings for ranks that lack in one call: those with a dump, then those without, however many."""
    here = tuple(rank for rank in ranks if rank in context.job.ranks)
    gone = tuple(rank for rank in ranks if rank not in context.job.ranks)
    weight = context.graph.weight(here or gone)
    return [(weight, f, explain_ranks(context, blocked, r)) for r, f in ((here, 1), (gone, 0)) if r]


def _calls_of(context: Context, sink: tuple[int, ...]) -> list[Blocked]:
    """The blocked calls of a sink: those inside it, or those that lack its rank."""
    inside = [context.blocked[-1 - node] for node in sink if node < 0]
    if inside:
        return inside
    lacking = {b.index: b for rank in sink for b in context.lacking.get(rank, ())}
    return [lacking[index] for index in sorted(lacking)]


def _at_the_end(root: Finding) -> Finding:
    """What was found in the last moment of a job, less sure if nobody knows how long that moment lasted."""
    if root.waited_s is not None or root.cause not in WAITING:
        return root
    sure, asked = round(root.confidence * UNTIMED, 2), (*root.missing_evidence, say("at_the_end"))
    return replace(root, confidence=sure, missing_evidence=asked)


def _with_doubts(context: Context, root: Finding, doubts: Sequence[Doubt]) -> Finding:
    """Tells why a call that the dumps call completed is taken as unfinished."""
    for doubt in doubts:
        if doubt.proven and (context.job.groups[doubt.group].label, doubt.seq) == (root.group, root.sequence):
            text = say("false_completion", done=ranks_text(doubt.rows), late=ranks_text(doubt.late))
            return replace(root, evidence=(*root.evidence, text))
    return root


def _compose(
    context: Context,
    roots: list[Finding],
    warnings: list[Finding],
    files: Sequence[FileNote],
    options: DiagnoseOptions,
) -> Diagnosis:
    job = context.job
    bad = sum(note.status == "damaged" for note in files)
    trust = 0.97 if bad else 1.0
    roots = [replace(root, severity="root", confidence=round(root.confidence * trust, 2)) for root in roots]
    verdict = roots[0] if roots else None
    folded = _consequences(context, roots)
    calls = sum(len(view.trace.calls) for view in job.ranks.values())
    unsafe = [note for note in files if note.status == "damaged" and REFUSED in note.note]
    warnings = [*(_unsafe(context, note) for note in unsafe), *warnings]
    lost = bad > 0 and not calls
    status: Status = "ok" if job.ranks and not lost and not unsafe else "unclear"
    if lost:
        warnings.insert(0, context.warning("nothing_read"))
    if verdict is not None:
        status = "fault" if verdict.confidence >= SURE_ENOUGH else "unclear"
    listed = folded[: options.consequences]
    if len(folded) > len(listed):
        folded_up = context.root("folded", (), number=len(folded) - len(listed))
        listed.append(replace(folded_up, severity="consequence"))
    ranks = f"{len(job.ranks):,} of {job.world_size or len(job.ranks):,} ranks"
    return Diagnosis(
        status,
        verdict,
        (*roots, *listed, *warnings),
        tuple(files),
        job.world_size,
        tuple(job.ranks),
        (f"{ranks}, {count(len(job.groups), 'group')}, {calls:,} calls",),
        tuple(_summarise(group) for group in job.groups),
        tuple((rank, host) for rank in job.ranks if (host := job.host(rank))),
    )


def _unsafe(context: Context, note: FileNote) -> Finding:
    """A dump that would run code where another tool unpickles it: torch's never hold a global."""
    return context.warning("unsafe_pickle", path=note.path, what=note.note.partition(REFUSED)[0] + REFUSED)


def _consequences(context: Context, roots: list[Finding]) -> list[Finding]:
    """Blocked calls that are not themselves a root, in the order of ranks; the calls of one kind of group in one sentence."""
    told = {(root.group, root.sequence) for root in roots}
    kinds: dict[tuple[object, ...], list[Blocked]] = {}
    for blocked in context.blocked if roots else ():
        group, sequence = context.group(blocked), blocked.seq if blocked.seq >= 0 else None
        lacks = bool(blocked.missing or blocked.absent)
        # Sends and receives have no number to be told by.
        chained = sequence is None and not lacks and bool(context.graph.edges[-1 - blocked.index])
        if (group.label, sequence) in told and not chained:
            continue
        kind = re.sub(r"[\[\d].*", "", group.label).rstrip("_-")
        op = context.job.op(*min(blocked.rows.items()))
        several = sequence is not None and kind not in ("", group.label)
        kinds.setdefault((kind, op, lacks) if several else (blocked.index,), []).append(blocked)
    found = [_follows(context, calls, str(kind[0])) for kind, calls in kinds.items()]
    return sorted(found, key=lambda finding: (finding.waiting, finding.sentence))


def _follows(context: Context, calls: list[Blocked], kind: str) -> Finding:
    """What follows from a root, in one sentence."""
    first = min(calls, key=context.age)
    lacks = tuple(sorted({rank for call in calls for rank in call.missing + call.absent}))
    waiters = tuple(sorted({rank for call in calls for rank in call.rows}))
    facts = {"lacks": ranks_text(lacks) if lacks else "", "waits": ranks_wait(waiters)}
    if len(calls) > 1:
        op = context.job.op(*min(first.rows.items()))
        facts |= {"op": op, "number": str(len({call.group for call in calls})), "kind": kind}
    cause = "missing_rank" if lacks else "none_finished"
    found = context.root("follows", lacks, first, 0.0, cause, **facts)
    found = replace(found, severity="consequence", waiting=waiters, waited_s=None)
    return replace(found, group="", sequence=None) if len(calls) > 1 else found


def _summarise(group: GroupView) -> GroupSummary:
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    last = max((lane.last for lane in lanes), default=None)
    behind = tuple(rank for rank, lane in group.lanes.items() if last is not None and lane.last < last)
    first = min((lane.first for lane in lanes), default=None)
    known = (group.label, group.name, group.desc, group.backend, group.members, group.members_known)
    return GroupSummary(*known, first, last, behind)
