"""The manager's options: one frozen object, with each default written once.

Precedence: argument > environment > default. `from_environment` reads the environment once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from allranks.errors import ConfigurationError
from allranks.manager.drift import EVERY_STEPS, OnDifference
from allranks.manager.groups.gloo import own_host
from allranks.manager.groups.group_spec import seconds
from allranks.model.options import check_options, option

_STATE_LOSS = ("", "stop", "restart")


class WorldSizeMode(Enum):
    """DYNAMIC: all members count. FIXED_WITH_SPARES: `min_replica_size` count, the others contribute zeros."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class ManagerOptions:
    """Times are seconds. `rank` and `world_size` are those inside the replica."""

    lighthouse: str
    replica_id: str
    min_replica_size: int = option(1, "fewest members of a quorum", at_least=1)
    rank: int = 0
    world_size: int = 1
    timeout_s: float = option(60.0, "of one collective, and of healing", above=0)
    quorum_timeout_s: float = option(60.0, "to find enough members", above=0)
    connect_timeout_s: float = option(60.0, "to reach the lighthouse, and to connect a new group", above=0)
    use_async_quorum: bool = True
    init_sync: bool = True
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    max_retries: int | None = None  # steps in a row that may fail; None: no limit
    proactive: bool = True  # act on the lighthouse's notices; off: wait for a socket error or the timeout
    host: str = "127.0.0.1"  # address of this rank for the other members
    store_host: str = ""  # of the store that the ranks of this replica share; only for world_size > 1
    store_port: int = 0
    token: str | None = None  # of the job; None: from the environment
    check_every: int = option(EVERY_STEPS, "steps between two comparisons of states; 0: never", at_least=0)
    on_difference: OnDifference = option(
        "heal", "action when a replica's state differs", choices=("heal", "stop", "report")
    )
    on_state_loss: str = option(
        "", 'when all holders of the state are gone; "": stop if there are checkpoints', choices=_STATE_LOSS
    )
    global_rank: int = -1  # in the whole job, for verdicts; -1: not known

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank {self.rank} is outside the replica's world size {self.world_size}"
            )
        if not self.lighthouse:
            raise ConfigurationError(
                "the manager does not know where the lighthouse is",
                hint="start one with `allranks lighthouse --min-replicas N` and set ALLRANKS_LIGHTHOUSE=host:port "
                "(or pass lighthouse_addr); `allranks run` does both for you",
            )


def from_environment(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> ManagerOptions:
    """Options from the arguments of a Manager; for None from the environment, else the default."""
    values: dict[str, Any] = {
        SETTINGS[name]: seconds(value) if name.endswith("timeout") else value
        for name, value in given.items()
        if name in SETTINGS and value is not None
    }
    for name, (variables, convert) in _VARIABLES.items():
        found = next((environment[v] for v in variables if environment.get(v)), None)
        if name not in values and found is not None:
            values[name] = convert(found)
    values["lighthouse"] = _plain(values.get("lighthouse", ""))
    values.setdefault("host", own_host(values["lighthouse"].split(",")[0]))
    values.setdefault("replica_id", f"{socket.gethostname()}-{os.getpid()}")
    return ManagerOptions(**values)


def _plain(address: str) -> str:
    """Converts torchft's URLs to host:port, several separated by commas."""
    return ",".join(part.strip().removeprefix("http://").rstrip("/") for part in address.split(","))


def _switch(text: str) -> bool:
    return text.strip().lower() not in {"0", "false", "no", "off"}


#: Argument of a Manager (torchft's name where it has one) -> field of ManagerOptions.
SETTINGS = {one.name.removesuffix("_s"): one.name for one in fields(ManagerOptions)} | {
    "lighthouse_addr": "lighthouse",
    "proactive_recovery": "proactive",
    "hostname": "host",
    "store_addr": "store_host",
}
_VARIABLES: dict[str, tuple[tuple[str, ...], Any]] = {
    "lighthouse": (("ALLRANKS_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"), str),
    "replica_id": (("ALLRANKS_REPLICA", "REPLICA_ID", "REPLICA_GROUP_ID"), str),
    "rank": (("ALLRANKS_GROUP_RANK", "RANK"), int),
    "world_size": (("ALLRANKS_GROUP_WORLD_SIZE", "WORLD_SIZE"), int),
    "timeout_s": (("ALLRANKS_TIMEOUT_S", "TORCHFT_TIMEOUT_SEC"), float),
    "quorum_timeout_s": (("ALLRANKS_QUORUM_TIMEOUT_S", "TORCHFT_QUORUM_TIMEOUT_SEC"), float),
    "connect_timeout_s": (("ALLRANKS_CONNECT_TIMEOUT_S", "TORCHFT_CONNECT_TIMEOUT_SEC"), float),
    "proactive": (("ALLRANKS_PROACTIVE", "TORCHFT_PROACTIVE_RECOVERY"), _switch),
    "store_host": (("MASTER_ADDR",), str),
    "store_port": (("MASTER_PORT",), int),
    "global_rank": (("ALLRANKS_RANK",), int),
    "on_state_loss": (("ALLRANKS_ON_STATE_LOSS",), str),
}
