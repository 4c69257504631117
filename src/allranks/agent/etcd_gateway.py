"""The few calls of etcd v3 that a rendezvous needs, over its JSON gateway with the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from allranks.errors import AllranksError


class EtcdError(AllranksError):
    """etcd did not answer, or refused."""


@dataclass(frozen=True)
class KeyValue:
    """A value with the revision that changed it last."""

    value: bytes
    revision: int


@dataclass
class EtcdGateway:
    """A client of one etcd cluster. Each call tries every endpoint once; threads share nothing but the list."""

    endpoints: tuple[str, ...]  # "http://host:2379"
    timeout_s: float = 5.0
    _local: threading.local = field(default_factory=threading.local)

    def get(self, key: str) -> KeyValue | None:
        """The value of a key, or None."""
        answer = self._call("/v3/kv/range", {"key": _encode(key.encode())})
        found = answer.get("kvs") or []
        return _key_value(found[0]) if found else None

    def get_prefix(self, prefix: str) -> dict[str, KeyValue]:
        """All keys that begin with the prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _encode(prefix.encode()), "range_end": _encode(end.encode())}
        found = self._call("/v3/kv/range", body).get("kvs") or []
        return {base64.b64decode(item["key"]).decode(): _key_value(item) for item in found}

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Writes a key."""
        body: dict[str, Any] = {"key": _encode(key.encode()), "value": _encode(value)}
        if lease:
            body["lease"] = str(lease)
        self._call("/v3/kv/put", body)

    def compare_and_put(self, key: str, value: bytes, revision: int, lease: int = 0) -> bool:
        """Writes only if the key's revision is as given (0: only if it does not exist). True when written."""
        put: dict[str, Any] = {"key": _encode(key.encode()), "value": _encode(value)}
        if lease:
            put["lease"] = str(lease)
        compare = {
            "key": _encode(key.encode()),
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": str(revision),
        }
        answer = self._call("/v3/kv/txn", {"compare": [compare], "success": [{"request_put": put}]})
        return bool(answer.get("succeeded"))

    def delete_prefix(self, prefix: str) -> int:
        """Removes all keys that begin with the prefix; returns how many."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _encode(prefix.encode()), "range_end": _encode(end.encode())}
        return int(self._call("/v3/kv/deleterange", body).get("deleted", 0))

    def delete(self, key: str) -> bool:
        """Removes a key; True if it was there."""
        return int(self._call("/v3/kv/deleterange", {"key": _encode(key.encode())}).get("deleted", 0)) > 0

    def grant(self, ttl_s: int) -> int:
        """A lease that ends after `ttl_s` unless kept alive."""
        return int(self._call("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"])

    def status(self) -> dict[str, Any]:
        """Version, leader and size, as etcd reports them."""
        return self._call("/v3/maintenance/status", {})

    def close(self) -> None:
        """Closes this thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        failures = []
        for attempt in range(len(self.endpoints) + 1):
            index = (getattr(self._local, "index", 0)) % len(self.endpoints)
            try:
                return self._post(self.endpoints[index], path, json.dumps(body))
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{self.endpoints[index]}: {error or type(error).__name__}")
                self.close()
                self._local.index = index + 1
                if attempt:
                    time.sleep(0.05)
        raise EtcdError(
            f"no etcd answers ({'; '.join(dict.fromkeys(failures))})",
            hint="Is etcd running? `allranks etcd status`, `allranks etcd start`.",
        )

    def _post(self, endpoint: str, path: str, body: str) -> dict[str, Any]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _connect(endpoint, self.timeout_s)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read()
        if response.status != 200:
            raise EtcdError(f"etcd at {endpoint} answered {response.status} to {path}: {raw[:300]!r}")
        answer: dict[str, Any] = json.loads(raw)
        return answer


def parse_endpoints(text: str) -> tuple[str, ...]:
    """`host:port,host:port` (or URLs) as a tuple of URLs; the port defaults to 2379."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        url = part if "://" in part else f"http://{part}"
        pieces = urllib.parse.urlsplit(url)
        found.append(f"{pieces.scheme}://{pieces.hostname}:{pieces.port or 2379}")
    if not found:
        raise EtcdError(f"no etcd endpoint in {text!r}", hint="Give HOST:PORT, several separated by commas.")
    return tuple(found)


def _connect(endpoint: str, timeout_s: float) -> http.client.HTTPConnection:
    pieces = urllib.parse.urlsplit(endpoint)
    host, port = pieces.hostname or "localhost", pieces.port or 2379
    if pieces.scheme == "https":
        return http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _key_value(item: dict[str, Any]) -> KeyValue:
    return KeyValue(base64.b64decode(item.get("value", "")), int(item.get("mod_revision", 0)))
