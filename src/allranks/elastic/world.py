"""The distributed environment of a rank, and the options of torchrun. Imports torch on first use."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import msgspec

from allranks.errors import ConfigurationError, DistributedSetupError, InputError
from allranks.model.options import check_options, option

_REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class WorldInfo:
    """What torchrun or `allranks run` set in the environment of a rank."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


def get_world_info() -> WorldInfo:
    """Reads the environment of this rank; DistributedSetupError if a variable is missing."""
    missing = [name for name in _REQUIRED if not os.environ.get(name)]
    if missing:
        raise DistributedSetupError(
            f"Missing required environment variables: {missing}. "
            "Ensure you are running with torchrun or torch.distributed.launch.",
            missing,
            hint="start the script with one of:\n"
            "  torchrun --nproc-per-node=4 train.py\n  allranks run --nproc-per-node=4 train.py",
        )
    return WorldInfo(
        rank=_number("RANK"),
        local_rank=_number("LOCAL_RANK"),
        world_size=_number("WORLD_SIZE"),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        master_addr=os.environ.get("MASTER_ADDR", "localhost"),
        master_port=_number("MASTER_PORT", 29500),
    )


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise DistributedSetupError(f"{name} is {text!r}, not a number", [name]) from None


def setup_distributed_environment(
    backend: str = "auto", init_method: str | None = None, timeout_s: float = _DEFAULT_TIMEOUT_S
) -> WorldInfo:
    """Creates the default process group (nccl with a GPU, else gloo) and selects this rank's device."""
    info = get_world_info()
    import torch
    import torch.distributed as dist

    if backend not in {"auto", "nccl", "gloo"}:
        raise DistributedSetupError(f"Unknown backend '{backend}'. Valid options: ['auto', 'nccl', 'gloo']")
    cuda = torch.cuda.is_available()
    if backend == "nccl" and not cuda:
        raise DistributedSetupError(
            "backend 'nccl' needs a GPU, but torch found none",
            hint="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use backend='auto' (gloo on CPUs)",
        )
    chosen = ("nccl" if cuda else "gloo") if backend == "auto" else backend
    if cuda:
        torch.cuda.set_device(info.local_rank % max(1, torch.cuda.device_count()))
    if dist.is_initialized():
        return info
    try:
        dist.init_process_group(
            chosen, init_method=init_method or "env://", timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        raise _explained(error, info, chosen) from error
    return info


def _explained(error: Exception, info: WorldInfo, backend: str) -> DistributedSetupError:
    where = f"{info.master_addr}:{info.master_port}"
    sizes = {"rank": str(info.rank), "world_size": str(info.world_size)}
    message = f"Failed to initialize distributed ({backend}, {where}): {error}"
    hint = (
        f"check that all {info.world_size} ranks were started and that {where} is reachable: allranks doctor"
    )
    return DistributedSetupError(message, (), {"backend": backend, "master": where, **sizes}, hint=hint)


def cleanup_distributed() -> None:
    if (dist := _dist()) is not None:
        dist.destroy_process_group()


def get_rank() -> int:
    """This rank; 0 without a process group."""
    return int(dist.get_rank()) if (dist := _dist()) is not None else 0


def get_world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return int(dist.get_world_size()) if (dist := _dist()) is not None else 1


def is_main_process() -> bool:
    """True on rank 0, and without a process group."""
    return get_rank() == 0


def barrier() -> None:
    """Waits for all ranks, up to the process group's timeout. Does nothing without a group."""
    if (dist := _dist()) is not None:
        dist.barrier()


def broadcast_object(obj: object, src: int = 0) -> Any:
    """Sends plain data from `src` to all ranks; TypeError on all ranks if msgpack cannot encode it.

    Tuples arrive as lists. For tensors use torch's `broadcast`.
    """
    packed, refused = [b""], f"rank {src} passed a value that is not plain data"
    if get_rank() == src:
        try:
            packed = [msgspec.msgpack.encode(obj)]
        except TypeError as error:  # raised after the broadcast, for which the other ranks wait
            refused = str(error)
    if (dist := _dist()) is not None:
        dist.broadcast_object_list(packed, src)
    if not packed[0]:
        raise TypeError(refused)
    return msgspec.msgpack.decode(packed[0])


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else from torch.distributed, else from the environment, else (0, 1)."""
    known = _dist() is not None
    if rank is None:
        rank = get_rank() if known else int(os.environ.get("RANK", 0))
    if world_size is None:
        world_size = get_world_size() if known else int(os.environ.get("WORLD_SIZE", 1))
    return rank, world_size


def _dist() -> ModuleType | None:
    """torch.distributed if it has a default process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True)
class ElasticTrainingConfig:
    """Options of torchrun. `heartbeat_*` are its keep-alive; `nproc_per_node` None: one per GPU, at least one."""

    min_nodes: int = option(1, "the job stops with fewer nodes", at_least=1)
    max_nodes: int = option(4, "no further nodes may join", at_least=1)
    rdzv_backend: str = option(
        "c10d",
        "how nodes find each other",
        choices=("c10d", "etcd-v3", "etcd-v2", "etcd", "static"),
        title="rendezvous backend",
    )
    rdzv_endpoint: str = "localhost:29400"
    rdzv_id: str = option("elastic-training", "the same on every node of a job")
    heartbeat_interval: float = option(1.0, "between two heartbeats of a node", unit="s", above=0)
    heartbeat_timeout: float = option(
        5.0, "a node without a heartbeat for this long is dead", unit="s", above=0
    )
    nproc_per_node: int | str | None = None
    max_restarts: int = option(100, "restarts of the job's ranks", at_least=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_nodes > self.max_nodes:
            text = f"min_nodes cannot exceed max_nodes ({self.min_nodes} > {self.max_nodes})"
            raise ConfigurationError(text, "elastic.min_nodes")
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ConfigurationError(
                f"heartbeat_timeout ({self.heartbeat_timeout:g} s) must be at least twice "
                f"heartbeat_interval ({self.heartbeat_interval:g} s)",
                "elastic.heartbeat_timeout",
            )

    def to_torchrun_args(self) -> list[str]:
        """The flags for torchrun or `allranks run`."""
        return [
            f"--nnodes={self.min_nodes}:{self.max_nodes}",
            f"--nproc-per-node={self.nproc_per_node if self.nproc_per_node is not None else _devices()}",
            f"--rdzv-backend={self.rdzv_backend}",
            f"--rdzv-endpoint={self.rdzv_endpoint}",
            f"--rdzv-id={self.rdzv_id}",
            f"--max-restarts={self.max_restarts}",
            f"--rdzv-conf={keep_alive(self.heartbeat_interval, self.heartbeat_timeout)}",
        ]


def keep_alive(interval_s: float, timeout_s: float) -> str:
    """Heartbeats as torchrun's --rdzv-conf, which takes whole seconds only."""
    whole = max(1, math.floor(interval_s))
    return f"keep_alive_interval={whole},keep_alive_max_attempt={max(2, math.ceil(timeout_s / whole))}"


def obey_timeout(words: list[str]) -> list[str]:
    """Replaces `--rdzv-conf timeout=N`, which torchrun silently ignores, by `join_timeout=N`."""
    found = []
    for index, word in enumerate(words):
        after_flag = index > 0 and words[index - 1].replace("_", "-") == "--rdzv-conf"
        head, equals, value = ("", "", word) if after_flag else word.partition("=")
        if after_flag or (equals and head.replace("_", "-") == "--rdzv-conf"):
            pairs = [pair.strip() for pair in value.split(",")]
            if not any(pair.startswith("join_timeout=") for pair in pairs):
                pairs = [f"join_{pair}" if pair.startswith("timeout=") else pair for pair in pairs]
            word = f"{head}{equals}{','.join(pairs)}"
        found.append(word)
    return found


def need_etcd_v2(backend: str | None) -> None:
    """Raises InputError if the packages for torch's etcd backends, which torch does not install, are missing."""
    missing = [name for name in ("etcd", "urllib3") if importlib.util.find_spec(name) is None]
    if backend in ("etcd", "etcd-v2") and missing:
        raise InputError(
            f"--rdzv-backend {backend} needs the package{'s' if len(missing) > 1 else ''} "
            f"{' and '.join({'etcd': 'python-etcd'}.get(name, name) for name in missing)}",
            hint="pip install python-etcd urllib3, or use --rdzv-backend etcd-v3, which needs no package (etcd 3.6 has no v2 API)",
        )


def _devices() -> int:
    try:
        import torch

        return max(1, int(torch.cuda.device_count()))
    except ImportError:
        return 1
