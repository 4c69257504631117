"""Where a manager's tiers lie, and which ranks write to each of them together."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from allranks.checkpoint.config import CheckpointConfig, CheckpointTier
from allranks.checkpoint.group import Group
from allranks.checkpoint.stores.store import StoreSpec
from allranks.errors import ConfigurationError

Tier = CheckpointTier
#: The environment an `allranks run` agent gives its ranks: this node's snapshot keeper, and the job's secret.
SNAPSHOTS_VARIABLE, TOKEN_VARIABLE, JOB_VARIABLE = "ALLRANKS_SNAPSHOTS", "ALLRANKS_TOKEN", "ALLRANKS_JOB_ID"


class TierLocations:
    """The durable tiers of one manager. Found at the first use, by all ranks together."""

    def __init__(self, config: CheckpointConfig, group: Group, known: dict[Tier, StoreSpec]) -> None:
        self.config = config
        self.group = group
        self._known = known
        self._specs: dict[Tier, StoreSpec] | None = None
        self._sharers: tuple[int, ...] | None = None

    def specs(self) -> dict[Tier, StoreSpec]:
        """The address of every configured durable tier, fastest first. Collective at the first call."""
        if self._specs is None:
            peers = self._peers()
            self._specs = {**({Tier.PEER: peers} if peers is not None else {}), **self._known}
        return self._specs

    def spec(self, tier: Tier) -> StoreSpec:
        """The address of one tier; ConfigurationError says what to set."""
        found = self.specs().get(tier)
        if found is None:
            setting = {Tier.PEER: "peers and peer_token", Tier.NVME: "nvme_path", Tier.S3: "s3_bucket"}[tier]
            raise ConfigurationError(
                f"tier {tier.name} is not configured", hint=f"set {setting} in CheckpointConfig"
            )
        return found

    def sharers(self, tier: Tier) -> tuple[int, ...]:
        """The ranks that write one checkpoint together. Collective at the first call for the disk."""
        if tier is not Tier.NVME:
            return tuple(range(self.group.world_size))
        if self._sharers is None:
            self._sharers = find_sharers(Path(self.spec(tier).url), self.group)
        return self._sharers

    def together(self, tiers: tuple[Tier, ...]) -> list[tuple[Tier, ...]]:
        """Tiers grouped by the ranks that share them: each group needs one snapshot."""
        groups: dict[tuple[int, ...], list[Tier]] = {}
        for tier in tiers:
            self.spec(tier)
            groups.setdefault(self.sharers(tier), []).append(tier)
        return [tuple(group) for group in groups.values()]

    def _peers(self) -> StoreSpec | None:
        """Every node's snapshot keeper: as configured, or as each rank's agent has told it.

        Agents that were started one by one have a token each: then there is one line per keeper.
        """
        own, secret = os.environ.get(SNAPSHOTS_VARIABLE, ""), os.environ.get(TOKEN_VARIABLE, "")
        addresses, token = list(self.config.peers), self.config.peer_token or secret
        if addresses:
            given = self.config.node_rank
            node = int(os.environ.get("GROUP_RANK", "0")) if given is None else given
        else:
            told = {address: key for address, key in self.group.gather([own, token]) if address and key}
            addresses, token = list(told), "\n".join(told.values())
            node = addresses.index(own) if own in addresses else 0
        if not addresses or not token:
            return None
        job = os.environ.get(JOB_VARIABLE, "job")
        return StoreSpec(f"peer://{','.join(addresses)}/{job}", {"token": token, "node": str(node)})


def find_sharers(folder: Path, group: Group) -> tuple[int, ...]:
    """The ranks that see the same folder as this one (a local disk: those of this node). Collective.

    Every rank leaves a mark and looks for the others'. A rank that cannot write sees nobody, and fails later
    with the right error.
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
