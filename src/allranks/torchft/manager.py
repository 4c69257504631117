"""torchft.manager: the manager."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import torch
import torch.distributed as dist

from allranks.manager.manager import Manager as AllranksManager
from allranks.manager.options import WorldSizeMode
from allranks.manager.work import ManagedWork

__all__ = ["ExceptionWithTraceback", "Manager", "WorldSizeMode"]

log = logging.getLogger("allranks.torchft")


class ExceptionWithTraceback(Exception):
    """What `Manager.errored` returns: `original_exception`, and where it came from as text."""

    def __init__(self, e: Exception) -> None:
        super().__init__(str(e))
        self.original_exception = e
        self.stack_trace = "".join(traceback.format_exception(e))


class Manager(AllranksManager):
    """allranks' Manager with what only torchft's users expect."""

    _told_quantize = False

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG
    ) -> ManagedWork:
        """`should_quantize` is accepted: the tensor is reduced in its own precision."""
        if should_quantize and not self._told_quantize:
            self._told_quantize = True
            log.warning("should_quantize is ignored: tensors are reduced in their own precision")
        return super().allreduce(tensor, False, reduce_op)

    def errored(self) -> ExceptionWithTraceback | None:
        """Why this step will not be committed, or None."""
        error = super().errored()
        return None if error is None else ExceptionWithTraceback(error)
