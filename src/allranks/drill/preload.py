"""Preloaded into the ranks of a drill (ALLRANKS_PRELOAD): fires the plan's faults at the progress mark.

Runs in the rank. The plan is `plan.json` in the folder $ALLRANKS_DRILL. A fault fires once per drill, restarted processes
included. Each mark of a rank is a line in `steps.RANK.PID`. Replicas report each step that the managed optimizer applied, with a
fingerprint of the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from allranks.drill.plan import DrillFault
from allranks.drill.self_faults import STEP, around, inject
from allranks.recording.recorder import Recorder

if TYPE_CHECKING:
    from allranks.manager.optimizer import OptimizerWrapper

MAX_BYTES = 64 << 20  # of parameters with a fingerprint
_folder = Path(os.environ["ALLRANKS_DRILL"])
_faults = [DrillFault(**fault) for fault in json.loads((_folder / "plan.json").read_text())["faults"]]
_original = Recorder.step
_begun: set[int] = set()  # steps that this process has marked
_groups = 0  # groups of replicas that this process has made
_marked_in = 0  # number of groups at the last mark


@cache
def _rank() -> int:
    """Read late, since a warm process gets its rank long after this import."""
    return int(os.environ.get("ALLRANKS_RANK") or os.environ.get("RANK") or 0)


@cache
def _marks() -> TextIO:
    return open(_folder / f"steps.{_rank()}.{os.getpid()}", "a", buffering=1)


def tell(**facts: object) -> None:
    """Reports facts to the drill. Scripts call it with digest="…", samples=[…], loss=…; see `allranks drill --help`."""
    _marks().write(json.dumps({"at": time.time(), **facts}) + "\n")


def _step(recorder: Recorder, number: int, *given: Any, **named: Any) -> None:
    global _marked_in
    _original(recorder, number, *given, **named)
    if os.getpid() != recorder.pid:
        return
    tell(step=number)
    again = number in _begun or (not _begun and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    again, _marked_in = again or 0 < _marked_in < _groups, _groups
    _begun.add(number)
    for index, fault in enumerate(_faults):
        if fault.kind == "slow" and fault.rank == _rank() and 0 <= number - fault.at_step < 20:
            _fire(index, number)
            inject("slow", fault.for_s)
    reach(STEP)
    if again:
        reach("regroup")


def reach(phase: str) -> None:
    """Fires the faults that are due in this phase. Scripts call it for their own phases ("save")."""
    step = max(_begun, default=0)
    for index, fault in enumerate(_faults):
        if fault.rank != _rank() or fault.at != phase or fault.kind == "slow":
            continue
        early = phase != STEP and not all((_folder / f"fired.{i}").exists() for i in range(index))
        if not early and (step >= fault.at_step or phase == "heal") and _fire(index, step):
            inject(fault.kind, fault.for_s)


def _fire(index: int, step: int) -> bool:
    """True for the first call of all processes; writes time and step to disk first."""
    path = _folder / f"fired.{index}"
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as out:
        out.write(json.dumps({"at": time.time(), "step": step, "rank": _rank(), "pid": os.getpid()}))
    return True


def _fingerprint(optimizer: OptimizerWrapper) -> str | None:
    """A hash of this rank's parameters; None if they are too large to hash in every step."""
    import torch

    seen, total = hashlib.blake2b(digest_size=8), 0
    for group in optimizer.param_groups:
        for value in group["params"]:
            local = value.to_local() if hasattr(value, "to_local") else value
            total += local.numel() * local.element_size()
            if total > MAX_BYTES:
                return None
            seen.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def _watch_replicas() -> None:
    from allranks.manager.manager import Manager
    from allranks.manager.optimizer import OptimizerWrapper
    from allranks.manager.regroup import Regrouper

    def count() -> None:
        global _groups
        _groups += 1

    around(Manager, "_load_healed", before=lambda: reach("heal"))
    around(Regrouper, "_connect", after=count)
    ordinary = OptimizerWrapper.step

    def step(optimizer: OptimizerWrapper, closure: Callable[[], float] | None = None) -> bool:
        applied = ordinary(optimizer, closure)
        if applied and (state := _fingerprint(optimizer)) is not None:
            made = (
                optimizer.manager.current_step() - 1
            )  # known only now: the replica may have healed meanwhile
            tell(at_step=made, state=state, part=int(os.environ.get("RANK", "0")))
        return applied

    OptimizerWrapper.step = step  # type: ignore[assignment, method-assign]


if "REPLICA_GROUP_ID" in os.environ:
    _watch_replicas()
Recorder.step = _step  # type: ignore[method-assign]
