"""Unary gRPC calls of bytes, with torchft's errors: TimeoutError when time is up, RuntimeError otherwise."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from allranks.errors import require

OPTIONS = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection per client: its end is the client's end
    ("grpc.so_reuseport", 0),
)


class Calls:
    """A connection to one service. The constructor connects, as torchft's clients do."""

    def __init__(self, service: str, address: str, connect_timeout: timedelta) -> None:
        require("grpc", feature="torchft's protocol", extra="grpc")
        import grpc

        self._service = service
        self._channel = grpc.insecure_channel(address.removeprefix("http://").rstrip("/"), options=OPTIONS)
        limit_s = connect_timeout.total_seconds()
        try:
            grpc.channel_ready_future(self._channel).result(timeout=limit_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise TimeoutError(f"no connection to {address} within {limit_s:g} s") from None

    def call(self, method: str, request: bytes, timeout: timedelta) -> bytes:
        """The answer's bytes."""
        import grpc

        function = self._channel.unary_unary(f"/torchft.{self._service}/{method}")
        try:
            answer: bytes = function(request, timeout=timeout.total_seconds())
        except grpc.RpcError as error:
            raise _translated(error, method, timeout) from None
        return answer

    def close(self) -> None:
        """Ends the connection; calls that wait end with an error."""
        self._channel.close()


def _translated(error: Any, method: str, timeout: timedelta) -> Exception:
    import grpc

    code, text = error.code(), error.details() or ""
    late = code is grpc.StatusCode.DEADLINE_EXCEEDED or (
        code is grpc.StatusCode.CANCELLED and "timeout" in text.lower()
    )
    if late:
        wanted = f"{method} was not answered within {timeout.total_seconds():g} s"
        return TimeoutError(
            f"status: Cancelled, message: {wanted}: Timeout expired"
        )  # scripts look for these words
    return RuntimeError(f"{method} failed: {code.name}: {text}")
