"""A client of etcd v3 over its JSON gateway, with the standard library, for an election and a rendezvous.

Runs in the lighthouse (leases, a leader's guarded writes), in the agent (torchrun's rendezvous) and in the doctor.
Blocking; every call has a time limit and tries the next endpoint when one does not answer or has no leader.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from allranks.channel.frames import JsonObject
from allranks.channel.web_client import ask
from allranks.errors import EtcdError

T = TypeVar("T")
MAX_ANSWER_BYTES = 64 << 20
_PAUSE_S = 0.05  # between two attempts, to spare an etcd that elects its leader


@dataclass(frozen=True)
class KeyValue:
    """A value, and the revision that last changed it."""

    value: bytes
    revision: int


@dataclass(frozen=True)
class Lease:
    """A lease: its keys are deleted when it expires."""

    id: int
    ttl_s: float  # as granted, which may be more than requested


@dataclass(frozen=True)
class Etcd:
    """A client of one cluster. Threads may share it: each has its own connection, and `close` ends them all."""

    endpoints: tuple[str, ...]  # "http://host:2379", see parse_endpoints
    timeout_s: float = 5.0  # of one attempt at one endpoint
    ca: str = ""  # PEM file for https; "": the system's
    _local: threading.local = field(default_factory=threading.local, compare=False)
    _open: set[http.client.HTTPConnection] = field(default_factory=set, compare=False)

    # ---- keys ---------------------------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        found = self._call("/v3/kv/range", {"key": _encode(key)}, _items)
        return next(iter(found.values()), None)

    def get_prefix(self, prefix: str) -> dict[str, KeyValue]:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return self._call("/v3/kv/range", {"key": _encode(prefix), "range_end": _encode(end)}, _items)

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self._call("/v3/kv/put", _put(key, value, lease), bool)

    def compare_and_put(self, key: str, value: bytes, revision: int, lease: int = 0) -> bool:
        """Writes only if the key's revision is as given (0: only if it does not exist). True when written."""
        compare = {"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        return self._put_where(compare, _put(key, value, lease))[0]

    def put_guarded(
        self, guard: str, create_revision: int, key: str, value: bytes, lease: int = 0
    ) -> tuple[bool, int]:
        """Writes `key` if `guard` was created at that revision (0: does not exist). Returns (written, current revision)."""
        compare = {
            "key": _encode(guard),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(create_revision),
        }
        return self._put_where(compare, _put(key, value, lease))

    def delete(self, key: str) -> bool:
        """Removes a key; True if it was there."""
        body = {"key": _encode(key)}
        return self._call("/v3/kv/deleterange", body, lambda found: int(found.get("deleted", 0))) > 0

    # ---- leases -------------------------------------------------------------------------------------------

    def grant(self, ttl_s: int) -> Lease:
        """A lease that ends after about `ttl_s` unless kept alive."""
        asked = {"TTL": str(ttl_s)}
        return self._call(
            "/v3/lease/grant", asked, lambda found: Lease(int(found["ID"]), float(found["TTL"]))
        )

    def keep_alive(self, lease: int) -> float:
        """Renews a lease; returns its remaining seconds, 0 when it has expired."""
        asked = {"ID": str(lease)}
        return self._call(
            "/v3/lease/keepalive", asked, lambda found: float(found.get("result", {}).get("TTL", 0))
        )

    def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys."""
        self._call("/v3/lease/revoke", {"ID": str(lease)}, bool)

    # ---- the cluster --------------------------------------------------------------------------------------

    def status(self) -> JsonObject:
        """Version, leader and size, as etcd reports them."""
        return self._call("/v3/maintenance/status", {}, dict)

    def close(self) -> None:
        """Closes every connection. The next call makes a new one."""
        for connection in list(self._open):
            connection.close()
        self._open.clear()

    def _put_where(self, compare: dict[str, str], put: dict[str, str]) -> tuple[bool, int]:
        asked = {"compare": [compare], "success": [{"request_put": put}]}
        return self._call(
            "/v3/kv/txn",
            asked,
            lambda found: (bool(found.get("succeeded")), int(found["header"]["revision"])),
        )

    def _call(self, path: str, body: JsonObject, read: Callable[[JsonObject], T]) -> T:
        """Posts a request and returns `read(answer)`.

        Makes one attempt more than there are endpoints, since a kept connection may have been closed.
        """
        failures = []
        for attempt in range(len(self.endpoints) + 1):
            endpoint = self.endpoints[getattr(self._local, "index", 0) % len(self.endpoints)]
            try:
                return self._post(endpoint, path, json.dumps(body), read)
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{endpoint}: {error or type(error).__name__}")
                self._drop()
                self._local.index = getattr(self._local, "index", 0) + 1
                if attempt:
                    time.sleep(_PAUSE_S)
        raise EtcdError(f"no etcd answers ({'; '.join(dict.fromkeys(failures))})", hint=_HINT)

    def _post(self, endpoint: str, path: str, body: str, read: Callable[[JsonObject], T]) -> T:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect(endpoint)
        self._open.add(connection)
        headers = {"Content-Type": "application/json"}
        response, raw = ask(connection, "POST", path, self.timeout_s, MAX_ANSWER_BYTES, body, headers)
        if response.status >= 500:  # this member has lost its cluster: tries another
            raise OSError(f"HTTP {response.status} {raw[:200].decode('utf-8', 'replace')}")
        if response.status != 200:
            raise EtcdError(f"etcd at {endpoint} answered {response.status} to {path}: {bytes(raw[:300])!r}")
        try:
            answer = json.loads(raw)
            if not isinstance(answer, dict):
                raise TypeError("not an object")
            return read(answer)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._drop()  # unread bytes may follow
            raise EtcdError(f"{endpoint} is not an etcd: it answered {bytes(raw[:100])!r}") from error

    def _drop(self) -> None:
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            connection.close()
            self._open.discard(connection)

    def _connect(self, endpoint: str) -> http.client.HTTPConnection:
        pieces = urllib.parse.urlsplit(endpoint)
        host, port = pieces.hostname or "localhost", pieces.port or 2379
        if pieces.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=self.timeout_s)
        context = ssl.create_default_context(cafile=self.ca or None)
        return http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=context)


def parse_endpoints(text: str) -> tuple[str, ...]:
    """`host:port,host:port` (or URLs) as a tuple of URLs; the port defaults to 2379."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        pieces = urllib.parse.urlsplit(part if "://" in part else f"http://{part}")
        host = f"[{pieces.hostname}]" if ":" in (pieces.hostname or "") else pieces.hostname
        found.append(f"{pieces.scheme}://{host}:{pieces.port or 2379}")
    if not found:
        raise EtcdError(f"no etcd endpoint in {text!r}", hint="Give HOST:PORT, several separated by commas.")
    return tuple(found)


_HINT = "Is etcd running? `allranks etcd status`, `allranks etcd start`."


def _encode(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _put(key: str, value: bytes, lease: int) -> dict[str, str]:
    put = {"key": _encode(key), "value": _encode(value)}
    return {**put, "lease": str(lease)} if lease else put


def _items(answer: JsonObject) -> dict[str, KeyValue]:
    found = {}
    for item in answer.get("kvs") or []:
        value, revision = base64.b64decode(item.get("value", "")), int(item.get("mod_revision", 0))
        found[base64.b64decode(item["key"]).decode()] = KeyValue(value, revision)
    return found
