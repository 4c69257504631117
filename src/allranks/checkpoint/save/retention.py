"""Which checkpoints to remove: a pure decision, and the one place that acts on it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from allranks.checkpoint.manifest import MANIFEST, decode_manifest
from allranks.checkpoint.stores.store import Store
from allranks.errors import CheckpointValidationError


@dataclass(frozen=True)
class Kept:
    """A checkpoint as retention sees it: `valid` means its manifest is whole."""

    name: str
    step: int
    valid: bool


@dataclass(frozen=True)
class Decision:
    """`remove` is ordered oldest first; `reason` says why these and no others."""

    remove: tuple[str, ...]
    reason: str


def decide(found: Sequence[Kept], keep_last: int, spare: str = "") -> Decision:
    """Keeps the newest `keep_last` valid ones, all invalid ones (they are for quarantine), always one, and `spare`.

    `keep_last` of 0 or less keeps everything.
    """
    valid = sorted((kept for kept in found if kept.valid), key=lambda kept: kept.step)
    if keep_last <= 0:
        return Decision((), "retention is off: everything is kept")
    surplus = [kept for kept in valid[: max(0, len(valid) - keep_last)] if kept.name != spare]
    damaged = [kept.name for kept in found if not kept.valid]
    aside = f"; damaged and not counted: {', '.join(damaged)}" if damaged else ""
    if not surplus:
        return Decision((), f"{len(valid)} of at most {keep_last} checkpoints: nothing to remove{aside}")
    steps = ", ".join(str(kept.step) for kept in surplus)
    return Decision(
        tuple(kept.name for kept in surplus),
        f"keeping the newest {keep_last}: steps {steps} are surplus{aside}",
    )


def prune(store: Store, keep_last: int, spare: str = "") -> tuple[list[str], list[str]]:
    """Removes surplus checkpoints, but never `spare`; returns (removed, left because somebody reads them)."""
    return remove(store, decide(look(store), keep_last, spare))


def remove(store: Store, decision: Decision) -> tuple[list[str], list[str]]:
    """Acts on a decision; returns (removed, left because somebody reads them)."""
    removed: list[str] = []
    left: list[str] = []
    for name in decision.remove:
        try:
            (removed if store.remove(name) else left).append(name)
        except FileNotFoundError:
            continue  # another saver was first
    return removed, left


def look(store: Store) -> list[Kept]:
    """Reads the manifest of every checkpoint of a store."""
    found = []
    for name in store.names():
        try:
            found.append(
                Kept(name, decode_manifest(store.read(name, MANIFEST), store.path_of(name)).step, True)
            )
        except CheckpointValidationError:
            found.append(Kept(name, -1, False))
        except FileNotFoundError:
            continue
    return found


def look_closely(store: Store, good: Callable[[str], bool]) -> list[Kept]:
    """As `look`, but `good` is asked about the newest, and the next older, until one is: others do not count."""
    found = {kept.name: kept for kept in look(store)}
    for kept in sorted((one for one in found.values() if one.valid), key=lambda one: -one.step):
        if good(kept.name):
            break
        found[kept.name] = replace(kept, valid=False)
    return list(found.values())
