"""What a silence is, from several looks at it: a stall, a hang, or over. Pure.

*Stalled*: nobody has moved for longer than usual. *Hung*: it will not move by itself. That is certain when it follows from
what was seen: calls that do not match, ranks that wait for each other, a process that is gone, a rank all of whose threads
wait without limit for one another, a sleep that ends after the cap. Else only time tells: a rank whose stack moves, that
compiles or waits for a command that works has time until the cap; any other one until several times the longest pause so
far. Sleeps between retries, waits for a signal, garbage collection, saving, swapping and a stopped process end by themselves;
they are not told from a hang before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from allranks.incidents.policy import CERTAIN_MISMATCH, PROGRAM_FAULT
from allranks.model.diagnosis import Finding
from allranks.model.formatting import duration, ranks_text
from allranks.model.stacks import (
    PLAIN_VERBS,
    WAITS,
    Capture,
    ProcessCapture,
    RankState,
    StackFrame,
    StacksReport,
    ThreadFacts,
    is_user_file,
)
from allranks.stacktraces.classify import verb_of

State = Literal["stalled", "hung", "ended"]
TRUSTED = 0.6  # of a verdict: a less confident one does not make a hang certain
SURE_OF_SETUP = 0.8  # two names may mean one host
WORKING = frozenset(
    {"busy_python", "native_call", "gil_held_native", "gil_contention", "cuda_kernel", "slow", "healthy"}
)
SAVING = frozenset({"checkpoint_io", "d_state", "file_lock_wait", "network_io"})
#: Files that are on a stack while torch or Triton compile, but not while compiled code runs.
COMPILING = (
    *("torch/_dynamo/convert_frame", "torch/_dynamo/symbolic_convert", "torch/_inductor/compile_fx"),
    *("torch/_inductor/async_compile", "torch/_inductor/codecache", "torch/_inductor/graph.py"),
    *(
        "torch/_inductor/scheduler",
        "torch/_inductor/codegen/",
        "torch/_functorch/_aot_autograd/graph_compile",
    ),
    *("triton/compiler", "triton/runtime/build", "torch/utils/cpp_extension"),
)
#: Waits of Python's own, which only a thread or a child of the same process can end.
_INSIDE = frozenset(
    {"lock_deadlock", "queue_wait", "shutdown_join", "sleep", "dataloader_wait", "event_loop_idle"}
    | {"subprocess_wait", "child_process_wait"}
)
#: Waits for another rank. One for the device may be work of its own, one for a key of a store may wait for anybody.
_FOR_A_RANK = frozenset({"collective_wait", "p2p_wait", "rendezvous_wait"})
_FOR_A_CHILD = frozenset({"subprocess_wait", "child_process_wait", "dataloader_wait"})
#: Threads that watch, report or copy, and wake nobody.
_BACKGROUND = ("/tqdm/", "/wandb/", "/tensorboard", "/allranks/", "/torch/utils/data/_utils/pin_memory")
#: How the names of native threads of torch's libraries begin: they serve collectives, and wake no Python code that waits otherwise.
_OF_TORCH = ("pt_", "gloo", "nccl", "cuda")
_PRIVATE = 0x80  # flag of a futex that no other process can wake
_STILL_TICKS = 2  # clock ticks between two looks that are not work


@dataclass(frozen=True)
class ThreadWait:
    """What the kernel says of one thread."""

    wait_s: float | None  # how long its system call may last; -1 without limit, None when not known
    inside: bool  # only its own process can end it
    piped: bool = False  # it waits for the other end of a pipe
    still: bool = True  # neither CPU time nor a context switch during the look


@dataclass(frozen=True)
class Activity:
    """What the kernel says of a rank and its child processes at one look."""

    ticks: int = 0  # CPU time of these threads
    threads: tuple[ThreadWait, ...] = ()  # of Python, but not those that only watch or report
    children: tuple[ThreadWait, ...] = ()  # the same of child processes; of another program its first one
    switches: int = 0  # how often these threads have waited


@dataclass(frozen=True)
class Look:
    """One look at a silent job."""

    at_s: float
    quiet_s: float
    report: StacksReport | None
    moved: bool  # some rank made progress while we looked
    calling: bool = False  # some rank completed calls of the same attempt at its step
    finding: Finding | None = None  # the verdict on all evidence, if this is a hang
    activity: Mapping[int, Activity] = field(default_factory=dict)  # by rank
    absent: tuple[int, ...] = ()  # ranks whose process has ended
    behind: bool = False  # the others have given these ranks up and continue


@dataclass(frozen=True)
class StallLimits:
    """Seconds without progress."""

    hung_s: float  # after which a rank that shows nothing is hung
    cap_s: float  # that anything may take
    longest_s: float = 0.0  # pause that this job has had
    trained: bool = False  # it has made steps, or many calls: without them it does nothing


@dataclass(frozen=True)
class StallOutcome:
    """What it is, and why. `certain`: it follows from what was seen, not from the time that has passed."""

    state: State
    reason: str
    certain: bool = False
    livelock: bool = False  # every rank runs, and none gets further
    hung_at_s: float = 0.0  # the silence at which a stall is a hang, where that is not known from the limits


def judge_stall(looks: Sequence[Look], limits: StallLimits) -> StallOutcome:
    """What several looks at the same silence show."""
    last = looks[-1]
    if last.moved:
        return StallOutcome("ended", "the ranks move again")
    if last.calling and last.quiet_s < limits.cap_s:
        return StallOutcome("stalled", "no step was done, but calls of it are being completed")
    if len(looks) < 2:
        return StallOutcome("stalled", "one look cannot tell a pause from a hang")
    if reason := _certain(looks, limits):
        return StallOutcome("hung", reason, certain=True)
    if (began_s := _remote_call_began_s(looks, limits)) is not None and (
        last.quiet_s - began_s < limits.hung_s
    ):
        doing = (
            "the ranks call each other (RPC)"
            if began_s == last.quiet_s
            else _describe(find_guilty(last), last)
        )
        return StallOutcome("stalled", doing, hung_at_s=began_s + limits.hung_s)
    if all(map(_all_wake, looks[-2:])):
        loop = _shared_loop(looks)
        if last.quiet_s < limits.cap_s or not (limits.trained or loop):
            return StallOutcome("stalled", "no rank is in a collective, and every rank wakes now and then")
        what = "made a step or a call" if limits.trained else "come to a first step or call"
        return StallOutcome(
            "hung", f"no rank has {what} for {duration(last.quiet_s)}; {loop or _places(last)}", livelock=True
        )
    silent = f"no progress for {duration(last.quiet_s)}"
    if last.quiet_s >= limits.cap_s:
        return StallOutcome(
            "hung", f"{silent}, more than the {duration(limits.cap_s)} that anything may take"
        )
    guilty = find_guilty(last)
    patient = next(filter(None, (_works(state, looks) for state in guilty)), "")
    if patient:
        return StallOutcome("stalled", patient)
    if last.quiet_s < limits.hung_s:
        return StallOutcome("stalled", _describe(guilty, last))
    known = f"3 times the longest pause so far ({duration(limits.longest_s)})" if _by_history(limits) else ""
    why = known or f"the {duration(limits.hung_s)} that a pause may take"
    return StallOutcome("hung", f"{silent}, more than {why}: {_describe(guilty, last)}")


def _all_wake(look: Look) -> bool:
    """Whether no rank waits in a recorded call and none sleeps through a look: a job that works by messages of another kind."""
    states = look.report.ranks if look.report is not None else {}
    recorded = look.finding is not None and look.finding.kind != ""
    apart = not recorded and all(s.cause not in ("collective_wait", "cuda_wait") for s in states.values())
    mains = [
        activity.threads[0] for rank in states if (activity := look.activity.get(rank)) and activity.threads
    ]
    return apart and 1 < len(mains) == len(states) and not any(main.still for main in mains)


def _remote_call_began_s(looks: Sequence[Look], limits: StallLimits) -> float | None:
    """How long the silence had lasted when the remote call that others wait for was seen first; None outside of RPC.

    Remote calls are not recorded. One that ends wakes the rank that ran it and the one that asked for it.
    """
    last = looks[-1]
    states = list(last.report.ranks.values()) if last.report is not None else []
    if not any(map(_serves, states)) or not all(_serves(s) or s.cause == "p2p_wait" for s in states):
        return None
    guilty = {state.rank for state in find_guilty(last)}
    began_s = 0.0 if limits.trained else looks[0].quiet_s
    for before, look in pairwise(looks):
        woke = {r for r, a in look.activity.items() if a.switches != before.activity.get(r, a).switches}
        if len(woke) > 1 and (woke & guilty or not guilty):
            began_s = look.quiet_s
    return began_s


def _serves(state: RankState) -> bool:
    """Whether it is in RPC: native threads run Python there when another rank asks for it."""
    return any("/distributed/rpc/" in frame.file for frame in state.stack)


def _shared_loop(looks: Sequence[Look]) -> str:
    """The loop that all ranks are in, by the last looks; "" when they are in several, or in calls of others (RPC)."""
    last = looks[-1].report
    states = list(last.ranks.values()) if last is not None else []
    frames = [next((f for f in state.stack if is_user_file(f.file)), None) for state in states]
    places = {(f.name, f.file) if f is not None else None for f in frames}
    serving = any(map(_serves, states))
    same = all(_same_functions(state.rank, looks[-LOOP_LOOKS:]) for state in states)
    if len(places) != 1 or None in places or serving or not same:
        return ""
    return f"all ranks run the same loop at {states[0].where or 'an unknown line'}"


def _places(look: Look) -> str:
    """Where every rank is, ranks at one place together."""
    found: dict[str, list[int]] = {}
    for state in look.report.ranks.values() if look.report is not None else ():
        found.setdefault(state.where or "an unknown line", []).append(state.rank)
    return "; ".join(f"{ranks_text(ranks)} at {where}" for where, ranks in list(found.items())[:8])


def _by_history(limits: StallLimits) -> bool:
    return limits.longest_s * HISTORY_FACTOR >= limits.hung_s


HISTORY_FACTOR = 3.0  # times the longest pause
FLOOR_FACTOR = 8.85  # times the shortest silence that is a stall


POLL_S = 0.5  # a look may begin so much later than it should
SPARE_S = 3.0  # that a look may end before the limit which it is made for
LOOP_LOOKS = 4  # in which a rank must be in the same functions


def limits_of(floor_s: float, cap_s: float, longest_s: float, trained: bool = False) -> StallLimits:
    """By what this job has shown so far. A pause comes on top of what the job does between two signs of progress."""
    hung_s = max(FLOOR_FACTOR * floor_s + longest_s, HISTORY_FACTOR * longest_s)
    return StallLimits(min(cap_s, hung_s), cap_s, longest_s, trained)


def next_look_s(quiet_s: float, limits: StallLimits, took_s: float = 0.0, hung_at_s: float = 0.0) -> float:
    """The length of the silence at which to look again: each time a third longer, and so that a look which takes somewhat longer
    than the last one ends before a limit is reached."""
    later = min(quiet_s * 4 / 3, quiet_s + limits.hung_s)
    near = (limit for limit in (limits.hung_s, hung_at_s, limits.cap_s) if quiet_s < limit < later)
    return next((limit - POLL_S - 1.2 * took_s for limit in near), later)


def left_s(quiet_s: float, limits: StallLimits, hung_at_s: float = 0.0) -> float:
    """How long to wait before a look is judged that has ended just before a limit: what it saw counts if nobody moves until then."""
    every = (limits.hung_s, hung_at_s, limits.cap_s)
    return next((one - quiet_s + 1e-3 for one in every if 0.0 < one - quiet_s <= min(SPARE_S, one / 20)), 0.0)


def find_guilty(look: Look) -> list[RankState]:
    """The culprits, or those of them that the verdict on all evidence names: a collective of NCCL is waited for in
    whatever CUDA call comes next, in a stack that looks like work."""
    report, found = look.report, look.finding
    if report is None:
        return []
    guilty = [report.ranks[rank] for rank in report.culprits if rank in report.ranks]
    named = found.ranks if found is not None and found.confidence >= TRUSTED else ()
    return [state for state in guilty if state.rank in named] or guilty


def describe_pause(looks: Sequence[Look]) -> str:
    """What the ranks did that the others waited for; "" when nothing tells."""
    still = [look for look in looks if not look.moved and look.report is not None and look.report.culprits]
    seen = still[-1] if still else None
    return _describe(find_guilty(seen), seen) if seen is not None else ""


# certain


def _certain(looks: Sequence[Look], limits: StallLimits) -> str:
    """Why it cannot move by itself; "" when it may."""
    last = looks[-1]
    found, states = last.finding, last.report.ranks.values() if last.report is not None else ()
    named = found.ranks if found is not None else ()
    idle = [
        state
        for state in states
        if (state.cause not in _FOR_A_RANK and state.cause != "unknown" and not _of_waiting(state, last))
        or (state.rank in named and 0.0 < state.confidence < TRUSTED)  # its wait is only a guess
    ]
    if found is not None and found.cause in CERTAIN_MISMATCH:  # who of them is wrong may not be
        return f"the calls of the ranks do not match: {found.sentence}"
    if found is not None and found.cause == "setup_mismatch" and found.confidence >= SURE_OF_SETUP:
        return f"these ranks cannot meet: {found.sentence}"
    if found is not None and found.confidence < TRUSTED:
        found = None
    if found is not None and found.cause in PROGRAM_FAULT and not idle:
        return f"the calls of the ranks do not match: {found.sentence}"
    if found is not None and found.ranks and set(found.ranks) <= set(last.absent):
        return f"the others wait for a process that has ended: {found.sentence}"
    if found is not None and found.ranks and states and not idle and found.cause != "none_finished":
        return f"every rank waits for another: {found.sentence}"
    alone = bool(last.absent) and len(states) == 1  # all others have left: it keeps the job from its end
    waited = any(state.cause in WAITS for state in states) or (found is not None and bool(found.ranks))
    if not (last.behind or alone or waited):  # the boxes tell it too: on a GPU a wait may look like work
        return ""  # nobody waits for another rank
    return next(filter(None, (_never_wakes(state, looks, limits) for state in find_guilty(last))), "")


def _of_waiting(state: RankState, look: Look) -> bool:
    """Whether it waits for a lock on a file that a rank holds which itself waits for another rank."""
    holder = look.report.ranks.get(state.held_by) if look.report and state.held_by is not None else None
    return holder is not None and holder.rank != state.rank and holder.cause in _FOR_A_RANK


def _never_wakes(state: RankState, looks: Sequence[Look], limits: StallLimits) -> str:
    """Why a rank that the others wait for will not move; "" when it may."""
    before, now = (look.activity.get(state.rank, Activity()) for look in looks[-2:])
    if (
        not now.threads
        or state.cause == "stopped"
        or now.ticks - before.ticks > _STILL_TICKS
        or _serves(state)
    ):
        return ""
    # a DataLoader asks its workers again and again
    threads = (*(() if state.cause == "dataloader_wait" else now.threads), *now.children)
    if not threads or not all(thread.still for thread in threads):
        return ""
    left = [t.wait_s for t in threads if t.wait_s is not None and t.wait_s > limits.cap_s]
    inside = state.cause in _INSIDE and all(
        t.wait_s == -1.0 and (t.inside or (t.piped and now.children and state.cause in _FOR_A_CHILD))
        for t in threads
        if t.wait_s not in left
    )
    at = f"rank {state.rank} at {state.where or 'an unknown line'}"
    if len(left) == len(threads) or (left and inside):
        verb = PLAIN_VERBS.get(state.cause, "waits")
        return f"{at} {verb}, and nothing in it moves for another {duration(min(left))}"
    if inside:
        return f"{at} waits without limit, and no thread of it can wake another ({state.cause.replace('_', ' ')})"
    return ""


# patience


def _works(state: RankState, looks: Sequence[Look]) -> str:
    """Why a rank has time until the cap, or "" when it has not."""
    name = f"rank {state.rank}"
    if _compiles(state):
        return f"{name} compiles"
    if state.command_works:
        return f"{name} waits for a command that works"
    if state.cause in WORKING | SAVING and not _same_functions(state.rank, looks):
        return f"{_does(state)}, and its stack moves"
    return ""


def _same_functions(rank: int, looks: Sequence[Look]) -> bool:
    """Whether the rank was in the same functions at every look (lines inside a loop may differ)."""
    seen = set()
    for look in looks:
        state = look.report.ranks.get(rank) if look.report is not None else None
        if state is not None and state.stack:
            seen.add(tuple((frame.name, frame.file) for frame in state.stack if not frame.native))
    return len(seen) <= 1


def _describe(guilty: Sequence[RankState], look: Look) -> str:
    if not guilty:
        waits = look.report is not None and look.report.ranks
        return "every rank waits for another" if waits else "what the ranks do could not be read"
    return ", ".join(map(_does, guilty[:3]))


def _compiles(state: RankState) -> bool:
    return any(part in frame.file for frame in state.stack for part in COMPILING)


def _does(state: RankState) -> str:
    """ "rank 1 sleeps at train.py:7 in load"."""
    if not state.where and all(frame.native for frame in state.stack):
        return f"rank {state.rank} has no Python frames: it starts, exits or could not be read"
    verb = "compiles" if _compiles(state) else verb_of(state, PLAIN_VERBS)
    return f"rank {state.rank} {verb} at {state.where or 'an unknown line'}"


# from captures


def find_activity(captures: Sequence[Capture]) -> dict[int, Activity]:
    """By rank; of several captures of a rank the last one counts."""
    found: dict[int, list[ProcessCapture]] = {}
    for capture in captures:
        for process in capture.processes:
            found.setdefault(process.rank, []).append(process)
    return {rank: _activity(processes) for rank, processes in found.items()}


def _activity(processes: Sequence[ProcessCapture]) -> Activity:
    ticks = switches = 0
    found: tuple[list[ThreadWait], list[ThreadWait]] = ([], [])
    for process in processes:
        shots = [shot for shot in process.snapshots if shot.facts]
        if not shots or process.is_helper:
            continue
        first, last = ({fact.tid: fact for fact in shot.facts} for shot in (shots[0], shots[-1]))
        for tid in _telling(process, shots[-1].facts):
            ticks += last[tid].ticks
            switches += last[tid].switches
            found[process.child is not None].append(_thread(first.get(tid, last[tid]), last[tid]))
    return Activity(ticks, tuple(found[0]), tuple(found[1]), switches)


def _telling(process: ProcessCapture, facts: Sequence[ThreadFacts]) -> list[int]:
    """The main thread, and those that may wake it: they run Python, or wait for the network in native code."""
    stacks = process.snapshots[-1].stacks
    python = [one for one in stacks if any(not frame.native for frame in one.frames)]
    able = {one.tid for one in python if not any(map(_is_background, one.frames))}
    able |= {fact.tid for fact in facts if _awaits_network(fact)} - {one.tid for one in python}
    return [fact.tid for number, fact in enumerate(facts) if number == 0 or fact.tid in able]


def _awaits_network(fact: ThreadFacts) -> bool:
    """A runtime of Rust or C++, as libraries of object stores have. One descriptor of a loop is its own."""
    network = fact.file.startswith("socket:") or (fact.file.startswith("epoll ") and fact.file != "epoll 1")
    return network and not fact.comm.lower().startswith(_OF_TORCH)


def _is_background(frame: StackFrame) -> bool:
    """Also the thread of a pool that replaces workers: the result of one that died never comes."""
    return any(part in frame.file for part in _BACKGROUND) or frame.name.endswith("_handle_workers")


def _thread(first: ThreadFacts, last: ThreadFacts) -> ThreadWait:
    still = (first.ticks, first.switches) == (last.ticks, last.switches) and last.state in ("S", "D")
    futex = last.syscall == "futex" and len(last.args) > 1 and bool(last.args[1] & _PRIVATE)
    # an event loop that watches one descriptor watches its own: threads wake it with it
    inside = futex or last.file == "epoll 1" or last.syscall in ("wait4", "waitid")
    return ThreadWait(last.wait_s, inside, last.file.startswith("pipe:"), still)
