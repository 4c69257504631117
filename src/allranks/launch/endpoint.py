"""The address at which a c10d rendezvous is held: who listens there, and waiting until somebody does.

Runs in the agent. All waiting is done in Python, where Ctrl-C is heard; torch connects in C++ and hears nothing.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from datetime import timedelta
from typing import Literal

from allranks.errors import AllranksError

DEFAULT_PORT = 29400  # torchrun's
POLL_S = 0.2


class LaunchError(AllranksError):
    """The job could not be started, or its rendezvous failed."""


def port_in_use(endpoint: str, text: str) -> LaunchError:
    """Somebody else has the port."""
    return LaunchError(
        f"the rendezvous port of {endpoint or 'this node'} is in use: {text}",
        hint="Find who holds it (ss -ltnp), or choose another with --rdzv-endpoint HOST:PORT "
        "(port 0 with --standalone takes a free one).",
    )


def nobody_answers(endpoint: str, text: str) -> LaunchError:
    """Nobody listens there."""
    return LaunchError(
        f"no rendezvous server answers at {endpoint}: {text}",
        hint="Is etcd running? `allranks etcd status`, `allranks etcd start`. For c10d, the node that "
        "hosts the endpoint must be started too, and the name must resolve to it.",
    )


def split(endpoint: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = endpoint.rpartition(":") if ":" in endpoint.rpartition("]")[2] else (endpoint, "", "")
    return host.strip("[]") or "localhost", int(port) if port.isdigit() else DEFAULT_PORT


def who_listens(endpoint: str) -> Literal["nobody", "somebody", "elsewhere"]:
    """What is known of the port from here; `elsewhere` is an address of another machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(split(endpoint))
        except OSError as error:
            return "somebody" if error.errno == errno.EADDRINUSE else "elsewhere"
    return "nobody"


def wait_for_host(endpoint: str, deadline: float) -> bool:
    """Whether somebody listens at the endpoint, or this node may, before the deadline (monotonic)."""
    while True:
        if who_listens(endpoint) != "elsewhere":
            return True
        with contextlib.suppress(OSError), socket.create_connection(split(endpoint), timeout=2.0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)


def refuse_stranger(endpoint: str, wait_s: float = 10.0) -> None:
    """LaunchError if this node's rendezvous port is held by something that is no rendezvous store.

    torch would connect to it and wait without limit for an answer. Another agent's store answers at once.
    """
    if who_listens(endpoint) != "somebody":
        return
    import torch.distributed as dist

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # refused or closed: not a store either
            dist.TCPStore(*split(endpoint), is_master=False, timeout=timedelta(seconds=wait_s))
            answered.set()

    asking = threading.Thread(target=ask, name="allranks-ask-endpoint", daemon=True)
    asking.start()
    asking.join(wait_s)
    if not answered.is_set():
        raise port_in_use(endpoint, "what listens there is not a rendezvous store")
