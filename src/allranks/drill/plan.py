"""A fault plan: which faults to inject, in which rank, at which step. Read from YAML or JSON; pure except for reading.

seed: 7
faults:
  - {kind: kill, rank: 1, at_step: 12}
  - {kind: hang, replica: random, at_step: [20, 30], for_s: 60}
  - {kind: kill, rank: 1, at_step: 0, at: heal}

`at` is the phase of the fault: "step" (default, at the mark), "heal" (a joining replica loads its state), "regroup" (the first
step in a new group, a retried step, or the first step after a restart), or a name that the script passes to
`allranks.drill.preload.reach("save")`. Faults in phases other than "step" wait until all faults before them have fired.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from allranks.drill.self_faults import FAULTS, STEP
from allranks.errors import InputError
from allranks.model.parsing import convert
from allranks.model.yaml_tree import read_yaml

EXAMPLE = "faults:\n  - {kind: kill, rank: 1, at_step: 12}"


@dataclass(frozen=True)
class DrillFault:
    """One fault without random parts. `rank` is the global rank; `for_s` 0 means for ever."""

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
    """Reads a plan and draws its random parts. InputError, with its place, for every mistake."""
    try:
        content = read_yaml(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is neither YAML nor JSON: {error}") from error
    return make_plan(content, ranks=ranks, ranks_per_replica=ranks_per_replica, name=str(path))


_Number = Annotated[int, msgspec.Meta(ge=0)]


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault as written in the file."""

    kind: str
    rank: _Number | Literal["random"] | None = None
    replica: _Number | Literal["random"] | None = None
    at_step: _Number | Annotated[list[_Number], msgspec.Meta(min_length=2, max_length=2)] = 1
    for_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    at: Annotated[str, msgspec.Meta(min_length=1)] = STEP


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    faults: list[_Fault]
    seed: int = 0


def make_plan(
    content: object, *, ranks: int | None = None, ranks_per_replica: int = 1, name: str = "plan"
) -> DrillPlan:
    """A plan from plain data."""
    try:
        written = convert(content, _Plan)
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: {error}", hint=EXAMPLE) from error
    dice = random.Random(written.seed)
    faults = []
    for number, one in enumerate(written.faults):
        place = f"{name}: faults[{number}]"
        if one.kind not in FAULTS:
            raise InputError(f"{place}: unknown kind {one.kind!r}", hint=f"Known kinds: {', '.join(FAULTS)}")
        rank = _rank(one, place, dice, ranks, ranks_per_replica)
        steps = one.at_step if isinstance(one.at_step, list) else [one.at_step] * 2
        if steps[0] > steps[1]:
            raise InputError(f"{place}.at_step must be a step or [first, last], got {steps}")
        step = dice.randint(*steps) if isinstance(one.at_step, list) else steps[0]
        faults.append(DrillFault(one.kind, rank, step, one.for_s, one.at))
    return DrillPlan(written.seed, tuple(faults))


def _rank(one: _Fault, place: str, dice: random.Random, ranks: int | None, per_replica: int) -> int:
    """The global rank of a fault; for a replica, its first rank."""
    if (one.rank is None) == (one.replica is None):
        raise InputError(f"{place}: give either rank or replica")
    each = per_replica if one.rank is None else 1
    value = one.replica if one.rank is None else one.rank
    if value == "random":
        if ranks is None:
            raise InputError(
                f'{place}: "random" needs the number of ranks',
                hint="Give --ranks N, or run the job with `allranks run --replicas N`.",
            )
        value = dice.randrange(ranks // each)
    assert isinstance(value, int)
    if ranks is not None and value * each >= ranks:
        raise InputError(f"{place}: rank {value * each} does not exist in a job of {ranks}")
    return value * each
