"""A change of the world size as one flow: decide, rescale, restore, move the data position. Runs in a rank.

    job = ElasticJob(model, optimizer, scaling=scaling, loader=loader, checkpoint=manager, limits=Limits(2, 4))
    event = job.start(world_size, rank)                  # in a new process, also after a restart
    event = job.on_topology_change(old, new, rank=rank)  # in a process that survives the change
    for step in range(event.step, last + 1): ...; job.save(step)

Every rank calls the same method with the same sizes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from allranks.elastic.batches import StateDict
from allranks.elastic.world import world_of
from allranks.errors import AllranksError, TopologyChangeError

if TYPE_CHECKING:  # parts that are None do not need to be importable
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from allranks.checkpoint.config import CheckpointTier
    from allranks.checkpoint.manager import CheckpointManager
    from allranks.elastic.data import ElasticDataLoader
    from allranks.elastic.metrics import TrainingMetrics
    from allranks.elastic.scaling import ElasticScalingManager

log = logging.getLogger("allranks.elastic")


@dataclass(frozen=True)
class Limits:
    """Limits in nodes; a world of r ranks has r / ranks_per_node nodes."""

    min_nodes: int = 1
    max_nodes: int | None = None  # None: no upper limit
    ranks_per_node: int = 1

    def nodes(self, world_size: int) -> int:
        return -(-world_size // self.ranks_per_node)


@dataclass(frozen=True)
class Decision:
    """Whether the new world may train, and why."""

    go: bool
    reason: str
    detail: str = ""


def decide(old: int, new: int, limits: Limits) -> Decision:
    """Whether a world of `new` ranks may train. Pure."""
    nodes = limits.nodes(new)
    if new < 1 or nodes < limits.min_nodes:
        return Decision(
            False,
            "World size below min_nodes",
            f"{max(nodes, 0)} node(s), elastic.min_nodes requires {limits.min_nodes}",
        )
    if limits.max_nodes is not None and nodes > limits.max_nodes:
        return Decision(
            False, "World size above max_nodes", f"{nodes} nodes, elastic.max_nodes allows {limits.max_nodes}"
        )
    if new == old:
        return Decision(True, f"{new} ranks as before")
    return Decision(True, f"{old} -> {new} ranks, {'fewer' if new < old else 'more'} than before")


@dataclass(frozen=True)
class TopologyEvent:
    """The result of a change. `step` is the next step to train, `restored` the source of the state."""

    old_world_size: int
    new_world_size: int
    rank: int
    step: int
    reason: str
    restored: str  # "checkpoint" | "live" | "fresh"
    tier: str = ""  # tier of the checkpoint: "MEMORY" | "PEER" | "NVME" | "S3"
    lr: float | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None
    data_position: int | None = None  # samples consumed by all ranks together
    took_s: float = 0.0

    def to_dict(self) -> StateDict:
        return asdict(self)


@dataclass
class ElasticJob:
    """The parts that a topology change affects; parts that are None are skipped."""

    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: LRScheduler | None = None
    scaling: ElasticScalingManager | None = None
    loader: ElasticDataLoader | None = None
    checkpoint: CheckpointManager | None = None
    limits: Limits = field(default_factory=Limits)
    metrics: TrainingMetrics | None = None

    def start(self, world_size: int | None = None, rank: int | None = None) -> TopologyEvent:
        """In a new process: continues from the newest checkpoint, or starts at step 1 if there is none.

        World size and rank default to those of the process group, else of the environment.
        """
        here, world = world_of(rank, world_size)
        return self._change(None, world, here, None)

    def on_topology_change(
        self, old: int, new: int, *, rank: int | None = None, live_step: int | None = None
    ) -> TopologyEvent:
        """Adapts to a changed world. Restores the newest checkpoint, unless `live_step` is given: the last step that all
        survivors have in memory (a new rank heals from its peers first)."""
        here, _ = world_of(rank, new)
        return self._change(old, new, here, live_step)

    def state(self) -> StateDict:
        """State of data and scaling for a checkpoint's `dataset_state`; the same on every rank."""
        return {
            "data": self.loader.state_dict() if self.loader is not None else None,
            "scaling": self.scaling.state_dict() if self.scaling is not None else None,
        }

    def save(self, step: int) -> tuple[CheckpointTier, ...]:
        """Saves to the tiers that are due. Call it after each optimizer step."""
        if self.checkpoint is None:
            return ()
        start = time.monotonic()
        parts = (self.model, self.optimizer, self.lr_scheduler)
        epoch = int(self.loader.dataset.epoch) if self.loader is not None else 0
        saved = self.checkpoint.step(step, *parts, dataset_state=self.state, epoch=epoch)
        if saved and self.metrics is not None:
            stall = time.monotonic() - start
            for i, tier in enumerate(saved):
                name = str(getattr(tier, "name", tier)).lower()  # a user's own manager may return strings
                self.metrics.checkpoint.record_save(name, stall, 0.0 if i else stall)
        return saved

    def _change(self, old: int | None, new: int, rank: int, live_step: int | None) -> TopologyEvent:
        """Runs the flow. `old` None: this process has just started."""
        began, doing = time.monotonic(), ""
        try:
            if self.optimizer is not None:  # drops the gradients of an interrupted step
                self.optimizer.zero_grad(set_to_none=True)
            decision = decide(new if old is None else old, new, self.limits)
            if not decision.go:
                raise _error(decision.reason, decision.detail, new if old is None else old, new)
            doing = "rescale"
            self._rescale(new, rank)
            doing = "restore"
            restored, step, saved, old = self._restore(old, new, rank, live_step)
            doing = "data"
            self._move_data(saved, step, new, rank)
        except TopologyChangeError:
            raise
        except AllranksError as error:
            raise _error(f"{doing}: {error}", error.hint, new if old is None else old, new) from error
        event = self._event(old, new, rank, restored, step + 1, time.monotonic() - began)
        source = f"{event.restored} ({event.tier})" if event.tier else event.restored
        log.info("%s; state %s, next step %d (%.3f s)", event.reason, source, event.step, event.took_s)
        if self.metrics is not None and restored != "fresh":
            self.metrics.recovery.record_recovery(old, new, event.took_s, restored, event.step)
        return event

    def _rescale(self, new: int, rank: int) -> None:
        if self.scaling is None:
            return
        before = self.scaling.current_lr
        target = self.scaling.on_topology_change(new, rank)["lr"]
        if self.metrics is not None and target != before:
            self.metrics.lr.record_adjustment(before, target)

    def _restore(
        self, old: int | None, new: int, rank: int, live_step: int | None
    ) -> tuple[str, int, StateDict, int]:
        """(source of the state, last finished step, saved state of data and scaling, old world size)."""
        if live_step is not None:
            return "live", live_step, {}, new if old is None else old
        state = None
        if self.checkpoint is not None:
            state = self.checkpoint.restore(self.model, self.optimizer, self.lr_scheduler)
        if state is None:
            if old is not None:
                detail = (
                    "every tier is empty: set checkpoint.checkpoint_interval and memory_snapshot_interval"
                )
                raise _error("No checkpoint available for recovery", detail, old, new)
            return "fresh", 0, {}, new
        # this rank's state of data and scaling, or for a new rank that of any other rank
        others = (state.rank_states[number].get("dataset_state") for number in sorted(state.rank_states))
        saved = state.dataset_state or next(filter(None, others), {})
        if self.scaling is not None and saved.get("scaling"):
            self.scaling.load_state_dict(saved["scaling"])
            self._rescale(new, rank)
        return "checkpoint", int(state.step), saved, int(state.world_size) if old is None else old

    def _move_data(self, saved: StateDict, step: int, new: int, rank: int) -> None:
        if self.loader is None:
            return
        if saved.get("data"):
            self.loader.load_state_dict(saved["data"])
        plan = self.scaling.plan if self.scaling is not None else None
        # the data counts steps from 0, training from 1
        self.loader.on_topology_change(new, rank, plan, step=step)

    def _event(self, old: int, new: int, rank: int, restored: str, step: int, took_s: float) -> TopologyEvent:
        scaling, loader = self.scaling, self.loader
        taken = getattr(self.checkpoint, "restored_from", None)  # a user's own manager may lack it
        return TopologyEvent(
            old_world_size=old,
            new_world_size=new,
            rank=rank,
            step=step,
            reason=decide(old, new, self.limits).reason,
            restored=restored,
            tier=getattr(taken, "name", "") if restored == "checkpoint" else "",
            lr=scaling.current_lr if scaling is not None else None,
            accumulation_steps=scaling.accumulation_steps if scaling is not None else None,
            global_batch_size=scaling.effective_batch_size if scaling is not None else None,
            data_position=loader.dataset.position if loader is not None else None,
            took_s=took_s,
        )


def _error(message: str, detail: str, old: int, new: int) -> TopologyChangeError:
    error = TopologyChangeError(message, old, new)
    error.hint = f"{detail}\n{error.hint}" if detail else error.hint
    return error
