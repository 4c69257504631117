"""What is known of a process group: its name, its members, its counters. Runs in the rank.

A group is looked up by the identity of its Python object, once per call. Counters are `itertools.count`, so that
two threads (the main one and autograd's) never draw the same number.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from allranks.model.trace import Flag
from allranks.recording.options import TORCH_ERRORS, fast

P2P, PART = int(Flag.P2P), int(Flag.COALESCED_PART)
WAITS_BLOCK = frozenset({"gloo", "mpi", "fake"})  # backends whose wait() returns when the call is over


class PyCounters:
    """The numbers of one group's calls, in Python; `_fast.c` has the same."""

    __slots__ = (
        "_batch",
        "_last_seq",
        "_ops",
        "_p2ps",
        "_parts",
        "_seqs",
        "blocking",
        "cpu_side",
        "number",
        "timeout_ms",
    )

    def __init__(self, number: int, timeout_ms: int, blocking: bool) -> None:
        self.number = number  # id of the group in the black box
        self.timeout_ms = timeout_ms
        self.blocking = blocking  # wait() returns when the call is over
        # stands for calls on CPU tensors when these have a backend of their own
        self.cpu_side: Counters | None = None
        self._last_seq = 0
        self._batch = (0, 0)  # seq and p2p_seq of the open batch; 0 = not drawn yet
        self._parts: list[int] | None = None  # numbers of the calls in the open batch
        self._seqs, self._p2ps, self._ops = itertools.count(1), itertools.count(1), itertools.count(1)

    def draw(self, p2p: bool) -> tuple[int, int, int, int]:
        """(seq, p2p_seq, op_id, flags) of the next call. Calls of one batch share one p2p and one collective number."""
        if self._parts is None:
            if p2p:
                return self._last_seq, next(self._p2ps), next(self._ops), P2P
            self._last_seq = seq = next(self._seqs)
            return seq, 0, next(self._ops), 0
        seq, p2p_seq = self._batch
        if p2p and not p2p_seq:
            p2p_seq = next(self._p2ps)
        elif not p2p and not seq:
            self._last_seq = seq = next(self._seqs)
        self._batch = (seq, p2p_seq)
        return seq or self._last_seq, p2p_seq if p2p else 0, next(self._ops), PART | P2P if p2p else PART

    @property
    def in_batch(self) -> bool:
        return self._parts is not None

    def open_batch(self) -> None:
        """The calls from now on are parts of one batch."""
        self._batch, self._parts = (0, 0), []

    def add_part(self, number: int) -> None:
        """A call belongs to the open batch."""
        if self._parts is not None:
            self._parts.append(number)

    def close_batch(self) -> tuple[int, int, int, tuple[int, ...]]:
        """(seq, p2p_seq, op_id, numbers of its calls) of the batch."""
        (seq, p2p_seq), parts = self._batch, tuple(self._parts or ())
        self._batch, self._parts = (0, 0), None
        return seq or self._last_seq, p2p_seq, next(self._ops), parts


Counters = PyCounters  # or the same in C


class GroupState:
    __slots__ = ("backend", "counters", "first_ranks", "mixed", "name", "ranks", "ref")

    def __init__(
        self,
        number: int,
        name: str,
        ranks: tuple[int, ...],
        backend: str,
        timeout_ms: int,
        accelerate: bool = True,
    ) -> None:
        self.name = name
        self.ranks = ranks  # global ranks in group order; () = unknown
        self.first_ranks = ranks  # those before it was reconfigured
        self.backend = backend
        self.mixed = "," in backend  # "cpu:gloo,cuda:nccl": what wait() means depends on the tensor
        self.counters = make_counters(number, timeout_ms, backend in WAITS_BLOCK, ranks, accelerate)
        if self.mixed:
            self.counters.cpu_side = make_counters(number, timeout_ms, True, ranks, accelerate)
        self.ref: weakref.ref[Any] | None = None

    def side(self, on_cpu: bool) -> Counters:
        """The counters of calls on CPU tensors, or of the others; the same where one backend serves all."""
        return self.counters.cpu_side if on_cpu and self.counters.cpu_side is not None else self.counters

    def global_rank(self, group_rank: int) -> int:
        """A group-local rank as a global one; itself when the members are unknown."""
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else group_rank


def make_counters(
    number: int, timeout_ms: int, blocking: bool, ranks: tuple[int, ...], accelerate: bool
) -> Counters:
    """Counters in C when that was built and is wanted, else in Python."""
    module = fast(accelerate)
    if module is not None:
        made: Counters = module.Counters(number, timeout_ms, blocking, ranks)
        return made
    return PyCounters(number, timeout_ms, blocking)


def describe_group(
    group: Any, world_size: int, members: tuple[int, ...] = ()
) -> tuple[str, str, tuple[int, ...], str]:
    """(name, description, global ranks, backend) of a ProcessGroup or a bare Backend, as far as it tells.

    `members` are its ranks as far as we know them ourselves: torch does not tell those of a group that was split off.
    """
    name = _text(group, "group_name") or _text(getattr(group, "options", None), "group_name")
    desc = _text(group, "group_desc")
    return name, desc, _ranks(group, world_size, members), _backend(group)


def _text(group: Any, attribute: str) -> str:
    try:
        return str(getattr(group, attribute, "") or "")
    except TORCH_ERRORS:  # a property of an unfinished C++ group may raise anything
        return ""


def _ranks(group: Any, world_size: int, members: tuple[int, ...]) -> tuple[int, ...]:
    import torch.distributed as dist

    from allranks.recording.torch_internals import group_ranks

    known = members or group_ranks(group)
    if known:
        return known
    try:
        size = int(group.size())
    except TORCH_ERRORS:  # as above
        return ()
    if world_size < 0 and dist.is_initialized():
        world_size = dist.get_world_size()
    return tuple(range(size)) if size == world_size or world_size < 0 else ()


def _backend(group: Any) -> str:
    """ "nccl", "gloo", …; "cpu:gloo,cuda:nccl" for a group that has several."""
    try:
        from allranks.recording.torch_internals import backends, group_backend

        if config := group_backend(group):
            return config
        names = {str(device.type): str(backend.name()) for device, backend in backends(group)}
        if len(set(names.values())) > 1:
            return ",".join(f"{device}:{name}" for device, name in sorted(names.items()))
        return next(iter(names.values()), "") or str(group.name())
    except TORCH_ERRORS:  # as above
        return ""


def timeout_ms(group: Any) -> int:
    """The group's own timeout in milliseconds; 0 when it does not tell."""
    from allranks.recording.torch_internals import group_timeout

    value = group_timeout(group)
    return int(value.total_seconds() * 1000) if value is not None else 0
