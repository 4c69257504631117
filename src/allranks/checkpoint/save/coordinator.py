"""Coordinates a save: agrees with the other ranks, starts the copy, hands the snapshot to the memory tier and the helper.

`Saves` tracks all running saves and their failures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace

import torch

from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.config import AsyncSavePolicy, BusyPolicy, CheckpointConfig, CheckpointTier
from allranks.checkpoint.group import RankGroup, TierLocations
from allranks.checkpoint.save.helper_client import HelperClient, SaveOrder
from allranks.checkpoint.save.plan import Plan, Planner, fingerprint, local_tensors
from allranks.checkpoint.save.snapshot import Copy, FlatState, StateSnapshot, flatten_state
from allranks.checkpoint.save.writer import Saved, SaveJob
from allranks.checkpoint.state import CheckpointState
from allranks.checkpoint.stores import Attempt, checkpoint_name, reason_of
from allranks.checkpoint.stores.backends import MemorySnapshotBackend
from allranks.errors import CheckpointSaveError, MemoryLimitExceeded

log = logging.getLogger("allranks.checkpoint")


@dataclass(frozen=True)
class Pending:
    """One started save. `future` is done when the save is durable or has failed."""

    tier: str
    step: int
    path: str
    future: Future[Saved]


class Saves:
    """The saves of one manager. Thread-safe, because copies finish in other threads."""

    def __init__(self, policy: AsyncSavePolicy) -> None:
        self.policy = policy
        self.helper = HelperClient()
        self.failures: list[CheckpointSaveError] = []
        self.finished = 0
        self.newest: dict[str, int] = {}  # tier -> newest step that is durable
        self._pending: list[Pending] = []
        self._unraised: list[CheckpointSaveError] = []
        self._failed = False  # a save failed since the last `any_failed()`
        self._lock = threading.Lock()

    def announce(self, job: SaveJob) -> Future[Saved]:
        """Registers a save whose copy is still running."""
        future: Future[Saved] = Future()
        with self._lock:  # failed saves of this step stay, because `wait` reports them
            kept = [one for one in self._pending if one.step == job.step or not one.future.done()]
            self._pending = [*kept, Pending(job.tier, job.step, job.path, future)]
        return future

    def submit(self, snapshot: StateSnapshot, job: SaveJob, announced: Future[Saved]) -> None:
        """Hands a complete snapshot to the helper; the snapshot is held until the save ends."""
        snapshot.hold()
        try:
            inner = self.helper.submit(SaveOrder(job, snapshot.arena, snapshot.plan))
        except OSError as error:  # no process or memory for a new helper
            snapshot.release()
            self.fail(job, error, announced)
            return
        inner.add_done_callback(lambda done: self._ended(snapshot, job, announced, done))

    def fail(self, job: SaveJob, error: BaseException, announced: Future[Saved]) -> None:
        """Ends an announced save that did not reach the helper."""
        reason = f"{type(error).__name__}: {error}"
        self._settle(announced, CheckpointSaveError(reason, tier=job.tier, path=job.path))

    def busy(self, tiers: set[str]) -> list[Pending]:
        with self._lock:
            return [p for p in self._pending if p.tier in tiers and not p.future.done()]

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for all saves; False on timeout or if one failed."""
        with self._lock:
            futures = [pending.future for pending in self._pending]
        done, left = wait(futures, timeout_s)
        with self._lock:
            self._pending = [pending for pending in self._pending if pending.future not in done]
        return not left and not any(future.exception() for future in done)

    def any_failed(self) -> bool:
        """Whether a save failed since the last call."""
        with self._lock:
            failed, self._failed = self._failed, False
        return failed

    def wait_for_room(self, tiers: set[str], most: int, timeout_s: float) -> None:
        """Waits until fewer than `most` steps are being saved to these tiers: each step uses a buffer."""
        running = self.busy(tiers)
        steps = sorted({pending.step for pending in running})
        oldest = set(steps[: max(0, len(steps) - most + 1)])
        for pending in running:
            if pending.step in oldest:
                pending.future.exception(timeout_s)

    def wait_for(self, tier: str, path: str, timeout_s: float) -> None:
        """Waits for saves to one path ("": all of the tier); does not raise their failures."""
        with self._lock:
            mine = [p for p in self._pending if p.tier == tier and path in ("", p.path)]
        for pending in mine:
            pending.future.exception(timeout_s)

    def raise_failures(self) -> None:
        """With the policy "fail", raises the first failure that was not raised yet."""
        with self._lock:
            unraised, self._unraised = self._unraised, []
        if unraised and self.policy is AsyncSavePolicy.FAIL:
            raise unraised[0]

    def _ended(
        self, snapshot: StateSnapshot, job: SaveJob, announced: Future[Saved], done: Future[Saved]
    ) -> None:
        snapshot.release()
        error = done.exception()
        if error is None:
            saved = done.result()
            with self._lock:
                self.finished += 1
                self.newest[job.tier] = max(job.step, self.newest.get(job.tier, -1))
                self._pending = [p for p in self._pending if p.future is not announced]
            log.info("saved %s: %d bytes in %.2f s", saved.path, saved.bytes, saved.total_s)
            for name in saved.left:
                log.info("kept %s beyond keep_last_n: it is being read", name)
            if saved.problem:
                text = "saved %s, but could not remove older checkpoints: %s"
                log.warning(text, saved.path, saved.problem)
            announced.set_result(saved)
        else:
            assert isinstance(error, CheckpointSaveError)
            self._settle(announced, error)

    def _settle(self, announced: Future[Saved], error: CheckpointSaveError) -> None:
        with self._lock:
            self.failures = [*self.failures[-31:], error]
            self._unraised.append(error)
            self._failed = True
        log.warning("%s%s", error, f"\n{error.hint}" if error.hint else "")
        announced.set_exception(error)


Tier = CheckpointTier
MOST_BUFFERS = 2  # steps being saved at once with busy_policy "queue"


@dataclass(frozen=True)
class Proposal:
    """Exchanged between the ranks before a save."""

    step: int
    busy: list[str] = field(default_factory=list)  # tiers that this rank is still saving to
    mark: str = ""  # fingerprint of its tensors
    common: str = ""  # hash of its skeleton: ranks with the same hash share one
    error: str = ""  # why this rank cannot save
    token: str = field(default_factory=lambda: secrets.token_hex(6))


class SaveCoordinator:
    """Starts the saves of one manager. `given` is the newest step handed to each tier, `copy` the last copy."""

    def __init__(
        self, config: CheckpointConfig, group: RankGroup, places: TierLocations, memory: MemorySnapshotBackend
    ) -> None:
        self.config, self.group, self.places, self.memory = config, group, places, memory
        self.saves = Saves(AsyncSavePolicy(config.async_save_policy))
        self.planner = Planner(group)
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.skipped = 0
        self.given: dict[str, int] = {}
        self.copy: Copy | None = None

    def save(self, state: CheckpointState, tiers: tuple[Tier, ...], may_skip: bool) -> dict[Tier, str | None]:
        """Saves one snapshot to all tiers (one per set of ranks that share a store); returns tier → path."""
        if self.copy is not None:
            self.copy.join()
        durable = tuple(tier for tier in tiers if tier is not Tier.MEMORY)
        flat: FlatState | None = None
        problem: CheckpointSaveError | None = None
        try:
            flat = flatten_state(state, self.group.rank)
        except Exception as error:  # the other ranks must know before this one raises
            reason = str(error) if isinstance(error, (TypeError, ValueError)) else reason_of(error)
            problem = CheckpointSaveError(reason, tier="MEMORY", path="")
        saved: dict[Tier, str | None] = {}
        in_memory = Tier.MEMORY in tiers
        for together in self.places.together(durable):
            proposals, together = self._agree(state, flat, problem, together, may_skip)
            if flat is None or not together:
                continue
            paths, kept = self._save_durable(state, flat, proposals, together, in_memory)
            if kept:
                saved[Tier.MEMORY], in_memory = None, False
            saved.update(paths)
        if flat is None:
            raise problem or AssertionError("unreachable")
        if in_memory and not saved:  # the memory tier alone needs no exchange with the other ranks
            plan = self.planner.alone(fingerprint(flat.tensors), flat.tensors)
            if not may_skip or self._has_room(state.step, plan):
                self._start(state, flat, plan, [], True)
                saved[Tier.MEMORY] = None
        return saved

    def _agree(
        self,
        state: CheckpointState,
        flat: FlatState | None,
        problem: CheckpointSaveError | None,
        tiers: tuple[Tier, ...],
        may_skip: bool,
    ) -> tuple[list[Proposal], tuple[Tier, ...]]:
        """(proposals of all ranks, the tiers that no rank is still saving to). Errors raise on all ranks."""
        running = self.saves.busy({tier.name for tier in tiers})
        skips = may_skip and self.config.busy_policy is BusyPolicy.SKIP
        mine = Proposal(state.step, sorted({pending.tier for pending in running}) if skips else [])
        if flat is not None:
            text = json.dumps(flat.common, sort_keys=True).encode() if not self.group.alone else b""
            mine = replace(mine, mark=fingerprint(flat.tensors), common=hashlib.sha256(text).hexdigest())
        elif problem is not None:
            mine = replace(mine, error=problem.reason)
        proposals = [Proposal(**raw) for raw in self.group.gather(asdict(mine))]
        check_proposals(proposals, state.step, tiers[0].name, self.places.spec(tiers[0]).url)
        tiers = self._not_busy(tiers, proposals, running, state.step)
        most = MOST_BUFFERS if may_skip else 1
        self.saves.wait_for_room({tier.name for tier in tiers}, most, self.config.commit_timeout_s)
        return proposals, tiers

    def _save_durable(
        self,
        state: CheckpointState,
        flat: FlatState,
        proposals: list[Proposal],
        tiers: tuple[Tier, ...],
        in_memory: bool,
    ) -> tuple[dict[Tier, str | None], bool]:
        """Plans and starts the save. (tier → path, whether the memory tier keeps the snapshot)."""
        rank, sharers = self.group.rank, self.places.sharers(tiers[0])
        try:
            plan = self.planner.shared([one.mark for one in proposals], sharers, flat.tensors, in_memory)
        except ValueError as error:
            path = f"{self.places.spec(tiers[0]).url.rstrip('/')}/{checkpoint_name(state.step)}"
            raise CheckpointSaveError(str(error), tier=tiers[0].name, path=path) from error
        alike = rank != sharers[0] and proposals[rank].common == proposals[sharers[0]].common
        jobs = [(tier, self._job(state, flat, tier, proposals[0].token, alike)) for tier in tiers]
        kept = in_memory and self._has_room(state.step, plan)
        self._start(state, flat, plan, jobs, kept)
        return {tier: job.path for tier, job in jobs}, kept

    def _not_busy(
        self, tiers: tuple[Tier, ...], proposals: list[Proposal], running: list[Pending], step: int
    ) -> tuple[Tier, ...]:
        """The tiers that no rank is still saving to; logs a warning for the others."""
        for tier in [tier for tier in tiers if any(tier.name in one.busy for one in proposals)]:
            tiers = tuple(other for other in tiers if other is not tier)
            self.skipped += 1
            since = [str(pending.step) for pending in running if pending.tier == tier.name]
            text = "step %d is not saved to %s: the save of step %s is still running (busy_policy=skip)"
            log.warning(text, step, tier.name, since[0] if since else "? on another rank")
        return tiers

    def _has_room(self, step: int, plan: Plan) -> bool:
        """Whether the memory tier has room for a snapshot; logs a warning if not."""
        try:
            self.memory.make_room(plan.arena_bytes)
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
        """Starts the copy; `after` submits the saves when it is complete."""
        if keep:
            self.memory.make_room(plan.arena_bytes)
        saves, memory = self.saves, self.memory
        self.given.update({tier.name: max(state.step, self.given.get(tier.name, -1)) for tier, _ in jobs})
        orders = [(job, saves.announce(job)) for _, job in jobs]
        try:
            snapshot = StateSnapshot.begin(state, flat, plan, memory.pool)
        except (OSError, MemoryError) as error:  # no memory or descriptor
            log.warning("step %d cannot be copied: %s", state.step, reason_of(error))
            for job, announced in orders:
                saves.fail(job, error, announced)
            return
        snapshot.hold()  # released by `after`
        if keep:
            memory.add(snapshot)

        def after(error: BaseException | None) -> None:
            snapshot.ready = error is None
            for job, announced in orders:
                if error is None:
                    saves.submit(snapshot, job, announced)
                else:
                    saves.fail(job, error, announced)
            if error is not None:
                log.warning("[MEMORY] the snapshot of step %d is dropped: %s", state.step, error)
                memory.discard(snapshot)
            elif keep:
                snapshot.seal()
            snapshot.release()

        sources = [source for source, _ in local_tensors(flat.tensors, plan)]
        may_wait = _storages(ref() for ref in self.optimizers) if self.config.overlap_copy else frozenset()
        self.copy = snapshot.arena.stager(plan).start(
            sources, lambda tensor: tensor.untyped_storage().data_ptr() in may_wait, after, bool(may_wait)
        )

    def _job(self, state: CheckpointState, flat: FlatState, tier: Tier, token: str, alike: bool) -> SaveJob:
        config = self.config
        retries = config.async_save_retries if config.async_save_policy is AsyncSavePolicy.RETRY else 0
        metrics = {  # those that JSON can represent
            str(name): value
            for name, value in state.metrics.items()
            if isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))
        }
        return SaveJob(
            store=self.places.spec(tier),
            attempt=Attempt(checkpoint_name(state.step), token),
            rank=self.group.rank,
            ranks=self.places.sharers(tier),
            world_size=self.group.world_size,
            step=state.step,
            epoch=state.epoch,
            timestamp=state.timestamp,
            algorithm=best_algorithm(),
            common=None if alike else flat.common,
            own=flat.own,
            metrics=metrics,
            keep_last=1 if tier is Tier.PEER else config.keep_last_n,
            commit_timeout_s=config.commit_timeout_s,
            retries=retries,
            retry_delay_s=config.async_save_retry_delay,
            job=config.job,
        )


def check_proposals(proposals: list[Proposal], step: int, tier: str, url: str) -> None:
    """Raises on all ranks if they disagree on the step or one of them cannot save."""
    path = f"{url.rstrip('/')}/{checkpoint_name(step)}"
    steps = sorted({one.step for one in proposals})
    if len(steps) > 1:
        hint = "every rank must save the same step"
        raise CheckpointSaveError(f"ranks disagree on the step: {steps}", tier=tier, path=path, hint=hint)
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(proposals) if one.error]
    if errors:
        raise CheckpointSaveError("; ".join(errors), tier=tier, path=path)


def _storages(optimizers: Iterable[torch.optim.Optimizer | None]) -> frozenset[int]:
    """The storages of the parameters and the state of these optimizers."""
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
