"""The lighthouse's page, JSON API, events and metrics: one function from request to answer. On the loop's thread.

Reading is open to every client that reaches the port under a name that nobody else can register (see `_own_name`); every
action needs the job token (Authorization: Bearer …), over TLS or from this machine. What members tell each other
(Member.data) is not shown.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from importlib import resources

import msgspec

from allranks.lighthouse.connection import Taker, hand_over, open_files_limit
from allranks.lighthouse.http import Answer, EventStream, HttpConnection, HttpRequest, HttpSlots
from allranks.lighthouse.metrics import METRICS_KIND, render_metrics
from allranks.lighthouse.page import overview, page_view, take_snapshot
from allranks.lighthouse.service import Service
from allranks.lighthouse.status import StatusEvent
from allranks.model.parsing import from_json, printable

MAX_CONNECTIONS = 256  # of HTTP, beside those of replicas
PUSH_S = 0.25  # least time between two pushes
REFRESH_S = 1.0  # pushed this often even when nothing happens, for ages and steps
MAX_SPAN_S = 86400.0
KEEP_S = 0.1  # an answer that describes everybody is given again for so long, unless something has happened

HTML = "text/html; charset=utf-8"
_ICON = (
    b"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><circle cx='8' cy='8' r='7' fill='#1a7f37'/>"
    b"<path d='M8 1v7l5 4' stroke='#fff' stroke-width='2' fill='none'/></svg>"
)


#: Ends of names that public name servers do not know.
_PRIVATE = (".localhost", ".local", ".internal", ".svc", ".cluster.local")


class _Reason(msgspec.Struct):
    reason: str = ""
    replicas: list[str] = []


@dataclass
class Web:
    """One per lighthouse. `handle` answers requests; listeners share one encoded status."""

    service: Service
    token: str
    names: frozenset[str] = frozenset()  # under which it may be asked, besides its own
    _streams: set[EventStream] = field(default_factory=set)
    _timer: asyncio.TimerHandle | None = None
    _unsubscribe: Callable[[], None] | None = None
    _last_s: float = 0.0
    # path -> when, after what, answer
    _kept: dict[str, tuple[float, object, bytes]] = field(default_factory=dict)

    def handle(self, request: HttpRequest) -> Answer:
        host = request.headers.get("host", "")
        if host and not self._own_name(_host_name(host)):
            hint = f"start the lighthouse with --allow-host {_host_name(host)} if this name is yours"
            return _error(
                421, f"this lighthouse is not called {host}: {hint} ($ALLRANKS_ALLOW_HOSTS for `run`)"
            )
        if request.method in ("GET", "HEAD"):
            return self._read(request)
        if request.method == "POST":
            return self._act(request)
        return _error(405, f"{request.method} is not known here")

    def _own_name(self, name: str) -> bool:
        """Whether nobody outside can have made this name point here (DNS rebinding): addresses, names without a dot
        or inside a cluster, this machine's, and those that were allowed."""
        if "." not in name or name.endswith(_PRIVATE) or name in self.names:
            return True
        if name in (socket.gethostname().lower(), _host_name(self.service.address)):
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    # ---- reading ----------------------------------------------------------------------------------------

    def _read(self, request: HttpRequest) -> Answer:
        path = request.path
        if path == "/":
            return Answer(body=_page(), kind=HTML)
        if path.startswith("/incidents/"):
            return self._story(path.removeprefix("/incidents/"))
        if path == "/api/status":
            return Answer(body=self._once(path, self._status))
        if path == "/api/page":
            return Answer(body=self._once(path, self._view))
        if path == "/api/nodes":
            return Answer(
                body=self._once(path, lambda: msgspec.json.encode(self.service.agents.ranks.nodes()))
            )
        if path == "/api/history":
            return self._history(request)
        if path == "/api/jobs":
            return Answer(body=self._once(path, lambda: msgspec.json.encode(overview(self.service))))
        if path.startswith("/api/ranks/"):
            return self._rank(path.removeprefix("/api/ranks/"))
        if path == "/api/events":
            return Answer(kind="text/event-stream", stream=self._listen)
        if path == "/metrics":
            return Answer(body=self._once(path, self._metrics), kind=METRICS_KIND)
        if path == "/healthz":
            leading = self.service.leading
            return Answer(body=msgspec.json.encode({"ok": True, "leading": leading}))
        if path == "/openapi.json":
            return Answer(body=_openapi())
        if path == "/favicon.ico":
            return Answer(body=_ICON, kind="image/svg+xml")
        if path == "/status":
            return Answer(body=self._once(path, self._fragment), kind=HTML)
        return _error(404, f"there is no {path}")

    def _once(self, path: str, make: Callable[[], bytes]) -> bytes:
        """With thousands of replicas it takes milliseconds: a client that asks again and again must not keep members waiting."""
        now = time.monotonic()
        happened = (self.service.event_log.counts.total(), *self.service.agents.incidents)
        made, after, answer = self._kept.get(path, (-KEEP_S, None, b""))
        if now - made >= KEEP_S or after != happened:
            answer = make()
            self._kept[path] = (time.monotonic(), happened, answer)
        return answer

    def _metrics(self) -> bytes:
        return ("\n".join(render_metrics(take_snapshot(self.service))) + "\n").encode()

    def _status(self) -> bytes:
        status = take_snapshot(self.service)
        if status.quorum is not None:
            members = tuple(replace(member, data="") for member in status.quorum.members)
            status = replace(status, quorum=replace(status.quorum, members=members))
        return msgspec.json.encode(status)

    def _view(self) -> bytes:
        return msgspec.json.encode(page_view(self.service))

    def _history(self, request: HttpRequest) -> Answer:
        try:
            span = min(MAX_SPAN_S, float(request.query.get("span", "900")))
        except ValueError:
            return _error(400, "span is a number of seconds, at most 86400")
        found = self.service.history.since(time.time() - span, span)
        return Answer(body=msgspec.json.encode(found))

    def _rank(self, number: str) -> Answer:
        known = reversed(self.service.agents.evidence.items())
        valid = number.isdecimal() and len(number) < 8
        found = self.service.agents.ranks.detail(int(number), known) if valid else None
        return _done(found) if found is not None else _error(404, f"nothing is known of rank {number}")

    def _story(self, incident: str) -> Answer:
        """The page of an incident, which an agent sent: in a sandbox, without the rights of our own page. Its
        evidence is JSON, which the page of the job shows as text."""
        if incident.endswith("/evidence"):
            found = self.service.agents.evidence.get(incident.removesuffix("/evidence"))
            if found is None:
                return _error(404, f"there is no evidence of incident {incident.removesuffix('/evidence')}")
            return Answer(body=found.encode("utf-8", "replace"))
        story = self.service.agents.stories.get(incident)
        if story is None:
            return _error(404, f"there is no story of incident {incident}")
        policy = ("Content-Security-Policy", "sandbox allow-scripts allow-popups")
        return Answer(body=story.encode("utf-8", "replace"), kind=HTML, headers=(policy,), framed=True)

    def _fragment(self) -> bytes:
        """What torchft's own lighthouse answers at /status: a piece of HTML with quorum and heartbeats."""
        status = take_snapshot(self.service)
        rows = "".join(
            f"<li>{escape(row.replica)}: step {row.step}, {escape(row.state)}, heard {row.heard_s:.1f} s ago</li>"
            for row in status.replicas
        )
        waits = escape(status.waiting or status.reason)
        return f"<h2>Quorum {status.number}</h2><p>{waits}</p><ul>{rows}</ul>".encode()

    # ---- events -----------------------------------------------------------------------------------------

    def _listen(self, stream: EventStream) -> Callable[[], None]:
        self._streams.add(stream)
        stream.send(self._view())
        if self._unsubscribe is None:
            self._unsubscribe = self.service.event_log.subscribe(self._happened)
            self.service.on_health = self._soon
            self._plan(REFRESH_S)
        return lambda: self._leave(stream)

    def _leave(self, stream: EventStream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
            self.service.on_health = lambda: None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _happened(self, event: StatusEvent) -> None:
        self._soon()

    def _soon(self) -> None:
        now = asyncio.get_running_loop().time()
        self._plan(max(0.0, self._last_s + PUSH_S - now))

    def _plan(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer.when() <= loop.time() + delay_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self._push)

    def _push(self) -> None:
        self._timer = None
        if not self._streams:
            return
        self._last_s = asyncio.get_running_loop().time()
        body = self._view()
        for stream in list(self._streams):
            stream.send(body)
        self._plan(REFRESH_S)

    # ---- actions ----------------------------------------------------------------------------------------

    def _act(self, request: HttpRequest) -> Answer:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            return _error(403, f"actions are not taken from pages of {origin}")
        if self.token and not request.private:
            hint = "switch TLS on (--certificate), use `allranks lighthouse`, or an ssh tunnel to its port"
            return _error(403, f"the job token must not travel unencrypted: {hint}")
        if not self._allowed(request):
            place = self.service.agents.ranks.token_file() or self.service.token_file
            where = f"; it is in {place}" if place else ""
            return _error(401, f"this needs the job token{where} (Authorization: Bearer TOKEN)")
        try:
            asked = from_json(request.body or b"{}", _Reason)
        except (ValueError, RecursionError) as error:
            return _error(400, f"the body must be JSON with a reason: {error}")
        reason = printable(asked.reason) or "asked for on the page"
        found = re.fullmatch(r"/api/replicas/(.+)/(evict|readmit|let_in)", request.path)
        if found and found.group(2) == "evict":
            return self._evict(found.group(1), reason)
        if found:
            done = self.service.let_in(found.group(1))
            return _done({found.group(2): done}) if done else _error(404, f"{found.group(1)} is not evicted")
        if request.path == "/api/collect":
            return _done({"incident": self.service.agents.collect(reason, asked.replicas)})
        if request.path == "/api/restart":
            return self._restart(reason)
        return _error(404, f"there is no action {request.path}")

    def _restart(self, reason: str) -> Answer:
        if self.service.state.last is not None:
            return _error(400, "this job has replicas: evict one of them instead")
        if not self.service.agents.count:
            return _error(409, "no agent is connected that could restart the job")
        self.service.agents.restart(reason)
        return _done({"restart": True})

    def _evict(self, name: str, reason: str) -> Answer:
        if not any(row.replica == name for row in take_snapshot(self.service).replicas):
            return _error(404, f"no replica {name!r}")
        self.service.evict(name, reason)
        return _done({"evicted": name})

    def _allowed(self, request: HttpRequest) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return not self.token or hmac.compare_digest(given.encode(), self.token.encode())


def page_taker(service: Service, token: str, names: Sequence[str] = ()) -> Taker:
    """Serves HTTP on connections that begin so. `names`, and those of $ALLRANKS_ALLOW_HOSTS, are host names under which it
    may be asked."""
    names = [*names, *filter(None, os.environ.get("ALLRANKS_ALLOW_HOSTS", "").split(","))]
    web = Web(service, token, frozenset(name.lower() for name in names))
    slots = HttpSlots(min(MAX_CONNECTIONS, open_files_limit() // 8))
    return lambda transport, data: hand_over(transport, HttpConnection(web.handle, slots), data)


def _host_name(host: str) -> str:
    """Of "host:port", "[::1]:port" or "host"."""
    bracketed = re.fullmatch(r"\[([^][]*)\](:\d*)?", host)  # "[::1].example" is none, and has a dot
    name = bracketed[1] if bracketed else host if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _done(facts: dict[str, object]) -> Answer:
    return Answer(body=msgspec.json.encode(facts))


def _error(status: int, text: str) -> Answer:
    return Answer(status, msgspec.json.encode({"error": text}))


@cache
def _page() -> bytes:
    from allranks import pages

    scripts, styles = ("uplot.js", "charts.js", "ranks.js", "job.js"), ("uplot.css", "job.css")
    return pages.render(
        "job.html", scripts=scripts, styles=styles, title="allranks", connect="'self'", icon="/favicon.ico"
    ).encode()


@cache
def _openapi() -> bytes:
    return resources.files("allranks.lighthouse").joinpath("openapi.json").read_bytes()
