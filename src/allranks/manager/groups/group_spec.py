"""The specification of a new group, and its registration with torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from allranks.channel.frames import split_address
from allranks.errors import ConfigurationError
from allranks.torch_private import is_known, register_group, unregister_group

Seconds: TypeAlias = "float | timedelta"


def seconds(value: Seconds) -> float:
    """A timedelta or a number of seconds, as seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


@dataclass(frozen=True)
class GroupSpec:
    """Everything needed to make a backend."""

    store: dist.Store
    rank: int
    world_size: int
    number: int = 0  # of the quorum; for logs and for the liveness proxy
    listeners: tuple[str, ...] = ()  # gloo listeners of the other members
    name: str = ""  # of the group, in black boxes and verdicts
    global_ranks: tuple[int, ...] = ()  # of the members in group order; (): not known
    limit_s: float = 0.0  # wait for the other members; 0: the limit of the group's operations


def create_store_client(store_addr: str, timeout: timedelta) -> dist.Store:
    """A client of the store at "host:port/prefix"."""
    address, _, prefix = store_addr.partition("/")
    return dist.PrefixStore(prefix, dist.TCPStore(*split_address(address), is_master=False, timeout=timeout))


class RegisteredGroup:
    """Mixin of a ProcessGroup. torch sees a group of one rank, because the real size changes."""

    _registered: str | None = None

    def register(self, name: str) -> dist.ProcessGroup:
        """Makes the group known as `BACKEND:name` to torch.distributed, its functional collectives and DeviceMesh."""
        assert isinstance(self, dist.ProcessGroup)
        full = f"{self.getBackendName()}:{name}"
        if full.lower() in dist.Backend.backend_list or self._registered is not None:
            raise ConfigurationError(f"a process group {full!r} is registered already: choose another name")
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(full, lambda *_: self, devices=devices)
        if not dist.is_initialized():  # torch has no default group yet
            self._registered = full
            register_group(full, self)
            return self
        return dist.new_group(ranks=[dist.get_rank()], backend=full, group_desc=full)

    def unregister(self) -> None:
        """Removes the group from torch."""
        assert isinstance(self, dist.ProcessGroup)
        if is_known(self):
            dist.destroy_process_group(self)
        elif self._registered is not None:
            unregister_group(self._registered)
        self._registered = None

    def _set_group_name(self, name: str) -> None:
        """Called by torch with the registered name."""
        self._registered = name
