"""CheckpointManager: saves the training state of a rank to up to four tiers and restores it.

    manager = CheckpointManager(CheckpointConfig(nvme_path="/nvme/run-1"))
    state = manager.restore(model, optimizer, scheduler)          # None on the first start
    for step in range(state.step + 1 if state else 1, last + 1):
        ...forward, backward, optimizer.step()...
        manager.step(step, model, optimizer, scheduler)           # saves when a save is due
    manager.close()                                               # saves the last step if it is not saved yet

With a process group, every rank calls the same methods with the same step. A save blocks training only for the copy
into shared memory; with an attached optimizer, most of the copy overlaps with the next step.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from allranks.blackbox.phases import during
from allranks.checkpoint.config import CheckpointConfig, CheckpointLoadConfig, CheckpointTier
from allranks.checkpoint.group import SNAPSHOTS_VARIABLE, RankGroup, TierLocations, start_fresh
from allranks.checkpoint.restore.candidates import RestoreRules
from allranks.checkpoint.restore.into_state import Live
from allranks.checkpoint.restore.loader import Loader
from allranks.checkpoint.save.coordinator import SaveCoordinator
from allranks.checkpoint.state import (
    CheckpointState,
    create_checkpoint_state,
    restore_rng_states,
    unwrap,
    whole_number,
)
from allranks.checkpoint.stores.backends import Backend, MemorySnapshotBackend, NVMeBackend, S3Backend

log = logging.getLogger("allranks.checkpoint")
Tier = CheckpointTier
SAVE_LAST_S = 60.0  # limit for a save before the state of this process is replaced
EXIT_S = 30.0  # limit for a running copy when the process exits


_MANAGERS: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()  # in this process
os.register_at_fork(after_in_child=_MANAGERS.clear)


def saves_checkpoints() -> bool:
    """Whether a manager of this process has a durable tier."""
    return any(one.config.nvme_path or one.config.s3_bucket for one in list(_MANAGERS))


def save_last_steps() -> list[int]:
    """Saves the last step of every manager in this process to its durable tiers; returns the steps that are saved."""
    found = []
    for manager in list(_MANAGERS):
        manager._save_last()
        if manager.wait_for_pending_saves(SAVE_LAST_S):
            found += [step for step in manager.saves.newest.values() if step == manager._last_step]
    return found


def finish_copies() -> None:
    """Waits for running copies, so that the state of this process can be replaced."""
    for manager in list(_MANAGERS):
        if manager.coordinator.copy is not None:
            manager.coordinator.copy.join(SAVE_LAST_S)


@cache
def _register_exit() -> None:
    """Registered after the first copy: later handlers run earlier, and this one still needs the memory of the copy."""
    atexit.register(_hand_over)


def _hand_over() -> None:
    """Hands pending saves to the helper when the process exits without `close()`, for example after Ctrl-C."""
    for manager in list(_MANAGERS):
        manager._leave_to_helper()


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """See the module docstring. `process_group`: the ranks that share one model (default: all ranks)."""

    def __init__(self, config: CheckpointConfig | None = None, process_group: Any = None) -> None:
        self.config = config = config or CheckpointConfig()
        self.group = RankGroup(process_group, config.commit_timeout_s)
        self.memory_backend = MemorySnapshotBackend(config.max_snapshots, config.max_memory_mb)
        self.nvme_backend = NVMeBackend(str(config.nvme_path)) if config.nvme_path is not None else None
        self.s3_backend: S3Backend | None = None
        if config.s3_bucket:
            where = (config.s3_bucket, config.s3_prefix, config.s3_region)
            endpoint = config.s3_endpoint_url
            self.s3_backend = S3Backend(*where, endpoint_url=endpoint, options=config.s3_options)
        known: dict[Tier, Backend | None] = {Tier.NVME: self.nvme_backend, Tier.S3: self.s3_backend}
        backends = {tier: backend for tier, backend in known.items() if backend is not None}
        self.places = TierLocations(config, self.group, {tier: one.spec for tier, one in backends.items()})
        if not backends and not config.peers and SNAPSHOTS_VARIABLE not in os.environ:
            text = "no checkpoint will outlive this process: set nvme_path or s3_bucket in CheckpointConfig"
            log.warning(text)
        self.coordinator = SaveCoordinator(config, self.group, self.places, self.memory_backend)
        self.saves = self.coordinator.saves
        for tier, backend in backends.items():
            backend.settle = partial(self.saves.wait_for, tier.name, timeout_s=config.commit_timeout_s)
        self.restored_from: CheckpointTier | None = None  # tier of the last restore; None if it found nothing
        self._last: Callable[[], CheckpointState] | None = None  # builds the state of the last step
        self._last_step, self._last_world, self._stepped_since = -1, 0, False
        self._hooks: list[Any] = []
        _MANAGERS.add(self)

    @property
    def skipped(self) -> int:
        """Number of saves skipped because the previous one was still running."""
        return self.coordinator.skipped

    def __exit__(self, *_: object) -> None:
        self.close()

    # saving

    def step(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        epoch: int = 0,
        dataset_state: Mapping[str, object] | Callable[[], Mapping[str, object]] | None = None,
        metrics: Mapping[str, object] | None = None,
    ) -> tuple[CheckpointTier, ...]:
        """Saves to every tier that is due and returns those tiers. Call it after `optimizer.step()` number `step`."""
        self.saves.raise_failures()
        step = whole_number("step", step)
        due = self.due(step)
        if optimizer is not None:
            self.attach(optimizer)

        # `close` may save this step later, when the data loader has already advanced
        last = hasattr(optimizer, "register_step_pre_hook")
        data = dataset_state() if callable(dataset_state) and (due or last) else dataset_state

        def state() -> CheckpointState:
            assert not callable(data)
            return create_checkpoint_state(
                step, model, optimizer, lr_scheduler, dict(data or {}), dict(metrics or {}), epoch
            )

        self._last = state if last else None
        self._last_step, self._last_world, self._stepped_since = step, self.group.world_size, False
        if not due:
            return ()
        saved = self._save(state(), due, may_skip=True)
        return tuple(tier for tier in due if tier in saved)

    def save_checkpoint(
        self, state: CheckpointState, tier: CheckpointTier = CheckpointTier.NVME
    ) -> str | None:
        """Saves to one tier and returns the path (None for memory and for a failed synchronous save).

        Waits for a running save of this tier first. With `async_save`, returns after the copy.
        """
        self.saves.raise_failures()
        return self._save(state, (tier,), may_skip=False).get(tier)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets copies of this optimizer's tensors overlap with training; its next step waits for the copy."""
        if any(ref() is optimizer for ref in self.coordinator.optimizers):
            return
        if not hasattr(optimizer, "register_step_pre_hook"):
            return
        manager = weakref.ref(self)

        def before_step(*_: object) -> None:
            alive = manager()
            if alive is not None:
                alive._stepped_since = True
                alive.wait_for_copy()

        self._hooks.append(optimizer.register_step_pre_hook(before_step))
        self.coordinator.optimizers.append(weakref.ref(optimizer))

    def wait_for_copy(self) -> None:
        """Waits until parameters and optimizer state may change. Attached optimizers call this themselves."""
        if self.coordinator.copy is not None:
            with during("saving"):
                self.coordinator.copy.wait()

    def due(self, step: int) -> tuple[CheckpointTier, ...]:
        """The configured tiers to save to at this step."""
        tiers = (Tier.MEMORY, *self.places.specs())
        return tuple(tier for tier in tiers if self.should_checkpoint(step, tier))

    def should_checkpoint(self, step: int, tier: CheckpointTier) -> bool:
        """Whether the step is a multiple of the tier's interval; False for step 0 and for an interval of 0."""
        memory = tier in (Tier.MEMORY, Tier.PEER)
        interval = self.config.memory_snapshot_interval if memory else self.config.checkpoint_interval
        return step > 0 and interval > 0 and step % interval == 0

    def wait_for_pending_saves(self, timeout: float | None = None) -> bool:
        """Waits until every save is durable. False on timeout or if a save failed since the last call (the save policy
        "fail" raises instead)."""
        in_time = self._wait_for_saves(timeout)
        return not self.saves.any_failed() and in_time

    def _wait_for_saves(self, timeout: float | None = None) -> bool:
        """Whether all pending saves are durable."""
        began = time.monotonic()
        if self.coordinator.copy is not None and not self.coordinator.copy.join(timeout):
            return False
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        ok = self.saves.wait(left)
        self.saves.raise_failures()
        return ok

    def clear_memory_snapshots(self) -> None:
        """Drops all snapshots of the memory tier."""
        self.memory_backend.clear()

    def close(self, timeout_s: float = 600.0) -> None:
        """Saves the last step to durable tiers that lack it, waits for pending saves, ends the helper and frees memory.

        Every rank calls it; a second call does nothing. After an error it does not save, because the step may be
        incomplete and other ranks may be gone. After Ctrl-C it does not wait; the helper finishes by itself.
        """
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        try:
            if interrupted:
                self._leave_to_helper()
                _MANAGERS.discard(self)
                return
            if self.config.save_on_close and sys.exc_info()[0] is None:
                try:
                    self._save_last()
                except RuntimeError as error:  # raised by gloo when another rank is gone
                    first = (str(error).splitlines() or [""])[0][:200]
                    text = "last step %d not saved: another rank does not respond (%s)"
                    log.warning(text, self._last_step, first)
            self.wait_for_pending_saves(timeout_s)
            self._log_missing_steps()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self.coordinator.optimizers = [], []
            self.saves.helper.close(None if interrupted else 30.0)
            self.memory_backend.clear()
            self.memory_backend.pool.close()

    def _leave_to_helper(self) -> None:
        """Finishes the running copy and logs which saves the helper will complete after this process exits."""
        copy, saves = self.coordinator.copy, self.saves
        in_time = copy is None or copy.join(EXIT_S)
        for pending in saves.busy({tier.name for tier in Tier}):
            end = f"the helper process (pid {saves.helper.pid}) will finish it" if in_time else "it is lost"
            log.warning("[%s] step %d is still being saved: %s", pending.tier, pending.step, end)

    def _log_missing_steps(self) -> None:
        """Repeats at the end which saves failed: the warning of each save may be far up in the log."""
        for tier, step in self.coordinator.given.items():
            saved = self.saves.newest.get(tier, -1)
            if saved < step:
                newest = (
                    f"step {saved} is the newest saved" if saved >= 0 else "no step of this run was saved"
                )
                log.error("[%s] step %d was not saved: %s", tier, step, newest)

    def _save_last(self) -> None:
        state, self._last = self._last, None
        specs = self.places.specs() if state is not None else {}
        tiers = tuple(
            tier
            for tier in (Tier.NVME, Tier.S3)
            if tier in specs and self.coordinator.given.get(tier.name, -1) < self._last_step
        )
        if state is None or not tiers:
            return
        if self._stepped_since or self._last_world != self.group.world_size:
            why = "the optimizer has stepped" if self._stepped_since else "the process group has changed"
            log.warning("last step %d not saved: %s since", self._last_step, why)
            return
        self._save(state(), tiers, may_skip=False)

    # loading

    def load_checkpoint(
        self,
        path: str | None = None,
        tier: CheckpointTier | None = None,
        config: CheckpointLoadConfig | None = None,
    ) -> CheckpointState | None:
        """The newest state that all ranks can read, as whole CPU tensors; None if there is no checkpoint.

        With `path`, loads that checkpoint and no other. `tier` limits the search to one tier.
        """
        self._settle()
        loader = self._loader(tier)
        if path is not None:
            return loader.load_path(path, tier, config or CheckpointLoadConfig())
        start_fresh(self.places, os.environ)
        with during("restoring"):
            return loader.load_newest(None)

    def restore(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        tier: CheckpointTier | None = None,
        strict: bool = True,
        restore_rng: bool = True,
        missing_ok: bool = True,
    ) -> CheckpointState | None:
        """Loads the newest checkpoint into model and optimizer; each rank reads only its own shards.

        Returns the state, whose tensors are those of the model, or None if every tier is empty (an error with
        `missing_ok=False`). Raises CheckpointUnreachable on all ranks if a tier that may hold a newer checkpoint cannot be
        read. Every byte is verified. After a damaged checkpoint, the next older one is loaded over it; if all are damaged,
        CheckpointLoadError says whether the model holds parts of one.
        """
        self._settle()
        self._last = None  # the model no longer holds that step
        start_fresh(self.places, os.environ)
        loader = self._loader(tier, missing_ok)
        with during("restoring"):
            state = loader.load_newest(Live(unwrap(model), optimizer, lr_scheduler, strict))
        self.restored_from = CheckpointTier[loader.taken.tier] if loader.taken is not None else None
        if state is not None and restore_rng:
            restore_rng_states(state.rng_states)
        return state

    def _save(
        self, state: CheckpointState, tiers: tuple[Tier, ...], may_skip: bool
    ) -> dict[Tier, str | None]:
        with during(f"saving {tiers[-1].name.lower()}" if tiers else "saving"):
            saved = self.coordinator.save(state, tiers, may_skip)
            _register_exit()
            durable = any(tier is not Tier.MEMORY for tier in tiers)
            if durable and not self.config.async_save and not self._wait_for_saves():
                return {tier: None for tier in saved if tier is Tier.MEMORY}
            return saved

    def _loader(self, tier: CheckpointTier | None, missing_ok: bool = True) -> Loader:
        specs = self.places.specs()
        wanted = {one.name: spec for one, spec in specs.items() if tier is None or one is tier}
        memory = self.memory_backend if tier is None or tier is Tier.MEMORY else None
        config = self.config
        ignore = config.on_unreachable == "ignore"
        rules = RestoreRules(config.job, config.from_job, config.wait_for_stores_s, ignore, missing_ok)
        return Loader(self.group, wanted, memory, rules, self.coordinator.given)

    def _settle(self) -> None:
        """Finishes running saves before a load."""
        if self.coordinator.copy is not None:
            self.coordinator.copy.join()
        self.saves.wait(self.config.commit_timeout_s)
