"""torchft.otel: accepted. The manager logs through `logging`; the lighthouse serves /metrics for Prometheus."""

from __future__ import annotations

import logging
import os

__all__ = ["setup_logger", "shutdown"]

log = logging.getLogger("allranks.torchft")


def setup_logger(name: str) -> None:
    """Says once per name what is there instead when OpenTelemetry was asked for (TORCHFT_USE_OTEL)."""
    if os.environ.get("TORCHFT_USE_OTEL", "false").lower() not in ("false", "0", ""):
        log.warning(
            "%s: no OpenTelemetry export here; scrape /metrics of the lighthouse, or attach a handler", name
        )


def shutdown() -> None:
    """Nothing was opened."""
