"""Resumable training data: the samples of a step are a pure function of seed, step and world history.

dataset = ResumableDataset(TokenIndexFile("train.index"), seq_length=1024, seed=1)
loader = ElasticDataLoader(dataset, batch_size=8, num_workers=2)
for batch in loader: ...
state = loader.state_dict()               # exact, prefetched batches not counted
loader.on_topology_change(world_size=3, rank=0)

The loader runs in a rank. The main process computes which samples come next; worker processes only fetch them. So the state
counts the batches that were returned and not those that were prefetched, and a topology change drops the prefetched ones.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from allranks.elastic.batches import BatchPlan, StateDict, batch_plan, even
from allranks.elastic.data.dataset import Batch, DatasetState, ResumableDataset
from allranks.elastic.data.order import Ids, Mixture, Order, Segment, WorldHistory, mix
from allranks.elastic.world import world_of
from allranks.errors import DataLoadingError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DatasetState",
    "ElasticDataLoader",
    "Mixture",
    "Order",
    "ResumableDataset",
    "Segment",
    "WorldHistory",
]
T = TypeVar("T")


@dataclass(frozen=True)
class _Upcoming:
    """The sampler for torch's DataLoader."""

    loader: ElasticDataLoader

    def __iter__(self) -> Iterator[Ids]:
        return self.loader._upcoming()


@dataclass(frozen=True)
class _Fetcher:
    """The dataset for torch's DataLoader."""

    dataset: ResumableDataset

    def __getitem__(self, ids: Ids) -> tuple[Ids, Batch]:
        """Fetches a micro-batch. An empty one has weight 0 and contains sample 0, so that its loss is a number."""
        return ids, self.dataset.fetch(ids if len(ids) else np.zeros(1, dtype=np.int64))


def _identity(item: T) -> T:
    return item


class ElasticDataLoader:
    """Yields this rank's micro-batches: of the sizes `plan.micro[rank]` per step, or `batch_size` without a plan.

    Multiply the mean loss of the last batch by `weight` to get the exact mean over the global batch. A state taken inside
    a step resumes at the beginning of that step, because its gradients are not saved.
    """

    def __init__(
        self,
        dataset: ResumableDataset,
        batch_size: int = 1,
        *,
        plan: BatchPlan | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.last_samples: Ids = np.empty(0, dtype=np.int64)
        self.weight = 0.0
        self.waited_s = 0.0  # total time that training waited for data
        self._loader: Any = None  # torch's DataLoader, whose workers survive topology changes
        self._generation = 0  # a running iteration restarts when it changes
        self._micro = 0  # micro-batches returned in the current step
        rank, world = world_of(rank, world_size if plan is None else plan.world_size)
        self._take_plan(plan or batch_plan(batch_size * world, world, batch_size), rank)

    @property
    def rank(self) -> int:
        return self.dataset.rank or 0

    @property
    def step(self) -> int:
        """The optimizer step of the next batch, counted from 0."""
        return self.dataset.step

    @property
    def step_done(self) -> bool:
        """Whether the last batch completed its step, so that the optimizer step is due."""
        return self._micro == 0

    def on_topology_change(
        self, world_size: int, rank: int, plan: BatchPlan | None = None, *, step: int | None = None
    ) -> None:
        """Distributes the data over the new world from the current step on, or from `step` after a rollback."""
        if step is not None:
            self.dataset.seek(step)
        self._take_plan(plan or batch_plan(self.batch_size * world_size, world_size, self.batch_size), rank)
        self._restart()

    def seek(self, step: int) -> None:
        self.dataset.seek(step)
        self._restart()

    def state_dict(self) -> StateDict:
        """The exact position: prefetched batches do not count."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Continues at the step of the state, in the world of this loader."""
        self.dataset.load_state_dict(state)
        self._restart()

    def __iter__(self) -> Iterator[Batch]:
        """Continues from the current state; ends after the last epoch, if there is one."""
        self._restart()
        generation = -1
        while generation != self._generation:
            generation = self._generation
            fetched = self._fetched()
            while (item := self._awaited(fetched)) is not None:
                self._count(item[0])
                yield item[1]
                if self._generation != generation:
                    break

    def _awaited(self, fetched: Iterator[tuple[Ids, Batch]]) -> tuple[Ids, Batch] | None:
        start = time.perf_counter()
        try:
            return next(fetched, None)
        except (RuntimeError, OSError, EOFError) as error:
            dead = self._dead_workers(error)
            if not dead:
                raise
            self.close()
            raise DataLoadingError(
                f"DataLoader worker (pid {dead}) died. The position is kept: iterating again starts new workers.",
                hint="killed by signal 9: often out of memory, see `dmesg` and reduce num_workers; "
                "killed by a bus error: give the container more shared memory",
            ) from error
        finally:
            self.waited_s += time.perf_counter() - start

    def _dead_workers(self, error: Exception) -> str:
        """The pids of dead workers; "" if the error has another cause, such as an exception in a worker."""
        from allranks.torch_private import loader_workers

        workers = [] if str(error).startswith("Caught ") else loader_workers(self._loader)
        for worker in workers:
            worker.join(timeout=0.5)  # a pipe may break before its process is reaped
        return ", ".join(str(worker.pid) for worker in workers if not worker.is_alive())

    def close(self) -> None:
        from allranks.torch_private import stop_loader

        loader, self._loader = self._loader, None
        stop_loader(loader)

    def _take_plan(self, plan: BatchPlan, rank: int) -> None:
        self.plan = plan
        self.dataset.change_world(plan.shares, rank)

    def _restart(self) -> None:
        self._generation += 1
        self._micro = 0

    def _count(self, ids: Ids) -> None:
        """Counts a batch, just before it is returned."""
        dataset = self.dataset
        total = sum(dataset.shares(dataset.step))
        self.last_samples = ids
        self.weight = len(ids) * self.plan.world_size / total
        self._micro += 1
        if self._micro == len(self._sizes(dataset.step)):
            self._micro = 0
            dataset.step += 1

    def _sizes(self, step: int) -> tuple[int, ...]:
        """This rank's micro-batch sizes in a step. At the end of a finite order they differ from the plan."""
        shares = self.dataset.shares(step)
        if shares == self.plan.shares:
            return self.plan.micro[self.rank]
        return even(shares[self.rank], -(-max(shares) // max(map(max, self.plan.micro))))

    def _upcoming(self) -> Iterator[Ids]:
        """The sample ids of each micro-batch, from the current step on."""
        dataset, step = self.dataset, self.dataset.step
        while not dataset.ends_before(step):
            ids = dataset.samples(step, self.rank)
            start = 0
            for size in self._sizes(step):
                yield ids[start : start + size]
                start += size
            step += 1

    def _fetched(self) -> Iterator[tuple[Ids, Batch]]:
        if self.num_workers == 0:
            yield from map(_Fetcher(self.dataset).__getitem__, self._upcoming())
            return
        if self._loader is None:
            from torch.utils.data import DataLoader

            self._loader = DataLoader(
                _Fetcher(self.dataset),
                batch_size=None,
                sampler=_Upcoming(self),
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor,
                persistent_workers=True,
                collate_fn=_identity,
                pin_memory=self.pin_memory,
                generator=self._generator(),
            )
        with _own_child_signal():
            fetched = iter(self._loader)
        yield from fetched

    def _generator(self) -> torch.Generator:
        """The generator for worker seeds. The default one is the training's, and drawing from it would change dropout."""
        import torch

        seed = mix(self.dataset.seed, self.dataset.step, self.rank)
        return torch.Generator().manual_seed(seed)


@contextmanager
def _own_child_signal() -> Iterator[None]:
    """Keeps the SIGCHLD handler: torch's would raise a worker's death anywhere. The next batch raises it in any case."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)
