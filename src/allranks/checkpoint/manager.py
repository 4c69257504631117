"""The checkpoint manager of a rank: one snapshot, four tiers, one verified restore.

    manager = CheckpointManager(CheckpointConfig(nvme_path="/nvme/run-1"))
    state = manager.restore(model, optimizer, scheduler)          # None on the first start
    for step in range(state.step + 1 if state else 1, last + 1):
        ...forward, backward, optimizer.step()...
        manager.step(step, model, optimizer, scheduler)           # saves when it is due
    manager.close()                                               # saves the last step if that is not saved yet

With a process group every rank calls the same methods with the same step. A save stops training for the copy
into shared memory only; where the optimizer is known, not even for that.
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
SAVE_LAST_S = 60.0  # for a state that another is about to replace
EXIT_S = 30.0  # for a copy that is under way when the process ends


_MANAGERS: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()  # of this process
os.register_at_fork(after_in_child=_MANAGERS.clear)


def saves_checkpoints() -> bool:
    """Whether this process has a manager with a tier that outlives it."""
    return any(one.config.nvme_path or one.config.s3_bucket for one in list(_MANAGERS))


def save_last_steps() -> list[int]:
    """Saves the last step of every manager of this process where no durable tier has it yet; the steps that are safe."""
    found = []
    for manager in list(_MANAGERS):
        manager._save_last()
        if manager.wait_for_pending_saves(SAVE_LAST_S):
            found += [step for step in manager.saves.newest.values() if step == manager._last_step]
    return found


def finish_copies() -> None:
    """Waits for the copies that are under way: then the state of this process may be replaced."""
    for manager in list(_MANAGERS):
        if manager.coordinator.copy is not None:
            manager.coordinator.copy.join(SAVE_LAST_S)


@cache
def _register_exit() -> None:
    """Called when the first copy has begun: what is registered later runs earlier, and the memory must still be there."""
    atexit.register(_hand_over)


def _hand_over() -> None:
    """The process ends without `close()`, after Ctrl-C for example: the helper gets what was promised to be saved."""
    for manager in list(_MANAGERS):
        manager._leave_to_helper()


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """See the module. `process_group`: the ranks that hold one model together (default: all)."""

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
        self.restored_from: CheckpointTier | None = None  # of the last restore; None: there was nothing
        self._last: Callable[[], CheckpointState] | None = None  # makes the state of the last step
        self._last_step, self._last_world, self._moved_on = -1, 0, False
        self._hooks: list[Any] = []
        _MANAGERS.add(self)

    @property
    def skipped(self) -> int:
        """How many saves were left out because the one before still ran."""
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
        """Call after `optimizer.step()` number `step`: saves to every tier that is due, and says which."""
        self.saves.raise_failures()
        step = whole_number("step", step)
        due = self.due(step)
        if optimizer is not None:
            self.attach(optimizer)

        last = hasattr(
            optimizer, "register_step_pre_hook"
        )  # what `close` saves; the data may have moved on by then
        data = dataset_state() if callable(dataset_state) and (due or last) else dataset_state

        def state() -> CheckpointState:
            assert not callable(data)
            return create_checkpoint_state(
                step, model, optimizer, lr_scheduler, dict(data or {}), dict(metrics or {}), epoch
            )

        self._last = state if last else None
        self._last_step, self._last_world, self._moved_on = step, self.group.world_size, False
        if not due:
            return ()
        saved = self._save(state(), due, may_skip=True)
        return tuple(tier for tier in due if tier in saved)

    def save_checkpoint(
        self, state: CheckpointState, tier: CheckpointTier = CheckpointTier.NVME
    ) -> str | None:
        """Saves to one tier and returns its path (None for memory, and for a failed synchronous save).

        A save of this tier that is still under way is waited for. With `async_save` it returns after the copy.
        """
        self.saves.raise_failures()
        return self._save(state, (tier,), may_skip=False).get(tier)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets copies of this optimizer's tensors overlap with forward and backward: its next step waits."""
        if any(ref() is optimizer for ref in self.coordinator.optimizers):
            return
        if not hasattr(optimizer, "register_step_pre_hook"):
            return
        manager = weakref.ref(self)

        def before_step(*_: object) -> None:
            alive = manager()
            if alive is not None:
                alive._moved_on = True
                alive.wait_for_copy()

        self._hooks.append(optimizer.register_step_pre_hook(before_step))
        self.coordinator.optimizers.append(weakref.ref(optimizer))

    def wait_for_copy(self) -> None:
        """Returns when parameters and optimizer state may be changed. Attached optimizers call it themselves."""
        if self.coordinator.copy is not None:
            with during("saving"):
                self.coordinator.copy.wait()

    def due(self, step: int) -> tuple[CheckpointTier, ...]:
        """The tiers that are configured and due at a step."""
        tiers = (Tier.MEMORY, *self.places.specs())
        return tuple(tier for tier in tiers if self.should_checkpoint(step, tier))

    def should_checkpoint(self, step: int, tier: CheckpointTier) -> bool:
        """Whether a step is a multiple of the tier's interval; never for step 0 or an interval of 0."""
        memory = tier in (Tier.MEMORY, Tier.PEER)
        interval = self.config.memory_snapshot_interval if memory else self.config.checkpoint_interval
        return step > 0 and interval > 0 and step % interval == 0

    def wait_for_pending_saves(self, timeout: float | None = None) -> bool:
        """Waits until every save is durable; False if one failed since the last call, or the time ran out (policy
        "fail" raises)."""
        in_time = self._wait_for_saves(timeout)
        return not self.saves.any_failed() and in_time

    def _wait_for_saves(self, timeout: float | None = None) -> bool:
        """Whether what was under way is durable now."""
        began = time.monotonic()
        if self.coordinator.copy is not None and not self.coordinator.copy.join(timeout):
            return False
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        ok = self.saves.wait(left)
        self.saves.raise_failures()
        return ok

    def clear_memory_snapshots(self) -> None:
        """Lets the memory tier go."""
        self.memory_backend.clear()

    def close(self, timeout_s: float = 600.0) -> None:
        """Saves the last step of `step` where no durable tier has it yet (not after an error: half a step may have
        been made, and other ranks may be gone), waits for pending saves, ends the helper process and frees the
        memory. Every rank calls it. Safe to call twice. After Ctrl-C it waits for nothing: the helper finishes alone."""
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        try:
            if interrupted:
                self._leave_to_helper()
                _MANAGERS.discard(self)
                return
            if self.config.save_on_close and sys.exc_info()[0] is None:
                try:
                    self._save_last()
                except RuntimeError as error:  # of gloo: another rank is gone
                    first = (str(error).splitlines() or [""])[0][:200]
                    text = "step %d is not saved at the end: another rank does not answer (%s)"
                    log.warning(text, self._last_step, first)
            self.wait_for_pending_saves(timeout_s)
            self._say_what_is_missing()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self.coordinator.optimizers = [], []
            self.saves.helper.close(None if interrupted else 30.0)
            self.memory_backend.clear()
            self.memory_backend.pool.close()

    def _leave_to_helper(self) -> None:
        """Ends the copy that is under way, and says what the helper will do after this process has ended."""
        copy, saves = self.coordinator.copy, self.saves
        in_time = copy is None or copy.join(EXIT_S)
        for pending in saves.busy({tier.name for tier in Tier}):
            end = f"its helper process (pid {saves.helper.pid}) finishes that" if in_time else "it is lost"
            log.warning("[%s] step %d is still being saved: %s", pending.tier, pending.step, end)

    def _say_what_is_missing(self) -> None:
        """The last word of a training whose last saves failed: the warnings of each have scrolled by."""
        for tier, step in self.coordinator.given.items():
            saved = self.saves.newest.get(tier, -1)
            if saved < step:
                newest = f"step {saved}" if saved >= 0 else "nothing of this run"
                log.error(
                    "[%s] ends without step %d: the newest that is safe there is %s", tier, step, newest
                )

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
        if self._moved_on or self._last_world != self.group.world_size:
            why = "the optimizer has made steps" if self._moved_on else "the process group has changed"
            log.warning("step %d is not saved at the end: %s since", self._last_step, why)
            return
        self._save(state(), tiers, may_skip=False)

    # loading

    def load_checkpoint(
        self,
        path: str | None = None,
        tier: CheckpointTier | None = None,
        config: CheckpointLoadConfig | None = None,
    ) -> CheckpointState | None:
        """The newest state that all ranks can read, as whole CPU tensors; None when there is no checkpoint.

        With `path` that very one, without fallback. `tier` limits the search to one tier.
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
        """Loads the newest checkpoint straight into model and optimizer, each rank only its own shards.

        Returns the state (tensors are the live ones), or None when every tier answered that it is empty (with
        `missing_ok=False` that is an error, too). A tier that may hold something newer and cannot be read raises
        CheckpointUnreachable on all ranks; damaged ones alone raise at every start. Every byte is checked as it is
        read; of a bad one nothing is kept, since the next older one is read over it. If all are bad, CheckpointLoadError
        says whether the model holds parts of one.
        """
        self._settle()
        self._last = None  # the model is no longer what that step left
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
        """Saves under way are finished before anything is loaded."""
        if self.coordinator.copy is not None:
            self.coordinator.copy.join()
        self.saves.wait(self.config.commit_timeout_s)
