"""Decides what to do about a hang. Pure: facts, budget and options in; an action and its reason out.

`decide_action` is called when the evidence is on disk. Acting costs a restart or a heal; waiting costs training time if the
stall is a hang, and saves the action if it is not. A certain hang is acted on at once, any other one when waiting costs more
than acting. If all ranks entered a call and none finished, the network or a device is at fault, and no rank is blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from allranks.model.diagnosis import Action, ActionKind, share_right
from allranks.model.formatting import duration, ranks_text
from allranks.model.options import option

Mode = Literal["whole_job", "replica"]
NODE_FAILURES = 3  # within window_s: then a job in whole-job mode continues without the node


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
    on_slow: Literal["report", "profile", "swap", "evict"] = option(
        "report",
        "for a rank that became slow: report it; profile: also sample its stack; swap: replace its processes (replica mode), or "
        "let its node leave for a standby node; evict: continue without its replica or node",
        choices=("report", "profile", "swap", "evict"),
    )
    command: str = option("", "for the action `command`; {incident} and {ranks} are filled in")
    min_confidence: float = option(0.6, "of a verdict, to act on it", at_least=0, at_most=1)
    max_actions: int = option(10, "within window_s; beyond it evidence is collected only", at_least=0)
    window_s: float = option(3600.0, "window of max_actions", unit="s", above=0)
    back_off_s: float = option(30.0, "shortest time between two actions", unit="s", at_least=0)

    def wanted(self, mode: Mode) -> ActionKind:
        """The action for a hang."""
        return self.on_hang or ("evict" if mode == "replica" else "restart_job")

    def acts(self, mode: Mode) -> bool:
        """Whether actions are carried out, or only reported."""
        return self.enabled if self.enabled is not None else mode == "replica"

    def may_act(self, mode: Mode) -> bool:
        """Whether a hang may lead to an action beyond collecting evidence."""
        return self.acts(mode) and self.wanted(mode) not in ("none", "collect")


@dataclass(frozen=True)
class PolicyState:
    """The actions so far."""

    acted_s: tuple[float, ...] = ()
    against: dict[int, int] = field(default_factory=dict)  # replica -> number of actions

    def after(self, now_s: float, replica: int | None, window_s: float) -> PolicyState:
        """The state after an action."""
        against = dict(self.against)
        if replica is not None:
            against[replica] = against.get(replica, 0) + 1
        return PolicyState((*(t for t in self.acted_s if now_s - t < window_s), now_s), against)


@dataclass(frozen=True)
class HangFacts:
    """The facts for a decision."""

    mode: Mode
    cause: str
    ranks: tuple[int, ...]  # guilty
    confidence: float
    ranks_per_replica: int = 1
    replicas: int = 1
    members: tuple[int, ...] = ()  # running replicas
    certain: bool = True  # the evidence proves a hang
    stalled_s: float = 0.0  # so far
    usual_s: float = 10.0  # shortest silence that is noticed
    act_s: float = 60.0  # cost of the action, as measured in this job
    leaving: bool = False  # the guilty ranks have finished training: they save, upload or end


NO_STEP = "no_step"  # collectives are completed, steps are not: a loop, or an unannounced phase
NO_RANKS_FAULT = frozenset({"none_finished"})
#: Calls that differ although all ranks made them: no later call can resolve this.
CERTAIN_MISMATCH = frozenset(
    {"type_mismatch", "size_mismatch", "dtype_mismatch", "reduce_op_mismatch", "root_mismatch"}
    | {"order_inversion"}
)
PROGRAM_FAULT = CERTAIN_MISMATCH | {"extra_collective", "p2p_mismatch", "setup_mismatch"}


_DOES = {
    "restart_job": "restart the job",
    "restart_rank": "restart the rank",
    "evict": "evict the replica",
    "command": "run the command",
}


@dataclass(frozen=True)
class Costs:
    """Expected seconds of lost training."""

    wait_s: float
    act_s: float

    @property
    def sentence(self) -> str:
        return f"waiting costs about {duration(self.wait_s)}, acting about {duration(self.act_s)}"


def weigh(case: HangFacts) -> Costs:
    """The costs of waiting as long again as the stall has lasted, and of acting now.

    Durations of pauses have a long tail: a share of about usual_s / stalled_s of the noticed ones lasts this long.
    """
    right = share_right(case.confidence)
    hung = right if case.certain else right / (1 + case.usual_s / max(case.stalled_s, case.usual_s))
    return Costs(case.stalled_s + hung * case.act_s, case.act_s)


def back_off_left_s(now_s: float, state: PolicyState, options: PolicyOptions) -> float:
    """Seconds until the next action is allowed; a confirmed hang waits for it."""
    return max(0.0, state.acted_s[-1] + options.back_off_s - now_s) if state.acted_s else 0.0


def decide_leaving(
    now_s: float, failures_s: Sequence[float], options: PolicyOptions
) -> tuple[ActionKind | None, str]:
    """Whole-job mode with optional nodes: whether this node, the cause of each failure, should leave; None: it stays."""
    recent = [t for t in failures_s if now_s - t < options.window_s]
    if len(recent) < NODE_FAILURES:
        return None, f"{len(recent)} failures of this node within {options.window_s:g} s"
    why = f"ranks of this node were the cause of {len(recent)} failures within {options.window_s:g} s"
    if not options.enabled:
        return "dry_run", f"{why}: would leave the job (--recovery on does it)"
    return "leave_node", f"{why}: the job continues without it"


def decide_action(now_s: float, case: HangFacts, state: PolicyState, options: PolicyOptions) -> Action:
    """The action for a confirmed hang, with its reason for the log and the page."""
    wanted = options.wanted(case.mode)
    replica = case.ranks[0] // case.ranks_per_replica if case.ranks else None
    kind: ActionKind = wanted
    reason = _why_not(now_s, case, state, options, wanted)
    if reason:
        kind = "collect"
    elif not case.certain and (costs := weigh(case)).act_s > costs.wait_s:
        kind, reason = "collect", f"not yet: {costs.sentence}"
    else:
        reason = _why(case, wanted) + ("" if case.certain else f"; {weigh(case).sentence}")
        if not options.acts(case.mode):
            kind, reason = "dry_run", f"would {_DOES.get(wanted, wanted)}: {reason} (--recovery on does it)"
    return Action(kind, reason, case.ranks, replica, options.command)


def decide_slow(
    now_s: float, case: HangFacts, state: PolicyState, options: PolicyOptions, may_leave: bool
) -> Action:
    """The action for a rank that stays slow."""
    wanted, replica = options.on_slow, case.ranks[0] // case.ranks_per_replica
    if wanted in ("report", "profile"):
        return Action("none", f"the policy for slow ranks is: {wanted}", case.ranks, replica)
    kind: ActionKind = (
        "leave_node" if case.mode == "whole_job" else "evict" if wanted == "swap" else "set_aside"
    )
    why_not = _budget_spent(now_s, state, options)
    if kind == "leave_node" and not may_leave:
        why_not = "the job cannot continue without this node (--nnodes MIN:MAX lets it)"
    elif kind == "set_aside" and len(case.members) < 2:
        why_not = "it is the only replica"
    elif state.against.get(replica, 0) and not why_not:
        why_not = f"replica {replica} is slow again after an earlier action: inspect it by hand"
    if why_not:
        return Action("none", why_not, case.ranks, replica)
    reason = f"rank {case.ranks[0]} became slow, and the policy for slow ranks is: {wanted}"
    if not options.acts(case.mode):
        return Action("dry_run", f"would {wanted}: {reason} (--recovery on does it)", case.ranks, replica)
    return Action(kind, reason, case.ranks, replica)


def _why(case: HangFacts, wanted: ActionKind) -> str:
    if case.cause in NO_RANKS_FAULT:
        return "no rank is to blame (network or device)"
    if not case.ranks:
        return "no rank was named"
    why = f"{ranks_text(case.ranks)}, {case.cause.replace('_', ' ')}, {case.confidence:.0%} sure"
    if case.cause in PROGRAM_FAULT and wanted == "evict":
        why += "; the program differs between ranks, so this may happen again"
    return why


def _why_not(
    now_s: float, case: HangFacts, state: PolicyState, options: PolicyOptions, wanted: ActionKind
) -> str:
    """The reason to collect evidence only; "" when the action may be taken."""
    if wanted in ("none", "collect"):
        return "the policy asks for evidence only"
    if spent := _budget_spent(now_s, state, options):
        return spent
    if case.cause == NO_STEP:
        return "collectives are still completed: inspect the ranks by hand"
    if case.cause in NO_RANKS_FAULT or not case.ranks:
        return f"{_why(case, wanted)}: no replica is evicted" if wanted == "evict" else ""
    if case.confidence < options.min_confidence:
        return f"the verdict's confidence {case.confidence:.2f} is below {options.min_confidence:.2f}"
    if case.leaving and not case.certain:
        return f"{ranks_text(case.ranks)} finished training and may still save: ending it would gain nothing"
    guilty = {rank // case.ranks_per_replica for rank in case.ranks}
    if wanted == "evict" and len(guilty) > 1 and len(guilty) * 2 > max(1, len(case.members) or case.replicas):
        return f"{len(guilty)} of {case.replicas} replicas are named: too many to evict"
    return ""


def _budget_spent(now_s: float, state: PolicyState, options: PolicyOptions) -> str:
    recent = [t for t in state.acted_s if now_s - t < options.window_s]
    if len(recent) >= options.max_actions:
        return (
            f"{len(recent)} actions within {options.window_s:g} s use up the budget; inspect the job by hand"
        )
    if recent and now_s - recent[-1] < options.back_off_s:
        return f"the last action was {now_s - recent[-1]:.1f} s ago; waiting {options.back_off_s:g} s"
    return ""
