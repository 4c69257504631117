"""Which checkpoints each rank sees, which one all ranks load, and whether they know enough to decide. No torch.

An empty store and an unreadable store are different: only an empty one may lead to step 1. Each rank lists its stores and
shares the result; `choose` is a pure decision over all views. `refuse_to_guess` and `refuse_to_start_over` raise the same
error on all ranks.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from allranks import errors
from allranks.checkpoint.manifest import IS_NEWER, UPGRADE
from allranks.checkpoint.stores import (
    Store,
    StoreSpec,
    hint_for,
    open_store,
    reason_of,
    step_in_name,
    store_arguments,
    was_answered,
)
from allranks.checkpoint.stores.listing import read_manifests
from allranks.model.parsing import convert, without_secrets

log = logging.getLogger("allranks.checkpoint")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two attempts to read a store
#: Errors that a retry does not fix.
FINAL = (PermissionError, FileNotFoundError, NotADirectoryError, errors.AllranksError)
OF_ANOTHER_JOB = "it belongs to job"
AFTER_UNREACHABLE = 'then start again; to continue without it: CheckpointConfig(on_unreachable="ignore")'
TIER_ORDER = ("MEMORY", "PEER", "NVME", "S3")  # fastest first


@dataclass(frozen=True)
class RestoreCandidate:
    """A checkpoint that every rank can see."""

    tier: str
    step: int
    name: str


@dataclass(frozen=True)
class RestoreChoice:
    """The candidates to try, best first, and why."""

    candidates: tuple[RestoreCandidate, ...]
    reason: str


#: One rank's view: tier → (name, step) of every checkpoint it can see.
FoundByTier = Mapping[str, Sequence[tuple[str, int]]]


def choose(views: Sequence[FoundByTier]) -> RestoreChoice:
    """The checkpoints that all ranks see: newest step first, then fastest tier first."""
    found = []
    partial: dict[int, int] = {}
    for tier in TIER_ORDER:
        seen: list[set[tuple[str, int]]] = [
            {(name, step) for name, step in view.get(tier, ())} for view in views
        ]
        everywhere = set.intersection(*seen) if seen else set()
        found += [RestoreCandidate(tier, step, name) for name, step in everywhere]
        for name, step in set.union(*seen) - everywhere if seen else set():
            partial[step] = max(partial.get(step, 0), sum((name, step) in one for one in seen))
    found.sort(key=lambda c: (-c.step, TIER_ORDER.index(c.tier), c.name))
    return RestoreChoice(tuple(found), _reason(found, partial, len(views)))


def _reason(found: Sequence[RestoreCandidate], partial: Mapping[int, int], ranks: int) -> str:
    newest = found[0].step if found else -1
    newer = sorted(step for step in partial if step > newest)
    missed = "".join(f"; step {step} is complete on {partial[step]} of {ranks} ranks only" for step in newer)
    if not found:
        return f"no checkpoint is complete on all {ranks} ranks{missed}"
    where = f" on all {ranks} ranks" if ranks > 1 else ""
    return f"step {newest} in {found[0].tier} is the newest complete one{where}{missed}"


@dataclass(frozen=True)
class RestoreRules:
    """Which checkpoints a restore accepts. `job` "" accepts all; otherwise those of `job` and `from_job`."""

    job: str = ""
    from_job: str = ""
    wait_s: float = 60.0
    ignore_unreachable: bool = False
    missing_ok: bool = True

    def accepts(self, job: str) -> bool:
        """Whether a checkpoint of that job may be restored; one without a job name always may."""
        return not job or not self.job or job in (self.job, self.from_job)


@dataclass(frozen=True)
class Unanswered:
    """A tier that could not be read, with the reason and a hint."""

    tier: str
    address: str
    reason: str
    hint: str
    answered: bool = False  # the server of the store refused the request

    def __str__(self) -> str:
        outcome = "answered" if self.answered else "did not answer"
        return without_secrets(f"[{self.tier}] {self.address} {outcome}: {self.reason}")


@dataclass(frozen=True)
class Unusable:
    """A checkpoint that exists but cannot be restored. `store` is an argument of `allranks checkpoint`."""

    tier: str
    store: str
    path: str
    step: int
    reason: str


@dataclass
class TiersSeen:
    """One rank's view. `given` is the newest step that this process has saved or is saving to each tier."""

    found: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # tier → (name, step)
    unanswered: list[Unanswered] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)

    def share(self, gather: Callable[[object], list[object]]) -> list[TiersSeen]:
        """Every rank's view, on every rank. Collective."""
        return [convert(raw, TiersSeen) for raw in gather(asdict(self))]


class StoreLister:
    """Lists stores, with retries. `damaged` collects checkpoints with a damaged manifest, for quarantine."""

    def __init__(self, rules: RestoreRules) -> None:
        self.rules = rules
        self.stores: dict[str, Store] = {}
        self.damaged: list[tuple[Store, str, str]] = []
        self.deadline = time.monotonic() + rules.wait_s

    def list_tier(self, spec: StoreSpec, seen: TiersSeen) -> None:
        """Adds the checkpoints of a tier to `seen`, or the reason why it cannot be read."""
        tier = spec.tier
        for pause in growing_pauses():
            try:
                seen.found[tier], unusable = self._list(tier, spec)
                seen.unusable += unusable
                return
            except (OSError, errors.AllranksError) as error:
                left = self.deadline - time.monotonic()
                if left <= 0 or isinstance(error, FINAL):
                    seen.found[tier] = []
                    seen.unanswered.append(_unanswered(spec, error))
                    return
                text = "[%s] %s does not respond (%s): retrying for %.0f s"
                log.warning(text, tier, spec.url, reason_of(error), left)
            time.sleep(min(pause, left))

    def quarantined(self, seen: TiersSeen) -> None:
        """Adds quarantined checkpoints: with one of those, a store does not count as empty."""
        for store in self.stores.values():
            try:
                for where, reason in store.quarantined():
                    seen.unusable.append(_unusable(store, where, reason))
            except OSError as error:
                seen.unanswered.append(_unanswered(store.spec, error))

    def _list(self, tier: str, spec: StoreSpec) -> tuple[list[tuple[str, int]], list[Unusable]]:
        store = self.stores.get(tier) or open_store(spec)
        self.stores[tier] = store
        found: list[tuple[str, int]] = []
        unusable, damaged = [], []
        for name, manifest in read_manifests(store):
            if isinstance(manifest, errors.CheckpointValidationError):
                reason = manifest.reason
            elif not self.rules.accepts(manifest.job):
                reason = f"{OF_ANOTHER_JOB} '{manifest.job}'"
            else:
                found.append((name, manifest.step))
                continue
            unusable.append(_unusable(store, store.path_of(name), reason))
            if isinstance(manifest, errors.CheckpointDamaged):
                damaged.append((store, name, reason))
            else:
                log.warning("[%s] %s is skipped: %s", tier, store.path_of(name), reason)
        self.damaged += damaged
        return found, unusable


def growing_pauses() -> Iterator[float]:
    """Seconds between attempts: doubled each time, up to the longest."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(LONGEST_PAUSE_S, 2 * pause)


def refuse_to_guess(views: Sequence[TiersSeen], choice: RestoreChoice, rules: RestoreRules) -> None:
    """Raises if a tier that may hold a newer checkpoint could not be read on some rank, or holds a newer one that this
    version cannot read, unless the rules ignore that."""
    _refuse_newer(views, choice, rules)
    held = max((c.step for c in choice.candidates if c.tier == "MEMORY"), default=-1)
    silent = {
        f"rank {rank}: {one}" if len(views) > 1 else str(one): one
        for rank, view in enumerate(views)
        for one in view.unanswered
        if held < 0 or view.given.get(one.tier, -1) > held
    }
    if not silent:
        return
    if rules.ignore_unreachable:
        log.warning("%s; skipped (on_unreachable=ignore)", "; ".join(silent))
        return
    first = next(iter(silent.values()))
    raise errors.CheckpointUnreachable(
        "; ".join(silent) + ". It may hold a newer checkpoint, so nothing was restored",
        path=first.address,
        hint=f"{first.hint}\n{AFTER_UNREACHABLE}",
    )


def _refuse_newer(views: Sequence[TiersSeen], choice: RestoreChoice, rules: RestoreRules) -> None:
    """Restoring an older step would repeat training and overwrite checkpoints of a newer version of allranks."""
    newest = max((c.step for c in choice.candidates), default=sys.maxsize)
    every = [one for view in views for one in view.unusable if IS_NEWER in one.reason and one.step > newest]
    if not every:
        return
    text = "; ".join(dict.fromkeys(f"{one.path}: {one.reason}" for one in every))
    if rules.ignore_unreachable:
        log.warning("%s; skipped (on_unreachable=ignore)", text)
        return
    raise errors.CheckpointLoadError(
        f"{text}. No older checkpoint was restored", hint=f"{UPGRADE}, {AFTER_UNREACHABLE}"
    )


def refuse_to_start_over(
    views: Sequence[TiersSeen], choice: RestoreChoice, rules: RestoreRules, addresses: Sequence[str]
) -> None:
    """Called if there is nothing to restore: raises unless every tier is empty and the rules allow that."""
    unusable = {one.path: one for view in views for one in view.unusable}
    if unusable:
        newest = sorted(unusable.values(), key=lambda one: -one.step)
        raise errors.CheckpointLoadError(
            "there are checkpoints, but none that can be restored: "
            + "; ".join(f"{one.path}: {one.reason}" for one in newest),
            hint=_ways_out(newest),
        )
    partial = {
        tier: name
        for view in views
        for tier, found in view.found.items()
        for name, _ in found
        if tier != "MEMORY"
    }
    if partial:
        tier, name = sorted(partial.items())[0]
        raise errors.CheckpointLoadError(
            choice.reason,
            tier=tier,
            hint="restore the missing disk, or copy the checkpoint of another node to it: "
            f"allranks checkpoint copy OTHER_STORE/{name} {' or '.join(addresses)}\n"
            f"on every node, {scratch_hint(addresses[0] if addresses else 'STORE')}",
        )
    if not rules.missing_ok:
        raise errors.CheckpointLoadError(
            f"there is no checkpoint in {' or '.join(addresses) or 'any tier: none is configured'}",
            hint="is this the path of the run that saved? List it: allranks checkpoint ls "
            + (addresses[0] if addresses else "STORE"),
        )


def _ways_out(unusable: Sequence[Unusable]) -> str:
    stores = dict.fromkeys(one.store for one in unusable if one.store)
    lines = [f"list the store: allranks checkpoint ls {store}" for store in stores]
    if any(one.tier == "MEMORY" for one in unusable):
        lines.append("to continue without the memory snapshots: manager.clear_memory_snapshots()")
    if any(one.reason.startswith(OF_ANOTHER_JOB) for one in unusable):
        other = 'CheckpointConfig(from_job="NAME")'
        lines.append(f"use another path for this job, or restore the checkpoints of the other job: {other}")
    return "\n".join([*lines, *map(scratch_hint, stores)])


def scratch_hint(store: str) -> str:
    """The command that allows a start from scratch."""
    return f"to start from scratch (deletes nothing): allranks checkpoint set-aside {store}"


def _unanswered(spec: StoreSpec, error: Exception) -> Unanswered:
    return Unanswered(spec.tier, spec.url, reason_of(error), hint_for(error, spec), was_answered(error))


def _unusable(store: Store, path: str, reason: str) -> Unusable:
    url = store.spec.url
    name = path.removeprefix(url).strip("/").removeprefix("quarantine/").split("-")[0].split("/")[0]
    return Unusable(
        store.tier, store_arguments(url, store.spec.options), path, step_in_name(name) or 0, reason
    )
