"""What each rank sees in the tiers, which checkpoint all of them load, and whether that is enough to decide. Torch-free.

"There is nothing" and "I could not look" are different answers: only the first may lead to step 1. Each rank lists its
stores and sends the others what it found; `choose` is a pure decision over that; `refuse_to_guess` and `refuse_to_start_over` raise the same error on all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from allranks.checkpoint.failure import hint_for, reason_of, store_arguments
from allranks.checkpoint.manifest import MANIFEST, decode_manifest
from allranks.checkpoint.stores.store import Store, StoreSpec, open_store, step_in_name
from allranks.errors import (
    AllranksError,
    CheckpointDamaged,
    CheckpointLoadError,
    CheckpointUnreachable,
    CheckpointValidationError,
)

log = logging.getLogger("allranks.checkpoint")
#: Between two attempts at a store that does not answer.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
AFTER_UNREACHABLE = 'then start again; to go on without it: CheckpointConfig(on_unreachable="ignore")'


#: Fastest first; of equal steps the faster tier is taken.
TIER_ORDER = ("MEMORY", "PEER", "NVME", "S3")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that every rank can see."""

    tier: str
    step: int
    name: str


@dataclass(frozen=True)
class Choice:
    """What to try, best first, and why."""

    candidates: tuple[Candidate, ...]
    reason: str


#: One rank's view: tier → (name, step) of every checkpoint it can see.
FoundByTier = Mapping[str, Sequence[tuple[str, int]]]


def choose(views: Sequence[FoundByTier]) -> Choice:
    """The checkpoints complete everywhere: newest step first, the faster tier first among equal steps."""
    found = []
    partial: dict[int, int] = {}
    for tier in TIER_ORDER:
        seen: list[set[tuple[str, int]]] = [
            {(name, step) for name, step in view.get(tier, ())} for view in views
        ]
        everywhere = set.intersection(*seen) if seen else set()
        found += [Candidate(tier, step, name) for name, step in everywhere]
        for name, step in set.union(*seen) - everywhere if seen else set():
            partial[step] = max(partial.get(step, 0), sum((name, step) in one for one in seen))
    found.sort(key=lambda c: (-c.step, TIER_ORDER.index(c.tier), c.name))
    return Choice(tuple(found), _reason(found, partial, len(views)))


def _reason(found: Sequence[Candidate], partial: Mapping[int, int], ranks: int) -> str:
    newest = found[0].step if found else -1
    newer = sorted(step for step in partial if step > newest)
    missed = "".join(f"; step {step} is complete on {partial[step]} of {ranks} ranks only" for step in newer)
    if not found:
        return f"no checkpoint is complete on all {ranks} ranks{missed}"
    where = f" on all {ranks} ranks" if ranks > 1 else ""
    return f"step {newest} in {found[0].tier} is the newest complete one{where}{missed}"


@dataclass(frozen=True)
class RestoreRules:
    """What the user wants of a look. `job` "" takes every job's checkpoints, `from_job` those of that one too."""

    job: str = ""
    from_job: str = ""
    wait_s: float = 60.0
    ignore_unreachable: bool = False
    missing_ok: bool = True

    def accepts(self, job: str) -> bool:
        """Whether a checkpoint of that job may be restored; those of earlier versions name none."""
        return not job or not self.job or job in (self.job, self.from_job)


@dataclass
class RankView:
    """One rank's view. `given` is the newest step that this process has handed to each tier."""

    found: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # tier → (name, step)
    unanswered: list[dict[str, str]] = field(default_factory=list)  # tier, address, answer, hint
    unusable: list[dict[str, str]] = field(default_factory=list)  # tier, store, path, reason
    given: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For the other ranks."""
        return asdict(self)


class StoreLister:
    """Lists stores patiently. `damaged` are checkpoints whose manifest is bad, for quarantine."""

    def __init__(self, rules: RestoreRules) -> None:
        self.rules = rules
        self.stores: dict[str, Store] = {}
        self.damaged: list[tuple[Store, str, str]] = []
        self.deadline = time.monotonic() + rules.wait_s

    def list_tier(self, tier: str, spec: StoreSpec, seen: RankView) -> None:
        """Adds what a tier holds to `seen`, or what it answered instead."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                seen.found[tier], unusable = self._list(tier, spec)
                seen.unusable += unusable
                return
            except (OSError, AllranksError) as error:
                left = self.deadline - time.monotonic()
                if left <= 0 or not _may_pass(error):
                    seen.found[tier] = []
                    seen.unanswered.append(_answer(tier, spec, error))
                    return
                log.warning(
                    "[%s] %s does not answer (%s): asking again for %.0f s", tier, spec.url, reason_of(error), left
                )  # fmt: skip
                time.sleep(min(pause, left))
                pause = min(LONGEST_PAUSE_S, 2 * pause)

    def quarantined(self, seen: RankView) -> None:
        """Adds what lies in quarantine: it was there once, so the store is not merely empty."""
        for tier, store in self.stores.items():
            try:
                for where, reason in store.quarantined():
                    seen.unusable.append(_unusable(store, where, reason))
            except OSError as error:
                seen.unanswered.append(_answer(tier, store.spec, error))

    def _list(self, tier: str, spec: StoreSpec) -> tuple[list[tuple[str, int]], list[dict[str, str]]]:
        store = self.stores.get(tier) or open_store(spec)
        self.stores[tier] = store
        found: list[tuple[str, int]] = []
        unusable, damaged = [], []
        for name in store.names():
            path = store.path_of(name)
            try:
                manifest = decode_manifest(store.read(name, MANIFEST), path)
            except FileNotFoundError:
                continue  # removed meanwhile
            except CheckpointValidationError as error:
                unusable.append(_unusable(store, path, error.reason))
                if isinstance(error, CheckpointDamaged):
                    damaged.append((store, name, error.reason))
                else:
                    log.warning("[%s] %s is left out: %s", tier, path, error.reason)
                continue
            if self.rules.accepts(manifest.job):
                found.append((name, manifest.step))
            else:
                unusable.append(_unusable(store, path, f"it is of job '{manifest.job}'"))
                log.warning("[%s] %s is left out: it is of job '%s'", tier, path, manifest.job)
        self.damaged += damaged
        return found, unusable


def refuse_to_guess(views: Sequence[Mapping[str, Any]], choice: Choice, rules: RestoreRules) -> None:
    """Raises when a tier that may hold something newer did not answer on some rank, unless the user ignores that."""
    held = max((c.step for c in choice.candidates if c.tier == "MEMORY"), default=-1)
    silent = [
        (rank, answer)
        for rank, view in enumerate(views)
        for answer in view["unanswered"]
        if held < 0 or view["given"].get(answer["tier"], -1) > held
    ]
    if not silent:
        return
    where = "rank {}: " if len(views) > 1 else ""
    texts = [
        f"{where.format(rank)}[{one['tier']}] {one['address']} did not answer: {one['answer']}"
        for rank, one in silent
    ]
    if rules.ignore_unreachable:
        log.warning("%s; skipped (on_unreachable=ignore)", "; ".join(texts))
        return
    first = silent[0][1]
    raise CheckpointUnreachable(
        "; ".join(dict.fromkeys(texts)) + ". It may hold something newer, so nothing was restored",
        path=first["address"],
        hint=f"{first['hint']}\n{AFTER_UNREACHABLE}",
    )


def refuse_to_start_over(
    views: Sequence[Mapping[str, Any]], choice: Choice, rules: RestoreRules, addresses: Sequence[str]
) -> None:
    """Called when there is nothing to restore: raises unless every tier is empty and that is fine with the user."""
    unusable = {one["path"]: one for view in views for one in view["unusable"]}
    if unusable:
        newest = sorted(unusable.values(), key=lambda one: -(step_in_name(one["name"]) or 0))
        raise CheckpointLoadError(
            "there are checkpoints, but none that can be restored: "
            + "; ".join(f"{one['path']}: {one['reason']}" for one in newest),
            hint=_ways_out(newest),
        )
    partial = sorted({tier for view in views for tier, found in view["found"].items() if found} - {"MEMORY"})
    if partial:
        raise CheckpointLoadError(
            choice.reason,
            tier=partial[0],
            hint="bring back the disk that is missing, or copy what the others have to it, on that node: "
            "allranks checkpoint copy STORE/NAME STORE\n"
            "to start from scratch (deletes nothing), on every node: allranks checkpoint set-aside STORE",
        )
    if not rules.missing_ok:
        raise CheckpointLoadError(
            f"there is no checkpoint in {' or '.join(addresses) or 'any tier: none is configured'}",
            hint="is this the path of the run that saved? What is there: allranks checkpoint ls "
            + (addresses[0] if addresses else "STORE"),
        )


def _ways_out(unusable: Sequence[Mapping[str, str]]) -> str:
    stores = dict.fromkeys(one["store"] for one in unusable if one["store"])
    lines = [f"what is there: allranks checkpoint ls {store}" for store in stores]
    if any(one["tier"] == "MEMORY" for one in unusable):
        lines.append("to go on without the snapshots in memory: manager.clear_memory_snapshots()")
    if any(one["reason"].startswith("it is of job") for one in unusable):
        lines.append(
            'give this job a path of its own, or restore the other job\'s: CheckpointConfig(from_job="NAME")'
        )
    lines += [
        f"to start from scratch (deletes nothing): allranks checkpoint set-aside {store}" for store in stores
    ]
    return "\n".join(lines)


def _may_pass(error: Exception) -> bool:
    """Whether waiting may help: not where the answer was a clear no."""
    final = (PermissionError, FileNotFoundError, NotADirectoryError, AllranksError)
    return not isinstance(error, final)


def _answer(tier: str, spec: StoreSpec, error: Exception) -> dict[str, str]:
    return {
        "tier": tier, "address": spec.url, "answer": reason_of(error), "hint": hint_for(error, tier, spec.url, spec.options),
    }  # fmt: skip


def _unusable(store: Store, path: str, reason: str) -> dict[str, str]:
    url = store.spec.url
    name = path.removeprefix(url).strip("/").removeprefix("quarantine/")
    return {
        "tier": store.tier,
        "store": store_arguments(url, store.spec.options),
        "path": path,
        "name": name.split("-")[0].split("/")[0],
        "reason": reason,
    }
