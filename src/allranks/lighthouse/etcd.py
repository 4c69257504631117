"""etcd over its JSON gateway, with the standard library. Blocking; called from worker threads.

Only what an election needs: leases, one guarded transaction, reading a key. Every call has a limit and tries
all endpoints in turn.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from allranks.errors import LighthouseError


class EtcdError(LighthouseError):
    """No endpoint of etcd gave a useful answer."""


@dataclass(frozen=True)
class KeyValue:
    """A key's value and the revision that made it; revision 0: there is no such key."""

    value: bytes
    create_revision: int


@dataclass(frozen=True)
class Etcd:
    """A cluster by its client URLs ("http://host:2379")."""

    endpoints: tuple[str, ...]
    timeout_s: float = 1.0
    ca: str = ""
    _first: list[int] = field(default_factory=lambda: [0])  # the endpoint that answered last is asked first

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """(lease id, granted seconds)."""
        answer = self._call("/v3/lease/grant", {"TTL": ttl_s})
        return int(answer["ID"]), float(answer["TTL"])

    def keep_alive(self, lease: int) -> float:
        """Seconds that the lease lives on; 0 when it is gone."""
        answer = self._call("/v3/lease/keepalive", {"ID": lease})
        return float(answer.get("result", {}).get("TTL", 0))

    def revoke(self, lease: int) -> None:
        """Ends a lease and what hangs on it."""
        self._call("/v3/lease/revoke", {"ID": lease})

    def get(self, key: str) -> KeyValue:
        """The key as it is now."""
        found = self._call("/v3/kv/range", {"key": _b64(key.encode())}).get("kvs", [])
        if not found:
            return KeyValue(b"", 0)
        return KeyValue(base64.b64decode(found[0].get("value", "")), int(found[0]["create_revision"]))

    def put_if(
        self, guard: str, create_revision: int, key: str, value: bytes, lease: int = 0
    ) -> tuple[bool, int]:
        """Puts `key` if `guard` was created at that revision (0: does not exist). (done, revision now)."""
        put: dict[str, Any] = {"key": _b64(key.encode()), "value": _b64(value)}
        if lease:
            put["lease"] = lease
        compare = {
            "key": _b64(guard.encode()), "target": "CREATE", "result": "EQUAL", "create_revision": create_revision,
        }  # fmt: skip
        answer = self._call("/v3/kv/txn", {"compare": [compare], "success": [{"request_put": put}]})
        return bool(answer.get("succeeded")), int(answer["header"]["revision"])

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        problems, count = [], len(self.endpoints)
        first = self._first[0]
        for index in (i % count for i in range(first, first + count)):
            endpoint = self.endpoints[index]
            try:
                answer = self._post(endpoint, path, json.dumps(body).encode())
                self._first[0] = index
                return answer
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{endpoint}: {error or type(error).__name__}")
        raise EtcdError(f"etcd does not answer {path}: {'; '.join(problems)}")

    def _post(self, endpoint: str, path: str, body: bytes) -> dict[str, Any]:
        url = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca or None)
            connection = http.client.HTTPSConnection(
                url.hostname or "", url.port or 2379, timeout=self.timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(
                url.hostname or "", url.port or 2379, timeout=self.timeout_s
            )
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read(64 << 20)
            if response.status != 200:
                raise ValueError(f"HTTP {response.status} {data[:200].decode('utf-8', 'replace')}")
            answer: dict[str, Any] = json.loads(data)
            return answer
        finally:
            connection.close()


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
