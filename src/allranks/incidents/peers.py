"""Asks the agents of the job's other nodes for their part of an incident, and sends them this node's part. Runs in the agent.

All nodes notice a hang at about the same time. The lighthouse lets one agent lead: it gathers all parts, explains and acts. The
others send their part and continue watching. A command gathers parts of a running job in the same way (`gather_everywhere`).

The leader accepts a part only with a proof of the job token, only for an incident that it gathers, once per sender, and up to a
size limit. A part is a zip file with boxes/, stacks/AGENT/ and part.json (missing evidence). Unpacking checks names and size.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from allranks.blackbox.header import process_state
from allranks.channel import frames
from allranks.channel.keys import ChannelError, Keyring, find_token, greet_as_client, read_token
from allranks.channel.server import MemberServer
from allranks.errors import AllranksError, ConfigurationError, InputError, why
from allranks.incidents.folder import new_id
from allranks.incidents.job_overview import find_job, read_job
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.model.cluster import FOLLOW_S, CollectEvidence, Gathering
from allranks.model.parsing import from_json

log = logging.getLogger("allranks.agent")

MAX_PACKED_BYTES = 64 << 20
MAX_BYTES = 512 << 20
FACTS = "part.json"
UPLOAD_S = 20.0
#: Errors of unpacking a damaged or malicious part.
BAD_PART = (zipfile.BadZipFile, zlib.error, EOFError, LookupError, ValueError, RuntimeError, OSError)
PURPOSE = "evidence"  # of the key for these connections
MAX_REQUEST_BYTES = 16 << 10
MAX_REMEMBERED = 100  # incidents
PARTS_S = 30.0  # limit for the parts of other nodes
EARLY_S = 2.0  # a part may arrive this long before the leader expects it


@dataclass(frozen=True)
class _Facts:
    missing: tuple[str, ...] = ()


@dataclass
class _Awaited:
    folder: Path
    received: set[str] = field(default_factory=set)  # senders
    unpacking: set[str] = field(default_factory=set)  # senders
    missing: list[str] = field(default_factory=list)


class PeerAgents:
    """The agents of other nodes. `client` belongs to the caller; the socket for parts is opened on first use."""

    def __init__(self, client: Client, token: str) -> None:
        self.client = client
        self.token = token
        self.gone: set[str] = set()  # agents that send no more parts
        self._contributed: deque[str] = deque(maxlen=MAX_REMEMBERED)  # incidents that other agents lead
        self._awaited: dict[str, _Awaited] = {}
        self._changed = threading.Condition()
        self._members: MemberServer | None = None
        self._address = ""

    @property
    def name(self) -> str:
        """This agent's name at the lighthouse."""
        return self.client.options.replica

    def open(self) -> str:
        """The address for parts, HOST:PORT."""
        if self._members is None:
            host = frames.own_address(self.client.lighthouse or self.client.options.addresses[0])
            listener = frames.listen(host, 0)
            self._address = frames.join_address(host, listener.getsockname()[1])
            self._members = MemberServer(Keyring(self.token), PURPOSE, self._serve, "allranks-evidence")
            self._members.start(listener)
        return self._address

    def close(self) -> None:
        if self._members is not None:
            self._members.close()
            self._members = None

    # incidents that this agent leads

    def ask(
        self,
        incident: str,
        reason: str,
        folder: Path,
        *,
        stacks: bool = True,
        alone: bool = True,
        follow_s: float = FOLLOW_S,
        agents: tuple[str, ...] = (),
    ) -> Gathering | None:
        """The leader of the incident and the agents that were asked; None without a connection to the lighthouse. If this agent
        leads, the parts of all others, or of `agents`, go to the folder."""
        if not self.client.connected:
            return None
        try:
            lead, upload = self.name, self.open()
            wanted = CollectEvidence(incident, reason, agents, lead, upload, stacks, alone, follow_s)
            found = self.client.gather(wanted)
        except (AllranksError, OSError) as error:
            log.warning("the other agents could not be asked: %s", error)
            return None
        if found.agents and found.lead == self.name:
            self.expect(found.incident, folder)
        return found

    def expect(self, incident: str, folder: Path) -> None:
        """Accepts parts of this incident into the folder from now on."""
        with self._changed:
            self._awaited[incident] = _Awaited(folder)
            self._changed.notify_all()

    def wait(self, gathering: Gathering, limit_s: float = PARTS_S) -> list[str]:
        """Waits for all parts, up to the limit; returns a sentence for everything that is missing."""
        with self._changed:
            awaited, senders = self._awaited[gathering.incident], set(gathering.agents)
            self._changed.wait_for(lambda: senders <= awaited.received | self.gone, limit_s)
            del self._awaited[gathering.incident]
            why = {True: ", it is gone", False: f" within {limit_s:g} s"}
            absent = sorted(senders - awaited.received)
            return [*awaited.missing, *(f"{one}: no evidence{why[one in self.gone]}" for one in absent)]

    def give_up(self, agent: str) -> None:
        """Stops waiting for parts of an agent that is gone."""
        with self._changed:
            self.gone.add(agent)
            self._changed.notify_all()

    def take(self, incident: str, sender: str, data: bytes, reply: Callable[[bool], None]) -> None:
        """Unpacks a part. An early part waits until it is expected; `reply` gets False for an unexpected one. The part counts after
        the reply, since a waiting thread may then close the connection."""
        with self._changed:
            self._changed.wait_for(lambda: incident in self._awaited, timeout=EARLY_S)
            awaited = self._awaited.get(incident)
            wanted = awaited is not None and sender not in awaited.received | awaited.unpacking
            if awaited is not None and wanted:
                awaited.unpacking.add(sender)
        if awaited is None or not wanted:
            return reply(False)
        try:  # without the lock: a slow disk must not delay `give_up`
            missing = unpack_part(data, awaited.folder)
        except AllranksError as error:
            missing = [str(error)]
        try:
            reply(True)
        finally:
            with self._changed:
                awaited.missing += [f"{sender}: {item}" for item in missing]
                awaited.received.add(sender)
                self._changed.notify_all()

    def _serve(self, connection: socket.socket, purpose: str) -> None:
        """Receives one part: a request, the bytes, the answer."""
        connection.settimeout(UPLOAD_S)
        request = frames.receive_json(connection, MAX_REQUEST_BYTES)
        size = int(request["bytes"])
        if size > MAX_PACKED_BYTES + (1 << 20):
            frames.send_json(connection, {"ok": False, "why": f"a part of {size} bytes is too large"})
            return
        data, hasher = bytearray(size), hashlib.sha256()
        frames.read_into(connection, [memoryview(data)], hasher)
        if not frames.is_intact(connection, hasher):
            raise ChannelError("a part came with the wrong checksum")

        def reply(taken: bool) -> None:
            why = "" if taken else "the part is not expected, or no longer"
            frames.send_json(connection, {"ok": taken, "why": why})

        self.take(str(request["incident"]), str(request["sender"]), bytes(data), reply)

    # incidents that another agent leads

    def contribute(self, wanted: CollectEvidence, collect: Callable[[Path, bool], list[str]]) -> None:
        """Sends this node's part, gathered by `collect(folder, stacks)`, to the leader."""
        incident = wanted.incident
        self._contributed.append(incident)
        with tempfile.TemporaryDirectory(prefix="allranks-part-") as name:
            missing = collect(Path(name), wanted.stacks)
            try:
                send_part(wanted.upload, incident, self.name, self.token, pack_part(Path(name), missing))
            except OSError as error:
                log.warning("%s: evidence not sent to %s: %s", incident, wanted.upload, error)
                return
        log.info("%s: evidence sent to %s", incident, wanted.lead)

    def took_part_in(self, incident: str) -> bool:
        """Whether this agent has sent its part of an incident that another agent leads."""
        return incident in self._contributed


def send_part(upload: str, incident: str, sender: str, token: str, data: bytes) -> None:
    """Sends a part to another agent; OSError when that fails or takes too long."""
    with socket.create_connection(frames.split_address(upload), UPLOAD_S) as sock:
        greet_as_client(sock, Keyring(token).for_purpose(PURPOSE))
        frames.send_json(sock, {"incident": incident, "sender": sender, "bytes": len(data)})
        hasher = hashlib.sha256()
        frames.send_from(sock, [memoryview(data)], hasher)
        frames.send_checksum(sock, hasher)
        answer = frames.receive_json(sock)
    if not answer.get("ok"):
        raise ChannelError(str(answer.get("why", "refused")))


def pack_part(folder: Path, missing: list[str], *, limit: int = MAX_PACKED_BYTES) -> bytes:
    """Packs all files of a folder, boxes first, up to the limit; part.json lists the others."""
    out, missing = io.BytesIO(), list(missing)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as pack:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            try:
                data = path.read_bytes()
            except OSError as error:
                missing.append(f"{name}: {why(error)}")
                continue
            if out.tell() + len(data) > limit:
                missing.append(f"{name}: left out, a part is limited to {limit >> 20} MiB")
            else:
                pack.writestr(name, data)
        pack.writestr(FACTS, json.dumps({"missing": missing}))
    return out.getvalue()


def unpack_part(data: bytes, folder: Path, *, limit: int = MAX_BYTES) -> list[str]:
    """Unpacks a part into an incident folder; returns what its node could not collect. InputError for a bad part."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as pack:
            entries = [entry for entry in pack.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > limit:
                raise InputError(f"a part of more than {limit >> 20} MiB")
            for entry in entries:
                if entry.filename != FACTS:
                    _write(folder, pack, entry)
            facts = from_json(pack.read(FACTS), _Facts) if FACTS in pack.namelist() else _Facts()
    except BAD_PART as error:
        raise InputError(f"a part that cannot be read: {error}") from error
    return list(facts.missing)


def _write(folder: Path, pack: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    place = PurePosixPath(entry.filename)
    outside = place.is_absolute() or ".." in place.parts or len(place.parts) < 2
    if outside or place.parts[0] not in ("boxes", "stacks"):
        raise InputError(f"a part with a file {entry.filename!r}")
    target = folder / place
    target.parent.mkdir(parents=True, exist_ok=True)
    with pack.open(entry) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file)


@dataclass(frozen=True)
class Gathered:
    """The result of `gather_everywhere`; the evidence is in boxes/ and stacks/AGENT/ of the folder."""

    agents: tuple[str, ...]  # that were asked
    missing: tuple[str, ...]  # sentences


def find_lighthouse(job: str | None) -> tuple[str, str] | None:
    """(address, token) of the lighthouse in the environment, or of a running job on this node; None without one."""
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
        return None  # the job has ended
    try:
        token = read_token(folder / "token")
    except ConfigurationError:
        return None
    return (address, token) if address else None


def gather_everywhere(
    lighthouse: tuple[str, str], folder: Path, *, stacks: bool, limit_s: float = PARTS_S
) -> Gathered:
    """Gathers the parts of all agents of the job in the folder; AllranksError when there is no agent."""
    address, token = lighthouse
    host = socket.gethostname()
    name = f"command-{host}-{os.getpid()}"
    options = ClientOptions(tuple(address.split(",")), token, name, host, role="observer", beacon=False)
    with Client(options) as client:
        peers = PeerAgents(client, token)
        try:
            reason = f"asked for on {host}"
            asked = peers.ask(f"{new_id()}-{name}", reason, folder, stacks=stacks, alone=False)
            if asked is None or not asked.agents:
                raise AllranksError(
                    f"no agent answers at the lighthouse {address}",
                    hint="Agents are there while `allranks run` runs on their nodes.",
                )
            return Gathered(asked.agents, tuple(peers.wait(asked, limit_s)))
        finally:
            peers.close()
