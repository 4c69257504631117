"""The memory tier: the last few snapshots of this process, bounded in number and in bytes."""

from __future__ import annotations

import logging
import threading

from allranks.checkpoint.save.plan import Plan, find_pieces, fingerprint, make_plan
from allranks.checkpoint.save.snapshot import ArenaPool, StateSnapshot, flatten_state
from allranks.checkpoint.state import CheckpointState
from allranks.errors import CheckpointDamaged, MemoryLimitExceeded

log = logging.getLogger("allranks.checkpoint")
_MB = 1 << 20


class MemorySnapshotBackend:
    """Keeps the newest `max_snapshots` snapshots; the oldest makes room. `max_memory_mb` None: no bound.

    A warning is logged from `memory_warning_threshold` of the bound on.
    """

    def __init__(
        self,
        max_snapshots: int = 2,
        max_memory_mb: float | None = None,
        memory_warning_threshold: float = 0.8,
        pool: ArenaPool | None = None,
    ) -> None:
        self.max_snapshots = max_snapshots
        self.max_memory_mb = max_memory_mb
        self.memory_warning_threshold = memory_warning_threshold
        self.pool = pool or ArenaPool()
        self._snapshots: list[StateSnapshot] = []
        self._lock = threading.Lock()
        self._plans: dict[str, Plan] = {}
        self.damaged: dict[int, str] = {}  # step → why its snapshot was dropped, until there is a new one

    @property
    def num_snapshots(self) -> int:
        """How many complete snapshots are kept."""
        return len(self._ready())

    @property
    def latest_step(self) -> int | None:
        """The step of the newest one, or None."""
        ready = self._ready()
        return ready[-1].step if ready else None

    @property
    def latest_timestamp(self) -> float | None:
        """When the newest one was taken (Unix time), or None."""
        ready = self._ready()
        return ready[-1].timestamp if ready else None

    def steps(self) -> list[int]:
        """The steps of all complete snapshots, oldest first."""
        return [snapshot.step for snapshot in self._ready()]

    def memory_usage_bytes(self) -> int:
        """Shared memory held by snapshots."""
        with self._lock:
            return sum(snapshot.bytes for snapshot in self._snapshots)

    def get_stats(self) -> dict[str, object]:
        """The numbers above as one dict."""
        ready, used = self._ready(), self.memory_usage_bytes()
        return {
            "num_snapshots": len(ready),
            "max_snapshots": self.max_snapshots,
            "memory_bytes": used,
            "memory_mb": used / _MB,
            "max_memory_mb": self.max_memory_mb,
            "oldest_step": ready[0].step if ready else None,
            "latest_step": ready[-1].step if ready else None,
            "oldest_timestamp": ready[0].timestamp if ready else None,
            "latest_timestamp": ready[-1].timestamp if ready else None,
            "steps": [snapshot.step for snapshot in ready],
        }

    def save(self, state: CheckpointState) -> None:
        """Copies a state now. Raises MemoryLimitExceeded, with everything as before, when it cannot fit."""
        flat = flatten_state(state, 0)
        mark = fingerprint(flat.tensors)
        if mark not in self._plans:
            self._plans = {mark: make_plan(mark, find_pieces(flat.tensors), None, True)}
        plan = self._plans[mark]
        self.make_room(plan.arena_bytes)
        snapshot = StateSnapshot.copied(state, flat, plan, self.pool)
        self.add(snapshot)
        snapshot.seal()

    def load(self) -> CheckpointState | None:
        """The newest state whose bytes are still what was copied, copied out, or None."""
        for step in reversed(self.steps()):
            try:
                return self.load_by_step(step)
            except CheckpointDamaged as error:
                log.warning("[MEMORY] %s: dropped, the next older one is taken", error.reason)
                self.drop(step, error.reason)
        return None

    def load_by_step(self, step: int) -> CheckpointState | None:
        """The state of a step, or None; CheckpointDamaged when its bytes have changed since."""
        snapshot = self.find(step)
        if snapshot is None:
            return None
        try:
            snapshot.check()
            return snapshot.to_state()
        finally:
            snapshot.release()

    def find(self, step: int) -> StateSnapshot | None:
        """The snapshot of a step, held for the caller, who must release it."""
        with self._lock:
            for snapshot in reversed(self._snapshots):
                if snapshot.step == step and snapshot.ready:
                    snapshot.hold()
                    return snapshot
        return None

    def clear(self) -> None:
        """Lets every snapshot go; their memory stays in the pool for the next one."""
        self.damaged.clear()
        with self._lock:
            gone, self._snapshots = self._snapshots, []
        for snapshot in gone:
            _let_go(snapshot)

    def make_room(self, required: int) -> None:
        """Lets the oldest go until one more of this size fits; MemoryLimitExceeded if it never can."""
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
            _let_go(snapshot)
        if limit is not None and usage > self.memory_warning_threshold * limit:
            text = "[MEMORY] snapshots use %.1fMB of %.1fMB: the next larger state will not fit"
            log.warning(text, usage / _MB, limit / _MB)

    def add(self, snapshot: StateSnapshot) -> None:
        """Keeps a snapshot; one that is not ready yet counts from when it is."""
        snapshot.hold()
        self.damaged.clear()
        with self._lock:
            older = [s for s in self._snapshots if s.step == snapshot.step]
            self._snapshots = [s for s in self._snapshots if s.step != snapshot.step] + [snapshot]
            self._snapshots.sort(key=lambda s: s.step)
        for replaced in older:
            _let_go(replaced)

    def drop(self, step: int, reason: str) -> None:
        """Lets go of the snapshot of a step whose bytes are not what was copied."""
        self.damaged[step] = reason
        for snapshot in [one for one in self._ready() if one.step == step]:
            self.discard(snapshot)

    def discard(self, snapshot: StateSnapshot) -> None:
        """Lets go of a snapshot that is no good."""
        with self._lock:
            known = snapshot in self._snapshots
            self._snapshots = [s for s in self._snapshots if s is not snapshot]
        if known:
            _let_go(snapshot)

    def _ready(self) -> list[StateSnapshot]:
        with self._lock:
            return [snapshot for snapshot in self._snapshots if snapshot.ready]

    def _usage(self) -> int:
        return sum(snapshot.bytes for snapshot in self._snapshots)


def _let_go(snapshot: StateSnapshot) -> None:
    """Its memory is free for the next one when this returns, unless a save still needs it."""
    snapshot.forget()
    snapshot.release()
