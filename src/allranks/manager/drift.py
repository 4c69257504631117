"""Do all replicas hold the same state? Checksums of parameters and optimizer state, compared in the votes.

Runs in a rank. Every `every` steps each rank sums the bits of every parameter and of every tensor of the optimizer's
state, beside the step: on a GPU on a stream of its own, on a CPU in a thread. The vote that ends the step carries a
digest of the sums; when digests differ the sums follow, so that every member can name the replica that differs and the
first tensor in which it does. Learning rates, loss scales and the position of samplers are part of every vote.
Buffers (batch-norm statistics) and random generators may differ between replicas and are left out.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from allranks.manager.groups.generation import Generation
from allranks.manager.heal.state import local_of
from allranks.manager.votes import Tally
from allranks.model.cluster import Quorum

log = logging.getLogger("allranks.manager")
OnDifference = Literal["heal", "stop", "report"]
EVERY_STEPS = 100  # keeps the cost below 0.5 % of a step: benchmarks/drift.py


@dataclass(frozen=True)
class Difference:
    """Members whose values differ from the majority's; all of them when there is no majority."""

    places: tuple[int, ...]  # of the voters that differ
    majority: tuple[int, ...]  # of those that agree; () when no more than half do


def find_difference(values: Sequence[int], groups: Iterable[Sequence[int]]) -> Difference | None:
    """Compares the values of the voters of each group; 0 stands for "not computed" and differs from nothing."""
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
    """What the digests of a vote show."""

    sentence: str
    replicas: tuple[str, ...]  # that differ
    healable: bool  # a majority agrees: the others can take its state


@dataclass(eq=False)
class CorruptionHistory:
    """Which replicas differed from a majority in this job, and on which host: twice is no accident."""

    _steps: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def repeated(self, found: StateFinding, quorum: Quorum, step: int) -> dict[str, str]:
        """Notes what was found; replica -> reason for those that should go."""
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
    """What is summed, and the sums of the current step. All methods run on the training thread."""

    every: int = EVERY_STEPS
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    # schedulers, scalers, samplers: state_dict() is compared
    small: dict[str, Any] = field(default_factory=dict)
    # what LocalSGD and DiLoCo keep of the last exchange
    kept: list[Callable[[], Mapping[str, torch.Tensor]]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    corruption: CorruptionHistory = field(default_factory=CorruptionHistory)
    _running: _Summing | None = None
    _layout: _Layout = field(default_factory=lambda: _Layout([]))

    def is_due(self, step: int) -> bool:
        """Whether the vote of this step carries a checksum."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def begin(self) -> None:
        """Starts to sum the state as it is now; it must not change before `finish`."""
        tensors = [local_of(tensor) for _, _, tensor in self._tensors()]
        if not self._layout.is_of(tensors):
            self._layout = _Layout(tensors)
        self._running = _Summing(self._layout)

    def forget(self) -> None:
        """The state was replaced meanwhile."""
        self._running = None

    def finish(self) -> int:
        """The digest of the sums, never 0; begins now if that was not done."""
        if self._running is None:
            self.begin()
        assert self._running is not None
        self.sums, self._running = self._running.result(), None
        return _digest(struct.pack(f"{len(self.sums)}q", *self.sums)) if self.sums else 0

    def compare(self, generation: Generation, tally: Tally, step: int) -> StateFinding | None:
        """Compares the digests of a vote and logs what differs; raises GroupAborted."""
        small = self.examine_small(generation, tally, step)
        if small and not generation.reported:
            log.error("%s; is a scheduler or scaler missing in Manager(state=[...])?", small)
            generation.reported = True
        found = self.examine(generation, tally, step)
        if found is not None:
            log.error("%s", found.sentence)
        return found

    def examine(self, generation: Generation, tally: Tally, step: int) -> StateFinding | None:
        """Who differs after this vote, and where. Every member comes to the same result; raises GroupAborted."""
        found = find_difference(tally.state, generation.counterparts) if tally.state else None
        if found is None:
            return None
        replicas, odd = _replicas(generation, found.places), found.places[0]
        counterparts = next(group for group in generation.counterparts if odd in group)
        other = next(place for place in counterparts if tally.state[place] != tally.state[odd])
        theirs, others = generation.exchange_sums(self.sums, (odd, other))
        where = first_difference(theirs, others, self.names)
        who, verb = " and ".join(replicas), "differs" if len(replicas) == 1 else "differ"
        if found.majority:
            sentence = f"the state of {who} {verb} from that of the other replicas, first in {where}"
        else:
            sentence = f"the states of {who} differ, first in {where}; nobody can tell which is right"
        healable = bool(found.majority) and 2 * len(replicas) < len(generation.quorum.members)
        return StateFinding(f"step {step}: {sentence}", replicas, healable)

    def examine_small(self, generation: Generation, tally: Tally, step: int) -> str:
        """A sentence when learning rates and the like differ; else ""."""
        found = find_difference(tally.small, generation.counterparts) if tally.small else None
        if found is None:
            return ""
        who = " and ".join(_replicas(generation, found.places))
        return (
            f"step {step}: learning rate, loss scale or the like of {who} differ; here: {self.small_state()}"
        )

    def small_state(self) -> dict[str, Any]:
        """Learning rates, and what the small objects say of themselves: in plain values."""
        found: dict[str, Any] = {}
        for index, optimizer in enumerate(self.optimizers):
            found[f"learning rates {index}"] = [float(group["lr"]) for group in optimizer.param_groups]
        for name, part in self.small.items():
            state = part.state_dict()
            plain = state.items() if isinstance(state, Mapping) else ()
            found[name] = {key: value for key, value in plain if isinstance(value, (int, float, str, bool))}
        return found

    def small_digest(self) -> int:
        """Of `small_state`; never 0."""
        return _digest(repr(self.small_state()).encode())

    @property
    def names(self) -> list[str]:
        """Of what is summed, in the order of the sums."""
        of: dict[torch.Tensor, str] = {}
        for optimizer in self.optimizers:
            for group, parameters in enumerate(optimizer.param_groups):
                of |= {p: f"parameter {group}.{index}" for index, p in enumerate(parameters["params"])}
        for index, module in enumerate(self.modules):
            prefix = f"module {index}." if len(self.modules) > 1 else ""
            of |= {p: prefix + name for name, p in module.named_parameters()}
        found = ((key, of[p] if p is not None else "") for key, p, _ in self._tensors())
        return [f"{key} of {name}" if key and name else key or name for key, name in found]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """(what it is, "" for a parameter itself; the parameter; the tensor)"""
        for kept in self.kept:
            for name, tensor in kept().items():
                yield name, None, tensor
        for module in self.modules:
            for p in module.parameters():
                yield "", p, p
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    for key, value in optimizer.state.get(p, {}).items():
                        if isinstance(value, torch.Tensor):
                            yield key, p, value


def _replicas(generation: Generation, places: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(generation.replica_of(place) for place in places))


class _Summing:
    """Sums of the bits of tensors, computed beside the training.

    Device kernels are launched here, on the training thread before the step's first collective: loading a kernel while
    a collective waits for other members could stop both.
    """

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self._sums = [0] * len(layout.tensors)
        for index in layout.numbers:
            self._sums[index] = _digest(repr(layout.tensors[index].item()).encode())
        self._on_device = [(places, *_launch(device, rows)) for device, places, rows in layout.on_device]
        self._thread = threading.Thread(target=self._sum_on_host, name="allranks-checksum", daemon=True)
        if layout.on_host:
            self._thread.start()

    def _sum_on_host(self) -> None:
        for index, view in self._layout.on_host:
            self._sums[index] = int(_bit_sum(view))

    def result(self) -> list[int]:
        if self._layout.on_host:
            self._thread.join()
        for places, stream, sums in self._on_device:
            with torch.cuda.stream(stream):
                for index, value in zip(places, sums.tolist(), strict=True):
                    self._sums[index] = int(value)
        return self._sums


def _launch(device: torch.device, rows: Rows) -> tuple[torch.cuda.Stream, torch.Tensor]:
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return stream, _sum_rows(rows)


_COPIED_WORDS = 1 << 22  # 32 MiB
_streams: dict[torch.device, torch.cuda.Stream] = {}
View = tuple[torch.Tensor | None, torch.Tensor | None]  # whole words, and the bytes after them
Rows = list[View | list[torch.Tensor]]  # one tensor; or several of equal size, which are summed by one kernel


class _Layout:
    """Where the tensors of the state lie, and how they are summed. Kept from sum to sum as long as they stay there."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        self._in_place = all(tensor.is_contiguous() for tensor in tensors)  # else views are of copies
        self.numbers: list[int] = []  # AdamW counts the steps of each parameter in a tensor on the CPU
        self.on_host: list[tuple[int, View]] = []
        devices: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.is_cuda:
                devices.setdefault(tensor.device, []).append(index)
            elif tensor.numel() == 1:
                self.numbers.append(index)
            else:
                self.on_host.append((index, as_words(tensor)))
        self.on_device: list[tuple[torch.device, list[int], Rows]] = []
        for device, places in devices.items():
            order, rows = together([as_words(tensors[index]) for index in places])
            self.on_device.append((device, [places[number] for number in order], rows))

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        return (
            self._in_place
            and len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and [tensor.data_ptr() for tensor in tensors] == self._pointers
        )


def as_words(tensor: torch.Tensor) -> View:
    """The bits of a tensor as 8-byte words and the bytes that are left over."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8 if flat.storage_offset() % 8 == 0 else 0
    return (
        flat[:whole].view(torch.int64) if whole else None,
        flat[whole:] if whole < flat.numel() or not whole else None,
    )


def together(views: Sequence[View]) -> tuple[list[int], Rows]:
    """(numbers of the views in the order of the rows, rows). Those of equal size are copied and summed together, as many
    as make a copy of reasonable size: launching kernels is what costs."""
    alike: dict[int, list[int]] = {}
    for number, (words, tail) in enumerate(views):
        whole = words is not None and tail is None
        alike.setdefault(words.numel() if whole and words is not None else -1 - number, []).append(number)
    order: list[int] = []
    rows: Rows = []
    for size, numbers in alike.items():
        count = max(1, _COPIED_WORDS // size) if size > 0 else 1
        for some in (numbers[at : at + count] for at in range(0, len(numbers), count)):
            alone = len(some) == 1
            rows.append(views[some[0]] if alone else [w for n in some if (w := views[n][0]) is not None])
            order += some
    return order, rows


def _sum_rows(rows: Rows) -> torch.Tensor:
    parts = [
        torch.cat(row).view(len(row), -1).sum(1) if isinstance(row, list) else _bit_sum(row).reshape(1)
        for row in rows
    ]
    return torch.cat(parts)


def bit_sum(tensor: torch.Tensor) -> int:
    """Changes with every single bit of the tensor."""
    return int(_bit_sum(as_words(tensor)))


def _bit_sum(view: View) -> torch.Tensor:
    words, tail = view
    total = words.sum() if words is not None else torch.zeros((), dtype=torch.int64)
    if tail is None:
        return total
    weights = torch.arange(1, tail.numel() + 1, device=tail.device)
    return total.to(tail.device) + tail.to(torch.int64).mul_(weights).sum()


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1 or 1
