"""torchrun's rendezvous on etcd v3 (`--rdzv-backend etcd-v3`), through the entry point group `torchrun.handlers`.

torch has only an etcd v2 client, and etcd has dropped v2. Runs in the agent. The state is under `/allranks/rdzv/RUN_ID`,
the store's keys under `/allranks/store/RUN_ID/`; both expire with a lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point. Defined above the imports of torch, which call it."""
    return lambda params: create_etcd_v3_handler(params)


# ruff: noqa: E402
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from allranks.errors import EtcdError
from allranks.etcd import Etcd, KeyValue, parse_endpoints

PREFIX = "/allranks"
LEASE_S = 24 * 3600  # stale keys of a dead job expire
POLL_S = 0.02
STORE_S = 15.0


class JobLease:
    """Leases for the keys of a running job, renewed so that only the keys of an ended job expire."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._id = 0
        self._renew_s = 0.0

    def lease(self) -> int:
        """A lease with at least half of its time left."""
        if time.monotonic() >= self._renew_s:
            self._id = self._etcd.grant(LEASE_S).id
            self._renew_s = time.monotonic() + LEASE_S / 2
        return self._id

    def forget(self) -> None:
        """After an error: the lease may be lost with the data of a new etcd."""
        self._renew_s = 0.0


class EtcdV3Backend(RendezvousBackend):
    """The rendezvous state in one key, changed only by compare-and-put on its revision."""

    def __init__(self, etcd: Etcd, run_id: str, lease: JobLease) -> None:
        self._etcd = etcd
        self._key = f"{PREFIX}/rdzv/{run_id}"
        self._lease = lease

    @property
    def name(self) -> str:
        return "etcd-v3"

    def get_state(self) -> tuple[bytes, int] | None:
        """The state and its revision, or None before the first node."""
        try:
            found = self._etcd.get(self._key)
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if found is None else (found.value, found.revision)

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        """Writes the state unless it has changed since `token`; returns the current state and whether it was written."""
        try:
            written = self._etcd.compare_and_put(self._key, state, int(token or 0), self._lease.lease())
        except EtcdError as error:
            self._lease.forget()
            raise RendezvousConnectionError(str(error)) from error
        found = self.get_state()
        return None if found is None else (*found, written)


class EtcdV3Store(dist.Store):
    """torch's key-value store on etcd, which nodes use during a rendezvous."""

    def __init__(self, etcd: Etcd, run_id: str, lease: JobLease, timeout: timedelta) -> None:
        super().__init__()
        self._etcd = etcd
        self._prefix = f"{PREFIX}/store/{run_id}/"
        self._limit = timeout
        self._lease = lease

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def set(self, key: str, value: str | bytes) -> None:
        self._etcd.put(self._prefix + key, _bytes(value), self._lease.lease())

    def get(self, key: str) -> bytes:
        while (found := self._etcd.get(self._prefix + key)) is None:
            self.wait([key])
        return found.value

    def _replace(self, key: str, value: bytes, found: KeyValue | None) -> bool:
        """Writes a value unless the key has changed since it was `found`."""
        revision = found.revision if found else 0
        return self._etcd.compare_and_put(self._prefix + key, value, revision, self._lease.lease())

    def add(self, key: str, number: int) -> int:
        while True:
            found = self._etcd.get(self._prefix + key)
            value = int(found.value) + number if found else number
            if self._replace(key, str(value).encode(), found):
                return value

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes `desired` if the value is `expected` (or the key is missing and expected is empty)."""
        while True:
            found = self._etcd.get(self._prefix + key)
            if (found is None and expected) or (found is not None and found.value != _bytes(expected)):
                return found.value if found is not None else _bytes(expected)
            if self._replace(key, _bytes(desired), found):
                return _bytes(desired)

    def check(self, keys: list[str]) -> bool:
        return all(self._etcd.get(self._prefix + key) is not None for key in keys)

    def wait(self, keys: list[str], override_timeout: timedelta | None = None) -> None:
        limit = override_timeout or self._limit
        deadline = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise LookupError(f"keys {keys} did not all appear in etcd within {limit}")
            time.sleep(POLL_S)

    def delete_key(self, key: str) -> bool:
        return self._etcd.delete(self._prefix + key)

    def num_keys(self) -> int:
        return len(self._etcd.get_prefix(self._prefix))


def create_etcd_v3_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Called by torchrun for `--rdzv-backend etcd-v3`."""
    endpoint = params.endpoint or "localhost:2379"
    try:
        etcd = Etcd(parse_endpoints(endpoint), timeout_s=float(params.get("read_timeout", 10)))
        etcd.status()
    except EtcdError as error:
        raise RendezvousConnectionError(f"{error}. {error.hint}") from error
    # how long nodes wait for each other's keys before they repeat the rendezvous
    timeout = timedelta(seconds=float(params.get("store_timeout", STORE_S) or STORE_S))
    lease = JobLease(etcd)
    store = EtcdV3Store(etcd, params.run_id, lease, timeout)
    return create_handler(store, EtcdV3Backend(etcd, params.run_id, lease), params)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
