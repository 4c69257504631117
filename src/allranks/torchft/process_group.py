"""torchft.process_group: groups whose members come and go."""

from __future__ import annotations

from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.managed import ManagedProcessGroup
from allranks.manager.groups.nccl import ProcessGroupNCCL

__all__ = ["ManagedProcessGroup", "ProcessGroupGloo", "ProcessGroupNCCL"]
