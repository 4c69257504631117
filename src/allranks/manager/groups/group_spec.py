"""Where the members of a new group meet. Plain values, made by the manager, used by every backend."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

Seconds: TypeAlias = "float | timedelta"


def seconds(value: Seconds) -> float:
    """A timedelta or a number of seconds, as seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


@dataclass(frozen=True)
class GroupSpec:
    """Where and as whom to meet: everything a backend needs to be made."""

    store: dist.Store
    rank: int
    world_size: int
    number: int = 0  # of the quorum; for logs and for the liveness proxy
    remote_ports: tuple[int, ...] = ()  # gloo listeners of the other members
    name: str = ""  # of the group, as black boxes and verdicts say it
    global_ranks: tuple[int, ...] = ()  # of the members in group order; () = not known
    limit_s: float = 0.0  # of waiting for the others; 0 = that of the group's operations
