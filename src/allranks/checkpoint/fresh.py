"""`allranks run --fresh`: before the first restore of a run, all checkpoints are set aside. Runs in a rank.

Once per run, not once per restart: the agent's folder remembers that it was done, and a run in which any rank's node
remembers it is not fresh any more. Nothing is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from allranks.checkpoint.failure import hint_for, reason_of
from allranks.checkpoint.stores.store import open_store
from allranks.checkpoint.tier_locations import TierLocations
from allranks.errors import AllranksError, CheckpointUnreachable

log = logging.getLogger("allranks.checkpoint")
FRESH_VARIABLE = "ALLRANKS_FRESH"
MARK = "fresh-start-done"


def start_fresh(places: TierLocations, environment: Mapping[str, str]) -> bool:
    """Sets everything aside if every rank was started with --fresh and none has done so before. Collective."""
    group = places.group
    asked = environment.get(FRESH_VARIABLE) == "1" and environment.get("ALLRANKS_DIR", "")
    mark = Path(asked) / MARK if asked else None
    with _alone_on_this_node(mark if group.rank == 0 else None):
        if not all(group.gather(mark is not None and not mark.exists())):
            return False
        problems: list[str] = [text for text in group.gather(_set_aside(places)) if text]
        if problems:
            raise CheckpointUnreachable(
                f"--fresh: {'; '.join(dict.fromkeys(problems))}. Nothing was started",
                hint="make the store writable and start again, or leave out --fresh",
            )
        assert mark is not None
        mark.touch()
        group.gather(None)
    return True


def _set_aside(places: TierLocations) -> str:
    """What this rank has to set aside: one rank for each store. Returns what went wrong."""
    problems = []
    for tier, spec in places.specs().items():
        if places.sharers(tier)[0] != places.group.rank:
            continue
        try:
            store = open_store(spec)
            try:
                moved = store.set_aside()
            finally:
                store.close()
        except (OSError, AllranksError) as error:
            hint = hint_for(error, tier.name, spec.url, spec.options)
            problems.append(f"[{tier.name}] {spec.url} cannot be set aside: {reason_of(error)} ({hint})")
            continue
        if moved:
            log.warning(
                "[%s] --fresh: the checkpoints of %s are set aside: %s", tier.name, spec.url, ", ".join(moved)
            )
    return "; ".join(problems)


@contextlib.contextmanager
def _alone_on_this_node(mark: Path | None) -> Iterator[None]:
    """Replicas of one node start at the same time, each as a world of its own: one after the other here."""
    if mark is None:
        yield
        return
    with mark.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
