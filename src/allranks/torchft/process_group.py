"""torchft.process_group: groups whose members come and go.

The Baby groups exist in torchft because a stuck backend could not be aborted inside a process. Ours can: they are
the ordinary groups, without a child process.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from allranks.errors import ConfigurationError
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.managed import ManagedProcessGroup
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.torchft.wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroupDummy,
    ProcessGroupWrapper,
)

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
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
]

ProcessGroup = ReconfigurableGroup


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


class ProcessGroupXCCL(ReconfigurableGroup):
    """Can be imported, so that scripts which choose a group by device run on other devices; not on XPUs."""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        raise ConfigurationError(
            f"allranks.torchft does not offer {type(self).__name__}: there is no XCCL here, "
            "use ProcessGroupGloo (CPU) or ProcessGroupNCCL (CUDA)"
        )


class ProcessGroupBabyXCCL(ProcessGroupXCCL):
    """See ProcessGroupXCCL."""


def create_store_client(store_addr: str, timeout: timedelta) -> dist.Store:
    """A client of the store at "host:port/prefix"."""
    address, _, prefix = store_addr.partition("/")
    host, _, port = address.rpartition(":")
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=timeout))
