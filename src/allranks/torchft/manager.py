"""torchft.manager: the manager."""

from __future__ import annotations

from allranks.manager.manager import Manager
from allranks.manager.options import WorldSizeMode

__all__ = ["Manager", "WorldSizeMode"]
