"""Whom to look at more closely, with native frames, after the first passes. Pure."""

from __future__ import annotations

from allranks.model.stacks import RankState, StacksReport

MAX_SUSPECTS = 16
#: Causes that Python frames and /proc have settled: native frames would add nothing.
_SETTLED = frozenset({"stopped", "d_state", "healthy", "dataloader_wait", "stdin_wait", "subprocess_wait",
                      "child_process_wait", "file_lock_wait", "pipe_write_blocked", "rendezvous_wait"})  # fmt: skip
_IDLE_CHILD = frozenset({"queue_wait", "healthy"})


def choose_suspects(report: StacksReport) -> set[tuple[int, int | None]]:
    """(rank, child) pairs: the culprits, the doubtful, and one of each group that waits alike."""
    chosen: dict[tuple[int, int | None], None] = {}
    for rank in report.culprits:
        state = report.ranks[rank]
        if state.cause not in _SETTLED:
            chosen.setdefault((rank, None))
        for child in state.children:
            if child.cause not in _SETTLED and child.cause not in _IDLE_CHILD:
                chosen.setdefault((rank, child.child))
    seen: set[tuple[str, str]] = set()
    for rank, state in report.ranks.items():
        site = (state.cause, state.where)
        if _doubtful(state) and site not in seen:
            seen.add(site)
            chosen.setdefault((rank, None))
    return set(list(chosen)[:MAX_SUSPECTS])


def _doubtful(state: RankState) -> bool:
    """Whether the pattern that matched was a weak one, or the wait has a hidden inside."""
    return state.confidence < 0.85 or (state.cause == "collective_wait" and "_engine_run" in state.evidence)
