"""torchft.coordination: a lighthouse inside a program, with torchft's words. Our rules, our defaults otherwise."""

from __future__ import annotations

from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse

__all__ = ["LighthouseServer"]


class LighthouseServer:
    """Listens at once, as torchft's does; `shutdown` ends it. Times are milliseconds."""

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        min_replicas: int = 1,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,
        heartbeat_timeout_ms: int = 5000,
    ) -> None:
        host, _, port = bind.removeprefix("http://").rpartition(":")
        options = Options(
            min_replicas=min_replicas,
            join_timeout_s=join_timeout_ms / 1e3,
            quorum_tick_s=quorum_tick_ms / 1e3,
            heartbeat_timeout_s=heartbeat_timeout_ms / 1e3,
        )
        server = ServerOptions(host=host.strip("[]") or "127.0.0.1", port=int(port))
        self._lighthouse = Lighthouse(options, server).start()

    def address(self) -> str:
        """For TORCHFT_LIGHTHOUSE."""
        return f"http://{self._lighthouse.address}"

    def shutdown(self) -> None:
        """Any number of times."""
        self._lighthouse.close()
