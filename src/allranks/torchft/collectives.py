"""torchft.collectives: FP8 collectives."""

from __future__ import annotations

from allranks.torchft.not_offered import not_offered

__all__ = ["allreduce_quantized", "reduce_scatter_quantized"]

allreduce_quantized = not_offered(
    "allreduce_quantized", "use Manager.allreduce, which reduces in full precision"
)
reduce_scatter_quantized = not_offered("reduce_scatter_quantized", "use the group's reduce_scatter")
