"""Elects one leader among several lighthouses by a lease in etcd, which also stores the state that must survive it.

Keys under /allranks/JOB: `leader` (address, on the leader's lease) and `state` (packed PersistedState). Every write of
a leader is guarded by its own `leader` key, so a leader that was deposed without noticing changes nothing. A leader
that cannot renew its lease steps down when the lease may have expired, not at the first error of etcd.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from allranks.errors import ConfigurationError, EtcdError, LighthouseError
from allranks.etcd import Etcd
from allranks.lighthouse.status import PersistedState
from allranks.model.parsing import from_json

log = logging.getLogger("allranks.lighthouse")

T = TypeVar("T")


class Deposed(LighthouseError):
    """This lighthouse no longer leads."""


@dataclass(frozen=True)
class EtcdOptions:
    """Where etcd is and which job this is."""

    endpoints: tuple[str, ...]
    job: str = "job"
    lease_s: int = 3  # how long a dead leader remains the leader
    ca: str = ""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigurationError("lighthouse: no etcd endpoint given")
        if self.lease_s < 1:
            raise ConfigurationError(f"lighthouse: lease_s is {self.lease_s}, must be at least 1")


class Election:
    """Campaigns and leads while `run()` runs. On the lighthouse's loop; calls etcd in threads."""

    def __init__(
        self,
        options: EtcdOptions,
        address: str,
        lead: Callable[[PersistedState], None],
        follow: Callable[[str], None],
    ) -> None:
        self._options = options
        self._address = address
        self._lead = lead
        self._follow = follow  # called with the leader's address ("": no leader)
        self._etcd = Etcd(options.endpoints, timeout_s=max(0.5, options.lease_s / 3), ca=options.ca)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="allranks-etcd")
        self._lease = 0
        self._revision = 0  # of our `leader` key; 0: we do not lead
        self._epoch = 0
        self._good_until = 0.0

    async def run(self) -> None:
        """Campaigns, leads, steps down, and starts again, until cancelled."""
        try:
            while True:
                kept = await self._campaign()
                log.info("leading job %s in epoch %d", self._options.job, kept.epoch)
                self._lead(kept)
                reason = await self._hold()
                self._revision = 0
                log.warning("no longer leading: %s", reason)
                self._follow("")
        finally:
            self._revision = 0

    async def close(self) -> None:
        """Revokes the lease, so that the next leader need not wait for it to expire."""
        if self._lease:
            try:
                await self._thread(lambda: self._etcd.revoke(self._lease))
            except EtcdError as error:
                log.warning("lease not revoked: %s", error)
        self._pool.shutdown(wait=False)
        self._etcd.close()

    async def keep(self, kept: PersistedState) -> None:
        """Saves the state under our epoch. If it raises (Deposed, EtcdError), nothing may be announced."""
        if not self._revision:
            raise Deposed("this lighthouse does not lead")
        await self._save(replace(kept, epoch=self._epoch))

    async def _campaign(self) -> PersistedState:
        leader = None
        pause = min(0.25, self._options.lease_s / 4)
        while True:
            try:
                found = await self._thread(lambda: self._etcd.get(self._key("leader")))
                if found is None:
                    if (kept := await self._try()) is not None:
                        return kept
                elif found.value.decode() != leader:
                    leader = found.value.decode()
                    self._follow(leader)
            except EtcdError as error:
                if leader != "":
                    log.warning("%s", error)
                    leader = ""
                    self._follow("")
            await asyncio.sleep(pause)

    async def _try(self) -> PersistedState | None:
        """Tries to become the leader; returns the state that the last leader saved, None if another was faster."""
        began = time.monotonic()
        lease = await self._thread(lambda: self._etcd.grant(self._options.lease_s))
        self._lease = lease.id
        leader, address = self._key("leader"), self._address.encode()
        won, revision = await self._thread(
            lambda: self._etcd.put_guarded(leader, 0, leader, address, lease.id)
        )
        if not won:
            await self._thread(lambda: self._etcd.revoke(lease.id))
            return None
        self._revision, self._good_until = revision, began + lease.ttl_s
        stored = await self._thread(lambda: self._etcd.get(self._key("state")))
        kept = self._unpack(stored.value) if stored is not None else PersistedState()
        kept = replace(kept, epoch=kept.epoch + 1)
        self._epoch = kept.epoch
        try:
            await self._save(kept)
        except Deposed:
            return None
        return kept

    async def _hold(self) -> str:
        """Renews the lease until it is lost; returns why."""
        while True:
            await asyncio.sleep(self._options.lease_s / 3)
            began = time.monotonic()
            try:
                renewal = self._thread(lambda: self._etcd.keep_alive(self._lease))
                ttl = await asyncio.wait_for(renewal, max(0.0, self._good_until - began))
                if ttl <= 0:
                    return "the lease expired"
                self._good_until = began + ttl
            except asyncio.TimeoutError:
                return "the lease could not be renewed: etcd did not answer in time"
            except EtcdError as error:
                if time.monotonic() >= self._good_until:
                    return f"the lease could not be renewed: {error}"
                log.warning("lease not renewed yet: %s", error)

    async def _save(self, kept: PersistedState) -> None:
        leader, revision = self._key("leader"), self._revision
        data = zlib.compress(msgspec.json.encode(kept), 1)
        done, _ = await self._thread(
            lambda: self._etcd.put_guarded(leader, revision, self._key("state"), data)
        )
        if not done:
            raise Deposed("another lighthouse leads now")

    def _key(self, name: str) -> str:
        return f"/allranks/{self._options.job}/{name}"

    async def _thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def _unpack(self, data: bytes) -> PersistedState:
        try:
            return from_json(zlib.decompress(data), PersistedState)
        except (zlib.error, msgspec.MsgspecError) as error:
            key = self._key("state")
            hint = f"once no replica of this job is running, `etcdctl del {key}` starts over"
            raise EtcdError(f"the state saved in etcd under {key} is damaged ({error}): {hint}") from error
