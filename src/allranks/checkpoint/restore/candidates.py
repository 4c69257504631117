"""What each rank sees in the tiers, which checkpoint all of them load, and whether that is enough to decide. Torch-free.

"There is nothing" and "I could not look" are different answers: only the first may lead to step 1. Each rank lists its
stores and sends the others what it found; `choose` is a pure decision over that; `refuse_to_guess` and `refuse_to_start_over` raise the same error on all of them.
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
#: Between two attempts at a store that does not answer.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
#: A clear no, which waiting does not change.
FINAL = (PermissionError, FileNotFoundError, NotADirectoryError, errors.AllranksError)
OF_ANOTHER_JOB = "it is of job"
AFTER_UNREACHABLE = 'then start again; to continue without it: CheckpointConfig(on_unreachable="ignore")'


#: Fastest first; of equal steps the faster tier is taken.
TIER_ORDER = ("MEMORY", "PEER", "NVME", "S3")


@dataclass(frozen=True)
class RestoreCandidate:
    """A checkpoint that every rank can see."""

    tier: str
    step: int
    name: str


@dataclass(frozen=True)
class RestoreChoice:
    """What to try, best first, and why."""

    candidates: tuple[RestoreCandidate, ...]
    reason: str


#: One rank's view: tier → (name, step) of every checkpoint it can see.
FoundByTier = Mapping[str, Sequence[tuple[str, int]]]


def choose(views: Sequence[FoundByTier]) -> RestoreChoice:
    """The checkpoints complete everywhere: newest step first, the faster tier first among equal steps."""
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
    """What the user wants of a look. `job` "" takes every job's checkpoints, `from_job` those of that one too."""

    job: str = ""
    from_job: str = ""
    wait_s: float = 60.0
    ignore_unreachable: bool = False
    missing_ok: bool = True

    def accepts(self, job: str) -> bool:
        """Whether a checkpoint of that job may be restored; one without a name may always."""
        return not job or not self.job or job in (self.job, self.from_job)


@dataclass(frozen=True)
class Unanswered:
    """A tier that could not be read: what it answered, or why it did not, and what helps."""

    tier: str
    address: str
    answer: str
    hint: str
    answered: bool = False  # the store itself said no

    def __str__(self) -> str:
        said = f"{'answered' if self.answered else 'did not answer'}: {self.answer}"
        return without_secrets(f"[{self.tier}] {self.address} {said}")


@dataclass(frozen=True)
class Unusable:
    """A checkpoint that is there and cannot be restored. `store` is an argument of `allranks checkpoint`."""

    tier: str
    store: str
    path: str
    step: int
    reason: str


@dataclass
class TiersSeen:
    """One rank's view. `given` is the newest step that this process has handed to each tier."""

    found: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # tier → (name, step)
    unanswered: list[Unanswered] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)

    def share(self, gather: Callable[[object], list[object]]) -> list[TiersSeen]:
        """Every rank's view, on every rank. Collective."""
        return [convert(raw, TiersSeen) for raw in gather(asdict(self))]


class StoreLister:
    """Lists stores patiently. `damaged` are checkpoints whose manifest is bad, for quarantine."""

    def __init__(self, rules: RestoreRules) -> None:
        self.rules = rules
        self.stores: dict[str, Store] = {}
        self.damaged: list[tuple[Store, str, str]] = []
        self.deadline = time.monotonic() + rules.wait_s

    def list_tier(self, tier: str, spec: StoreSpec, seen: TiersSeen) -> None:
        """Adds what a tier holds to `seen`, or what it answered instead."""
        for pause in growing_pauses():
            try:
                seen.found[tier], unusable = self._list(tier, spec)
                seen.unusable += unusable
                return
            except (OSError, errors.AllranksError) as error:
                left = self.deadline - time.monotonic()
                if left <= 0 or isinstance(error, FINAL):
                    seen.found[tier] = []
                    seen.unanswered.append(_answer(tier, spec, error))
                    return
                text = "[%s] %s does not answer (%s): asking again for %.0f s"
                log.warning(text, tier, spec.url, reason_of(error), left)
            time.sleep(min(pause, left))

    def quarantined(self, seen: TiersSeen) -> None:
        """Adds what lies in quarantine: it was there once, so the store is not merely empty."""
        for tier, store in self.stores.items():
            try:
                for where, reason in store.quarantined():
                    seen.unusable.append(_unusable(store, where, reason))
            except OSError as error:
                seen.unanswered.append(_answer(tier, store.spec, error))

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
                log.warning("[%s] %s is left out: %s", tier, store.path_of(name), reason)
        self.damaged += damaged
        return found, unusable


def growing_pauses() -> Iterator[float]:
    """Seconds between attempts: each pause is twice the one before, up to the longest."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(LONGEST_PAUSE_S, 2 * pause)


def refuse_to_guess(views: Sequence[TiersSeen], choice: RestoreChoice, rules: RestoreRules) -> None:
    """Raises when a tier that may hold something newer did not answer on some rank, or holds something newer that this
    version cannot read, unless the user ignores that."""
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
        "; ".join(silent) + ". It may hold something newer, so nothing was restored",
        path=first.address,
        hint=f"{first.hint}\n{AFTER_UNREACHABLE}",
    )


def _refuse_newer(views: Sequence[TiersSeen], choice: RestoreChoice, rules: RestoreRules) -> None:
    """An older step in place of one that a newer version saved would train again, and save over it."""
    newest = max((c.step for c in choice.candidates), default=sys.maxsize)
    every = [one for view in views for one in view.unusable if IS_NEWER in one.reason and one.step > newest]
    if not every:
        return
    text = "; ".join(dict.fromkeys(f"{one.path}: {one.reason}" for one in every))
    if rules.ignore_unreachable:
        log.warning("%s; skipped (on_unreachable=ignore)", text)
        return
    raise errors.CheckpointLoadError(
        f"{text}. Nothing older was restored", hint=f"{UPGRADE}, {AFTER_UNREACHABLE}"
    )


def refuse_to_start_over(
    views: Sequence[TiersSeen], choice: RestoreChoice, rules: RestoreRules, addresses: Sequence[str]
) -> None:
    """Called when there is nothing to restore: raises unless every tier is empty and that is fine with the user."""
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
            hint="bring back the disk that is missing, or copy what another node has to it: "
            f"allranks checkpoint copy OTHER_STORE/{name} {' or '.join(addresses)}\n"
            f"on every node, {scratch_hint(addresses[0] if addresses else 'STORE')}",
        )
    if not rules.missing_ok:
        raise errors.CheckpointLoadError(
            f"there is no checkpoint in {' or '.join(addresses) or 'any tier: none is configured'}",
            hint="is this the path of the run that saved? What is there: allranks checkpoint ls "
            + (addresses[0] if addresses else "STORE"),
        )


def _ways_out(unusable: Sequence[Unusable]) -> str:
    stores = dict.fromkeys(one.store for one in unusable if one.store)
    lines = [f"what is there: allranks checkpoint ls {store}" for store in stores]
    if any(one.tier == "MEMORY" for one in unusable):
        lines.append("to continue without the snapshots in memory: manager.clear_memory_snapshots()")
    if any(one.reason.startswith(OF_ANOTHER_JOB) for one in unusable):
        other = 'CheckpointConfig(from_job="NAME")'
        lines.append(f"give this job a path of its own, or restore the other job's: {other}")
    return "\n".join([*lines, *map(scratch_hint, stores)])


def scratch_hint(store: str) -> str:
    """How to start over: never by accident."""
    return f"to start from scratch (deletes nothing): allranks checkpoint set-aside {store}"


def _answer(tier: str, spec: StoreSpec, error: Exception) -> Unanswered:
    hint = hint_for(error, tier, spec.url, spec.options)
    return Unanswered(tier, spec.url, reason_of(error), hint, was_answered(error))


def _unusable(store: Store, path: str, reason: str) -> Unusable:
    url = store.spec.url
    name = path.removeprefix(url).strip("/").removeprefix("quarantine/").split("-")[0].split("/")[0]
    return Unusable(
        store.tier, store_arguments(url, store.spec.options), path, step_in_name(name) or 0, reason
    )
