"""A change of the world as one explicit flow: stop → decide → rescale → restore → data → go. Runs in a rank.

    job = ElasticJob(model, optimizer, scaling=scaling, loader=loader, checkpoint=manager, limits=Limits(2, 4))
    event = job.start(world_size, rank)                  # first start, or the restart after a change
    event = job.on_topology_change(old, new, rank=rank)  # a change that this process lives through
    for step in range(event.step, last + 1): ...; job.save(step)

Every rank calls the same method with the same sizes. The event says what was decided and how long each part took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from allranks.elastic.batches import StateDict
from allranks.elastic.world import world_of
from allranks.errors import AllranksError, TopologyChangeError

if TYPE_CHECKING:  # the parts that are None need not be importable
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from allranks.checkpoint.config import CheckpointTier
    from allranks.checkpoint.manager import CheckpointManager
    from allranks.elastic.data import ElasticDataLoader
    from allranks.elastic.metrics import TrainingMetrics
    from allranks.elastic.scaling import ElasticScalingManager

log = logging.getLogger("allranks.elastic")

PHASES = ("stop", "decide", "rescale", "restore", "data", "go")


@dataclass(frozen=True)
class Limits:
    """In nodes; a world of r ranks has r / ranks_per_node of them."""

    min_nodes: int = 1
    max_nodes: int | None = None  # None: no upper limit
    ranks_per_node: int = 1

    def nodes(self, world_size: int) -> int:
        return -(-world_size // self.ranks_per_node)


@dataclass(frozen=True)
class Decision:
    """Whether the new world may train, and the sentence that says why."""

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
            f"{max(nodes, 0)} node(s), elastic.min_nodes asks for {limits.min_nodes}",
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
    """What a change came to. `step` is the next one to train, `restored` where its state came from."""

    old_world_size: int
    new_world_size: int
    rank: int
    step: int
    reason: str
    restored: str  # "checkpoint" | "live" | "fresh"
    tier: str = ""  # of the checkpoint: "MEMORY" | "PEER" | "NVME" | "S3"
    lr: float | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None
    data_position: int | None = None  # samples that all ranks together have consumed
    durations_s: dict[str, float] = field(default_factory=dict)
    timestamp: float = 0.0  # Unix time at the end

    @property
    def total_s(self) -> float:
        return sum(self.durations_s.values())

    def to_dict(self) -> StateDict:
        return {**asdict(self), "total_s": self.total_s}


@dataclass
class ElasticJob:
    """The parts that a change touches; those that are None are left out.

    model, optimizer, lr_scheduler: torch's; scaling: ElasticScalingManager; loader: ElasticDataLoader;
    checkpoint: CheckpointManager; metrics: TrainingMetrics; on_event: called with every TopologyEvent.
    """

    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: LRScheduler | None = None
    scaling: ElasticScalingManager | None = None
    loader: ElasticDataLoader | None = None
    checkpoint: CheckpointManager | None = None
    limits: Limits = field(default_factory=Limits)
    metrics: TrainingMetrics | None = None
    on_event: Callable[[TopologyEvent], None] | None = None
    events: list[TopologyEvent] = field(default_factory=list)

    def start(self, world_size: int | None = None, rank: int | None = None) -> TopologyEvent:
        """A new process: continues from the newest checkpoint in this world, or starts at step 1 if there is none.

        World size and rank are those of the process group, else of the environment, unless given.
        """
        here, world = world_of(rank, world_size)
        return _Change(self, None, world, here, None).run()

    def on_topology_change(
        self, old: int, new: int, *, rank: int | None = None, live_step: int | None = None
    ) -> TopologyEvent:
        """The world has changed. With `live_step`, the last step that all survivors hold in memory, nothing is
        restored (a newcomer heals from its peers first); without, the newest checkpoint is."""
        here, _ = world_of(rank, new)
        return _Change(self, old, new, here, live_step).run()

    def state(self) -> StateDict:
        """What belongs into a checkpoint's `dataset_state`: data and scaling, the same on every rank."""
        return {
            "data": self.loader.state_dict() if self.loader is not None else None,
            "scaling": self.scaling.state_dict() if self.scaling is not None else None,
        }

    def save(self, step: int) -> tuple[CheckpointTier, ...]:
        """To be called after each optimizer step: saves where it is due."""
        if self.checkpoint is None:
            return ()
        start = time.monotonic()
        parts = (self.model, self.optimizer, self.lr_scheduler)
        epoch = int(self.loader.dataset.epoch) if self.loader is not None else 0
        saved = self.checkpoint.step(step, *parts, dataset_state=self.state, epoch=epoch)
        if saved and self.metrics is not None:
            stall = time.monotonic() - start
            for i, tier in enumerate(saved):
                name = str(getattr(tier, "name", tier)).lower()  # a manager of the user may name them as text
                self.metrics.checkpoint.record_save(name, stall, 0.0 if i else stall)
        return saved


@dataclass
class _Change:
    """One run of the flow. `old` None: this process has just started."""

    job: ElasticJob
    old: int | None
    new: int
    rank: int
    live_step: int | None
    took: dict[str, float] = field(default_factory=dict)

    def run(self) -> TopologyEvent:
        job = self.job
        with self._phase("stop"):  # at a step boundary: what a step has begun is dropped
            if job.optimizer is not None:
                job.optimizer.zero_grad(set_to_none=True)
            if job.scaling is not None and job.scaling.accum_manager is not None:
                job.scaling.accum_manager.reset()
        with self._phase("decide"):
            decision = decide(self._known_old, self.new, self.job.limits)
            if not decision.go:
                raise self._error(decision.reason, decision.detail)
        with self._phase("rescale"):
            self._rescale()
        with self._phase("restore"):
            restored, step, saved = self._restore()
        with self._phase("data"):
            self._data(saved, step)
        with self._phase("go"):
            event = self._event(decision, restored, step + 1)
        self.job.events.append(event)
        self._publish(event)
        return event

    @property
    def _known_old(self) -> int:
        return self.new if self.old is None else self.old

    def _rescale(self) -> None:
        job = self.job
        if job.scaling is None:
            return
        before = job.scaling.current_lr
        target = job.scaling.on_topology_change(self.new, self.rank)["lr"]
        if job.metrics is not None and target != before:
            job.metrics.lr.record_adjustment(before, target)

    def _restore(self) -> tuple[str, int, StateDict]:
        """(where from, last finished step, our part of the state)."""
        job = self.job
        if self.live_step is not None:
            return "live", self.live_step, {}
        state = None
        if job.checkpoint is not None:
            state = job.checkpoint.restore(job.model, job.optimizer, job.lr_scheduler)
        if state is None:
            if self.old is not None:
                raise self._error(
                    "No checkpoint available for recovery",
                    "every tier is empty: set checkpoint.checkpoint_interval and memory_snapshot_interval",
                )
            return "fresh", 0, {}
        if self.old is None:
            self.old = int(state.world_size)
        # data and scaling: this rank's, or any rank's for one that was not there
        others = (state.rank_states[number].get("dataset_state") for number in sorted(state.rank_states))
        saved = state.dataset_state or next(filter(None, others), {})
        if job.scaling is not None and saved.get("scaling"):
            job.scaling.load_state_dict(saved["scaling"])
            self._rescale()
        return "checkpoint", int(state.step), saved

    def _data(self, saved: StateDict, step: int) -> None:
        loader = self.job.loader
        if loader is None:
            return
        if saved.get("data"):
            loader.load_state_dict(saved["data"])
        scaling = self.job.scaling
        plan = scaling.plan if scaling is not None else None
        # Data counts steps from 0, training from 1: after `step` finished steps the next batch is that of `step`.
        loader.on_topology_change(self.new, self.rank, plan, step=step)

    def _event(self, decision: Decision, restored: str, step: int) -> TopologyEvent:
        job, old = self.job, self._known_old
        scaling, loader = job.scaling, job.loader
        taken = getattr(job.checkpoint, "restored_from", None)  # a manager of the user may not say
        return TopologyEvent(
            old_world_size=old,
            new_world_size=self.new,
            rank=self.rank,
            step=step,
            reason=decide(old, self.new, job.limits).reason if self.old is not None else decision.reason,
            restored=restored,
            tier=getattr(taken, "name", "") if restored == "checkpoint" else "",
            lr=scaling.current_lr if scaling is not None else None,
            accumulation_steps=scaling.accumulation_steps if scaling is not None else None,
            global_batch_size=scaling.effective_batch_size if scaling is not None else None,
            data_position=loader.dataset.position if loader is not None else None,
            durations_s=self.took,
            timestamp=time.time(),
        )

    def _publish(self, event: TopologyEvent) -> None:
        job = self.job
        parts = ", ".join(f"{name} {event.durations_s[name]:.3f} s" for name in PHASES)
        source = f"{event.restored} ({event.tier})" if event.tier else event.restored
        log.info("%s; state %s, next step %d (%s)", event.reason, source, event.step, parts)
        if job.metrics is not None and event.restored != "fresh":
            job.metrics.recovery.record_recovery(
                event.old_world_size, event.new_world_size, event.total_s, event.restored, event.step
            )
        if job.on_event is not None:
            job.on_event(event)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except TopologyChangeError:
            raise
        except AllranksError as error:
            raise self._error(f"{name}: {error}", error.hint) from error
        finally:
            self.took[name] = self.took.get(name, 0.0) + time.monotonic() - start

    def _error(self, message: str, detail: str = "") -> TopologyChangeError:
        error = TopologyChangeError(message, self._known_old, self.new)
        if detail:
            error.hint = f"{detail}\n{error.hint}"
        return error
