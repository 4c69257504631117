"""Loads a checkpoint across tiers and ranks: lists the candidates, tries them in order, handles damaged ones."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from allranks import errors
from allranks.checkpoint.config import CheckpointLoadConfig, CheckpointTier
from allranks.checkpoint.group import RankGroup
from allranks.checkpoint.restore import candidates
from allranks.checkpoint.restore.into_state import (
    Live,
    copy_into,
    is_legacy,
    load_legacy,
    load_state,
    prepare_into,
    read_state,
)
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.state import CheckpointState
from allranks.checkpoint.stores import (
    Store,
    StoreSpec,
    hint_for,
    open_store,
    reason_of,
    split_address,
    store_arguments,
)
from allranks.checkpoint.stores.backends import MemorySnapshotBackend

log = logging.getLogger("allranks.checkpoint")
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Loader:
    """One load. `specs` are the tiers to search; `memory` None skips the memory tier."""

    group: RankGroup
    specs: Mapping[str, StoreSpec]
    memory: MemorySnapshotBackend | None
    rules: candidates.RestoreRules
    given: Mapping[str, int]  # tier → newest step that this process has saved or is saving to it
    taken: candidates.RestoreCandidate | None = None  # loaded by `load_newest`
    _torn: candidates.RestoreCandidate | None = None  # partly written into the live model
    _stores: dict[str, Store] = field(default_factory=dict)

    def load_newest(self, into: Live | None) -> CheckpointState | None:
        """Tries the checkpoints that all ranks can see, newest first; None if every tier is empty. Collective."""
        try:
            with _no_gc():
                return self._load_newest(into)
        finally:
            for store in self._stores.values():
                store.close()

    def _load_newest(self, into: Live | None) -> CheckpointState | None:
        lister, seen = self._list_tiers()
        views = seen.share(self.group.gather)
        choice = candidates.choose([view.found for view in views])
        candidates.refuse_to_guess(views, choice, self.rules)
        if not choice.candidates:
            lister.quarantined(seen)
            views = seen.share(self.group.gather)
            candidates.refuse_to_guess(views, choice, self.rules)
            candidates.refuse_to_start_over(views, choice, self.rules, self._arguments())
            log.info("nothing to load: %s", choice.reason)
            return None
        log.info("loading: %s", choice.reason)
        tried: list[str] = []
        unread: list[candidates.RestoreCandidate] = []
        for candidate in choice.candidates:
            if unread and candidate.step < unread[0].step and not self.rules.ignore_unreachable:
                break  # do not fall back to an older step because a store does not respond
            state, problem, unreadable = self._attempt_patiently(candidate, into, lister.deadline)
            if state is not None:
                self.taken = candidate
                return state
            tried.append(f"step {candidate.step} in {candidate.tier}: {problem}")
            log.warning("%s; trying the next checkpoint", tried[-1])
            if unreadable:
                unread.append(candidate)
        raise self._failed(tried, unread, into)

    def _failed(
        self, tried: list[str], unread: list[candidates.RestoreCandidate], into: Live | None
    ) -> errors.CheckpointLoadError:
        if unread:
            tier = unread[0].tier
            spec = self.specs[tier]
            hint = hint_for(OSError(), spec)
            return errors.CheckpointUnreachable(
                f"[{tier}] {spec.url} stopped answering: {'; '.join(tried)}. No older checkpoint was restored"
                + self._model_state(into),
                path=spec.url,
                hint=f"{hint}\n{candidates.AFTER_UNREACHABLE}",
            )
        return errors.CheckpointLoadError(
            "no checkpoint could be loaded: " + "; ".join(tried) + self._model_state(into),
            hint="\n".join(map(candidates.scratch_hint, self._arguments())),
        )

    def _arguments(self) -> list[str]:
        """The stores as arguments of `allranks checkpoint`."""
        return [store_arguments(spec.url, spec.options) for spec in self.specs.values()]

    def load_path(
        self, path: str, tier: CheckpointTier | None, config: CheckpointLoadConfig
    ) -> CheckpointState:
        """Loads one checkpoint by its path (absolute, a URL, or relative to the tier's address)."""
        store, name, label = self._locate(path, tier)
        if isinstance(store, Path):
            return load_legacy(store, config, label)
        return load_state(store, name, self.group.rank)

    def _locate(self, path: str, tier: CheckpointTier | None) -> tuple[Store | Path, str, str]:
        if "://" not in path and not Path(path).is_absolute():
            order = [name for name in ("NVME", "S3", "PEER") if name in self.specs]
            label = tier.name if tier is not None else next(iter(order), "")
            base = self.specs[label].url if label in self.specs else "."
            whole = f"{base.rstrip('/')}/{path}" if "://" in base else str(Path(base).absolute() / path)
            return self._locate(whole, tier)
        if "://" not in path and is_legacy(Path(path)):
            return Path(path), "", "NVME"
        head, name = split_address(path)
        known = next((spec for spec in self.specs.values() if spec.url.rstrip("/") == head), StoreSpec(head))
        return open_store(known), name, ""

    def _list_tiers(self) -> tuple[candidates.StoreLister, candidates.TiersSeen]:
        """Every checkpoint with a valid manifest that this rank can see; quarantines damaged ones."""
        lister, seen = candidates.StoreLister(self.rules), candidates.TiersSeen(given=dict(self.given))
        if self.memory is not None:
            seen.found["MEMORY"] = [(str(step), step) for step in self.memory.steps()]
            seen.unusable += [
                candidates.Unusable("MEMORY", "", f"the snapshot of step {step}", step, reason)
                for step, reason in self.memory.damaged.items()
            ]
        self._stores = lister.stores
        for spec in self.specs.values():
            lister.list_tier(spec, seen)
        for store, name, reason in lister.damaged:
            self._quarantine(store, name, reason)
        return lister, seen

    def _model_state(self, into: Live | None) -> str:
        """How a failed load left the model, as the end of a message."""
        if into is None:
            return ""
        if self._torn is None:
            return ". Model and optimizer are unchanged"
        return f". THE MODEL HOLDS PARTS OF STEP {self._torn.step}: rebuild it before training"

    def _attempt_patiently(
        self, candidate: candidates.RestoreCandidate, into: Live | None, deadline: float
    ) -> tuple[CheckpointState | None, str, bool]:
        """(state, problem, whether a store did not respond). Retries such a store until the deadline."""
        for pause in candidates.growing_pauses():
            state, problem, kinds = self._attempt(candidate, into)
            unreadable = bool(kinds) and kinds <= {"unreadable", "refused"}
            if state is not None or not unreadable or "refused" in kinds:
                return state, problem, unreadable
            left = min(self.group.gather(deadline - time.monotonic()))
            if left <= 0:
                break
            text = "step %d in %s: %s; retrying for %.0f s"
            log.warning(text, candidate.step, candidate.tier, problem, left)
            time.sleep(min(pause, left))
        return None, problem, True

    def _attempt(
        self, candidate: candidates.RestoreCandidate, into: Live | None
    ) -> tuple[CheckpointState | None, str, set[str]]:
        """Every rank reads and verifies; the candidate is used only if all ranks succeed."""
        if into is not None:
            into.torn = False
        with ExitStack() as held:
            try:
                prepare = partial(self._prepare, candidate, into, held)
                finish, problem, kinds = self._together(candidate, prepare)
            except KeyboardInterrupt:
                self._torn = candidate if into is not None and into.torn else None
                log.warning("the restore was interrupted%s", self._model_state(into))
                raise
            state = None
            if finish is not None and not problem:
                state, problem, kinds = self._together(candidate, finish)
            if problem and into is not None and into.torn:
                self._torn = candidate
            return (None if problem else state), problem, kinds

    def _together(
        self, candidate: candidates.RestoreCandidate, act: Callable[[], T]
    ) -> tuple[T | None, str, set[str]]:
        """(result, problems of all ranks, kinds of failure). A mismatch of model and checkpoint raises on all ranks."""
        result, error = None, None
        try:
            result = act()
        except Exception as caught:  # the other ranks must know about any failure
            error = caught
        kind = "" if error is None else kind_of_failure(error, candidate.tier)
        outcomes = self.group.gather([kind, "" if error is None else reason_of(error)])
        if isinstance(error, errors.CheckpointDamaged) and candidate.tier != "MEMORY":
            self._quarantine(self._stores[candidate.tier], candidate.name, error.reason)
        elif isinstance(error, errors.CheckpointDamaged) and self.memory is not None:
            self.memory.drop(candidate.step, error.reason)
            text = "[MEMORY] the snapshot of step %d is damaged (%s): dropped"
            log.warning(text, candidate.step, error.reason)
        mismatches = [
            f"rank {rank}: {text}" for rank, (kind, text) in enumerate(outcomes) if kind == "mismatch"
        ]
        if mismatches:  # the model would not match an older checkpoint either
            if isinstance(error, errors.AllranksError) and kind == "mismatch":
                raise error
            where = {"tier": candidate.tier, "path": candidate.name}
            raise errors.CheckpointLoadError("; ".join(mismatches), **where) from error
        bad = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(outcomes) if kind]
        return result, "; ".join(bad), {kind for kind, _ in outcomes if kind}

    def _prepare(
        self, candidate: candidates.RestoreCandidate, into: Live | None, held: ExitStack
    ) -> Callable[[], CheckpointState]:
        """Reads and verifies a candidate; call the result to finish. `held` protects it from removal."""
        if candidate.tier == "MEMORY":
            return self._prepare_memory(candidate.step, into, held)
        checkpoint = held.enter_context(opened(self._stores[candidate.tier], candidate.name))
        if into is None:
            state = read_state(checkpoint, self.group.rank)
            return lambda: state
        return prepare_into(checkpoint, into, self.group.rank)

    def _prepare_memory(self, step: int, into: Live | None, held: ExitStack) -> Callable[[], CheckpointState]:
        assert self.memory is not None
        snapshot = self.memory.find(step)
        if snapshot is None:
            raise FileNotFoundError(f"the snapshot of step {step} is gone")
        held.callback(snapshot.release)
        snapshot.check()
        return snapshot.to_state if into is None else copy_into(snapshot, into)

    def _quarantine(self, store: Store, name: str, reason: str) -> None:
        where = ""
        with contextlib.suppress(OSError):
            where = store.quarantine(name, reason)
        moved = f"moved to {where}" if where else "could not be moved away"
        log.warning(
            "[%s] %s is damaged (%s): %s, not deleted", store.tier, store.path_of(name), reason, moved
        )


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Disables the garbage collector, which took an eighth of a load's time: a load makes many objects and no cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def kind_of_failure(error: BaseException, tier: str) -> str:
    """The kind of a failure, which decides what is tried next.

    "damaged", "partial", "gone": the next candidate. "unreadable", "refused": the same step in another tier.
    "mismatch": none.
    """
    if isinstance(error, errors.CheckpointDamaged):
        return "damaged"
    if isinstance(error, errors.CheckpointValidationError):
        partial = error.missing_keys and not error.invalid_keys and "elements of" in error.reason
        return "partial" if partial else "mismatch"
    bad_sector = tier == "NVME" and isinstance(error, OSError) and error.errno == errno.EIO
    if isinstance(error, (EOFError, FileNotFoundError)) or bad_sector:
        return "gone"
    if isinstance(error, PermissionError):
        return "refused"
    return "unreadable" if isinstance(error, OSError) else "mismatch"
