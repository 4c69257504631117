"""Lists the checkpoints of a store and decides which to remove. No torch.

A list may be stale or truncated, but a file requested by its name is current. Therefore a small pointer file holds the
names of the newest checkpoints. It is written after every commit, and every list is compared with it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from allranks.checkpoint.manifest import MANIFEST, Manifest, decode_manifest
from allranks.checkpoint.stores import Store
from allranks.errors import CheckpointValidationError
from allranks.model.parsing import printable

POINTER = ".allranks.json"
MOST = 256  # names in the pointer file, newest last
INCOMPLETE = "is not complete"


@dataclass(frozen=True)
class Listed:
    """One line of `ls`. The other fields are valid if `problem` is empty."""

    name: str
    path: str
    step: int = -1
    epoch: int = 0
    world_size: int = 0
    bytes: int = 0
    timestamp: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class PruneDecision:
    """The checkpoints to remove, oldest first, and why."""

    remove: tuple[str, ...]
    reason: str


def read_manifests(store: Store) -> Iterator[tuple[str, Manifest | CheckpointValidationError]]:
    """(name, manifest or its problem) of every checkpoint; skips one that is removed meanwhile."""
    for name in store.names():
        try:
            found = decode_manifest(store.read(name, MANIFEST), store.path_of(name))
        except FileNotFoundError:
            if name in store.names():
                yield name, CheckpointValidationError(f"it has no {MANIFEST}", missing_keys=(MANIFEST,))
            continue
        except CheckpointValidationError as error:
            yield name, error
            continue
        yield name, found


def list_checkpoints(store: Store) -> list[Listed]:
    """Every checkpoint of a store, oldest step first, including damaged ones."""
    found = []
    for name, m in read_manifests(store):
        path = store.path_of(name)
        if isinstance(m, CheckpointValidationError):
            found.append(Listed(name, path, problem=m.reason))
        else:
            found.append(Listed(name, path, m.step, m.epoch, m.world_size, m.data_bytes, m.timestamp))
    return sorted(found, key=lambda one: (one.step, one.name))


def has_manifest(store: Store, name: str) -> bool:
    """Whether a store has a checkpoint of that name, valid or not."""
    try:
        store.read(name, MANIFEST)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def decide(found: Sequence[Listed], keep_last: int, spare: str = "") -> PruneDecision:
    """Keeps the newest `keep_last` valid checkpoints, `spare`, and all damaged ones (quarantine handles those).

    `keep_last` of 0 or less keeps everything.
    """
    if keep_last <= 0:
        return PruneDecision((), "retention is off: all checkpoints are kept")
    valid = sorted((one for one in found if not one.problem), key=lambda one: one.step)
    surplus = [one for one in valid[: max(0, len(valid) - keep_last)] if one.name != spare]
    damaged = [one.name for one in found if one.problem]
    aside = f"; damaged and not counted: {', '.join(damaged)}" if damaged else ""
    if not surplus:
        return PruneDecision((), f"{len(valid)} of at most {keep_last} checkpoints: nothing to remove{aside}")
    steps = ", ".join(str(one.step) for one in surplus)
    return PruneDecision(
        tuple(one.name for one in surplus),
        f"keeping the newest {keep_last}: steps {steps} are surplus{aside}",
    )


def prune(store: Store, keep_last: int, spare: str = "") -> tuple[list[str], list[str]]:
    """Removes surplus checkpoints, but never `spare`; returns (removed, kept because they are being read)."""
    return remove(store, decide(list_checkpoints(store), keep_last, spare))


def remove(store: Store, decision: PruneDecision) -> tuple[list[str], list[str]]:
    """Carries out a decision; returns (removed, kept because they are being read)."""
    removed: list[str] = []
    left: list[str] = []
    for name in decision.remove:
        try:
            (removed if store.remove(name) else left).append(name)
        except FileNotFoundError:
            continue  # another process was faster
    return removed, left


def list_verified(store: Store, good: Callable[[str], bool]) -> list[Listed]:
    """As `list_checkpoints`, but verifies with `good` from the newest on until one is good; the others count as damaged."""
    found = {one.name: one for one in list_checkpoints(store)}
    for one in sorted((one for one in found.values() if not one.problem), key=lambda one: -one.step):
        if good(one.name):
            break
        found[one.name] = replace(one, problem="damaged")
    return list(found.values())


def decode(data: bytes) -> list[str]:
    """The names in a pointer file; [] if it is damaged (the next commit repairs it)."""
    try:
        found = json.loads(data)["checkpoints"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    names = found if isinstance(found, list) else []
    return [name for name in names if isinstance(name, str) and "/" not in name and name[:1] not in ("", ".")]


def encode(names: Iterable[str], add: str = "", drop: Iterable[str] = ()) -> bytes:
    """The pointer file with one name added and others dropped."""
    gone = {add, *drop}
    kept = [name for name in names if name not in gone] + ([add] if add else [])
    return json.dumps({"checkpoints": kept[-MOST:]}).encode() + b"\n"


def check_list(what: str, suspects: Iterable[str], there: Callable[[str], bool]) -> None:
    """Raises OSError if `there(path)` finds a file that the list does not contain."""
    for path in sorted(suspects):
        if there(path):
            raise OSError(errno.EIO, printable(f"{what} {INCOMPLETE}: {path} exists, but is not in it", 240))
