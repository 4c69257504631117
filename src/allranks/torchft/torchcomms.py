"""torchft.torchcomms."""

from __future__ import annotations

from allranks.torchft.not_offered import not_offered

__all__ = ["ProcessGroupTorchComms"]

ProcessGroupTorchComms = not_offered(
    "ProcessGroupTorchComms", "use ProcessGroupNCCL (CUDA) or ProcessGroupGloo (CPU)"
)
