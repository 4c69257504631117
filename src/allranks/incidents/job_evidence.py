"""Evidence of all nodes of a running job for a command: asks their agents through the lighthouse. Runs in the command."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.channel.token import find_token, read_token
from allranks.errors import AllranksError, ConfigurationError, InputError
from allranks.incidents.folder import new_id
from allranks.incidents.job_overview import find_job, read_job
from allranks.incidents.peers import PARTS_S, PeerAgents
from allranks.lighthouse.client.client import Client, ClientOptions


@dataclass(frozen=True)
class Gathered:
    """What came: boxes/ and stacks/AGENT/ in the folder, and sentences about what did not."""

    folder: Path
    agents: tuple[str, ...]
    missing: tuple[str, ...]


def find_lighthouse(job: str | None) -> tuple[str, str] | None:
    """(address, token) of the lighthouse of a job that runs on this node, or of the environment; None without one."""
    address = os.environ.get("ALLRANKS_LIGHTHOUSE", "")
    if address:
        return address, find_token()
    try:
        folder = find_job(job)
    except InputError:
        return None
    facts = read_job(folder)
    address, agent = str(facts.get("lighthouse") or ""), facts.get("pid")
    if not isinstance(agent, int) or process_state(agent) in ("", "Z", "X"):
        return None  # the job is over
    try:
        token = read_token(folder / "token")
    except ConfigurationError:
        return None
    return (address, token) if address else None


def gather_everywhere(
    lighthouse: tuple[str, str], folder: Path, *, stacks: bool, limit_s: float = PARTS_S
) -> Gathered:
    """Asks every agent of the job and puts what they send into the folder; AllranksError when none can be asked."""
    address, token = lighthouse
    host = socket.gethostname()
    options = ClientOptions(
        addresses=tuple(address.split(",")), token=token, replica=f"command-{host}-{os.getpid()}", node=host,
        role="observer", beacon=False,
    )  # fmt: skip
    with Client(options) as client:
        peers = PeerAgents(client, token)
        try:
            asked = peers.ask(new_id("request"), f"asked for on {host}", stacks=stacks, alone=False)
            if asked is None or not asked.agents:
                raise AllranksError(
                    f"no agent answers at the lighthouse {address}",
                    hint="Agents are there while `allranks run` runs on their nodes.",
                )
            peers.expect(asked, folder)
            return Gathered(folder, asked.agents, tuple(peers.wait(asked, limit_s)))
        finally:
            peers.close()
