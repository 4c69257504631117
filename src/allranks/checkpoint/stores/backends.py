"""Tiers that can be used without a manager: memory snapshots, disk and object store.

A backend saves in this process, for one process; use the manager for states that are sharded over several ranks.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.group import RankGroup
from allranks.checkpoint.restore.into_state import is_legacy, load_legacy, load_state
from allranks.checkpoint.restore.opened_checkpoint import verify_checkpoint
from allranks.checkpoint.save.plan import Planner, find_pieces, fingerprint, make_plan
from allranks.checkpoint.save.snapshot import ArenaPool, StateSnapshot, flatten_state
from allranks.checkpoint.save.writer import SaveJob, write_checkpoint
from allranks.checkpoint.state import CheckpointState
from allranks.checkpoint.stores import Attempt, Store, StoreSpec, hint_for, open_store, reason_of
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.listing import decide, has_manifest, list_checkpoints, list_verified, remove
from allranks.errors import CheckpointDamaged, CheckpointSaveError, MemoryLimitExceeded

log = logging.getLogger("allranks.checkpoint")
_MB = 1 << 20


@dataclass(eq=False, repr=False)
class MemorySnapshotBackend:
    """Keeps the newest `max_snapshots` snapshots in at most `max_memory_mb` (None: no limit).

    Logs a warning when they use more than `memory_warning_threshold` of the limit.
    """

    max_snapshots: int = 2
    max_memory_mb: float | None = None
    memory_warning_threshold: float = 0.8
    pool: ArenaPool = field(default_factory=ArenaPool)
    damaged: dict[int, str] = field(default_factory=dict)  # step → reason, until a new snapshot is added
    _snapshots: list[StateSnapshot] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _planner: Planner = field(default_factory=lambda: Planner(RankGroup()))

    @property
    def num_snapshots(self) -> int:
        return len(self._ready())

    @property
    def latest_step(self) -> int | None:
        ready = self._ready()
        return ready[-1].step if ready else None

    @property
    def latest_timestamp(self) -> float | None:
        """When the newest snapshot was taken (Unix time), or None."""
        ready = self._ready()
        return ready[-1].timestamp if ready else None

    def steps(self) -> list[int]:
        """The steps of all complete snapshots, oldest first."""
        return [snapshot.step for snapshot in self._ready()]

    def memory_usage_bytes(self) -> int:
        with self._lock:
            return sum(snapshot.bytes for snapshot in self._snapshots)

    def get_stats(self) -> dict[str, object]:
        ready, used = self._ready(), self.memory_usage_bytes()
        return {
            "num_snapshots": len(ready),
            "max_snapshots": self.max_snapshots,
            "memory_bytes": used,
            "memory_mb": used / _MB,
            "max_memory_mb": self.max_memory_mb,
            "oldest_step": ready[0].step if ready else None,
            "latest_step": self.latest_step,
            "oldest_timestamp": ready[0].timestamp if ready else None,
            "latest_timestamp": self.latest_timestamp,
            "steps": [snapshot.step for snapshot in ready],
        }

    def save(self, state: CheckpointState) -> None:
        """Copies a state now. Raises MemoryLimitExceeded, and changes nothing, if it cannot fit."""
        flat = flatten_state(state, 0)
        plan = self._planner.alone(fingerprint(flat.tensors), flat.tensors)
        self.make_room(plan.arena_bytes)
        snapshot = StateSnapshot.copied(state, flat, plan, self.pool)
        self.add(snapshot)
        snapshot.seal()

    def load(self) -> CheckpointState | None:
        """A copy of the newest undamaged state, or None."""
        for step in reversed(self.steps()):
            try:
                return self.load_by_step(step)
            except CheckpointDamaged as error:
                log.warning("[MEMORY] %s: dropped, trying the next older one", error.reason)
                self.drop(step, error.reason)
        return None

    def load_by_step(self, step: int) -> CheckpointState | None:
        """The state of a step, or None; CheckpointDamaged if its bytes have changed since the save."""
        snapshot = self.find(step)
        if snapshot is None:
            return None
        try:
            snapshot.check()
            return snapshot.to_state()
        finally:
            snapshot.release()

    def find(self, step: int) -> StateSnapshot | None:
        """The snapshot of a step, or None. It is held; the caller must release it."""
        with self._lock:
            for snapshot in reversed(self._snapshots):
                if snapshot.step == step and snapshot.ready:
                    snapshot.hold()
                    return snapshot
        return None

    def clear(self) -> None:
        """Drops all snapshots; their memory stays in the pool."""
        self.damaged.clear()
        with self._lock:
            gone, self._snapshots = self._snapshots, []
        for snapshot in gone:
            _free(snapshot)

    def make_room(self, required: int) -> None:
        """Drops the oldest snapshots until one of this size fits; MemoryLimitExceeded if it cannot fit."""
        limit = None if self.max_memory_mb is None else int(self.max_memory_mb * _MB)
        if limit is not None and required > limit:
            raise MemoryLimitExceeded(required, limit, limit, tier="MEMORY")
        with self._lock:
            gone = []
            while self._snapshots and (
                len(self._snapshots) >= self.max_snapshots
                or (limit is not None and self._usage() + required > limit)
            ):
                gone.append(self._snapshots.pop(0))
            usage = self._usage() + required
        for snapshot in gone:
            _free(snapshot)
        if limit is not None and usage > self.memory_warning_threshold * limit:
            text = "[MEMORY] snapshots use %.1fMB of %.1fMB: a larger state will not fit"
            log.warning(text, usage / _MB, limit / _MB)

    def add(self, snapshot: StateSnapshot) -> None:
        """Keeps a snapshot and replaces an older one of the same step. It can be loaded once it is `ready`."""
        snapshot.hold()
        self.damaged.clear()
        with self._lock:
            older = [s for s in self._snapshots if s.step == snapshot.step]
            self._snapshots = [s for s in self._snapshots if s.step != snapshot.step] + [snapshot]
            self._snapshots.sort(key=lambda s: s.step)
        for replaced in older:
            _free(replaced)

    def drop(self, step: int, reason: str) -> None:
        """Drops the damaged snapshot of a step and remembers why."""
        self.damaged[step] = reason
        for snapshot in [one for one in self._ready() if one.step == step]:
            self.discard(snapshot)

    def discard(self, snapshot: StateSnapshot) -> None:
        """Drops one snapshot."""
        with self._lock:
            known = snapshot in self._snapshots
            self._snapshots = [s for s in self._snapshots if s is not snapshot]
        if known:
            _free(snapshot)

    def _ready(self) -> list[StateSnapshot]:
        with self._lock:
            return [snapshot for snapshot in self._snapshots if snapshot.ready]

    def _usage(self) -> int:
        return sum(snapshot.bytes for snapshot in self._snapshots)


def _free(snapshot: StateSnapshot) -> None:
    """Returns the snapshot's memory to the pool, unless a save still needs it."""
    snapshot.forget()
    snapshot.release()


class Backend:
    """Base of the disk and object store backends. `path` arguments are names within the store, or absolute paths."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        #: Waits for running saves to a path ("": to any path). Set by the manager.
        self.settle: Callable[[str], None] = lambda path: None
        self._opened: Store | None = None

    @property
    def store(self) -> Store:
        """The store, opened at the first use."""
        if self._opened is None:
            self._opened = open_store(self.spec)
        return self._opened

    def save(self, state: CheckpointState, path: str) -> str:
        """Saves now; the checkpoint is durable when it returns. CheckpointSaveError leaves no partial checkpoint."""
        store, name = self.store, self._name(path)
        try:
            flat = flatten_state(state, 0)
            plan = make_plan("", find_pieces(flat.tensors), None, True)
            snapshot = StateSnapshot.copied(state, flat, plan, ArenaPool())
            job = SaveJob(
                self.spec,
                Attempt(name, secrets.token_hex(6)),
                rank=0,
                ranks=(0,),
                world_size=state.world_size,
                step=state.step,
                epoch=state.epoch,
                timestamp=state.timestamp,
                algorithm=best_algorithm(),
                common=flat.common,
                own=flat.own,
            )
            write_checkpoint(job, plan.layout, snapshot.arena.view, store)
        except (OSError, TypeError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            path, hint = store.path_of(name), hint_for(error, self.spec)
            raise CheckpointSaveError(reason, tier=store.tier, path=path, hint=hint) from error
        return store.path_of(name)

    def save_async(self, state: CheckpointState, path: str) -> Future[str]:
        """Copies now and writes in a thread; the Future raises CheckpointSaveError on failure."""
        saver = ThreadPoolExecutor(1, "allranks-checkpoint-save")
        future = saver.submit(self.save, state.cpu_copy(), path)
        saver.shutdown(wait=False)
        return future

    def load(self, path: str, config: CheckpointLoadConfig | None = None) -> CheckpointState:
        """Loads and verifies one checkpoint; whole CPU tensors."""
        name = self._name(path)
        self.settle(self.store.path_of(name))
        return load_state(self.store, name, 0)

    def exists(self, path: str) -> bool:
        """Whether a complete checkpoint of that name exists."""
        name = self._name(path)
        self.settle(self.store.path_of(name))
        return has_manifest(self.store, name)

    def list_checkpoints(self, prefix: str = "") -> list[str]:
        """The names of all complete checkpoints, oldest step first."""
        found = list_checkpoints(self.store)
        return [one.name for one in found if not one.problem and one.name.startswith(prefix)]

    def delete(self, path: str) -> None:
        """Deletes one; FileNotFoundError if it does not exist, BlockingIOError while it is being read."""
        self.settle(self.store.path_of(self._name(path)))
        if not self.store.remove(self._name(path)):
            raise BlockingIOError(f"{self.store.path_of(self._name(path))} is being read")

    def get_latest_checkpoint(self) -> str | None:
        """The name of the newest step's checkpoint, or None."""
        found = self.list_checkpoints()
        return found[-1] if found else None

    def cleanup_old_checkpoints(self, keep_last: int = 3) -> list[str]:
        """Removes all but the newest `keep_last` checkpoints and returns the removed names.

        Verifies from the newest on: a damaged checkpoint does not count, and the last good one is always kept.
        """
        self.settle("")
        store = self.store
        found = list_verified(store, lambda name: not verify_checkpoint(store, name).problems)
        return remove(store, decide(found, max(1, keep_last)))[0]

    def _name(self, path: str) -> str:
        base = self.store.path_of("").rstrip("/")
        return str(path).removeprefix(base).strip("/")


class NVMeBackend(Backend):
    """A folder. Saves are always atomic; `use_atomic_save` is accepted for compatibility."""

    def __init__(self, base_path: str | Path, use_atomic_save: bool = True) -> None:
        super().__init__(StoreSpec(str(base_path)))
        self.base_path = Path(base_path)
        self.use_atomic_save = use_atomic_save

    @property
    def store(self) -> FileStore:
        store = super().store
        assert isinstance(store, FileStore)
        return store

    def load(self, path: str, config: CheckpointLoadConfig | None = None) -> CheckpointState:
        """Loads a checkpoint, or a legacy `.pt` file as `config` allows."""
        whole = self.base_path / path
        if is_legacy(whole):
            return load_legacy(whole, config or CheckpointLoadConfig())
        return super().load(path, config)

    def exists(self, path: str) -> bool:
        """Whether a complete checkpoint or a legacy file of that name exists."""
        return super().exists(path) or is_legacy(self.base_path / path)

    def delete(self, path: str) -> None:
        whole = self.base_path / path
        if is_legacy(whole):
            whole.unlink()
        else:
            super().delete(path)


class S3Backend(Backend):
    """A bucket of any object store (`bucket` may be a URL such as gs://name). `options` are passed to obstore."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        region: str | None = None,
        connect_timeout: float = 10,
        read_timeout: float = 60,
        max_retries: int = 3,
        retry_mode: str = "adaptive",
        endpoint_url: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        base = bucket if "://" in bucket else f"s3://{bucket}"
        url = "/".join(part for part in (base.rstrip("/"), prefix.strip("/")) if part)
        given = {"endpoint": endpoint_url or "", "region": region or ""}
        limits = {"timeout_s": str(read_timeout), "max_retries": str(max_retries)}
        super().__init__(
            StoreSpec(url, {**{k: v for k, v in given.items() if v}, **limits, **dict(options or {})})
        )
        self.bucket = bucket
        self.prefix = prefix
