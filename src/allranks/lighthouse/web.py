"""The lighthouse's page, JSON API, events and metrics: one function from request to answer. On the loop's thread.

Reading is open to every client that reaches the port under a name that nobody else can register (see `_own_name`); every
action needs the job token (Authorization: Bearer …), over TLS or from this machine. What members tell each other
(Member.data) is not shown. Prometheus text is written by hand: docs/decisions.md says what prometheus_client costs.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from importlib import resources

import msgspec

from allranks.lighthouse.connection import open_files_limit
from allranks.lighthouse.http import Answer, EventStream, HttpConnection, HttpRequest, HttpSlots
from allranks.lighthouse.service import Service
from allranks.lighthouse.status import ReplicaStatus, Status, StatusEvent
from allranks.model.cluster import AGENT
from allranks.model.metrics import METRICS_KIND, Metric, labels, render
from allranks.model.parsing import from_json, printable


def render_metrics(status: Status) -> Iterator[str]:
    """One line per sample, each metric with its help."""
    rows = [row for row in status.replicas if row.state != "observer"]
    return render([*_lighthouse(status), *_training(status), *_incidents(status), *_replicas(status, rows)])


def _lighthouse(status: Status) -> list[Metric]:
    members = len(status.quorum.members) if status.quorum else 0
    agents = sum(row.state == "observer" and row.replica.startswith(AGENT) for row in status.replicas)
    events = {labels(kind=kind): count for kind, count in sorted(status.events.items())}
    by_kind = "Events since the start, by kind (lost, left, evicted, quorum ...)"
    return [
        ("quorum_number", "gauge", "Number of the current quorum", status.number),
        ("epoch", "gauge", "Epoch (term) of the lighthouse", status.epoch),
        ("quorum_members", "gauge", "Members of the current quorum", members),
        ("leading", "gauge", "1 when this lighthouse leads", int(status.leading)),
        ("connections", "gauge", "Open connections", status.connections),
        ("up_seconds", "counter", "Seconds since the start", status.up_s),
        ("agents", "gauge", "Connected agents, one per node", agents),
        ("events_total", "counter", by_kind, events),
    ]


def _training(status: Status) -> list[Metric]:
    """The first line of the page, in numbers."""
    training = status.training
    step = max(status.quorum.max_step if status.quorum else 0, training.step)
    missing = max(0, training.replicas - training.members)
    states = {labels(state=state): float(int(training.state == state)) for state in ("good", "warn", "bad")}
    unusual = "Seconds without a step when that is unusually long, else 0"
    return [
        ("step_max", "gauge", "Highest step of any replica", step),
        ("steps_per_second", "gauge", "Steps per second, 0 when none is made", training.steps_per_s or 0.0),
        ("stalled_seconds", "gauge", unusual, training.stalled_s),
        ("replicas_missing", "gauge", "Replicas that were lost or evicted and are not back", missing),
        (
            "training",
            "gauge",
            "The colour of the page: 1 for green (good), amber (warn) or red (bad)",
            states,
        ),
    ]


def _incidents(status: Status) -> list[Metric]:
    causes = Counter((each.kind or "unknown", each.cause or "unknown") for each in status.incidents)
    by_cause = {labels(kind=k, cause=c): float(n) for (k, c), n in sorted(causes.items())}
    still_open = sum(not each.closed for each in status.incidents)
    return [
        ("incidents", "gauge", "Incidents that this lighthouse remembers", len(status.incidents)),
        ("incidents_open", "gauge", "Incidents without a recovery", still_open),
        ("incidents_by_cause", "gauge", "The same by kind and cause", by_cause),
    ]


def _replicas(status: Status, rows: list[ReplicaStatus]) -> list[Metric]:
    here = {row.replica for row in rows}
    states = Counter(row.state for row in rows)
    states.update(one.kind for one in status.departed if one.replica not in here)
    named = {labels(replica=row.replica): row for row in rows}
    by_state = {labels(state=state): count for state, count in sorted(states.items())}
    steps = {label: float(row.step) for label, row in named.items()}
    heard = {label: round(row.heard_s, 3) for label, row in named.items()}
    idle = {label: round(row.idle_s, 3) for label, row in named.items()}
    return [
        ("replicas", "gauge", "Replicas by state, those that are gone included", by_state),
        ("replica_step", "gauge", "Step of a replica", steps),
        ("replica_heard_seconds", "gauge", "Seconds since a replica was last heard", heard),
        ("replica_idle_seconds", "gauge", "Seconds without progress of a replica", idle),
    ]


MAX_CONNECTIONS = 256  # of HTTP, beside those of replicas
PUSH_S = 0.5  # least time between two pushes of the whole status
REFRESH_S = 2.0  # pushed this often even when nothing happens, for ages and steps
KEEP_S = 0.1  # an answer that describes everybody is given again for so long, unless something has happened

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
            return Answer(body=_page(), kind="text/html; charset=utf-8")
        if path.startswith("/incidents/"):
            return self._story(path.removeprefix("/incidents/"))
        if path == "/api/status":
            return Answer(body=self._once(path, self._status))
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
            return Answer(body=self._once(path, self._fragment), kind="text/html; charset=utf-8")
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
        return ("\n".join(render_metrics(self.service.snapshot())) + "\n").encode()

    def _status(self) -> bytes:
        status = self.service.snapshot()
        if status.quorum is not None:
            members = tuple(replace(member, data="") for member in status.quorum.members)
            status = replace(status, quorum=replace(status.quorum, members=members))
        return msgspec.json.encode(status)

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
        return Answer(
            body=story.encode("utf-8", "replace"), kind="text/html; charset=utf-8", headers=(policy,)
        )

    def _fragment(self) -> bytes:
        """What torchft's own lighthouse answers at /status: a piece of HTML with quorum and heartbeats."""
        status = self.service.snapshot()
        rows = "".join(
            f"<li>{escape(row.replica)}: step {row.step}, {escape(row.state)}, heard {row.heard_s:.1f} s ago</li>"
            for row in status.replicas
        )
        waits = escape(status.waiting or status.reason)
        return f"<h2>Quorum {status.number}</h2><p>{waits}</p><ul>{rows}</ul>".encode()

    # ---- events -----------------------------------------------------------------------------------------

    def _listen(self, stream: EventStream) -> Callable[[], None]:
        self._streams.add(stream)
        stream.send(self._status())
        if self._unsubscribe is None:
            self._unsubscribe = self.service.subscribe(self._happened)
            self._plan(REFRESH_S)
        return lambda: self._leave(stream)

    def _leave(self, stream: EventStream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _happened(self, event: StatusEvent) -> None:
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
        body = self._status()
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
            return _error(401, "this needs the job token: Authorization: Bearer TOKEN")
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
        return _error(404, f"there is no action {request.path}")

    def _evict(self, name: str, reason: str) -> Answer:
        if not any(row.replica == name for row in self.service.snapshot().replicas):
            return _error(404, f"no replica {name!r}")
        self.service.evict(name, reason)
        return _done({"evicted": name})

    def _allowed(self, request: HttpRequest) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return not self.token or hmac.compare_digest(given.encode(), self.token.encode())


def http_protocol(names: Sequence[str] = ()) -> Callable[[Service, str], asyncio.Protocol]:
    """What `Lighthouse(http=…)` takes: makes the protocol of each HTTP connection; all of one lighthouse share one Web.
    `names`, and those of $ALLRANKS_ALLOW_HOSTS, are host names under which it may be asked."""
    names = [*names, *filter(None, os.environ.get("ALLRANKS_ALLOW_HOSTS", "").split(","))]
    shared: dict[int, tuple[Web, HttpSlots]] = {}

    def make(service: Service, token: str) -> asyncio.Protocol:
        if id(service) not in shared:
            shared.clear()
            web = Web(service, token, frozenset(name.lower() for name in names))
            shared[id(service)] = web, HttpSlots(min(MAX_CONNECTIONS, open_files_limit() // 8))
        web, slots = shared[id(service)]
        return HttpConnection(web.handle, slots)

    return make


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

    return pages.render(
        "job.html", script="job.js", title="allranks", connect="'self'", icon="/favicon.ico"
    ).encode()


@cache
def _openapi() -> bytes:
    return resources.files("allranks.lighthouse").joinpath("openapi.json").read_bytes()
