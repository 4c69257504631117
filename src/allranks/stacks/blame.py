"""Names the ranks that do not wait for others, and says so in a sentence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from allranks.model.stacks import Capture, RankState
from allranks.stacks.progress import Progress
from allranks.stacks.rank_sets import compress

#: How much a cause waits for others: 0 not at all, 3 most. The ranks of the lowest tier are to blame.
_TIERS = {
    "request_wait": 1,
    "event_loop_idle": 1,
    "store_wait": 2,
    "p2p_wait": 2,
    "rendezvous_wait": 2,
    "cuda_wait": 2,
    "collective_wait": 3,
}
_VERBS = {
    "sleep": "sleeps", "collective_wait": "waits", "p2p_wait": "waits for its partner",
    "rendezvous_wait": "waits for its group", "store_wait": "waits for a store key",
    "dataloader_wait": "waits for its DataLoader", "checkpoint_io": "is stuck in checkpoint I/O",
    "file_lock_wait": "waits for a file lock", "network_io": "waits for the network",
    "lock_deadlock": "is deadlocked on a lock", "queue_wait": "waits on a queue",
    "gil_held_native": "holds the GIL in C code", "native_call": "is inside native code",
    "cuda_wait": "waits for the device", "cuda_kernel": "runs a device kernel that does not end",
    "busy_python": "loops in Python", "subprocess_wait": "waits for a command",
    "child_process_wait": "waits for a child process", "event_loop_idle": "sits in an idle event loop",
    "request_wait": "waits for a request", "pipe_write_blocked": "writes to a full pipe",
    "stdin_wait": "waits for input", "shutdown_join": "is exiting and joins threads",
    "stopped": "is stopped", "d_state": "is in uninterruptible sleep", "slow": "is slow",
    "healthy": "makes progress", "unknown": "does something unknown",
}  # fmt: skip


#: Causes that do not end by themselves, whatever the marks say.
_FOR_GOOD = frozenset(
    {"lock_deadlock", "stopped", "gil_held_native", "d_state", "stdin_wait", "pipe_write_blocked", "unknown"}
)


def find_culprits(ranks: Mapping[int, RankState], hung: bool | None = True) -> tuple[int, ...]:
    """The ranks everybody else waits for; () when all wait alike.

    While nobody knows whether the job hangs, a rank is accused only if others wait or its cause cannot end.
    """
    if not ranks:
        return ()
    if hung is None and not any(_TIERS.get(state.cause, 0) >= 2 for state in ranks.values()):
        return tuple(sorted(rank for rank, state in ranks.items() if state.cause in _FOR_GOOD))
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


def _minority(ranks: Mapping[int, RankState]) -> tuple[int, ...]:
    """All wait for others: those who wait elsewhere than the clear majority, if there is one."""
    sites = {rank: (state.cause, state.operation, state.where) for rank, state in ranks.items()}
    counts = Counter(sites.values())
    (common, count), *rest = counts.most_common()
    if not rest or count * 2 <= len(ranks) or len(ranks) < 3:
        return ()
    return tuple(sorted(rank for rank, site in sites.items() if site != common))


def find_straggler(ranks: Mapping[int, RankState], waited: Mapping[int, float]) -> tuple[int, ...]:
    """In a job that moves: the ranks for which the others spend their time waiting.

    `waited` is the share of snapshots in which a rank was found waiting for others.
    """
    waiters = [rank for rank, share in waited.items() if share >= 0.75]
    others = [rank for rank, share in waited.items() if share <= 0.25]
    if len(waiters) < 1 or not others or len(waiters) < len(others):
        return ()
    return tuple(sorted(others))


def tell(
    capture: Capture, progress: Progress, culprits: Sequence[int], ranks: Mapping[int, RankState]
) -> str:
    """The one sentence of the report."""
    if not ranks:
        return "no rank could be looked at"
    if progress.hung is False:
        return _tell_moving(progress, culprits, ranks)
    lead = "" if progress.hung else "cannot tell stuck from slow (" + progress.reason + "): "
    if not culprits:
        return lead + _tell_nobody(capture, ranks)
    parts = [_tell_one(ranks[rank]) for rank in culprits[:3]]
    if len(culprits) > 3:
        parts = [f"ranks {compress(culprits)}: {_tell_one(ranks[culprits[0]], subject=False)}"]
    return lead + "; ".join(parts) + _tell_waiters(culprits, ranks)


def _tell_one(state: RankState, subject: bool = True) -> str:
    name = f"rank {state.rank} " if subject else "first of them "
    line = f" in {_swap(state.where)}" if state.where else ""
    child = next((c for c in state.children if c.cause not in ("healthy", "queue_wait")), None)
    tail = f" (child process {child.child}: {child.cause} at {child.where})" if child else ""
    verb = (
        f"cannot be read ({state.evidence})"
        if state.cause == "unknown"
        else _VERBS.get(state.cause, state.cause)
    )
    return f"{name}{verb}{line}{tail}"


def _swap(where: str) -> str:
    """`data.py:31 in load_batch` reads better in a sentence as `load_batch (data.py:31)`."""
    line, _, name = where.partition(" in ")
    return f"{name} ({line})" if name else where


def _tell_waiters(culprits: Sequence[int], ranks: Mapping[int, RankState]) -> str:
    waiting = [state for rank, state in ranks.items() if rank not in culprits]
    if not waiting:
        return ""
    operation, count = Counter(_wait_name(state) for state in waiting).most_common(1)[0]
    noun = "rank waits" if count == 1 else "ranks wait"
    return f" while {count} {noun} in {operation}"


def _wait_name(state: RankState) -> str:
    return state.operation or {"collective_wait": "a collective"}.get(state.cause, state.cause)


def _tell_nobody(capture: Capture, ranks: Mapping[int, RankState]) -> str:
    world = capture.world_size
    missing = sorted(set(range(world)) - set(ranks)) if world else []
    if missing:
        return f"{len(ranks)} of {world} ranks wait; ranks {compress(missing)} were not found on the nodes looked at"
    causes = Counter(state.cause for state in ranks.values())
    if set(causes) == {"request_wait"}:
        return f"all {len(ranks)} ranks are idle and wait for requests"
    if set(causes) == {"rendezvous_wait"}:
        return f"all {len(ranks)} ranks wait for ranks that have not come: was a process not started, or is WORLD_SIZE too large?"
    if not any(_TIERS.get(state.cause, 0) >= 2 for state in ranks.values()):
        told = "; ".join(_tell_one(ranks[rank]) for rank in sorted(ranks)[:3])
        return f"no rank waits for another one; {told}"
    sites = Counter((state.operation or state.cause, state.where) for state in ranks.values())
    if len(sites) == 1:
        (operation, where), _ = sites.most_common(1)[0]
        return (
            f"all {len(ranks)} ranks wait in {operation} at {where}: no rank is different; "
            "look at the network, the device or the dumps (allranks diagnose)"
        )
    groups = "; ".join(
        f"{compress([r for r, s in ranks.items() if (s.operation or s.cause, s.where) == site])} in {site[0]} at {site[1]}"
        for site, _ in sites.most_common(4)
    )
    return f"every rank waits for others, in different places: {groups}; allranks diagnose on the dumps tells who is wrong"


def _tell_moving(progress: Progress, culprits: Sequence[int], ranks: Mapping[int, RankState]) -> str:
    if not culprits:
        return f"not hung: {progress.reason}"
    names = "; ".join(_tell_one(replace(ranks[rank], cause="slow")) for rank in culprits[:3])
    return f"not hung: {progress.reason}; {names} while the others wait for it"
