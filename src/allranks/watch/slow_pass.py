"""A pass of a rank that lasts too long, seen while it lasts: from one of its recorded calls to the next. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from allranks.watch.samples import RankSample

EVERY_S = 10.0  # between two collections


@dataclass(frozen=True)
class SlowPasses:
    """The limit, and which pass of which rank was reported already."""

    limit_ms: float
    told: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    work: Mapping[int, int] = field(default_factory=dict)  # rank -> clock ticks at the last look
    last_s: float = -EVERY_S

    def after(
        self, now_s: float, samples: Iterable[RankSample], work: Mapping[int, int]
    ) -> tuple[SlowPasses, str]:
        """After one more look, and the reason to collect stacks now: "" for none. A rank that waits for requests is in no call
        and uses no processor: it is not slow."""
        slow = [
            (one, silent_ms)
            for one in samples
            if one.alive and one.last_ns and (silent_ms := now_s * 1e3 - one.last_ns / 1e6) > self.limit_ms
        ]
        works = {rank for rank, ticks in work.items() if ticks > self.work.get(rank, ticks)}
        new = [
            (one, silent_ms)
            for one, silent_ms in slow
            if self.told.get(one.rank) != one.mark
            and (one.calls_started > one.calls_completed or one.rank in works)
        ]
        if not new or now_s - self.last_s < EVERY_S:
            return replace(self, work=dict(work)), ""
        first, silent_ms = max(new, key=lambda pair: pair[1])
        told = {**self.told, **{one.rank: one.mark for one, _ in slow}}
        reason = f"a pass of rank {first.rank} lasts {silent_ms:.0f} ms"
        return SlowPasses(self.limit_ms, told, dict(work), now_s), reason
