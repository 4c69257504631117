"""Which checkpoint all ranks load: a pure decision over what each of them can see. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Fastest first; of equal steps the faster tier is taken.
TIER_ORDER = ("MEMORY", "PEER", "NVME", "S3")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that every rank can see."""

    tier: str
    step: int
    name: str


@dataclass(frozen=True)
class Choice:
    """What to try, best first, and why."""

    candidates: tuple[Candidate, ...]
    reason: str


#: One rank's view: tier → (name, step) of every checkpoint it can see.
View = Mapping[str, Sequence[tuple[str, int]]]


def choose(views: Sequence[View]) -> Choice:
    """The checkpoints complete everywhere: newest step first, the faster tier first among equal steps."""
    found = []
    partial: dict[int, int] = {}
    for tier in TIER_ORDER:
        seen: list[set[tuple[str, int]]] = [
            {(name, step) for name, step in view.get(tier, ())} for view in views
        ]
        everywhere = set.intersection(*seen) if seen else set()
        found += [Candidate(tier, step, name) for name, step in everywhere]
        for name, step in set.union(*seen) - everywhere if seen else set():
            partial[step] = max(partial.get(step, 0), sum((name, step) in one for one in seen))
    found.sort(key=lambda c: (-c.step, TIER_ORDER.index(c.tier), c.name))
    return Choice(tuple(found), _reason(found, partial, len(views)))


def _reason(found: Sequence[Candidate], partial: Mapping[int, int], ranks: int) -> str:
    newest = found[0].step if found else -1
    newer = sorted(step for step in partial if step > newest)
    missed = "".join(f"; step {step} is complete on {partial[step]} of {ranks} ranks only" for step in newer)
    if not found:
        return f"no checkpoint is complete on all {ranks} ranks{missed}"
    where = f" on all {ranks} ranks" if ranks > 1 else ""
    return f"step {newest} in {found[0].tier} is the newest complete one{where}{missed}"
