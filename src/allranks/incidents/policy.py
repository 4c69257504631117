"""Is it hung or slow, and what to do about it. Pure: facts, budget and options in; an action and its reason out.

`judge` tells a hang from slowness. One look is never enough: a rank may sleep, compile, save or collect garbage for longer
than usual. A rank that works (its stack or its CPU moves) gets patience up to the cap; one that waits for nobody and does
not move is hung at the second look; one that burns CPU in the same functions is hung at the third. All ranks at once may
pause for a minute.

`decide_action` is asked when evidence is already on disk. A fault that is nobody's (all entered, none finished) is
treated as the network's or a device's and never blamed on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from allranks.model.incident import Action, ActionKind
from allranks.model.options import option
from allranks.model.stacks import RankState, StacksReport

WORKING = frozenset(
    {"busy_python", "native_call", "gil_held_native", "gil_contention", "cuda_kernel", "slow", "healthy"}
)
SAVING = frozenset({"checkpoint_io", "d_state", "file_lock_wait", "network_io"})
COMPILING = (
    *("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/", "triton/compiler"),
    "/torch/utils/cpp_extension",
)
#: All ranks pause on their own, without a wait for another: a pause that nobody announced, or none of them comes back.
ALL_IDLE_S = 60.0


@dataclass(frozen=True)
class Look:
    """One look: when, how long the job had been silent, and what the stacks said."""

    at_s: float
    quiet_s: float
    report: StacksReport | None
    moved: bool  # some rank made progress while we looked
    calling: bool = False  # some rank completed calls of the same attempt at its step
    blamed: tuple[int, ...] = ()  # the ranks that the others wait for, by the verdict on all evidence
    crossed: bool = False  # the calls of the ranks block each other, by that verdict


def judge(looks: list[Look], cap_s: float) -> tuple[bool | None, str]:
    """True hung, False not hung, None look again; with the reason."""
    last = looks[-1]
    if last.moved:
        return False, "a rank made progress between two samples: slow, not hung"
    if last.calling and last.quiet_s < cap_s:
        return None, "no step was done, but calls of it are being completed: sampling again"
    if len(looks) < 2:
        return None, "one sample cannot tell stuck from slow: sampling again"
    silent = f"no progress for {last.quiet_s:.1f} s"
    still = f"{silent} over {len(looks)} samples"
    if last.report is None:
        return True, f"{still} (no stacks could be read)"
    guilty = _guilty(last.report, last.blamed)
    if not guilty:
        return True, f"{still}; every rank waits for another"
    if last.quiet_s >= cap_s:
        return True, f"{silent}, more than the {cap_s:g} s that anything may take"
    patience = _pause_of_all(last, guilty) or next(filter(None, (_patience(s, looks) for s in guilty)), "")
    if patience:
        return None, patience
    names = ", ".join(f"rank {s.rank} ({s.cause}, {s.where or 'unknown line'})" for s in guilty)
    return True, f"{still}; not waiting for any rank: {names}"


def _guilty(report: StacksReport, blamed: tuple[int, ...]) -> list[RankState]:
    """The culprits, or those of them that the verdict on all evidence blames: a collective of NCCL is waited for in
    whatever CUDA call comes next, in a stack that looks like work."""
    guilty = [report.ranks[rank] for rank in report.culprits if rank in report.ranks]
    return [state for state in guilty if state.rank in blamed] or guilty


def _pause_of_all(last: Look, guilty: list[RankState]) -> str:
    """Why all ranks together get more time, or "" when they get none."""
    idle = not any(state.cause in WORKING for state in guilty) and last.quiet_s >= ALL_IDLE_S
    all_guilty = last.report is not None and 1 < len(last.report.ranks) == len(guilty)
    if all_guilty and not idle and not last.crossed:
        return "all ranks are busy on their own and none waits for another: sampling again"
    return ""


def _patience(state: RankState, looks: list[Look]) -> str:
    """Why this rank gets more time, or '' when it gets none."""
    if any(part in frame.file for frame in state.stack for part in COMPILING):
        return f"rank {state.rank} compiles"
    if state.command_works:
        return f"rank {state.rank} waits for a command that works"
    same = _same_functions(state.rank, looks)
    if state.cause in SAVING and not same:
        return f"rank {state.rank} is in {state.cause} and moves"
    if state.cause in WORKING:
        if not same:
            return f"rank {state.rank} works: its stack moves"
        if len(looks) < 3:
            return f"rank {state.rank} burns CPU in {state.where or 'the same place'}: sampling once more"
    return ""


def _same_functions(rank: int, looks: list[Look]) -> bool:
    """Whether the rank was in the same functions at every look (lines inside a loop may differ)."""
    seen = set()
    for look in looks:
        state = look.report.ranks.get(rank) if look.report is not None else None
        if state is None or not state.stack:
            continue
        seen.add(tuple((frame.name, frame.file) for frame in state.stack if not frame.native))
    return len(seen) <= 1


Mode = Literal["whole_job", "replica"]


@dataclass(frozen=True)
class PolicyOptions:
    """The `recovery` section of a job configuration."""

    enabled: bool | None = None  # None: on in replica mode, dry run in whole-job mode
    on_hang: ActionKind | None = option(
        None,
        "action on a hang; none: evict (replica mode) or restart_job (whole-job mode)",
        choices=("evict", "restart_rank", "restart_job", "collect", "command"),
        title="recovery action",
    )
    command: str = option("", "for the action `command`; {incident} and {ranks} are filled in")
    min_confidence: float = option(0.6, "of a verdict, to act on it", at_least=0, at_most=1)
    max_actions: int = option(10, "within window_s; beyond it evidence is collected only", at_least=0)
    window_s: float = option(3600.0, "window of max_actions", unit="s", above=0)
    back_off_s: float = option(30.0, "shortest time between two actions", unit="s", at_least=0)
    node_failures: int = 3  # within window_s, of whole-job mode: then the job continues without this node

    def wanted(self, mode: Mode) -> ActionKind:
        """The action for a hang."""
        return self.on_hang or ("evict" if mode == "replica" else "restart_job")

    def acts(self, mode: Mode) -> bool:
        """Whether actions are carried out, or only said."""
        return self.enabled if self.enabled is not None else mode == "replica"

    def may_act(self, mode: Mode) -> bool:
        """Whether a hang may ever be answered with more than evidence."""
        return self.acts(mode) and self.wanted(mode) not in ("none", "collect")


@dataclass(frozen=True)
class PolicyState:
    """When actions were taken, and against which replica."""

    acted_s: tuple[float, ...] = ()
    against: dict[int, int] = field(default_factory=dict)

    def after(self, now_s: float, replica: int | None, window_s: float) -> PolicyState:
        """The state once an action has been taken."""
        against = dict(self.against)
        if replica is not None:
            against[replica] = against.get(replica, 0) + 1
        return PolicyState((*(t for t in self.acted_s if now_s - t < window_s), now_s), against)


@dataclass(frozen=True)
class HangFacts:
    """What is known when the policy is asked."""

    mode: Mode
    cause: str
    ranks: tuple[int, ...]  # guilty
    confidence: float
    ranks_per_replica: int = 1
    replicas: int = 1
    members: tuple[int, ...] = ()  # replicas that run now


NO_STEP = "no_step"  # collectives are completed, no step is: a loop, or a phase that nobody announced
NOBODYS_FAULT = frozenset({"none_finished"})
PROGRAM_FAULT = frozenset(
    {"type_mismatch", "size_mismatch", "dtype_mismatch", "reduce_op_mismatch", "root_mismatch"}
    | {"extra_collective", "order_inversion", "p2p_mismatch", "setup_mismatch"}
)


def back_off_left_s(now_s: float, state: PolicyState, options: PolicyOptions) -> float:
    """Seconds until the next action is allowed; a confirmed hang waits for them instead of being given up."""
    return max(0.0, state.acted_s[-1] + options.back_off_s - now_s) if state.acted_s else 0.0


def decide_leaving(
    now_s: float, failures_s: Sequence[float], options: PolicyOptions
) -> tuple[ActionKind | None, str]:
    """Whole-job mode that can do with fewer nodes: whether this one, the cause each time, should leave; None: stay."""
    recent = [t for t in failures_s if now_s - t < options.window_s]
    if len(recent) < options.node_failures:
        return None, f"{len(recent)} failures of this node within {options.window_s:g} s"
    why = f"ranks of this node were the cause of {len(recent)} failures within {options.window_s:g} s"
    if not options.enabled:
        return "dry_run", f"{why}: would leave the job (--recovery on does it)"
    return "leave_node", f"{why}: the job continues without it"


def decide_action(now_s: float, case: HangFacts, state: PolicyState, options: PolicyOptions) -> Action:
    """The action for a confirmed hang, with the reason that goes to the log and the page."""
    wanted = options.wanted(case.mode)
    replica = case.ranks[0] // case.ranks_per_replica if case.ranks else None
    kind: ActionKind = wanted
    reason = _why_not(now_s, case, state, options, wanted)
    if reason:
        kind = "collect"
    else:
        reason = _why(case, wanted)
        if not options.acts(case.mode):
            kind, reason = "dry_run", f"would {wanted.replace('_', ' ')}: {reason} (--recovery on does it)"
    return Action(kind, reason, case.ranks, replica, options.command)


def _why(case: HangFacts, wanted: ActionKind) -> str:
    if case.cause in NOBODYS_FAULT:
        return "no rank is to blame (network or device)"
    if not case.ranks:
        return "no rank was named"
    why = f"{case.cause} of rank {', '.join(map(str, case.ranks))} (confidence {case.confidence:.2f})"
    if case.cause in PROGRAM_FAULT and wanted == "evict":
        why += "; the program itself disagrees between ranks, it may come back"
    return why


def _why_not(
    now_s: float, case: HangFacts, state: PolicyState, options: PolicyOptions, wanted: ActionKind
) -> str:
    """Why nothing but evidence is taken; "" when the action may be taken."""
    if wanted in ("none", "collect"):
        return "the policy asks for evidence only"
    if spent := _budget_spent(now_s, state, options):
        return spent
    if case.cause == NO_STEP:
        return "collectives are still completed: a person must look"
    if case.cause in NOBODYS_FAULT or not case.ranks:
        return f"{_why(case, wanted)}: nobody is evicted" if wanted == "evict" else ""
    if case.confidence < options.min_confidence:
        return f"the verdict's confidence {case.confidence:.2f} is below {options.min_confidence:.2f}"
    guilty = {rank // case.ranks_per_replica for rank in case.ranks}
    if wanted == "evict" and len(guilty) > 1 and len(guilty) * 2 > max(1, len(case.members) or case.replicas):
        return f"{len(guilty)} of {case.replicas} replicas are named: too many to evict"
    return ""


def _budget_spent(now_s: float, state: PolicyState, options: PolicyOptions) -> str:
    recent = [t for t in state.acted_s if now_s - t < options.window_s]
    if len(recent) >= options.max_actions:
        return f"{len(recent)} actions within {options.window_s:g} s use up the budget; a person must look"
    if recent and now_s - recent[-1] < options.back_off_s:
        return f"the last action was {now_s - recent[-1]:.1f} s ago; waiting {options.back_off_s:g} s"
    return ""
