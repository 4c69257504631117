"""A lighthouse inside another command: `allranks run` has one of its own, `allranks slurm wrap` one for all nodes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from allranks.cli.job_file import quorum_times


def embed_lighthouse(
    bind: str, token: str, min_replicas: int | None, replicas: int, settings: Mapping[str, Any], stack: ExitStack,
    job: str = "",
) -> str:  # fmt: skip
    """Starts it until the stack ends, and returns its address. `replicas` are expected, 0: nobody knows how many."""
    from allranks.lighthouse.options import Options, ServerOptions
    from allranks.lighthouse.server import Lighthouse
    from allranks.lighthouse.web import http_protocol

    host, _, port = bind.rpartition(":")
    server = ServerOptions(host=host.strip("[]"), port=int(port), token=token, job=job)
    options = Options(min_replicas=min_replicas or 1, expect_replicas=replicas, **quorum_times(settings))
    # the agent of this process logs its incidents itself
    logging.getLogger("allranks.lighthouse").addFilter(_no_incidents)
    lighthouse = stack.enter_context(Lighthouse(options, server, http=http_protocol()))
    address = str(lighthouse.address)
    print(f"[allranks] lighthouse at {address}, page http://{address}/", file=sys.stderr, flush=True)
    return address


def _no_incidents(record: logging.LogRecord) -> bool:
    return getattr(record, "event", "") != "incident"
