"""Groups of ours in torch's registry of process groups, so that code that looks groups up by name finds them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from allranks.errors import ConfigurationError


class RegisteredGroup:
    """Mixed into a ProcessGroup. To torch it is a group of one rank: its real size changes."""

    _registered: str | None = None

    def register(self, name: str) -> dist.ProcessGroup:
        """Makes the group known as `BACKEND:name` to torch.distributed, its functional collectives and DeviceMesh."""
        assert isinstance(self, dist.ProcessGroup)
        full = f"{self.getBackendName()}:{name}"
        if full.lower() in dist.Backend.backend_list or self._registered is not None:
            raise ConfigurationError(f"a process group {full!r} is registered already: choose another name")
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(full, lambda *_: self, devices=devices)
        if not dist.is_initialized():  # there is nothing yet that a group of torch could be a part of
            self._registered = full
            c10d._register_process_group(full, self)
            return self
        return dist.new_group(ranks=[dist.get_rank()], backend=full, group_desc=full)

    def unregister(self) -> None:
        """torch forgets the group."""
        assert isinstance(self, dist.ProcessGroup)
        if self in c10d._world.pg_map:
            dist.destroy_process_group(self)
        elif self._registered is not None:
            c10d._unregister_process_group(self._registered)
        self._registered = None

    def _set_group_name(self, name: str) -> None:
        """torch tells the group under which name it keeps it."""
        self._registered = name
