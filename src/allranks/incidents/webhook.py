"""Tells other systems of an incident: one JSON POST per address, off the agent's own thread.

`slack:URL` (or a hooks.slack.com address) gets Slack's shape, anything else the whole incident.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from allranks.model.incident import Incident

log = logging.getLogger("allranks.agent")


def payload(address: str, incident: Incident, sentence: str) -> tuple[str, dict[str, Any]]:
    """Where to send, and what."""
    if address.startswith("slack:") or "//hooks.slack.com/" in address:
        lines = [f"*{incident.job}*: {sentence}"]
        if incident.action is not None:
            lines.append(f"{incident.action.kind.replace('_', ' ')}: {incident.action.reason}")
        lines.append(f"evidence: `{incident.folder}`")
        return address.removeprefix("slack:"), {"text": "\n".join(lines)}
    return address, {"sentence": sentence, "incident": incident.to_dict()}


def send(
    addresses: tuple[str, ...],
    incident: Incident,
    sentence: str,
    *,
    timeout_s: float = 5.0,
    attempts: int = 3,
    done: Callable[[str, bool], None] = lambda address, ok: None,
) -> threading.Thread | None:
    """Posts to every address in one thread; failures are logged and never reach the caller."""
    if not addresses:
        return None

    def work() -> None:
        for address in addresses:
            done(
                address, _post(*payload(address, incident, sentence), timeout_s=timeout_s, attempts=attempts)
            )

    thread = threading.Thread(target=work, name="allranks-webhook", daemon=True)
    thread.start()
    return thread


def _post(url: str, body: dict[str, Any], *, timeout_s: float, attempts: int) -> bool:
    data = json.dumps(body).encode()
    for attempt in range(1, attempts + 1):
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=timeout_s):
                return True
        except (OSError, ValueError) as error:
            log.warning("webhook %s failed (%d of %d): %s", url.split("?")[0], attempt, attempts, error)
            if isinstance(error, ValueError):
                return False
            time.sleep(min(2.0, 0.2 * attempt))
    return False
