"""torchft.process_group: reconfigurable process groups.

torchft's Baby groups run a backend in a child process that can be killed. Ours can be aborted in place, so the Baby names
are the ordinary groups. `ManagedProcessGroup` can be passed to `torch.distributed.all_reduce(group=...)`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from allranks.errors import ConfigurationError
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.group_spec import RegisteredGroup, create_store_client
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.manager.manager import Manager
from allranks.manager.work import ManagedWork
from allranks.torchft.coordination import not_offered


class ManagedProcessGroup(RegisteredGroup, dist.ProcessGroup):
    """Sums and averages over the participating replicas; offers no other collectives."""

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
        """How many replicas participate now."""
        return self._manager.num_participants()

    def rank(self) -> int:
        """This replica's index among the participants; 0 while it heals and contributes zeros."""
        return self._manager.participating_rank() or 0

    def getBackendName(self) -> str:
        return "allranks-managed"

    @property
    def group_name(self) -> str:
        return self._registered or f"allranks-managed/{self._manager.replica_id()}"


__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedDeviceMesh",
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
    "ft_init_device_mesh",
]

ProcessGroup = ReconfigurableGroup
_OWN = "use ProcessGroupGloo (CPU) or ProcessGroupNCCL (CUDA), or a subclass of one of them"
ErrorSwallowingProcessGroupWrapper = not_offered("ErrorSwallowingProcessGroupWrapper", _OWN)
FakeProcessGroupWrapper = not_offered("FakeProcessGroupWrapper", _OWN)
ProcessGroupDummy = not_offered("ProcessGroupDummy", _OWN)
ProcessGroupWrapper = not_offered("ProcessGroupWrapper", _OWN)
ProcessGroupXCCL = not_offered("ProcessGroupXCCL", f"there is no XCCL here, {_OWN}")
ProcessGroupBabyXCCL = not_offered("ProcessGroupBabyXCCL", f"there is no XCCL here, {_OWN}")
_MESH = "use ManagedProcessGroup in addition to a mesh of the ranks inside the replica"
ManagedDeviceMesh = not_offered("ManagedDeviceMesh", _MESH)  # this and the next: of torchft 0.1
ft_init_device_mesh = not_offered("ft_init_device_mesh", _MESH)
ProcessGroupBabyGloo, ProcessGroupBabyNCCL = ProcessGroupGloo, ProcessGroupNCCL
