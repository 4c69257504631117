"""What must survive a lighthouse: kept in etcd before anybody hears of it. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.model.cluster import Quorum


@dataclass(frozen=True)
class Kept:
    """`number` may be above the quorum's: it was given out for one that came to nothing."""

    epoch: int = 0
    number: int = 0
    quorum: Quorum | None = None
    evicted: dict[str, str] = field(default_factory=dict)  # name -> reason
    finished: tuple[str, ...] = ()  # members of the quorum whose training is over
