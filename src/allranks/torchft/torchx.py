"""torchft.torchx: the component that starts replicas."""

from __future__ import annotations

from allranks.torchft.not_offered import not_offered

__all__ = ["hsdp"]

hsdp = not_offered("torchx.hsdp", "start with `allranks run --replicas N --nproc-per-node M SCRIPT`")
