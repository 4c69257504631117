"""What is known of a process group: its name, its members, its counters. Runs in the rank.

A group is looked up by the identity of its Python object, once per call. Counters are `itertools.count`, so that
two threads (the main one and autograd's) never draw the same number.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from allranks.record.engine import fast

WAITS_BLOCK = frozenset({"gloo", "mpi", "fake"})  # backends whose wait() returns when the call is over


class PyCounters:
    """The numbers of one group's calls, in Python; `_fast.c` has the same."""

    __slots__ = (
        "_ops",
        "_p2ps",
        "_seqs",
        "batch",
        "blocking",
        "cpu_side",
        "last_seq",
        "number",
        "timeout_ms",
    )

    def __init__(self, number: int, timeout_ms: int, blocking: bool) -> None:
        self.number = number  # id of the group in the black box
        self.timeout_ms = timeout_ms
        self.blocking = blocking  # wait() returns when the call is over
        self.last_seq = 0
        self.cpu_side: Any = None  # stands for calls on CPU tensors when these have a backend of their own
        self.batch: tuple[int, int] | None = (
            None  # (seq, p2p_seq) of the open coalesced group, 0 = not drawn yet
        )
        self._seqs, self._p2ps, self._ops = itertools.count(1), itertools.count(1), itertools.count(1)

    def next_seq(self) -> int:
        """The number of the next collective."""
        self.last_seq = number = next(self._seqs)
        return number

    def next_p2p(self) -> int:
        """The number of the next send or recv."""
        return next(self._p2ps)

    def next_op(self) -> int:
        """The number of the next operation of any kind."""
        return next(self._ops)


class GroupState:
    """One process group as this rank sees it."""

    __slots__ = ("backend", "counters", "mixed", "name", "parts", "ranks", "ref")

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
        self.backend = backend
        self.mixed = "," in backend  # "cpu:gloo,cuda:nccl": what wait() means depends on the tensor
        self.counters = make_counters(number, timeout_ms, backend in WAITS_BLOCK, ranks, accelerate)
        if self.mixed:
            self.counters.cpu_side = make_counters(number, timeout_ms, True, ranks, accelerate)
        self.parts: list[int] = []  # numbers of the calls in the open coalesced group
        self.ref: weakref.ref[Any] | None = None

    def global_rank(self, group_rank: int) -> int:
        """A group-local rank as a global one; itself when the members are unknown."""
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else group_rank


def make_counters(
    number: int, timeout_ms: int, blocking: bool, ranks: tuple[int, ...], accelerate: bool
) -> Any:
    """Counters in C when that was built and is wanted, else in Python."""
    module = fast(accelerate)
    if module is not None:
        return module.Counters(number, timeout_ms, blocking, ranks)
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
    except Exception:  # a property of an unfinished C++ group may raise anything
        return ""


def _ranks(group: Any, world_size: int, members: tuple[int, ...]) -> tuple[int, ...]:
    import torch.distributed as dist

    from allranks.record.torch_internals import group_ranks

    known = members or group_ranks(group)
    if known:
        return known
    try:
        size = int(group.size())
    except Exception:  # as above
        return ()
    if world_size < 0 and dist.is_initialized():
        world_size = dist.get_world_size()
    return tuple(range(size)) if size == world_size or world_size < 0 else ()


def _backend(group: Any) -> str:
    """ "nccl", "gloo", …; "cpu:gloo,cuda:nccl" for a group that has several."""
    try:
        from allranks.record.torch_internals import backends, group_backend

        if config := group_backend(group):
            return config
        names = {str(device.type): str(backend.name()) for device, backend in backends(group)}
        if len(set(names.values())) > 1:
            return ",".join(f"{device}:{name}" for device, name in sorted(names.items()))
        return next(iter(names.values()), "") or str(group.name())
    except Exception:  # as above
        return ""


def timeout_ms(group: Any) -> int:
    """The group's own timeout in milliseconds; 0 when it does not tell."""
    from allranks.record.torch_internals import group_timeout

    value = group_timeout(group)
    return int(value.total_seconds() * 1000) if value is not None else 0
