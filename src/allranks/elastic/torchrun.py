"""The rendezvous side of a job as torchrun's flags. Pure."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

from allranks.errors import ConfigurationError, InputError


@dataclass(frozen=True)
class ElasticTrainingConfig:
    """`heartbeat_*` are torchrun's keep-alive; `nproc_per_node` None: one per GPU, or one."""

    min_nodes: int = 1
    max_nodes: int = 4
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = "localhost:29400"
    rdzv_id: str = "elastic-training"
    heartbeat_interval: float = 1.0  # seconds
    heartbeat_timeout: float = 5.0  # seconds
    nproc_per_node: int | str | None = None
    max_restarts: int = 100

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise ConfigurationError(f"min_nodes must be >= 1 (got {self.min_nodes})", "elastic.min_nodes")
        if self.min_nodes > self.max_nodes:
            raise ConfigurationError(
                f"min_nodes cannot exceed max_nodes ({self.min_nodes} > {self.max_nodes})",
                "elastic.min_nodes",
            )
        if self.heartbeat_interval <= 0 or self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ConfigurationError(
                f"heartbeat_timeout ({self.heartbeat_timeout:g} s) must be at least twice "
                f"heartbeat_interval ({self.heartbeat_interval:g} s)",
                "elastic.heartbeat_timeout",
            )

    def to_torchrun_args(self) -> list[str]:
        """Seven flags for torchrun or `allranks run`."""
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
    """torchrun's words for heartbeats; it knows whole seconds only."""
    whole = max(1, math.floor(interval_s))
    return f"keep_alive_interval={whole},keep_alive_max_attempt={max(2, math.ceil(timeout_s / whole))}"


def obey_timeout(words: list[str]) -> list[str]:
    """`--rdzv-conf timeout=N`, which torchrun passes over without a word, as what it does obey: join_timeout."""
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
    """torch's own etcd backends need packages that it does not install."""
    missing = [name for name in ("etcd", "urllib3") if importlib.util.find_spec(name) is None]
    if backend in ("etcd", "etcd-v2") and missing:
        raise InputError(
            f"--rdzv-backend {backend} needs the package{'s' if len(missing) > 1 else ''} "
            f"{' and '.join({'etcd': 'python-etcd'}.get(name, name) for name in missing)}",
            hint="pip install python-etcd urllib3, or use --rdzv-backend etcd-v3, which needs nothing (and etcd 3.6 has no v2)",
        )


def _devices() -> int:
    try:
        import torch

        return max(1, int(torch.cuda.device_count()))
    except ImportError:
        return 1
