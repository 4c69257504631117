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

import hashlib
import json
import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.config import (
    AsyncSavePolicy,
    BusyPolicy,
    CheckpointConfig,
    CheckpointLoadConfig,
    CheckpointTier,
)
from allranks.checkpoint.fresh import start_fresh
from allranks.checkpoint.group import Group
from allranks.checkpoint.restore.candidates import RestoreRules
from allranks.checkpoint.restore.into_state import Live, install_rng
from allranks.checkpoint.restore.loader import Loader
from allranks.checkpoint.save.plan import Plan, Planner, fingerprint, local_tensors
from allranks.checkpoint.save.saves import Pending, Saves
from allranks.checkpoint.save.snapshot import ArenaPool, FlatState, Snapshot, flatten_state, wraps_of
from allranks.checkpoint.save.staging import Copy
from allranks.checkpoint.save.writer import SaveJob
from allranks.checkpoint.state import CheckpointState, create_checkpoint_state
from allranks.checkpoint.stores.backends import NVMeBackend, S3Backend
from allranks.checkpoint.stores.memory import MemorySnapshotBackend
from allranks.checkpoint.stores.store import Attempt, checkpoint_name
from allranks.checkpoint.tier_locations import SNAPSHOTS_VARIABLE, TierLocations
from allranks.errors import CheckpointSaveError, MemoryLimitExceeded

log = logging.getLogger("allranks.checkpoint")
Tier = CheckpointTier
#: Steps being saved at once under busy_policy "queue": one more waits for the oldest.
MOST_BUFFERS = 2


class CheckpointManager:
    """See the module. `process_group`: the ranks that hold one model together (default: all)."""

    def __init__(self, config: CheckpointConfig | None = None, process_group: Any = None) -> None:
        self.config = config or CheckpointConfig()
        self.group = Group(process_group, self.config.commit_timeout_s)
        self.pool = ArenaPool()
        self.saves = Saves(AsyncSavePolicy(self.config.async_save_policy))
        self.memory_backend = MemorySnapshotBackend(
            self.config.max_snapshots, self.config.max_memory_mb, pool=self.pool
        )
        self.nvme_backend = None if self.config.nvme_path is None else _nvme(self.config, self.saves)
        self.s3_backend = _s3(self.config, self.saves) if self.config.s3_bucket else None
        self.skipped = 0
        self.restored_from: CheckpointTier | None = (
            None  # the tier of the last restore; None: there was nothing
        )
        known = {Tier.NVME: self.nvme_backend, Tier.S3: self.s3_backend}
        specs = {tier: backend.spec for tier, backend in known.items() if backend is not None}
        self.places = TierLocations(self.config, self.group, specs)
        if not specs and not self.config.peers and SNAPSHOTS_VARIABLE not in os.environ:
            log.warning(
                "no checkpoint will outlive this process: set nvme_path or s3_bucket in CheckpointConfig"
            )
        self.planner = Planner(self.group)
        self._last: Callable[[], CheckpointState] | None = None  # makes the state of the last step
        self._last_step, self._last_world, self._moved_on = -1, 0, False
        self._given: dict[str, int] = {}  # tier → newest step handed to it
        self._copy: Copy | None = None
        self._optimizers: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # saving

    def step(
        self, step: int, model: Any, optimizer: Any = None, lr_scheduler: Any = None, *, epoch: int = 0,
        dataset_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> tuple[CheckpointTier, ...]:  # fmt: skip
        """Call after `optimizer.step()` number `step`: saves to every tier that is due, and says which."""
        self.saves.raise_failures()
        due = self.due(step)
        if optimizer is not None:
            self.attach(optimizer)

        def state() -> CheckpointState:
            data = dataset_state() if callable(dataset_state) else dataset_state
            return create_checkpoint_state(
                step, model, optimizer, lr_scheduler, dict(data or {}), dict(metrics or {}), epoch
            )

        self._last = state if hasattr(optimizer, "register_step_pre_hook") else None
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

    def attach(self, optimizer: Any) -> None:
        """Lets copies of this optimizer's tensors overlap with forward and backward: its next step waits."""
        if any(ref() is optimizer for ref in self._optimizers):
            return
        if not hasattr(optimizer, "register_step_pre_hook"):
            return
        manager = weakref.ref(self)

        def before_step(*_: Any) -> None:
            alive = manager()
            if alive is not None:
                alive._moved_on = True
                alive.wait_for_copy()

        self._hooks.append(optimizer.register_step_pre_hook(before_step))
        self._optimizers.append(weakref.ref(optimizer))

    def wait_for_copy(self) -> None:
        """Returns when parameters and optimizer state may be changed. Attached optimizers call it themselves."""
        if self._copy is not None:
            self._copy.wait()

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
        """Waits until every save is durable; False if one failed or the time ran out (policy "fail" raises)."""
        began = time.monotonic()
        if self._copy is not None and not self._copy.join(timeout):
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
        memory. Every rank calls it. Safe to call twice."""
        try:
            if self.config.save_on_close and sys.exc_info()[0] is None:
                self._try_to_save_last()
            self.wait_for_pending_saves(timeout_s)
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._optimizers = [], []
            self.saves.helper.close()
            self.memory_backend.clear()
            self.pool.close()

    def _try_to_save_last(self) -> None:
        try:
            self._save_last()
        except RuntimeError as error:  # of gloo: another rank is gone
            first = (str(error).splitlines() or [""])[0][:200]
            log.warning(
                "step %d is not saved at the end: another rank does not answer (%s)", self._last_step, first
            )

    def _save_last(self) -> None:
        state, self._last = self._last, None
        specs = self.places.specs() if state is not None else {}
        tiers = tuple(
            tier for tier in (Tier.NVME, Tier.S3) if tier in specs and self._given.get(tier.name, -1) < self._last_step
        )  # fmt: skip
        if state is None or not tiers:
            return
        if self._moved_on or self._last_world != self.group.world_size:
            why = "the optimizer has made steps" if self._moved_on else "the process group has changed"
            log.warning("step %d is not saved at the end: %s since", self._last_step, why)
            return
        self._save(state(), tiers, may_skip=False)

    # loading

    def load_checkpoint(
        self, path: str | None = None, tier: CheckpointTier | None = None,
        config: CheckpointLoadConfig | None = None,
    ) -> CheckpointState | None:  # fmt: skip
        """The newest state that all ranks can read, as whole CPU tensors; None when there is no checkpoint.

        With `path` that very one, without fallback. `tier` limits the search to one tier.
        """
        self._settle()
        loader = self._loader(tier)
        if path is not None:
            return loader.load_path(path, tier, config or CheckpointLoadConfig())
        start_fresh(self.places, os.environ)
        return loader.load_newest(None)

    def restore(
        self, model: Any, optimizer: Any = None, lr_scheduler: Any = None, *,
        tier: CheckpointTier | None = None, strict: bool = True, restore_rng: bool = True,
        check_first: bool = False, missing_ok: bool = True,
    ) -> CheckpointState | None:  # fmt: skip
        """Loads the newest checkpoint straight into model and optimizer, each rank only its own shards.

        Returns the state (tensors are the live ones), or None when every tier answered that it is empty (with
        `missing_ok=False` that is an error, too). A tier that may hold something newer and cannot be read raises
        CheckpointUnreachable on all ranks; damaged ones alone raise at every start. Every byte is checked as it is read; of a bad one nothing is kept, since the next older one is read over it. If all are bad,
        CheckpointLoadError says whether the model holds parts of one. With `check_first` it never does: everything
        is read twice, and changes only when every byte that every rank needs was found right.
        """
        self._settle()
        self._last = None  # the model is no longer what that step left
        start_fresh(self.places, os.environ)
        loader = self._loader(tier, missing_ok)
        live = Live(model, optimizer, lr_scheduler, strict=strict, check_first=check_first)
        state = loader.load_newest(live)
        self.restored_from = CheckpointTier[loader.taken.tier] if loader.taken is not None else None
        if state is not None and restore_rng:
            install_rng(state)
        return state

    # how

    def _save(
        self, state: CheckpointState, tiers: tuple[Tier, ...], may_skip: bool
    ) -> dict[Tier, str | None]:
        """One snapshot for all tiers (one per set of ranks that share a store); returns tier → path."""
        if self._copy is not None:
            self._copy.join()
        durable = tuple(tier for tier in tiers if tier is not Tier.MEMORY)
        flat, problem = _flattened(state, self.group.rank)
        saved: dict[Tier, str | None] = {}
        in_memory = Tier.MEMORY in tiers
        for together in self.places.together(durable):
            paths, kept = self._save_durable(state, flat, problem, together, in_memory, may_skip)
            if kept:
                saved[Tier.MEMORY], in_memory = None, False
            saved.update(paths)
        if problem is not None:
            raise problem
        if in_memory and not saved and flat is not None and self._save_memory(state, flat, may_skip):
            saved[Tier.MEMORY] = None
        if durable and not self.config.async_save and not self.wait_for_pending_saves():
            return {tier: None for tier in saved if tier is Tier.MEMORY}
        return saved

    def _save_durable(
        self, state: CheckpointState, flat: FlatState | None, problem: BaseException | None,
        tiers: tuple[Tier, ...], in_memory: bool, may_skip: bool,
    ) -> tuple[dict[Tier, str | None], bool]:  # fmt: skip
        """Agrees with the other ranks, copies, and hands the snapshot on. (tier → path, kept in memory too)."""
        most = MOST_BUFFERS if may_skip else 1
        running = self.saves.busy({tier.name for tier in tiers})
        may_skip = may_skip and self.config.busy_policy is BusyPolicy.SKIP
        busy = sorted({pending.tier for pending in running}) if may_skip else []
        words = self.group.gather(_word(state, flat, problem, busy, self.group))
        check_words(words, state.step, tiers[0].name, self.places.spec(tiers[0]).url)
        tiers = self._not_busy(tiers, words, running, state.step)
        if not tiers:
            return {}, False
        names = {tier.name for tier in tiers}
        self.saves.wait_for_room(names, most, self.config.commit_timeout_s)
        assert flat is not None
        sharers = self.places.sharers(tiers[0])
        plan = self.planner.shared([word["mark"] for word in words], sharers, flat.tensors, in_memory)
        first = words[sharers[0]]["common"]
        alike = self.group.rank != sharers[0] and words[self.group.rank]["common"] == first
        jobs = [(tier, self._job(state, flat, tier, words[0]["token"], alike)) for tier in tiers]
        kept = in_memory and self._has_room(state.step, plan)
        self._start(state, flat, plan, jobs, kept)
        return {tier: _path(job) for tier, job in jobs}, kept

    def _not_busy(
        self, tiers: tuple[Tier, ...], words: list[dict[str, Any]], running: list[Pending], step: int
    ) -> tuple[Tier, ...]:
        """The tiers that no rank is still saving to; the others are left out, and said."""
        for tier in [tier for tier in tiers if any(tier.name in word["busy"] for word in words)]:
            tiers = tuple(other for other in tiers if other is not tier)
            self.skipped += 1
            since = [str(pending.step) for pending in running if pending.tier == tier.name]
            log.warning(
                "step %d is not saved to %s: the save of step %s still runs (busy_policy=skip)",
                step, tier.name, since[0] if since else "? on another rank",
            )  # fmt: skip
        return tiers

    def _save_memory(self, state: CheckpointState, flat: FlatState, may_skip: bool) -> bool:
        """A snapshot for the memory tier alone: no word with the other ranks."""
        plan = self.planner.alone(fingerprint(flat.tensors), flat.tensors)
        if may_skip and not self._has_room(state.step, plan):
            return False
        self._start(state, flat, plan, [], True)
        return True

    def _has_room(self, step: int, plan: Plan) -> bool:
        """Whether the memory tier can take a snapshot; says so when it cannot."""
        try:
            self.memory_backend.make_room(plan.arena_bytes)
        except MemoryLimitExceeded as error:
            log.warning("[MEMORY] step %d is not kept: %s\n%s", step, error, error.hint)
            return False
        return True

    def _start(
        self,
        state: CheckpointState,
        flat: FlatState,
        plan: Plan,
        jobs: list[tuple[Tier, SaveJob]],
        keep: bool,
    ) -> None:
        """Begins the copy; what follows it runs when the bytes are complete."""
        snapshot = self._snapshot(state, flat, plan, keep)
        saves, memory = self.saves, self.memory_backend
        self._given.update({tier.name: max(state.step, self._given.get(tier.name, -1)) for tier, _ in jobs})
        orders = [(tier.name, job, saves.announce(tier.name, state.step, _path(job))) for tier, job in jobs]

        def after(error: BaseException | None) -> None:
            snapshot.ready = error is None
            for tier, job, announced in orders:
                if error is None:
                    saves.submit(snapshot, tier, job, announced)
                else:
                    saves.fail(tier, _path(job), error, announced)
            if error is not None:
                log.warning("[MEMORY] the snapshot of step %d is dropped: %s", state.step, error)
                memory.discard(snapshot)
            elif keep:
                snapshot.seal()
            snapshot.release()

        sources = [source for source, _ in local_tensors(flat.tensors, plan)]
        may_wait = _storages(ref() for ref in self._optimizers) if self.config.overlap_copy else frozenset()
        self._copy = self.pool.stager(snapshot.arena, plan).start(
            sources, lambda tensor: tensor.untyped_storage().data_ptr() in may_wait, after, bool(may_wait)
        )

    def _snapshot(self, state: CheckpointState, flat: FlatState, plan: Plan, keep: bool) -> Snapshot:
        """An empty snapshot, held once for the copy, and by the memory tier if it is to keep it."""
        if keep:
            self.memory_backend.make_room(plan.arena_bytes)
        snapshot = Snapshot(
            state.step, state.timestamp, flat.common, flat.own, plan, self.pool.take(plan.arena_bytes), self.pool,
            wraps_of(flat.tensors),
        )  # fmt: skip
        snapshot.hold()
        if keep:
            self.memory_backend.add(snapshot)
        return snapshot

    def _job(self, state: CheckpointState, flat: FlatState, tier: Tier, token: str, alike: bool) -> SaveJob:
        config = self.config
        retries = config.async_save_retries if config.async_save_policy is AsyncSavePolicy.RETRY else 0
        return SaveJob(
            store=self.places.spec(tier), attempt=Attempt(checkpoint_name(state.step), token), rank=self.group.rank,
            ranks=self.places.sharers(tier), world_size=self.group.world_size, step=state.step, epoch=state.epoch,
            timestamp=state.timestamp, algorithm=best_algorithm(), common=None if alike else flat.common,
            own=flat.own, metrics=_plain_metrics(state.metrics),
            keep_last=1 if tier is Tier.PEER else config.keep_last_n, commit_timeout_s=config.commit_timeout_s,
            retries=retries, retry_delay_s=config.async_save_retry_delay, read_back=config.read_back, job=config.job,
        )  # fmt: skip

    def _loader(self, tier: CheckpointTier | None, missing_ok: bool = True) -> Loader:
        specs = self.places.specs()
        wanted = {one.name: spec for one, spec in specs.items() if tier is None or one is tier}
        memory = self.memory_backend if tier is None or tier is Tier.MEMORY else None
        config = self.config
        rules = RestoreRules(
            config.job,
            config.from_job,
            config.wait_for_stores_s,
            config.on_unreachable == "ignore",
            missing_ok,
        )
        return Loader(self.group, wanted, memory, rules, self._given)

    def _settle(self) -> None:
        """Saves under way are finished before anything is loaded."""
        if self._copy is not None:
            self._copy.join()
        self.saves.wait(self.config.commit_timeout_s)


def check_words(words: list[dict[str, Any]], step: int, tier: str, url: str) -> None:
    """Raises on every rank alike when they disagree on the step, or one of them cannot save."""
    path = f"{url.rstrip('/')}/{checkpoint_name(step)}"
    steps = sorted({word["step"] for word in words})
    if len(steps) > 1:
        raise CheckpointSaveError(
            f"ranks disagree on the step: {steps}",
            tier=tier,
            path=path,
            hint="every rank must save the same step",
        )
    errors = [f"rank {rank}: {word['error']}" for rank, word in enumerate(words) if word["error"]]
    if errors:
        raise CheckpointSaveError("; ".join(errors), tier=tier, path=path)


def _word(
    state: CheckpointState,
    flat: FlatState | None,
    problem: BaseException | None,
    busy: list[str],
    group: Group,
) -> dict[str, Any]:
    """What the other ranks must know before a save. `common` tells whether they may share one skeleton."""
    common = ""
    if flat is not None and not group.alone:
        common = hashlib.sha256(json.dumps(flat.common, sort_keys=True).encode()).hexdigest()
    return {
        "step": state.step, "mark": fingerprint(flat.tensors) if flat is not None else "", "busy": busy,
        "token": secrets.token_hex(6), "error": "" if problem is None else str(problem), "common": common,
    }  # fmt: skip


def _path(job: SaveJob) -> str:
    return f"{job.store.url.rstrip('/')}/{job.attempt.name}"


def _flattened(state: CheckpointState, rank: int) -> tuple[FlatState | None, BaseException | None]:
    """A state taken apart, or why it cannot be: the other ranks must hear of it before this one raises."""
    try:
        return flatten_state(state, rank), None
    except TypeError as error:
        return None, CheckpointSaveError(str(error), tier="MEMORY", path="")


def _storages(optimizers: Any) -> frozenset[int]:
    """The memory that only these optimizers change: their parameters and their state."""
    found = set()
    for optimizer in optimizers:
        if optimizer is None:
            continue
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.add(local.untyped_storage().data_ptr())
    return frozenset(found)


def _plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that a manifest can show."""
    kept = {}
    for name, value in metrics.items():
        if isinstance(value, (bool, int, str)) or (isinstance(value, float) and abs(value) < float("inf")):
            kept[str(name)] = value
    return kept


def _nvme(config: CheckpointConfig, saves: Saves) -> NVMeBackend:
    backend = NVMeBackend(str(config.nvme_path))
    backend.settle = lambda path: saves.wait_for("NVME", path, config.commit_timeout_s)
    return backend


def _s3(config: CheckpointConfig, saves: Saves) -> S3Backend:
    backend = S3Backend(
        config.s3_bucket or "", config.s3_prefix, config.s3_region, endpoint_url=config.s3_endpoint_url,
        options=config.s3_options,
    )  # fmt: skip
    backend.settle = lambda path: saves.wait_for("S3", path, config.commit_timeout_s)
    return backend
