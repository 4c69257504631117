"""Whether a second copy of a state fits into memory, in a rank: the first one is then kept until the second is complete."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of the free memory that a copy may take


def has_room(needs: dict[torch.device, int]) -> bool:
    """Whether so many bytes are free on each device."""
    return all(size <= _SHARE * free_bytes(device) for device, size in needs.items())


def free_bytes(device: torch.device) -> int:
    """Of the device, or of this machine and its container; 0 where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return 0
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        found = None
    return min(int(found[1]) * 1024 if found else 0, _left_in_container())


def _left_in_container() -> int:
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # another version of cgroups, or "max": no limit
        return 1 << 62
