"""Data parallelism over replicas: gradient buckets are reduced during the backward, and again after a member was lost.

Runs in a rank. Parameters are put into buckets in reverse order, the same in every process and every step (never
rebuilt: a new replica must form the same buckets as the others). A bucket is reduced as soon as its last gradient is
ready. `param.grad` keeps the local gradient until the whole backward has been reduced: if a member dies in between, the
survivors reduce once more among themselves and lose nothing.

A replica that heals during its first step contributes zeros. When its backward returns, its state is complete and it
has the reduced gradients, so clipping and unscaling work as on the other replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import ConfigurationError
from allranks.manager.groups.generation import Generation
from allranks.manager.heal.state import local_of
from allranks.manager.manager import Manager
from allranks.manager.work import ManagedWork
from allranks.torch_private import after_backward, copy_all

_FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early; as torch's DDP
_LARGE_BYTES = 64 << 10  # larger gradients get a call each
#: Options of torch's DDP that are accepted and change nothing.
_IGNORED = {
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "process_group",
    "device_mesh",
}


@dataclass(eq=False)
class Bucket:
    """Some parameters, and a flat buffer for their gradients, followed by one mark each: how many replicas have one.

    The first bucket also has a mark for each bucket of `frozen`: whether a replica needs it reduced in this step. An
    embedding with sparse gradients has a mark for each row that it has used.
    """

    parameters: list[nn.Parameter]
    buffer: torch.Tensor | None = None
    slices: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)  # of the slices
    absent: list[int] = field(default_factory=list)  # indexes of parameters without a local gradient
    clean: bool = False  # the buffer is all zeros
    spent: list[torch.Tensor | None] = field(default_factory=list)  # local gradients that were reduced
    missing: int = 0  # gradients still to come in this backward
    work: ManagedWork | None = None
    frozen: list[Bucket] = field(default_factory=list)
    sparse: frozenset[nn.Parameter] = frozenset()
    # index of a sparse parameter -> the marks of its rows, in the buffer
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def fill(self, divisor: int) -> torch.Tensor:
        """Copies the local gradients (zeros where there are none), divided, into the flat buffer."""
        gradients = [None if (gradient := p.grad) is None else _dense(gradient) for p in self.parameters]
        if self._holds_any(gradients):
            self.forget()  # gradients that accumulate lie in the buffer: the reduction must not change them
        buffer = self._allocate()
        self.clean = False
        self.spent.clear()
        local = [gradient for gradient in gradients if gradient is not None]
        self.absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        present = self.slices
        if len(local) < len(gradients):
            present = []
            for part, gradient in zip(self.slices, gradients, strict=True):
                if gradient is None:
                    part.zero_()
                else:
                    present.append(part)
        if divisor > 1 and buffer.device.type == "cpu" and buffer.nbytes > _LARGE_BYTES * len(present):
            for part, gradient in zip(present, local, strict=True):
                torch.div(gradient, divisor, out=part)  # one pass over memory
        elif local:
            copy_all(present, local)
            if divisor > 1:
                buffer.div_(divisor)
        marks = self._marks(buffer).fill_(1)
        still = [not any(p.requires_grad for p in bucket.parameters) for bucket in self.frozen]
        for place in (*self.absent, *(len(self.parameters) + i for i, frozen in enumerate(still) if frozen)):
            marks[place] = 0
        for place, rows in self.rows.items():
            rows.zero_()
            if (gradient := self.parameters[place].grad) is not None:
                rows[gradient.coalesce().indices()[0] if gradient.is_sparse else slice(None)] = 1
        return buffer

    def unfrozen(self) -> list[Bucket]:
        """After the reduction: the buckets of `frozen` that are to be reduced now."""
        if not self.frozen or self.buffer is None:
            return []
        marks = self._marks(self.buffer)[len(self.parameters) :].tolist()
        return [bucket for bucket, mark in zip(self.frozen, marks, strict=True) if mark]

    def _marks(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[buffer.numel() - len(self.parameters) - len(self.frozen) :]

    def _holds_any(self, gradients: list[torch.Tensor | None]) -> bool:
        return any(
            gradient is not None and address and gradient.data_ptr() == address
            for gradient, address in zip(gradients, self.addresses, strict=False)
        )

    def empty(self) -> torch.Tensor:
        """The buffer with zeros, the contribution of a replica that does not participate."""
        self.prepare()
        self.clean = False  # the reduction adds the others' gradients
        self.absent = list(range(len(self.parameters)))
        assert self.buffer is not None
        return self.buffer

    def prepare(self) -> None:
        """Touches the memory before the first step, for which others may wait."""
        buffer = self._allocate()
        if not self.clean:
            buffer.zero_()
            self.clean = True

    def forget(self) -> None:
        """Drops the buffer: an abandoned operation may still use it."""
        self.buffer = None
        self.clean = False
        self.slices.clear()
        self.addresses.clear()
        self.rows.clear()

    def spread(self) -> None:
        """Makes slices of the buffer `param.grad`, without a copy. A parameter for which no replica has a gradient gets None:
        an optimizer skips it, but would decay it with a gradient of zeros.

        On the CPU the local gradients are freed only when the next exist: freed all at once, their memory would go back to
        the kernel and be faulted in again in every step.
        """
        if self.parameters[0].device.type == "cpu":
            self.spent = [p.grad for p in self.parameters]
        for place, (p, part) in enumerate(zip(self.parameters, self.slices, strict=True)):
            p.grad = (
                _wrapped_like(p, part) if place not in self.rows else _sparse_rows(part, self.rows[place])
            )
        if self.absent and self.buffer is not None:
            marks = self._marks(self.buffer).tolist()
            for index in self.absent:
                if not marks[index]:
                    self.parameters[index].grad = None

    def _allocate(self) -> torch.Tensor:
        if self.buffer is None:
            parts = [local_of(p) for p in self.parameters]
            tall = {i: len(p) for i, p in enumerate(self.parameters) if p in self.sparse}
            length = sum(part.numel() for part in parts) + sum(tall.values()) + len(parts) + len(self.frozen)
            self.buffer = torch.empty(length, dtype=parts[0].dtype, device=parts[0].device)
            offset = 0
            for part in parts:
                self.slices.append(_shaped_like(part, self.buffer[offset : offset + part.numel()]))
                offset += part.numel()
            for place, rows in tall.items():
                self.rows[place] = self.buffer[offset : offset + rows]
                offset += rows
            self.addresses = [part.data_ptr() if part.numel() else 0 for part in self.slices]
        return self.buffer


@dataclass(eq=False)
class Backward:
    """The backward of a wrapped module. Not in the module itself: setting a module's attribute is slow."""

    running: bool = False
    # the first backward is done; it loads kernels, which collectives in flight would slow down
    warm: bool = False
    reduced: bool = False  # this step's gradients have been reduced
    next: int = 0  # bucket to reduce next; in the same order on every replica
    issuer: object = None  # identifies this backward's collectives


class DistributedDataParallel(nn.Module):
    """torch's and torchft's DDP in one: `DistributedDataParallel(manager, module)`.

    Each replica keeps its own buffers (batch-norm statistics): they are not broadcast.
    """

    def __init__(
        self, manager: Manager, module: nn.Module, bucket_cap_mb: float = 25.0, **options: object
    ) -> None:
        super().__init__()
        unknown = set(options) - _IGNORED
        if unknown:
            raise ConfigurationError(f"DistributedDataParallel does not know {sorted(unknown)}")
        self.module = module
        self._manager = [manager]  # in a list: a manager is not a submodule
        self._buckets, frozen = (
            cut([p for p in module.parameters() if p.requires_grad is wanted], int(bucket_cap_mb * (1 << 20)))
            for wanted in (True, False)
        )
        for bucket in self._buckets[:1]:
            bucket.frozen = frozen
        embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        sparse = frozenset(m.weight for m in embeddings if m.sparse)
        for bucket in (*self._buckets, *frozen):
            bucket.sparse = sparse
        for bucket in self._buckets:
            bucket.prepare()
        self._synchronises = True
        self._backward = Backward()
        self._unhooked = [(bucket, p) for bucket in (*self._buckets, *frozen) for p in bucket.parameters]
        self._hook()
        manager._before_vote.append(self._reduce_missing)
        manager._wrapped.append(module)
        manager.sums.modules.append(module)

    def forward(self, *args: object, **kwargs: object) -> object:
        if self._unhooked:
            self._hook()
        output = self.module(*args, **kwargs)
        self._manager[0].training.times.mark_first("forward done")
        return output

    def _hook(self) -> None:
        """Follows the parameters that have gradients by now."""
        due = [(bucket, p) for bucket, p in self._unhooked if p.requires_grad]
        if due and not self._buckets:
            raise ConfigurationError(
                "a parameter was unfrozen, and all of them were frozen when DistributedDataParallel was made",
                hint="make it while at least one parameter requires a gradient",
            )
        for bucket, p in due:
            p.register_post_accumulate_grad_hook(functools.partial(self._ready, bucket))
        if due:
            self._unhooked = [pair for pair in self._unhooked if not pair[1].requires_grad]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate gradients; the next one outside reduces the sum."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    # ---- called by autograd ----

    def _ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        training, backward = self._manager[0].training, self._backward
        if not self._synchronises or not training.in_step:
            return
        if not backward.running:
            self._begin()
            after_backward(self._finish)
        _place_like(parameter)
        bucket.missing -= 1
        while backward.next < len(self._buckets) and self._buckets[backward.next].missing <= 0:
            if not backward.warm or not training.may_launch(training.attempt):
                break  # the next gradient, or the end of the backward, launches the bucket
            self._reduce_next()

    def _begin(self) -> None:
        self._backward.running = True
        self._backward.next = 0
        self._backward.issuer = object()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._backward.next]
        self._backward.next += 1
        manager = self._manager[0]
        generation = manager.training.bind(manager.training.attempt, manager._patience_s)
        if generation is not None:
            bucket.work = self._start(bucket, generation)

    def _start(self, bucket: Bucket, generation: Generation) -> ManagedWork:
        counts = generation.participates
        buffer = bucket.fill(len(generation.participants)) if counts else bucket.empty()
        return self._manager[0]._allreduce(buffer, dist.ReduceOp.SUM, self._backward.issuer)

    def _finish(self) -> None:
        """At the end of the backward: reduces the remaining buckets, repeats all after a loss, then sets the gradients."""
        manager, backward = self._manager[0], self._backward
        backward.running, backward.warm = False, True
        attempt = manager.training.attempt
        manager.training.times.mark_first("backward done")
        while backward.next < len(self._buckets):
            self._reduce_next()
        while not (
            self._all_arrived(self._buckets) and self._all_arrived(unfrozen := self._reduce_unfrozen())
        ):
            for bucket in self._buckets:
                bucket.forget()
            if any(issuer is not backward.issuer for issuer in attempt.issuers):
                return  # other collectives of this step cannot be repeated: the step fails
            generation = manager.training.rebind(attempt, manager._patience_s)
            if generation is None:
                return
            for bucket in self._buckets:
                bucket.work = self._start(bucket, generation)
        manager.training.times.mark("gradients reduced")
        backward.reduced = attempt.reduced = True
        for bucket in (*self._buckets, *unfrozen):
            bucket.spread()

    def _reduce_unfrozen(self) -> list[Bucket]:
        """Starts what was frozen at first and is needed by now: all members read that in the first bucket."""
        unfrozen, manager = self._buckets[0].unfrozen() if self._buckets else [], self._manager[0]
        for bucket in unfrozen:
            bucket.forget()  # one that was given up in an earlier attempt may still be written to
            generation = manager.training.bind(manager.training.attempt, manager._patience_s)
            bucket.work = None if generation is None else self._start(bucket, generation)
        return unfrozen

    def _all_arrived(self, buckets: list[Bucket]) -> bool:
        self._manager[0]._bring_in_late_state()
        arrived = True
        for bucket in buckets:
            arrived = bucket.work is not None and bucket.work.wait() and arrived
        return arrived and not self._manager[0].training.attempt.invalid

    def _reduce_missing(self) -> None:
        """Before the vote: takes part in the reduction even if the step had no backward through this module."""
        backward = self._backward
        reduced, backward.reduced = backward.reduced, False
        if not reduced and not self._manager[0].training.attempt.invalid:
            self._begin()
            self._finish()
            backward.reduced = False


def _place_like(p: nn.Parameter) -> None:
    """Redistributes a sharded parameter's gradient, which may be partial sums over ranks, like the parameter."""
    gradient = p.grad
    if type(gradient) is torch.Tensor or gradient is None:
        return
    if getattr(gradient, "placements", None) != getattr(p, "placements", None):
        with torch.no_grad():
            p.grad = gradient.redistribute(p.device_mesh, p.placements)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient."""
    return gradient.to_dense() if gradient.is_sparse else local_of(gradient)


def _sparse_rows(part: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """The rows of an embedding that some replica has used."""
    rows = marks.nonzero().view(-1)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), part[rows], part.shape, is_coalesced=True)


def _wrapped_like(p: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The gradient as a DTensor if the parameter is one."""
    if local_of(p) is p:
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _shaped_like(p: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """A view with the parameter's strides (channels last ...), as optimizers want their gradients."""
    dense = torch.empty_like(p, device="meta", memory_format=torch.preserve_format).stride() == p.stride()
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset()) if dense else flat.view(p.shape)


def cut(parameters: list[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Buckets of at most `cap_bytes`, one type and device each, in reverse order of the parameters."""
    buckets: list[Bucket] = []
    room, kind = 0, None
    for p in reversed(parameters):
        size = local_of(p).numel() * p.element_size()
        if not buckets or size > room or (p.dtype, p.device) != kind:
            buckets.append(Bucket([]))
            room = min(cap_bytes, _FIRST_BUCKET_BYTES) if len(buckets) == 1 else cap_bytes
            kind = (p.dtype, p.device)
        buckets[-1].parameters.append(p)
        room -= size
    return buckets


def replicate(manager: Manager, model: nn.Module) -> nn.Module:
    """Averages the gradients of a model that is sharded inside each replica over the replicas. Returns the model.

    FSDP2 reduces and scatters gradients inside the replica; each shard is then averaged with the same rank's shard of the
    other replicas. All ranks of all replicas vote together, so either all shards are updated or none.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ConfigurationError(
            "replicate() needs a model sharded with FSDP2",
            hint="call torch.distributed.fsdp.fully_shard(model, mesh=...) first; "
            "for a model that is not sharded use DistributedDataParallel(manager, model)",
        )

    def average(shard: torch.Tensor) -> None:
        manager.allreduce(shard).wait()

    for module in sharded:
        module.set_all_reduce_hook(average)
    manager.sums.modules.append(model)
    return model
