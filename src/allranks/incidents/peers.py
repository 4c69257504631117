"""The agents of the job's other nodes: asks them for their part of an incident, and sends them ours. Runs in the agent.

All nodes notice a hang of the job at about the same time. The lighthouse lets one of them lead: it gathers the parts
of all, explains and acts. The others send their part and continue watching. A command asks all agents of a running job
in the same way (`gather_everywhere`).

The leader takes parts only from those who prove that they know the job token, only of an incident that is
waited for, once from each sender, and never more than a part may have. A part is one packed file: boxes/, stacks/AGENT/,
and part.json with what is missing. It may neither leave its folder nor grow beyond the limit when it is unpacked.
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
from allranks.errors import AllranksError, ConfigurationError, InputError
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
#: What unpacking a part may end with that is damaged, or made to harm.
BAD_PART = (zipfile.BadZipFile, zlib.error, EOFError, LookupError, ValueError, RuntimeError, OSError)
PURPOSE = "evidence"  # names the key that both sides prove
MAX_REQUEST_BYTES = 16 << 10
MAX_REMEMBERED = 100  # incidents
PARTS_S = 30.0  # how long the parts of others are waited for
EARLY_S = 2.0  # a part may arrive before its leader has opened a folder for it


@dataclass(frozen=True)
class _Facts:
    missing: tuple[str, ...] = ()


@dataclass
class _Awaited:
    folder: Path
    heard: set[str] = field(default_factory=set)
    taking: set[str] = field(default_factory=set)  # senders whose part is being unpacked
    missing: list[str] = field(default_factory=list)


class PeerAgents:
    """Asks and is asked. `client` belongs to the caller; the socket for parts is opened when it is first needed."""

    def __init__(self, client: Client, token: str) -> None:
        self.client = client
        self.token = token
        self.gone: set[str] = set()  # agents that are not waited for any more
        # incidents of others that we gave our part of, the newest last
        self._asked: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._awaited: dict[str, _Awaited] = {}
        self._changed = threading.Condition()
        self._members: MemberServer | None = None
        self._address = ""

    @property
    def name(self) -> str:
        """How the lighthouse calls us."""
        return self.client.options.replica

    def open(self) -> str:
        """Where parts go: HOST:PORT."""
        if self._members is None:
            host = frames.own_address(self.client.lighthouse or self.client.options.addresses[0])
            listener = frames.listen(host, 0)
            self._address = frames.join_address(host, listener.getsockname()[1])
            self._members = MemberServer(Keyring(self.token), PURPOSE, self._serve, "allranks-evidence")
            self._members.start(listener)
        return self._address

    def close(self) -> None:
        """Takes nothing any more."""
        if self._members is not None:
            self._members.close()
            self._members = None

    # an incident that we lead

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
        """Who leads, and who else was asked; None when the lighthouse cannot say (then we are on our own). If we lead, the
        parts of the others (of all, or of these `agents`) go to the folder."""
        if not self.client.connected:
            return None
        try:
            wanted = CollectEvidence(
                incident,
                reason,
                agents,
                lead=self.name,
                upload=self.open(),
                stacks=stacks,
                alone=alone,
                follow_s=follow_s,
            )
            found = self.client.gather(wanted)
        except (AllranksError, OSError) as error:
            log.warning("the other agents could not be asked: %s", error)
            return None
        if found.agents and found.lead == self.name:
            self.expect(found.incident, folder)
        return found

    def expect(self, incident: str, folder: Path) -> None:
        """From now on parts of this incident are put into the folder."""
        with self._changed:
            self._awaited[incident] = _Awaited(folder)
            self._changed.notify_all()

    def wait(self, gathering: Gathering, limit_s: float = PARTS_S) -> list[str]:
        """Until all parts are there or the limit; returns what is missing, as sentences."""
        with self._changed:
            awaited, senders = self._awaited[gathering.incident], set(gathering.agents)
            self._changed.wait_for(lambda: senders <= awaited.heard | self.gone, limit_s)
            del self._awaited[gathering.incident]
            why = {True: ", it is gone", False: f" within {limit_s:g} s"}
            silent = [f"{one}: no evidence{why[one in self.gone]}" for one in sorted(senders - awaited.heard)]
            return [*awaited.missing, *silent]

    def give_up(self, agent: str) -> None:
        """An agent is gone: its part will not come."""
        with self._changed:
            self.gone.add(agent)
            self._changed.notify_all()

    def take(self, incident: str, sender: str, data: bytes, reply: Callable[[bool], None]) -> None:
        """A part has come; `reply` gets False when nobody waits for it (any more). A fast one waits until it is expected.
        The part counts after the reply: what waits for it may close the connection then."""
        with self._changed:
            self._changed.wait_for(lambda: incident in self._awaited, timeout=EARLY_S)
            awaited = self._awaited.get(incident)
            wanted = awaited is not None and sender not in awaited.heard | awaited.taking
            if awaited is not None and wanted:
                awaited.taking.add(sender)
        if awaited is None or not wanted:
            return reply(False)
        try:  # without the lock: a slow disk must not hold up the thread that calls `give_up`
            missing = unpack_part(data, awaited.folder)
        except AllranksError as error:
            missing = [str(error)]
        try:
            reply(True)
        finally:
            with self._changed:
                awaited.missing += [f"{sender}: {item}" for item in missing]
                awaited.heard.add(sender)
                self._changed.notify_all()

    def _serve(self, connection: socket.socket, purpose: str) -> None:
        """One part: who sends what, the bytes, and the answer."""
        connection.settimeout(UPLOAD_S)
        told = frames.receive_json(connection, MAX_REQUEST_BYTES)
        size = int(told["bytes"])
        if size > MAX_PACKED_BYTES + (1 << 20):
            frames.send_json(connection, {"ok": False, "why": f"a part of {size} bytes is too large"})
            return
        data, hasher = bytearray(size), hashlib.sha256()
        frames.read_into(connection, [memoryview(data)], hasher)
        if not frames.is_intact(connection, hasher):
            raise ChannelError("a part came with the wrong checksum")

        def reply(taken: bool) -> None:
            why = "" if taken else "nobody waits for it any more"
            frames.send_json(connection, {"ok": taken, "why": why})

        self.take(str(told["incident"]), str(told["sender"]), bytes(data), reply)

    # an incident that another leads

    def contribute(self, wanted: CollectEvidence, collect: Callable[[Path, bool], list[str]]) -> None:
        """`collect(folder, stacks)` gathers our part, which goes to the leader."""
        self._asked.append(wanted.incident)
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


def send_part(upload: str, incident: str, sender: str, token: str, data: bytes) -> None:
    """Sends a part to another agent; OSError when it cannot be done in time."""
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
    """All files of a folder, boxes first; those beyond the limit are named in part.json instead."""
    out = io.BytesIO()
    missing = list(missing)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as pack:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            try:
                data = path.read_bytes()
            except OSError as error:
                missing.append(f"{name}: {error.strerror or error}")
                continue
            if out.tell() + len(data) > limit:
                missing.append(f"{name}: left out, the part is limited to {limit >> 20} MiB")
            else:
                pack.writestr(name, data)
        pack.writestr(FACTS, json.dumps({"missing": missing}))
    return out.getvalue()


def unpack_part(data: bytes, folder: Path, *, limit: int = MAX_BYTES) -> list[str]:
    """Puts a part into an incident folder; returns what its node could not give. InputError for a bad part."""
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
    with pack.open(entry) as packed, target.open("wb") as file:  # piece by piece: it may be large
        shutil.copyfileobj(packed, file)


@dataclass(frozen=True)
class Gathered:
    """Who was asked, and sentences about what did not come; what came is in boxes/ and stacks/AGENT/ of the folder."""

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
            reason = f"asked for on {host}"
            asked = peers.ask(new_id("request"), reason, folder, stacks=stacks, alone=False)
            if asked is None or not asked.agents:
                raise AllranksError(
                    f"no agent answers at the lighthouse {address}",
                    hint="Agents are there while `allranks run` runs on their nodes.",
                )
            return Gathered(asked.agents, tuple(peers.wait(asked, limit_s)))
        finally:
            peers.close()
