"""torchft.process_group: groups whose members come and go."""

from __future__ import annotations

from allranks.manager.group import ProcessGroupGloo
from allranks.manager.group_nccl import ProcessGroupNCCL
from allranks.manager.managed import ManagedProcessGroup

__all__ = ["ManagedProcessGroup", "ProcessGroupGloo", "ProcessGroupNCCL"]
