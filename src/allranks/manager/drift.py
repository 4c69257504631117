"""Checks that all replicas hold the same state: checksums of parameters and optimizer state, compared in the votes.

Runs in a rank. Every `every` steps each rank sums the bits of all parameters and optimizer tensors while the step runs: on
a GPU on a separate stream, on a CPU in a thread. The vote that ends the step carries a digest of the sum; if digests
differ, the sums of each tensor follow, so that every member can name the differing replica and tensor. Every vote also
covers learning rates, loss scales and the position of samplers. Buffers (batch-norm statistics) and random generators may
differ between replicas and are left out.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn

from allranks.errors import GroupAborted
from allranks.manager.groups.generation import Generation
from allranks.manager.groups.teardown import start_thread
from allranks.manager.heal.state import local_of
from allranks.manager.vote_mesh import Tally
from allranks.model.cluster import Quorum

log = logging.getLogger("allranks.manager")
OnDifference = Literal["heal", "stop", "report"]
EVERY_STEPS = 200  # keeps the cost below 0.5 % of a step on a CPU, 0.1 % on a GPU: benchmarks/drift.py


class HasState(Protocol):
    """A scheduler, a scaler, a sampler."""

    def state_dict(self) -> object: ...


@dataclass(frozen=True)
class Difference:
    """Voters whose values differ from the majority's; all of them without a majority."""

    places: tuple[int, ...]  # voters that differ
    majority: tuple[int, ...]  # voters that agree; () when at most half do


def find_difference(values: Sequence[int], groups: Iterable[Sequence[int]]) -> Difference | None:
    """Compares the values of the voters of each group; ignores 0, which means "not computed"."""
    if len(set(values)) == 1:  # nearly every vote
        return None
    differ: list[int] = []
    agree: list[int] = []
    for group in groups:
        known = [place for place in group if values[place]]
        counts = Counter(values[place] for place in known)
        if len(counts) < 2:
            continue
        value, count = counts.most_common(1)[0]
        decided = 2 * count > len(known)
        differ += [place for place in known if not decided or values[place] != value]
        agree += [place for place in known if decided and values[place] == value]
    return Difference(tuple(sorted(differ)), tuple(sorted(agree))) if differ else None


def first_difference(own: Sequence[int], other: Sequence[int], names: Sequence[str]) -> str:
    """The name of the first tensor whose sums differ."""
    for mine, theirs, name in zip(own, other, names, strict=False):
        if mine != theirs:
            return name
    return "" if len(own) == len(other) else "the number of tensors"


@dataclass(frozen=True)
class StateFinding:
    """The result of comparing the digests of a vote."""

    sentence: str
    replicas: tuple[str, ...]  # that differ
    healable: bool  # a majority agrees: the others can take its state


@dataclass(eq=False)
class CorruptionHistory:
    """Which replicas differed from a majority in this job, and on which host."""

    _steps: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def repeated(self, found: StateFinding, quorum: Quorum, step: int) -> dict[str, str]:
        """Records a finding; returns replica -> reason for those that differed before and should be evicted."""
        reasons = {}
        for name in found.replicas if found.healable else ():
            member = quorum.member(name)
            steps = self._steps.setdefault((name, member.node if member else ""), [])
            steps.append(step)
            if len(steps) > 1:
                where = f" on {member.node}" if member and member.node else ""
                at = " and ".join(map(str, steps))
                reasons[name] = (
                    f"its state differed from the majority's at steps {at}{where}: check the machine"
                )
        return reasons


@dataclass(eq=False)
class StateSums:
    """The state that is summed, and the sums of the current step. All methods run on the training thread."""

    every: int = EVERY_STEPS
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    # schedulers, scalers, samplers: compares state_dict()
    small: dict[str, HasState] = field(default_factory=dict)
    # the state that LocalSGD and DiLoCo keep from the last exchange
    kept: list[Callable[[], Mapping[str, torch.Tensor]]] = field(default_factory=list)
    corruption: CorruptionHistory = field(default_factory=CorruptionHistory)
    _running: _Summing | None = None

    def is_due(self, step: int) -> bool:
        """Whether the vote of this step carries a checksum."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def begin(self) -> None:
        """Starts to sum the current state, which must not change before `finish`."""
        self._running = _Summing([local_of(tensor) for _, _, tensor in self._tensors()])

    def forget(self) -> None:
        """Drops a running sum: the state was replaced."""
        self._running = None

    def finish(self) -> int:
        """The digest of the sum, never 0; sums now if `begin` was not called."""
        if self._running is None:
            self.begin()
        assert self._running is not None
        total, self._running = self._running.result(), None
        return _digest(str(total).encode())

    def of_each(self) -> list[int]:
        """The sum of each tensor, as `names` names them."""
        return [int(sum_bits([local_of(tensor)])) for _, _, tensor in self._tensors()]

    def compare(self, generation: Generation, tally: Tally, step: int) -> StateFinding | None:
        """Compares the digests of a vote and logs differences; raises GroupAborted."""
        small = self.examine_small(generation, tally, step)
        if small and not generation.reported:
            log.error("%s; is a scheduler or scaler missing in Manager(state=[...])?", small)
            generation.reported = True
        found = self.examine(generation, tally, step)
        if found is not None:
            log.error("%s", found.sentence)
        return found

    def examine(self, generation: Generation, tally: Tally, step: int) -> StateFinding | None:
        """Which replicas differ after this vote, and where. Every member gets the same result; raises GroupAborted."""
        found = find_difference(tally.state, generation.counterparts) if tally.state else None
        if found is None:
            return None
        replicas, odd = _replicas(generation, found.places), found.places[0]
        counterparts = next(group for group in generation.counterparts if odd in group)
        other = next(place for place in counterparts if tally.state[place] != tally.state[odd])
        who, verb = " and ".join(replicas), "differs" if len(replicas) == 1 else "differ"
        if found.majority:
            sentence, end = f"step {step}: the state of {who} {verb} from that of the other replicas", ""
        else:
            sentence, end = f"step {step}: the states of {who} differ", "; there is no majority"
        try:
            sums = generation.votes.exchange_sums(self.of_each())
        except GroupAborted:  # a member left after its vote, perhaps because this was its last step
            log.error("%s%s", sentence, end)
            raise
        where = first_difference(sums[odd], sums[other], self.names)
        healable = bool(found.majority) and 2 * len(replicas) < len(generation.quorum.members)
        return StateFinding(f"{sentence}, first in {where}{end}", replicas, healable)

    def examine_small(self, generation: Generation, tally: Tally, step: int) -> str:
        """A sentence if learning rates, loss scales or sampler positions differ; else ""."""
        found = find_difference(tally.small, generation.counterparts) if tally.small else None
        if found is None:
            return ""
        who = " and ".join(_replicas(generation, found.places))
        return (
            f"step {step}: learning rate, loss scale or the like of {who} differ; here: {self.small_state()}"
        )

    def small_state(self) -> dict[str, object]:
        """Learning rates, and the plain values in the state of the small objects."""
        found: dict[str, object] = {}
        for index, optimizer in enumerate(self.optimizers):
            found[f"learning rates {index}"] = [float(group["lr"]) for group in optimizer.param_groups]
        for name, part in self.small.items():
            state = part.state_dict()
            plain = state.items() if isinstance(state, Mapping) else ()
            found[name] = {key: value for key, value in plain if isinstance(value, (int, float, str, bool))}
        return found

    def small_digest(self) -> int:
        """The digest of `small_state`; never 0."""
        return _digest(repr(self.small_state()).encode())

    @property
    def names(self) -> list[str]:
        """The names of the summed tensors, in order."""
        of: dict[torch.Tensor, str] = {}
        for optimizer in self.optimizers:
            for group, parameters in enumerate(optimizer.param_groups):
                of |= {p: f"parameter {group}.{index}" for index, p in enumerate(parameters["params"])}
        for index, module in enumerate(self.modules):
            prefix = f"module {index}." if len(self.modules) > 1 else ""
            of |= {p: prefix + name for name, p in module.named_parameters()}
        found = ((key, of[p] if p is not None else "") for key, p, _ in self._tensors())
        return [f"{key} of {name}" if key and name else key or name for key, name in found]

    def _tensors(self) -> list[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """(name of the optimizer's or kept tensor, "" for a parameter; the parameter; the tensor)"""
        found: list[tuple[str, torch.Tensor | None, torch.Tensor]] = []
        found += [(name, None, tensor) for kept in self.kept for name, tensor in kept().items()]
        found += [("", p, p) for module in self.modules for p in module.parameters()]
        found += [
            (key, p, value)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        ]
        return found


def _replicas(generation: Generation, places: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(generation.replica_of(place) for place in places))


class _Summing:
    """The sum of the bits of tensors, computed during the step.

    Launches device kernels at once, on the training thread before the step's first collective: loading a kernel while a
    collective waits for other members could deadlock.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu)
        self._on_device = [_launch(device, [t for t in tensors if t.device == device]) for device in devices]
        self._on_host = 0
        host = [tensor for tensor in tensors if tensor.is_cpu]
        self._thread = start_thread("allranks-checksum", self._sum_on_host, host)

    def _sum_on_host(self, tensors: list[torch.Tensor]) -> None:
        self._on_host = int(sum_bits(tensors, copied_bytes=_COPIED_ON_HOST_BYTES))

    def result(self) -> int:
        self._thread.join()
        found = self._on_host
        for copied, total in self._on_device:
            if copied is not None:
                copied.synchronize()
            found += int(total)
        return found


def _launch(
    device: torch.device, tensors: list[torch.Tensor]
) -> tuple[torch.cuda.Event | None, torch.Tensor]:
    """(event of the copy, the sum in host memory)"""
    if device.type != "cuda":
        return None, sum_bits(tensors).cpu()
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        total = sum_bits(tensors).to("cpu", non_blocking=True)
        return stream.record_event(), total


_COPIED_BYTES, _COPIED_ON_HOST_BYTES = 64 << 20, 64 << 10
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_streams: dict[torch.device, torch.cuda.Stream] = {}


def sum_bits(tensors: Iterable[torch.Tensor], copied_bytes: int = _COPIED_BYTES) -> torch.Tensor:
    """A sum that changes with every bit of the tensors, which are on one device. Uses few kernels, since launching them is
    the main cost: small tensors are copied into blocks; a tensor larger than half of `copied_bytes` is summed in place."""
    found: list[torch.Tensor] = []
    blocks: dict[torch.dtype, list[torch.Tensor]] = {}
    room: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        flat = _flat(tensor)
        if 2 * tensor.nbytes > copied_bytes:
            found.append(flat.sum())
            continue
        if tensor.nbytes > room[flat.dtype]:
            found += [torch.cat(block).sum() for block in (blocks.pop(flat.dtype, []),) if block]
            room[flat.dtype] = copied_bytes
        blocks.setdefault(flat.dtype, []).append(flat)
        room[flat.dtype] -= tensor.nbytes
    found += [torch.cat(block).sum() for block in blocks.values()]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as the largest words that divide its size and offset."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    at = flat.numel() | flat.storage_offset()
    return flat.view(next(dtype for dtype in _WORDS if at % dtype.itemsize == 0))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1 or 1
