"""torchft.process_group: groups whose members come and go.

The Baby groups exist in torchft because a stuck backend could not be aborted inside a process. Ours can: they are
the ordinary groups, without a child process.
"""

from __future__ import annotations

from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.group_spec import create_store_client
from allranks.manager.groups.managed import ManagedDeviceMesh, ManagedProcessGroup, ft_init_device_mesh
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.torchft.coordination import not_offered

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
