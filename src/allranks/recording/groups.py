"""What is known of a process group: its name, its members, its counters. Runs in the rank.

A group is looked up by the identity of its Python object, once per call.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from allranks.recording.options import TORCH_ERRORS, fast

WAITS_BLOCK = frozenset({"gloo", "mpi", "fake"})  # backends whose wait() returns when the call is over


if TYPE_CHECKING:
    import torch.distributed as dist

    from allranks.recording._fast import Counters


class GroupState:
    __slots__ = ("backend", "counters", "first_ranks", "mixed", "name", "ranks", "ref")

    def __init__(self, number: int, name: str, ranks: tuple[int, ...], backend: str, timeout_ms: int) -> None:
        self.name = name
        self.ranks = ranks  # global ranks in group order; () = unknown
        self.first_ranks = ranks  # those before it was reconfigured
        self.backend = backend
        self.mixed = "," in backend  # "cpu:gloo,cuda:nccl": what wait() means depends on the tensor
        # the numbers of its calls; two threads (the main one and autograd's) never draw the same
        make: type[Counters] = fast().Counters
        self.counters = make(number, timeout_ms, backend in WAITS_BLOCK, ranks)
        if self.mixed:
            self.counters.cpu_side = make(number, timeout_ms, True, ranks)
        self.ref: weakref.ref[dist.ProcessGroup] | None = None

    def side(self, on_cpu: bool) -> Counters:
        """The counters of calls on CPU tensors, or of the others; the same where one backend serves all."""
        return self.counters.cpu_side if on_cpu and self.counters.cpu_side is not None else self.counters

    def global_rank(self, group_rank: int) -> int:
        """A group-local rank as a global one; itself when the members are unknown."""
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else group_rank


def describe_group(
    group: dist.ProcessGroup, world_size: int, members: tuple[int, ...] = ()
) -> tuple[str, str, tuple[int, ...], str]:
    """(name, description, global ranks, backend) of a ProcessGroup or a bare Backend, as far as it tells.

    `members` are its ranks as far as we know them ourselves: torch does not tell those of a group that was split off.
    """
    name = _text(group, "group_name") or _text(getattr(group, "options", None), "group_name")
    desc = _text(group, "group_desc")
    return name, desc, _ranks(group, world_size, members), _backend(group)


def _text(group: dist.ProcessGroup, attribute: str) -> str:
    try:
        return str(getattr(group, attribute, "") or "")
    except TORCH_ERRORS:  # a property of an unfinished C++ group may raise anything
        return ""


def _ranks(group: dist.ProcessGroup, world_size: int, members: tuple[int, ...]) -> tuple[int, ...]:
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


def _backend(group: dist.ProcessGroup) -> str:
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


def timeout_ms(group: dist.ProcessGroup) -> int:
    """The group's own timeout in milliseconds; 0 when it does not tell."""
    from allranks.recording.torch_internals import group_timeout

    value = group_timeout(group)
    return int(value.total_seconds() * 1000) if value is not None else 0
