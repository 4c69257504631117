"""The agents of the job's other nodes: asks them for their part of an incident, and sends them ours. Runs in the agent.

All nodes notice a hang of the job at about the same time. The lighthouse lets one of them lead: it gathers the parts
of all, explains and acts. The others send their part and continue watching. A command asks all agents of a running job
in the same way (`gather_everywhere`).
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.channel.frames import own_address
from allranks.channel.keys import find_token, read_token
from allranks.errors import AllranksError, ConfigurationError, InputError
from allranks.incidents.evidence_server import EvidenceServer, pack_part, send_part
from allranks.incidents.folder import new_id
from allranks.incidents.job_overview import find_job, read_job
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.model.cluster import FOLLOW_S, CollectEvidence, Gathering

log = logging.getLogger("allranks.agent")

PARTS_S = 30.0  # how long the parts of others are waited for


@dataclass
class PeerAgents:
    """Owns a mailbox, opened when it is first needed. `client` belongs to the caller."""

    client: Client
    token: str
    _mailbox: EvidenceServer | None = None
    gone: set[str] = field(default_factory=set)  # agents that are not waited for any more
    _asked: set[str] = field(default_factory=set)  # incidents of others that we gave our part of

    @property
    def name(self) -> str:
        """How the lighthouse calls us."""
        return self.client.options.replica

    def close(self) -> None:
        """Closes the mailbox."""
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def ask(
        self,
        incident: str,
        reason: str,
        *,
        stacks: bool = True,
        alone: bool = True,
        follow_s: float = FOLLOW_S,
    ) -> Gathering | None:
        """Who leads, and who else was asked; None when the lighthouse cannot say (then we are on our own)."""
        if not self.client.connected:
            return None
        try:
            upload = self._open()
            wanted = CollectEvidence(
                incident, reason, lead=self.name, upload=upload, stacks=stacks, alone=alone, follow_s=follow_s
            )
            return self.client.gather(wanted)
        except (AllranksError, OSError) as error:
            log.warning("the other agents could not be asked: %s", error)
            return None

    def expect(self, gathering: Gathering, folder: Path) -> None:
        """Parts of the gathering that we lead go to this folder; call it right after `ask`."""
        assert self._mailbox is not None
        self._mailbox.expect(gathering.incident, folder)

    def wait(self, gathering: Gathering, limit_s: float = PARTS_S) -> list[str]:
        """Until all parts are there or the limit; returns who or what is missing."""
        assert self._mailbox is not None
        return self._mailbox.wait(gathering.incident, gathering.agents, limit_s)

    def give_up(self, agent: str) -> None:
        """An agent is gone: its part will not come."""
        self.gone.add(agent)
        if self._mailbox is not None:
            self._mailbox.give_up(agent)

    def contribute(self, wanted: CollectEvidence, collect: Callable[[Path, bool], list[str]]) -> None:
        """Another leads: `collect(folder, stacks)` gathers our part, which goes to it."""
        self._asked.add(wanted.incident)
        with tempfile.TemporaryDirectory(prefix="allranks-part-") as name:
            missing = collect(Path(name), wanted.stacks)
            try:
                send_part(
                    wanted.upload, wanted.incident, self.name, self.token, pack_part(Path(name), missing)
                )
            except OSError as error:
                log.warning("%s: our part could not be sent to %s: %s", wanted.incident, wanted.upload, error)
                return
        log.info("%s: our part was sent to %s", wanted.incident, wanted.lead)

    def took_part_in(self, incident: str) -> bool:
        """Whether we gave our part of this incident to another's gathering."""
        return incident in self._asked

    def _open(self) -> str:
        if self._mailbox is None:
            mailbox = EvidenceServer(
                self.token, own_address(self.client.lighthouse or self.client.options.addresses[0])
            )
            mailbox.start()
            self._mailbox = mailbox
        return self._mailbox.address


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
    name = f"command-{host}-{os.getpid()}"
    options = ClientOptions(tuple(address.split(",")), token, name, host, role="observer", beacon=False)
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
