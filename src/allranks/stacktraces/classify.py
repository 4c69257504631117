"""From a capture to the report: what each rank does, whether the job is hung, and whose fault it is. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, starmap

from allranks.model.stacks import (
    IDLE_CHILD,
    VERBS,
    WAITS,
    Capture,
    ChildState,
    ProcessCapture,
    RankState,
    StackFrame,
    StacksReport,
)
from allranks.stacktraces import ras
from allranks.stacktraces.causes import Cause, find_cause
from allranks.stacktraces.patterns import StackPattern, load_patterns
from allranks.stacktraces.progress import (
    HangDecision,
    Stillness,
    decide_by_counts,
    decide_by_movement,
    decide_progress,
    may_be_slow,
)
from allranks.stacktraces.text import compress
from allranks.stacktraces.views import Children, ProcessView

#: How much a cause waits for others: 0 not at all, 3 most. The ranks of the lowest tier are to blame.
_TIERS = {
    **dict.fromkeys(("request_wait", "event_loop_idle"), 1),
    **dict.fromkeys(("store_wait", "p2p_wait", "rendezvous_wait", "cuda_wait"), 2),
    "collective_wait": 3,
}
#: Causes that do not end by themselves, whatever the marks say.
_FOR_GOOD = frozenset(
    {"lock_deadlock", "stopped", "gil_held_native", "d_state", "stdin_wait", "pipe_write_blocked", "unknown"}
)


def find_culprits(ranks: Mapping[int, RankState], hung: bool | None = True) -> tuple[int, ...]:
    """The ranks everybody else waits for; () when all wait alike.

    While nobody knows whether the job hangs, a rank is accused only if others wait or its cause cannot end.
    """
    if halted := _of_causes(ranks, {"stopped"}):
        return halted  # what others do meanwhile may be a wait for it: NCCL's own threads are stopped, too
    if hung is None and not any(_TIERS.get(state.cause, 0) >= 2 for state in ranks.values()):
        return _of_causes(ranks, _FOR_GOOD)
    tiers = {rank: _TIERS.get(state.cause, 0) for rank, state in ranks.items() if state.cause != "healthy"}
    if not tiers:
        return ()
    lowest = min(tiers.values())
    chosen = tuple(sorted(rank for rank, tier in tiers.items() if tier == lowest))
    if lowest == 0 or len(set(tiers.values())) > 1:
        return chosen
    if lowest == 1:
        return () if all(state.cause == "request_wait" for state in ranks.values()) else chosen
    return _minority(ranks)


def _of_causes(ranks: Mapping[int, RankState], causes: Collection[str]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, state in ranks.items() if state.cause in causes))


def _minority(ranks: Mapping[int, RankState]) -> tuple[int, ...]:
    """All wait for others: those who wait elsewhere than the clear majority, if there is one."""
    sites = {rank: (state.cause, state.operation, state.where) for rank, state in ranks.items()}
    counts = Counter(sites.values())
    (common, count), *rest = counts.most_common()
    if not rest or count * 2 <= len(ranks) or len(ranks) < 3:
        return ()
    return tuple(sorted(rank for rank, site in sites.items() if site != common))


def find_straggler(waited: Mapping[int, float]) -> tuple[int, ...]:
    """In a job that moves: the ranks for which the others spend their time waiting.

    `waited` is the share of snapshots in which a rank was found waiting for others.
    """
    waiters = [rank for rank, share in waited.items() if share >= 0.75]
    others = [rank for rank, share in waited.items() if share <= 0.25]
    return tuple(sorted(others)) if waiters and len(waiters) >= len(others) else ()


def write_summary(
    capture: Capture, progress: HangDecision, culprits: Sequence[int], ranks: Mapping[int, RankState]
) -> str:
    """The one sentence of the report."""
    if not ranks:
        return "no rank could be looked at"
    if progress.hung is False:
        return _describe_moving(progress, culprits, ranks)
    lead = "" if progress.hung else "cannot tell stuck from slow (" + progress.reason + "): "
    if not culprits:
        return lead + _describe_no_culprit(capture, ranks)
    alike: dict[str, list[int]] = {}
    for rank in culprits:
        alike.setdefault(_describe_one(ranks[rank], subject=False), []).append(rank)
    parts = [
        f"ranks {compress(same)}: each {text}" if len(same) > 1 else _describe_one(ranks[same[0]])
        for text, same in alike.items()
    ]
    if len(parts) > 3:
        parts = [f"ranks {compress(culprits)}: the first {next(iter(alike))}"]
    return lead + "; ".join(parts) + _describe_waiters(culprits, ranks)


def _describe_one(state: RankState, subject: bool = True) -> str:
    name = f"rank {state.rank} " if subject else ""
    line = f" in {_swap(state.where)}" if state.where else ""
    active = [c for c in state.children if c.cause not in IDLE_CHILD]
    child = min(
        active, key=lambda c: (c.cause != "busy_python", c.cause == "child_process_wait"), default=None
    )
    tail = f" (its child process {child.child} {_at(child)})" if child else ""
    unreadable = f"cannot be read ({state.evidence})"
    verb = unreadable if state.cause == "unknown" else verb_of(state, VERBS)
    return f"{name}{verb}{line}{tail}"


def verb_of(state: RankState, verbs: Mapping[str, str]) -> str:
    """What a rank does, in a few words."""
    polls = state.cause == "sleep" and state.evidence.startswith("looks again and again")
    return "looks again and again for a change" if polls else verbs.get(state.cause, state.cause)


def _swap(where: str) -> str:
    """`data.py:31 in load_batch` reads better in a sentence as `load_batch (data.py:31)`."""
    line, _, name = where.partition(" in ")
    return f"{name} ({line})" if name else where


def _describe_waiters(culprits: Sequence[int], ranks: Mapping[int, RankState]) -> str:
    waiting = [state for rank, state in ranks.items() if rank not in culprits]
    if not waiting:
        return ""
    plain = {"collective_wait": "a collective", "p2p_wait": "a message or a remote call"}
    names = (s.operation or plain.get(s.cause, s.cause) for s in waiting)
    operation, count = Counter(names).most_common(1)[0]
    noun = "rank waits" if count == 1 else "ranks wait"
    return f" while {count} {noun} in {operation}"


def _describe_no_culprit(capture: Capture, ranks: Mapping[int, RankState]) -> str:
    world = capture.world_size
    missing = sorted(set(range(world)) - set(ranks)) if world else []
    if missing:
        return f"{len(ranks)} of {world} ranks wait; ranks {compress(missing)} were not found on the nodes looked at"
    causes = Counter(state.cause for state in ranks.values())
    if set(causes) == {"request_wait"}:
        return f"all {len(ranks)} ranks are idle and wait for requests"
    if set(causes) == {"rendezvous_wait"}:
        if world == len(ranks):
            same = "do they use one address (MASTER_ADDR, MASTER_PORT, init_method) and one world_size?"
            return f"all {world} ranks are there and wait for each other to form a process group: {same}"
        return f"all {len(ranks)} ranks wait for ranks that have not come: was a process not started, or is WORLD_SIZE too large?"
    if not any(_TIERS.get(state.cause, 0) >= 2 for state in ranks.values()):
        parts = "; ".join(_describe_one(ranks[rank]) for rank in sorted(ranks)[:3])
        return f"no rank waits for another one; {parts}"
    sites = Counter((state.operation or state.cause, state.where) for state in ranks.values())
    if len(sites) == 1:
        (operation, where), _ = sites.most_common(1)[0]
        rest = "look at the dumps (allranks diagnose), the network or the device"
        return f"all {len(ranks)} ranks wait in {operation} at {where}: their stacks do not differ; {rest}"
    groups = []
    for site, _ in sites.most_common(4):
        there = [rank for rank, s in ranks.items() if (s.operation or s.cause, s.where) == site]
        groups.append(f"{compress(there)} in {site[0]} at {site[1]}")
    rest = "allranks diagnose on the dumps tells who is wrong"
    return f"every rank waits for others, in different places: {'; '.join(groups)}; {rest}"


def _describe_moving(progress: HangDecision, culprits: Sequence[int], ranks: Mapping[int, RankState]) -> str:
    if not culprits:
        return f"not hung: {progress.reason}"
    names = "; ".join(_describe_one(replace(ranks[rank], cause="slow")) for rank in culprits[:3])
    return f"not hung: {progress.reason}; {names} while the others wait for it"


_ALWAYS = frozenset({"stopped", "d_state"})


def classify(
    capture: Capture,
    patterns: Sequence[StackPattern] | None = None,
    stillness: Stillness | None = None,
    quiet_s: float = 0.0,
) -> StacksReport:
    """The report of a capture; a rank that cannot be read is `unknown` with the reason.

    `quiet_s`: who watches the job has seen no progress for so long, whatever marks and counts look like.
    """
    table = load_patterns() if patterns is None else patterns
    causes, views, states = _classify_ranks(capture, table)
    progress = _decide_progress(capture, causes, views, states, stillness or Stillness(), quiet_s)
    states, culprits = _judge(capture, progress, states, table)
    if not culprits and progress.hung is not False:
        culprits = _behind(capture)
    return StacksReport(
        hung=progress.hung,
        culprits=culprits,
        sentence=write_summary(capture, progress, culprits, states),
        ranks=states,
        reason=progress.reason,
        ras=ras.describe(capture.ras),
        notes=(*capture.notes, *(f"rank {p.rank}: {note}" for p in capture.processes for note in p.notes)),
    )


def _decide_progress(
    capture: Capture,
    causes: Mapping[int, Cause],
    views: Mapping[int, ProcessView],
    states: Mapping[int, RankState],
    limits: Stillness,
    quiet_s: float,
) -> HangDecision:
    """Whether the job hangs: by marks, by NCCL's counts, by who watches it, and by what the ranks wait for."""
    progress = decide_progress({one.rank: one for one in capture.marks}, views, causes, limits)
    times = [
        shot.at_s for process in capture.processes for shot in process.snapshots if shot.at_s is not None
    ]
    if progress.hung is None and not capture.marks:
        progress = decide_by_movement(views, causes, max(times, default=0.0) - min(times, default=0.0))
    if progress.hung is None:
        progress = decide_by_counts(progress, ras.stood_still_s(capture.ras), limits)
    if quiet_s and not progress.hung:
        progress = HangDecision(True, f"no rank has made progress for {quiet_s:.0f} s")
    if progress.hung and {state.cause for state in states.values()} == {"request_wait"}:
        return HangDecision(False, "an idle server: every rank waits for requests")
    slow = _waits_for_command(states) or may_be_slow(find_culprits(states), capture.marks, views, causes)
    if progress.hung and not quiet_s and slow:
        return HangDecision(None, slow)
    return progress


def _waits_for_command(states: Mapping[int, RankState]) -> str:
    """Why silence proves nothing: the culprits wait for commands that work (torch builds an extension), or for a lock meanwhile."""
    guilty = [states[rank] for rank in find_culprits(states)]
    works = [state.rank for state in guilty if state.command_works]
    if not works or not all(state.command_works or state.cause == "file_lock_wait" for state in guilty):
        return ""
    return f"rank {works[0]} waits for a command that works"


def _classify_ranks(
    capture: Capture, table: Sequence[StackPattern]
) -> tuple[dict[int, Cause], dict[int, ProcessView], dict[int, RankState]]:
    """What each rank does, with its child processes, by rank."""
    families: dict[int, list[ProcessCapture]] = {}
    for process in capture.processes:
        if process.child is not None and not process.is_helper:
            families.setdefault(process.rank, []).append(process)
    causes: dict[int, Cause] = {}
    views: dict[int, ProcessView] = {}
    states: dict[int, RankState] = {}
    names = {one.pid: _name(one) for one in capture.processes}
    for process in (one for one in capture.processes if one.child is None):
        children = families.get(process.rank, [])
        read = any(shot.stacks for child in children for shot in child.snapshots)
        cause, view = find_cause(process, table, Children(bool(children), read))
        causes[process.rank], views[process.rank] = cause, view
        states[process.rank] = _with_holder(_state(process, cause, children, table), view, names)
    return causes, views, states


def _name(process: ProcessCapture) -> tuple[str, int]:
    child = "" if process.child is None else f"child {process.child} of "
    return f"{child}rank {process.rank}", process.rank


def _with_holder(
    state: RankState, view: ProcessView, names: Mapping[int | None, tuple[str, int]]
) -> RankState:
    """The rank with the process that holds the lock on a file for which it waits, where the kernel tells."""
    files = (thread.now.file for thread in view.threads if thread.now is not None)
    pid = next((file.removeprefix("lock ") for file in files if file.startswith("lock ")), "")
    if state.cause != "file_lock_wait" or not pid.isdecimal():  # of a bundle, anything
        return state
    name, rank = names.get(int(pid), (f"process {pid}, which is not of this job", None))
    return replace(state, evidence=f"{state.evidence}, held by {name}", held_by=rank)


def _behind(capture: Capture) -> tuple[int, ...]:
    """The ranks that NCCL RAS knows to be behind, where stacks show no difference."""
    pids = {one.pid for one in ras.find_laggards(capture.ras)}
    return tuple(sorted(p.rank for p in capture.processes if p.child is None and p.pid in pids))


def _judge(
    capture: Capture, progress: HangDecision, states: dict[int, RankState], table: Sequence[StackPattern]
) -> tuple[dict[int, RankState], tuple[int, ...]]:
    """Causes and culprits in the light of progress: a wait is not a fault while the job moves."""
    if progress.hung is not False:
        return states, find_culprits(states, progress.hung)
    if held := _of_causes(states, _ALWAYS):
        return states, held
    if {state.cause for state in states.values()} == {"request_wait"}:
        return states, ()
    slow = find_straggler(_waited(capture, table))
    judged = {rank: _in_motion(state, rank in slow, bool(slow)) for rank, state in states.items()}
    return judged, slow


def _in_motion(state: RankState, slow: bool, somebody_slow: bool) -> RankState:
    if slow:
        evidence = f"the others wait for it in every look; it {state.evidence}"
        return replace(state, cause="slow", evidence=evidence)
    if somebody_slow and state.cause in WAITS:
        return state
    return replace(state, cause="healthy", evidence=f"makes progress; in the last sample: {state.evidence}")


def _waited(capture: Capture, table: Sequence[StackPattern]) -> dict[int, float]:
    """For each rank the share of its snapshots in which it waited for others."""
    shares = {}
    for process in capture.processes:
        if process.child is None and process.snapshots:
            looks = [replace(process, snapshots=(snapshot,)) for snapshot in process.snapshots]
            waits = [find_cause(look, table)[0].cause in WAITS for look in looks]
            shares[process.rank] = sum(waits) / len(waits)
    return shares


def _state(
    process: ProcessCapture, cause: Cause, captures: Sequence[ProcessCapture], table: Sequence[StackPattern]
) -> RankState:
    found = [(child, find_cause(child, table)[0]) for child in captures]
    children = tuple(_child(*one) for one in found)
    kernels = f"; on the device: {', '.join(process.kernels[:3])}" if process.kernels else ""
    lost = _LOST_TASK if _lost_task(cause, [one.stack for _, one in found]) else ""
    evidence = cause.evidence + lost + _child_tail(cause, children) + kernels
    known = {"host": process.host, "pid": process.pid, "notes": process.notes, "children": children}
    return RankState(**{**vars(cause), "rank": process.rank, "evidence": evidence, **known})


def _child_tail(cause: Cause, children: tuple[ChildState, ...]) -> str:
    """What the children do belongs to the evidence of a rank that waits for them."""
    waits = ("dataloader_wait", "child_process_wait", "subprocess_wait", "shutdown_join", "queue_wait")
    if cause.cause not in waits:
        return ""
    busy = [child for child in children if child.cause not in (*IDLE_CHILD, "unknown")]
    commands = [child for child in busy if child.cause != "child_process_wait"]
    busy = commands or busy  # a shell waits for its command: that one is named
    does = {c: c.evidence if c.cause == "lock_deadlock" else _at(c) for c in busy[:4]}  # whose lock it is
    return "".join(f"; child {c.child} (pid {c.pid}) {text}" for c, text in does.items())


def _at(child: ChildState) -> str:
    if child.cause == "gone":
        return child.evidence
    does = VERBS.get(child.cause, child.cause)
    return f"{does} at {child.where}" if child.where else does


_LOST_TASK = "; every worker of its pool waits for a task: the result is lost, most likely with a worker that was killed"


def _lost_task(cause: Cause, workers: Sequence[Sequence[StackFrame]]) -> bool:
    """Whether a process waits for a result of its pool (multiprocessing), and no worker has a task: each asks for the next."""
    waits = any(frame.file.endswith("multiprocessing/pool.py") for frame in cause.stack)
    pool = [stack for stack in workers if any(f.file.endswith("multiprocessing/pool.py") for f in stack)]
    return waits and bool(pool) and all(any(starmap(_asks_for_task, pairwise(stack))) for stack in pool)


def _asks_for_task(inner: StackFrame, outer: StackFrame) -> bool:
    return inner.file.endswith("multiprocessing/queues.py") and outer.file.endswith("multiprocessing/pool.py")


def _child(process: ProcessCapture, cause: Cause) -> ChildState:
    if (ended := _how_ended(process)) is not None:
        return ChildState(process.child or 0, process.pid, "gone", "", ended)
    if cause.cause == "network_io" and cause.stack and cause.stack[0].name.endswith("accept"):
        cause = replace(cause, cause="request_wait", evidence="a server that waits for a connection")
    words = process.title.split(maxsplit=1)  # arguments may hold secrets
    program = f"program {words[0].rsplit('/', 1)[-1]}" if words and not cause.stack else ""
    known = (process.pid, cause.cause, cause.where or program, cause.evidence)
    return ChildState(process.child or 0, *known)


def _how_ended(process: ProcessCapture) -> str | None:
    """How a process ended that its parent has not waited for; None while it runs."""
    facts = process.snapshots[-1].facts[:1] if process.snapshots else ()
    if not facts or facts[0].state != "Z":
        return None
    if facts[0].ended is None:
        return "has ended"
    number, code = facts[0].ended & 0x7F, facts[0].ended >> 8 & 0xFF
    return f"was killed by {_signal_name(number)}" if number else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
