"""Tells a hang from slowness after one or more looks at a job that makes no progress. Pure.

One look is never enough: a rank may sleep, compile, save or collect garbage for longer than usual. A rank
that works (its stack or its CPU moves) gets patience up to the cap; one that waits for nobody and does not
move is hung at the second look; one that burns CPU in the same functions is hung at the third. All ranks at once may
pause for a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.model.stacks import RankState, StacksReport

WORKING = frozenset(
    {"busy_python", "native_call", "gil_held_native", "gil_contention", "cuda_kernel", "slow", "healthy"}
)
SAVING = frozenset({"checkpoint_io", "d_state", "file_lock_wait", "network_io"})
COMPILING = (
    "torch/_dynamo/",
    "torch/_inductor/",
    "torch/_functorch/",
    "triton/compiler",
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


def judge(looks: list[Look], cap_s: float) -> tuple[bool | None, str]:
    """True hung, False not hung, None look again; with the reason."""
    last = looks[-1]
    if last.moved:
        return False, "a rank made progress between two samples: slow, not hung"
    if last.calling and last.quiet_s < cap_s:
        return None, "no step was done, but calls of it are being completed: sampling again"
    if len(looks) < 2:
        return None, "one sample cannot tell stuck from slow: sampling again"
    if last.report is None:
        return (
            True,
            f"no progress for {last.quiet_s:.1f} s over {len(looks)} samples (no stacks could be read)",
        )
    guilty = [last.report.ranks[rank] for rank in last.report.culprits if rank in last.report.ranks]
    # a collective of NCCL is waited for in whatever CUDA call comes next: in a stack that looks like work
    guilty = [state for state in guilty if state.rank in last.blamed] or guilty
    if not guilty:
        return (
            True,
            f"no progress for {last.quiet_s:.1f} s over {len(looks)} samples; every rank waits for another",
        )
    if last.quiet_s >= cap_s:
        return True, f"no progress for {last.quiet_s:.1f} s, more than the {cap_s:g} s that anything may take"
    patience = _pause_of_all(last, guilty) or next(filter(None, (_patience(s, looks) for s in guilty)), "")
    if patience:
        return None, patience
    names = ", ".join(
        f"rank {state.rank} ({state.cause}, {state.where or 'unknown line'})" for state in guilty
    )
    return (
        True,
        f"no progress for {last.quiet_s:.1f} s over {len(looks)} samples; not waiting for any rank: {names}",
    )


def _pause_of_all(last: Look, guilty: list[RankState]) -> str:
    """Why all ranks together get more time, or "" when they get none."""
    idle = not any(state.cause in WORKING for state in guilty) and last.quiet_s >= ALL_IDLE_S
    if last.report is not None and 1 < len(last.report.ranks) == len(guilty) and not idle:
        return "all ranks are busy on their own and none waits for another: sampling again"
    return ""


def _patience(state: RankState, looks: list[Look]) -> str:
    """Why this rank gets more time, or '' when it gets none."""
    if any(part in frame.file for frame in state.stack for part in COMPILING):
        return f"rank {state.rank} compiles"
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
