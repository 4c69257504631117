"""The ranks that save and load together (`RankGroup`), their tiers (`TierLocations`), and `--fresh` (`start_fresh`)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from allranks.checkpoint.config import CheckpointConfig, CheckpointTier
from allranks.checkpoint.stores import StoreSpec, hint_for, open_store, reason_of
from allranks.errors import AllranksError, CheckpointUnreachable, ConfigurationError


@dataclass(eq=False, repr=False)
class RankGroup:
    """The given process group, else all ranks, else this process alone.

    Values are exchanged over a separate gloo group, which all ranks create at the first `gather`.
    """

    process_group: dist.ProcessGroup | None = None
    timeout_s: float = 600.0
    _gloo: dist.ProcessGroup | None = None
    _seen: tuple[int, int] = (0, 1)  # rank and size at the last access to `world`
    _worlds: int = 0

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group) if _initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.process_group) if _initialized() else 1

    @property
    def world(self) -> int:
        """A number that changes with the default process group: agreements made in another one are void."""
        gone = self._gloo is not None and not _registered(self._gloo)
        if gone or self._seen != (self.rank, self.world_size):
            self._gloo = None if gone else self._gloo
            self._seen, self._worlds = (self.rank, self.world_size), self._worlds + 1
        return self._worlds

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. All ranks must call it."""
        if self.alone:
            return [json.loads(json.dumps(value))]
        found: list[str] = [""] * self.world_size
        dist.all_gather_object(found, json.dumps(value), group=self._channel())
        return [json.loads(text) for text in found]

    def _channel(self) -> dist.ProcessGroup:
        if self._gloo is None or not _registered(self._gloo):
            ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
            limit = timedelta(seconds=self.timeout_s)
            self._gloo = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=True)
        return self._gloo


def _initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _registered(group: dist.ProcessGroup) -> bool:
    """Whether a group still exists; False after `destroy_process_group`."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


Tier = CheckpointTier
#: Set for the ranks by the agent of `allranks run`: this node's snapshot keeper, and the secret of the job.
SNAPSHOTS_VARIABLE, TOKEN_VARIABLE, JOB_VARIABLE = "ALLRANKS_SNAPSHOTS", "ALLRANKS_TOKEN", "ALLRANKS_JOB_ID"


@dataclass(eq=False, repr=False)
class TierLocations:
    """The durable tiers of one manager, determined by all ranks together at the first use."""

    config: CheckpointConfig
    group: RankGroup
    known: dict[Tier, StoreSpec]
    _specs: dict[Tier, StoreSpec] | None = None
    _sharers: tuple[int, ...] | None = None
    _world: int = 0

    def specs(self) -> dict[Tier, StoreSpec]:
        """The address of every configured durable tier, fastest first. The first call is collective."""
        if self._specs is None or self._world != self.group.world:
            self._world, self._sharers = self.group.world, None
            peers = self._peers()
            self._specs = {**({Tier.PEER: peers} if peers is not None else {}), **self.known}
        return self._specs

    def spec(self, tier: Tier) -> StoreSpec:
        """The address of one tier; ConfigurationError if it is not configured."""
        found = self.specs().get(tier)
        if found is None:
            setting = {Tier.PEER: "peers and peer_token", Tier.NVME: "nvme_path", Tier.S3: "s3_bucket"}[tier]
            raise ConfigurationError(
                f"tier {tier.name} is not configured", hint=f"set {setting} in CheckpointConfig"
            )
        return found

    def sharers(self, tier: Tier) -> tuple[int, ...]:
        """The ranks that write one checkpoint together. The first call for the disk is collective."""
        if tier is not Tier.NVME:
            return tuple(range(self.group.world_size))
        url = self.spec(tier).url  # resets `_sharers` if the world has changed
        if self._sharers is None:
            self._sharers = find_sharers(Path(url), self.group)
        return self._sharers

    def together(self, tiers: tuple[Tier, ...]) -> list[tuple[Tier, ...]]:
        """Tiers grouped by the ranks that share them: each group needs one snapshot."""
        groups: dict[tuple[int, ...], list[Tier]] = {}
        for tier in tiers:
            self.spec(tier)
            groups.setdefault(self.sharers(tier), []).append(tier)
        return [tuple(group) for group in groups.values()]

    def _peers(self) -> StoreSpec | None:
        """The snapshot keepers of all nodes, from the configuration or from the environment of each rank.

        Agents that were started separately have different tokens; `token` then has one line per keeper.
        """
        own, secret = os.environ.get(SNAPSHOTS_VARIABLE, ""), os.environ.get(TOKEN_VARIABLE, "")
        addresses, token = list(self.config.peers), self.config.peer_token or secret
        if addresses:
            given = self.config.node_rank
            node = int(os.environ.get("GROUP_RANK", "0")) if given is None else given
        else:
            known = {address: key for address, key in self.group.gather([own, token]) if address and key}
            addresses, token = list(known), "\n".join(known.values())
            node = addresses.index(own) if own in addresses else 0
        if not addresses or not token:
            return None
        job = os.environ.get(JOB_VARIABLE, "job")
        return StoreSpec(f"peer://{','.join(addresses)}/{job}", {"token": token, "node": str(node)})


def find_sharers(folder: Path, group: RankGroup) -> tuple[int, ...]:
    """The ranks that see the same folder as this one (for a local disk, the ranks of this node). Collective.

    Every rank creates a marker file and checks which other markers it sees. A rank that cannot write sees none; its save
    fails later with the actual error.
    """
    if group.alone:
        return (0,)
    token = uuid.uuid4().hex
    mine = folder / f".seen-{token}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()
    tokens = group.gather(token)
    seen = [rank for rank, other in enumerate(tokens) if (folder / f".seen-{other}").exists()]
    everybody = group.gather(seen)
    with contextlib.suppress(OSError):
        mine.unlink()
    views = [tuple(sorted({rank, *view})) for rank, view in enumerate(everybody)]
    return tuple(rank for rank in views[group.rank] if group.rank in views[rank])


log = logging.getLogger("allranks.checkpoint")
FRESH_VARIABLE = "ALLRANKS_FRESH"
MARK = "fresh-start-done"


def start_fresh(places: TierLocations, environment: Mapping[str, str]) -> bool:
    """Sets all checkpoints aside if every rank runs with --fresh, once per run and not once per restart. Collective."""
    group = places.group
    folder = environment.get(FRESH_VARIABLE) == "1" and environment.get("ALLRANKS_DIR", "")
    mark = Path(folder) / MARK if folder else None
    with _exclusive_on_node(mark if group.rank == 0 else None):
        if not all(group.gather(mark is not None and not mark.exists())):
            return False
        problems: list[str] = [text for text in group.gather(_set_aside(places)) if text]
        if problems:
            raise CheckpointUnreachable(
                f"--fresh: {'; '.join(dict.fromkeys(problems))}. The training was not started",
                hint="make the store writable and start again, or omit --fresh",
            )
        assert mark is not None
        mark.touch()
        group.gather(None)
    return True


def _set_aside(places: TierLocations) -> str:
    """Sets aside the stores that this rank is responsible for (one rank per store); returns the problems as text."""
    problems = []
    for tier, spec in places.specs().items():
        if places.sharers(tier)[0] != places.group.rank:
            continue
        try:
            with contextlib.closing(open_store(spec)) as store:
                moved = store.set_aside()
        except (OSError, AllranksError) as error:
            hint = hint_for(error, spec)
            problems.append(f"[{tier.name}] {spec.url} cannot be set aside: {reason_of(error)} ({hint})")
            continue
        if moved:
            text = "[%s] --fresh: set the checkpoints of %s aside: %s"
            log.warning(text, tier.name, spec.url, ", ".join(moved))
    return "; ".join(problems)


@contextlib.contextmanager
def _exclusive_on_node(mark: Path | None) -> Iterator[None]:
    """Serializes the replicas of one node, which start at the same time and do not share a process group."""
    if mark is None:
        yield
        return
    with mark.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
