"""Where other nodes send their part of an incident: a small HTTP server that takes PUT and nothing else.

Runs in the agent that leads an incident, or in a command. Only for those who know the job token, only for an incident
that is waited for, once from each sender, and never more than a part may have.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.incidents.evidence_archive import MAX_PACKED_BYTES, unpack_part

log = logging.getLogger("allranks.agent")

UPLOAD_S = 20.0
EARLY_S = 2.0  # a part may arrive before its leader has opened a folder for it


@dataclass
class _Awaited:
    folder: Path
    heard: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)


class EvidenceServer:
    """`start()` and `close()` own the socket and the thread; `address` is where parts go."""

    def __init__(self, token: str, host: str = "127.0.0.1") -> None:
        self.token = token
        self.host = host
        self.address = ""
        self._awaited: dict[str, _Awaited] = {}
        self._over: set[str] = set()  # incidents that were waited for
        self._gone: set[str] = set()  # senders that are not waited for any more
        self._changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Listens on a free port."""
        mailbox = self

        class Handler(_Handler):
            box = mailbox

        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        kind = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        self._server = kind((self.host, 0), Handler)
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.address = f"http://{shown}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="allranks-mailbox", daemon=True).start()

    def close(self) -> None:
        """Takes nothing any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def expect(self, incident: str, folder: Path) -> None:
        """From now on parts of this incident are put into the folder."""
        with self._changed:
            self._awaited[incident] = _Awaited(folder)
            self._over.discard(incident)  # a second look
            self._changed.notify_all()

    def wait(self, incident: str, senders: tuple[str, ...], limit_s: float) -> list[str]:
        """Until the parts of all senders are there, or the limit; returns what is missing, as sentences."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            awaited = self._awaited[incident]
            while not (awaited.heard | self._gone).issuperset(senders):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            del self._awaited[incident]
            self._over.add(incident)
            silent = sorted(set(senders) - awaited.heard)
            why = {
                name: ", it is gone" if name in self._gone else f" within {limit_s:g} s" for name in silent
            }
            return [*awaited.missing, *(f"{name}: no evidence{why[name]}" for name in silent)]

    def give_up(self, sender: str) -> None:
        """It is gone: nobody waits for its part."""
        with self._changed:
            self._gone.add(sender)
            self._changed.notify_all()

    def take(self, incident: str, sender: str, data: bytes) -> bool:
        """A part has come; False when nobody waits for it (any more). A fast one waits until it is expected."""
        with self._changed:
            self._changed.wait_for(
                lambda: incident in self._awaited or incident in self._over, timeout=EARLY_S
            )
            awaited = self._awaited.get(incident)
            if awaited is None or sender in awaited.heard:
                return False
            try:
                missing = unpack_part(data, awaited.folder)
            except AllranksError as error:
                missing = [str(error)]
            awaited.missing += [f"{sender}: {item}" for item in missing]
            awaited.heard.add(sender)
            self._changed.notify_all()
        return True


class _Handler(BaseHTTPRequestHandler):
    box: EvidenceServer
    timeout = UPLOAD_S

    def do_PUT(self) -> None:
        """PUT /parts/INCIDENT/SENDER."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        size = self.headers.get("Content-Length", "")
        words = [urllib.parse.unquote(word) for word in self.path.split("/")]
        if not hmac.compare_digest(given.encode(), self.box.token.encode()):
            self.send_error(401)
        elif len(words) != 4 or words[1] != "parts":
            self.send_error(404)
        elif not size.isdigit() or int(size) > MAX_PACKED_BYTES + (1 << 20):
            self.send_error(413)
        else:
            taken = self.box.take(words[2], words[3], self.rfile.read(int(size)))
            self.send_response(204 if taken else 410)
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("mailbox: " + format, *args)


def send_part(upload: str, incident: str, sender: str, token: str, data: bytes) -> None:
    """Sends a part to a mailbox; OSError when it cannot be done in time."""
    place = "/".join(urllib.parse.quote(word, safe="") for word in (incident, sender))
    request = urllib.request.Request(f"{upload}/parts/{place}", data, method="PUT")
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=UPLOAD_S):
        pass


def own_address(toward: str) -> str:
    """The address of this host as seen by whoever is at HOST:PORT; nothing is sent."""
    host, _, port = toward.rpartition(":")
    host = host.strip("[]")
    family = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        found: str = probe.getsockname()[0]
        return found
