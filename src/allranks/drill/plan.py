"""A fault plan: what is to go wrong, in which rank, at which step. Read from YAML or JSON; pure but for reading.

seed: 7
faults:
  - {kind: kill, rank: 1, at_step: 12}
  - {kind: hang, replica: random, at_step: [20, 30], for_s: 60}
  - {kind: kill, rank: 1, at_step: 0, at: heal}

`at` is the phase in which the fault strikes: "step" (default, at the mark), "heal" (a replica that joins loads its state),
"regroup" (the first step in a new group, or one that is begun again; after a restart: the first step), or one that the script names with
`allranks.drill.preload.reach("save")`. Faults of other phases than "step" wait until those before them have fired.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from allranks.drill.self_faults import FAULTS, STEP
from allranks.errors import InputError
from allranks.model.yaml_tree import read_yaml


@dataclass(frozen=True)
class DrillFault:
    """One fault, fully decided. `rank` is the global rank; `for_s` 0 means for ever."""

    kind: str
    rank: int
    at_step: int
    for_s: float = 0.0
    at: str = STEP  # the phase


@dataclass(frozen=True)
class DrillPlan:
    seed: int
    faults: tuple[DrillFault, ...]

    def to_json(self) -> str:
        return json.dumps({"seed": self.seed, "faults": [asdict(fault) for fault in self.faults]})


def read_plan(path: Path, *, ranks: int | None = None, ranks_per_replica: int = 1) -> DrillPlan:
    """Reads a plan and decides everything random in it; every mistake is an InputError that names its place."""
    try:
        content = read_yaml(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is neither YAML nor JSON: {error}") from error
    return make_plan(content, ranks=ranks, ranks_per_replica=ranks_per_replica, name=str(path))


def make_plan(
    content: object, *, ranks: int | None = None, ranks_per_replica: int = 1, name: str = "plan"
) -> DrillPlan:
    """A plan from plain data."""
    if not isinstance(content, dict) or not isinstance(content.get("faults"), list):
        raise InputError(
            f"{name}: a plan is a mapping with `faults`, a list",
            hint="faults:\n  - {kind: kill, rank: 1, at_step: 12}",
        )
    seed = content.get("seed", 0)
    if not isinstance(seed, int):
        raise InputError(f"{name}: seed must be a whole number, got {seed!r}")
    dice = random.Random(seed)
    faults = tuple(
        _fault(item, f"{name}: faults[{i}]", dice, ranks, ranks_per_replica)
        for i, item in enumerate(content["faults"])
    )
    return DrillPlan(seed, faults)


def _fault(item: object, place: str, dice: random.Random, ranks: int | None, per_replica: int) -> DrillFault:
    if not isinstance(item, dict):
        raise InputError(f"{place} must be a mapping, got {item!r}")
    unknown = set(item) - {"kind", "rank", "replica", "at_step", "for_s", "at"}
    if unknown:
        known = "Known: kind, rank or replica, at_step, at, for_s"
        raise InputError(f"{place} has unknown keys {sorted(map(str, unknown))}", hint=known)
    kind, at = item.get("kind"), item.get("at", STEP)
    if not isinstance(kind, str) or kind not in FAULTS:
        raise InputError(f"{place}: unknown kind {kind!r}", hint=f"Known kinds: {', '.join(FAULTS)}")
    if not isinstance(at, str) or not at:
        raise InputError(f"{place}.at must be the name of a phase, got {at!r}")
    for_s = item.get("for_s", 0.0)
    if not isinstance(for_s, (int, float)) or for_s < 0:
        raise InputError(f"{place}.for_s must be seconds, got {for_s!r}")
    rank = _rank(item, place, dice, ranks, per_replica)
    return DrillFault(kind, rank, _step(item, place, dice), float(for_s), at)


def _rank(
    item: dict[str, object], place: str, dice: random.Random, ranks: int | None, per_replica: int
) -> int:
    if ("rank" in item) == ("replica" in item):
        raise InputError(f"{place}: give either rank or replica")
    if "rank" in item:
        rank = _number(item["rank"], f"{place}.rank", dice, ranks)
    else:
        replicas = None if ranks is None else ranks // per_replica
        rank = _number(item["replica"], f"{place}.replica", dice, replicas) * per_replica
    if ranks is not None and not 0 <= rank < ranks:
        raise InputError(f"{place}: rank {rank} does not exist in a job of {ranks}")
    return rank


def _step(item: dict[str, object], place: str, dice: random.Random) -> int:
    at = item.get("at_step", 1)
    if isinstance(at, list) and len(at) == 2 and all(isinstance(n, int) for n in at) and at[0] <= at[1]:
        at = dice.randint(at[0], at[1])
    if not isinstance(at, int) or at < 0:
        raise InputError(f"{place}.at_step must be a step or [first, last], got {item.get('at_step')!r}")
    return at


def _number(value: object, place: str, dice: random.Random, count: int | None) -> int:
    if value == "random":
        if count is None:
            raise InputError(
                f'{place}: "random" needs the number of ranks',
                hint="Give --ranks N, or run the job with `allranks run --replicas N`.",
            )
        return dice.randrange(count)
    if not isinstance(value, int) or value < 0:
        raise InputError(f'{place} must be a number or "random", got {value!r}')
    return value
