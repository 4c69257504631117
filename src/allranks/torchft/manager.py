"""torchft.manager: the manager."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import torch
import torch.distributed as dist

from allranks.manager.groups.group import ReconfigurableGroup
from allranks.manager.groups.group_spec import Seconds
from allranks.manager.manager import Manager as AllranksManager
from allranks.manager.options import SETTINGS, WorldSizeMode
from allranks.manager.registered_state import LoadFunction, SaveFunction
from allranks.manager.work import ManagedWork

__all__ = ["ExceptionWithTraceback", "Manager", "WorldSizeMode"]

log = logging.getLogger("allranks.torchft")


class ExceptionWithTraceback(Exception):
    """The result of `Manager.errored`: the exception, and its traceback as text."""

    def __init__(self, e: Exception) -> None:
        super().__init__(str(e))
        self.original_exception = e
        self.stack_trace = "".join(traceback.format_exception(e))


class Manager(AllranksManager):
    """allranks' Manager with torchft's interface."""

    _warned_quantize = False

    def __init__(
        self,
        pg: ReconfigurableGroup | None = None,
        load_state_dict: LoadFunction | None = None,
        state_dict: SaveFunction | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: Seconds | None = None,
        quorum_timeout: Seconds | None = None,
        connect_timeout: Seconds | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: Seconds | None = None,
        checkpoint_transport: object | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
        **more: Any,
    ) -> None:
        """torchft's arguments in its order, and allranks' own by name.

        `port`, `heartbeat_interval`, `checkpoint_transport` and `quorum_retries` change nothing: there is no server per
        manager, the lighthouse sets the heartbeat, healing is built in.
        """
        settings = {name: value for name, value in locals().items() if name in SETTINGS}
        if checkpoint_transport is not None:
            log.warning("checkpoint_transport is not used: healing is built in")
        super().__init__(pg, load_state_dict, state_dict, **settings, **more)

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: dist.ReduceOp = dist.ReduceOp.AVG,
    ) -> ManagedWork:
        """Ignores `should_quantize`: the tensor is reduced in its own precision."""
        if should_quantize and not self._warned_quantize:
            self._warned_quantize = True
            log.warning("should_quantize is ignored: tensors are reduced in their own precision")
        return super().allreduce(tensor, False, reduce_op)

    def errored(self) -> ExceptionWithTraceback | None:
        """Why this step will not be committed, or None."""
        error = super().errored()
        return None if error is None else ExceptionWithTraceback(error)
