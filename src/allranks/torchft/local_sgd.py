"""torchft.local_sgd: replicas that train alone for some steps."""

from __future__ import annotations

from allranks.manager.diloco import DiLoCo
from allranks.manager.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
