"""torchft.coordination: the lighthouse inside a program.

torchft's Manager uses a server per replica; allranks' Manager needs none, so that server and its client are not offered.
"""

from __future__ import annotations

import logging

from allranks.channel.frames import split_address
from allranks.errors import ConfigurationError, MissingExtra
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse, OtherProtocol

__all__ = ["LighthouseClient", "LighthouseServer", "ManagerClient", "ManagerServer"]

log = logging.getLogger("allranks.torchft")


def not_offered(name: str, instead: str) -> type:
    """A class of that name whose constructor raises ConfigurationError."""

    def refuse(self: object, *arguments: object, **named: object) -> None:
        raise ConfigurationError(f"allranks.torchft does not offer {name}: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not offered: {instead}.", "__module__": __name__})


_MANAGER = "use Manager, which talks to the lighthouse itself"
LighthouseClient, ManagerClient, ManagerServer = (
    not_offered(name, _MANAGER) for name in ("LighthouseClient", "ManagerClient", "ManagerServer")
)


class LighthouseServer:
    """Listens at once, like torchft's, on one port for allranks' and torchft's managers.

    Args:
        bind: HOST:PORT; port 0 takes any free one
        min_replicas: fewest members of a quorum
        join_timeout_ms: how long replicas that joined wait for live replicas that have not (100)
        quorum_tick_ms: how often a decision is reconsidered when nothing happens (100)
        heartbeat_timeout_ms: silence after which a replica counts as lost (5000)
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        min_replicas: int = 1,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        host, port = split_address(bind.removeprefix("http://"))
        heartbeat_s = (5000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms) / 1e3
        options = Options(
            min_replicas=min_replicas,
            join_timeout_s=(100 if join_timeout_ms is None else join_timeout_ms) / 1e3,
            quorum_tick_s=(100 if quorum_tick_ms is None else quorum_tick_ms) / 1e3,
            heartbeat_timeout_s=heartbeat_s,
            reset_grace_s=min(0.1, heartbeat_s),
            presume_dead_s=0.0,  # as with torchft, a silent replica counts as dead
        )
        server = ServerOptions(host=host, port=port)
        self._lighthouse = Lighthouse(options, server, protocols=_grpc()).start()

    def address(self) -> str:
        """The value for TORCHFT_LIGHTHOUSE."""
        return f"http://{self._lighthouse.address}"

    def shutdown(self) -> None:
        self._lighthouse.close()

    def __enter__(self) -> str:
        return self.address()

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _grpc() -> list[OtherProtocol]:
    from allranks.lighthouse.grpc_server import torchft_protocol

    try:
        return [torchft_protocol("", 0)]
    except MissingExtra as missing:
        log.warning("torchft's own clients cannot connect: %s", missing)
        return []
