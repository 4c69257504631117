"""torchft.process_group: groups whose members come and go.

The Baby groups exist in torchft because a stuck backend could not be aborted inside a process. Ours can: they are
the ordinary groups, without a child process. `ManagedProcessGroup` can be given to
`torch.distributed.all_reduce(group=...)`; `ManagedDeviceMesh` has one dimension over replicas (managed) beside ordinary
ones inside the replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from allranks.errors import ConfigurationError
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.group_spec import RegisteredGroup, create_store_client
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.manager.manager import Manager
from allranks.manager.work import ManagedWork
from allranks.torchft.coordination import not_offered


class ManagedProcessGroup(RegisteredGroup, dist.ProcessGroup):
    """Sums and averages over the replicas that take part; other collectives have no meaning here."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(0, 1)
        self._manager = manager

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> ManagedWork:
        """One tensor; the reduce operation may be SUM or AVG."""
        if len(tensors) != 1:
            raise ConfigurationError(f"a managed allreduce takes one tensor, not {len(tensors)}")
        wanted = getattr(opts, "reduceOp", opts) or dist.ReduceOp.SUM
        average = wanted == dist.ReduceOp.AVG
        return self._manager.allreduce(tensors[0], reduce_op=dist.ReduceOp.AVG if average else wanted)

    def size(self) -> int:
        """How many replicas take part now."""
        return self._manager.num_participants()

    def rank(self) -> int:
        """Our place among them; 0 while we heal (our part is zero then)."""
        return self._manager.participating_rank() or 0

    def getBackendName(self) -> str:
        return "allranks-managed"

    @property
    def group_name(self) -> str:
        return self._registered or f"allranks-managed/{self._manager.replica_id()}"


class ManagedDeviceMesh:
    """A mesh with one managed dimension. Index it by the other dimensions' names to get a real DeviceMesh."""

    def __init__(self, manager: Manager, inside: DeviceMesh, names: Sequence[str], managed: str) -> None:
        self.manager = manager
        self.inside = inside
        self.mesh_dim_names = tuple(names)
        self.managed = managed
        self._group = ManagedProcessGroup(manager)

    @property
    def ndim(self) -> int:
        return len(self.mesh_dim_names)

    @property
    def device_type(self) -> str:
        return str(self.inside.device_type)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part inside the replica."""
        wanted = (names,) if isinstance(names, str) else names
        if self.managed in wanted:
            raise ConfigurationError(
                f"dimension {self.managed!r} is managed: its members change, use get_group({self.managed!r})"
            )
        return self.inside[wanted if len(wanted) > 1 else wanted[0]]

    def get_group(self, name: str) -> dist.ProcessGroup:
        """The managed group for the managed dimension, the real one for the others."""
        return self._group if name == self.managed else self.inside.get_group(name)

    def size(self, name: str | None = None) -> int:
        """Ranks in one dimension, or in all."""
        if name == self.managed:
            return self._group.size()
        inner: int = self.inside.size() if name is None else self.inside[name].size()
        return inner * self._group.size() if name is None else inner

    def get_local_rank(self, name: str) -> int:
        """Our coordinate in one dimension."""
        if name == self.managed:
            return self._group.rank()
        rank: int = self.inside.get_local_rank(name)
        return rank


def managed_device_mesh(
    manager: Manager,
    device_type: str,
    mesh_shape: tuple[int, ...],
    mesh_dim_names: tuple[str, ...],
    replicate_dim: int = 0,
) -> ManagedDeviceMesh:
    """`mesh_shape` counts the managed dimension too; its size there is only what you start with."""
    managed = mesh_dim_names[replicate_dim]
    shape = tuple(size for place, size in enumerate(mesh_shape) if place != replicate_dim)
    names = tuple(name for place, name in enumerate(mesh_dim_names) if place != replicate_dim)
    inside = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return ManagedDeviceMesh(manager, inside, mesh_dim_names, managed)


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: tuple[int, ...],
    mesh_dim_names: tuple[str, ...],
    replicate_dim: int,
    manager: Manager,
) -> ManagedDeviceMesh:
    """torchft's spelling of managed_device_mesh."""
    return managed_device_mesh(manager, device_type, mesh_shape, mesh_dim_names, replicate_dim)


__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedDeviceMesh",  # up to torchft 0.1
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "create_store_client",
    "ft_init_device_mesh",  # up to torchft 0.1
]

ProcessGroup = ReconfigurableGroup
_OWN = "use ProcessGroupGloo (CPU) or ProcessGroupNCCL (CUDA), or a subclass of one of them"
ErrorSwallowingProcessGroupWrapper, FakeProcessGroupWrapper, ProcessGroupDummy, ProcessGroupWrapper = (
    not_offered(name, _OWN)
    for name in (
        *("ErrorSwallowingProcessGroupWrapper", "FakeProcessGroupWrapper"),
        *("ProcessGroupDummy", "ProcessGroupWrapper"),
    )
)
ProcessGroupXCCL, ProcessGroupBabyXCCL = (
    not_offered(name, f"there is no XCCL here, {_OWN}")
    for name in ("ProcessGroupXCCL", "ProcessGroupBabyXCCL")
)


class ProcessGroupBabyGloo(ProcessGroupGloo):
    """ProcessGroupGloo: no child process is needed to abort it."""

    def num_active_work(self) -> int:
        """How many operations may still be running."""
        return len(self._works)


class ProcessGroupBabyNCCL(ProcessGroupNCCL):
    """ProcessGroupNCCL: no child process is needed to abort it."""

    def num_active_work(self) -> int:
        """How many operations may still be running."""
        return len(self._works)
