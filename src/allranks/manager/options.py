"""What can be set on a manager: one frozen object, each default written once, relations checked.

Precedence: argument > environment > default. The environment is read once, by `from_environment`.
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


class WorldSizeMode(Enum):
    """DYNAMIC: all members count. FIXED_WITH_SPARES: `min_replica_size` count, the rest stand by with zeros."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class ManagerOptions:
    """Times are seconds. `rank` and `world_size` are those inside the replica."""

    lighthouse: str
    replica_id: str
    min_replica_size: int = 1
    rank: int = 0
    world_size: int = 1
    timeout_s: float = 60.0  # of one collective, and of healing
    quorum_timeout_s: float = 60.0  # of finding enough members
    connect_timeout_s: float = 60.0  # of reaching the lighthouse, and of connecting a new group
    use_async_quorum: bool = True
    init_sync: bool = True
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    max_retries: int | None = None  # steps in a row that may fail; None: no limit
    proactive: bool = True  # act on the lighthouse's push; off: wait for a socket error or the timeout
    host: str = "127.0.0.1"  # under which the other members reach this rank
    store_host: str = ""  # of the store that the ranks of this replica share; only for world_size > 1
    store_port: int = 0
    token: str | None = None  # of the job; None: from the environment
    check_every: int = EVERY_STEPS  # steps between two comparisons of the replicas' states; 0: never
    on_difference: OnDifference = "heal"  # what is done when one differs; see Manager
    # stop or restart when all holders of the state are gone; "": stop if there are checkpoints
    on_state_loss: str = ""
    global_rank: int = -1  # in the whole job; names the rank in verdicts; -1: not known

    def __post_init__(self) -> None:
        if self.min_replica_size < 1:
            raise ConfigurationError(f"min_replica_size must be at least 1, not {self.min_replica_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank {self.rank} is outside the replica's world size {self.world_size}"
            )
        for name in ("timeout_s", "quorum_timeout_s", "connect_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be positive, not {getattr(self, name)}")
        if self.check_every < 0:
            raise ConfigurationError(f"check_every must not be negative, but is {self.check_every}")
        if self.on_difference not in ("heal", "stop", "report"):
            raise ConfigurationError(
                f"on_difference must be heal, stop or report, not {self.on_difference!r}"
            )
        if self.on_state_loss not in ("", "stop", "restart"):
            raise ConfigurationError(f"on_state_loss must be stop or restart, not {self.on_state_loss!r}")
        if not self.lighthouse:
            raise ConfigurationError(
                "the manager does not know where the lighthouse is",
                hint="start one with `allranks lighthouse --min-replicas N` and set ALLRANKS_LIGHTHOUSE=host:port "
                "(or pass lighthouse_addr); `allranks run` does both for you",
            )


def from_environment(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> ManagerOptions:
    """Arguments of a Manager; fills what was not given (None) from the environment, what is in neither keeps its default."""
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
    """torchft writes addresses as URLs; ours are host:port, several separated by commas."""
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
