"""Preloaded into the ranks of a drill (ALLRANKS_PRELOAD): fires the plan's faults at the progress mark.

Runs in the rank. The plan is `plan.json` in the folder $ALLRANKS_DRILL; a fault fires once in the life of the
drill, whoever restarts; each mark of each rank is one line of `steps.RANK.PID`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from allranks.record.recorder import Recorder
from allranks.testing.misdeeds import commit

_folder = Path(os.environ["ALLRANKS_DRILL"])
_rank = int(os.environ.get("ALLRANKS_RANK") or os.environ.get("RANK") or 0)
_faults: list[dict[str, Any]] = json.loads((_folder / "plan.json").read_text())["faults"]
_marks = open(_folder / f"steps.{_rank}.{os.getpid()}", "a", buffering=1)  # noqa: SIM115  (lives as long as the rank)
_original = Recorder.step


def tell(**facts: Any) -> None:
    """A script may report what the drill cannot see: digest="…", samples=[…], loss=…; see `allranks drill --help`."""
    _marks.write(json.dumps({"at": time.time(), **facts}) + "\n")


def _step(recorder: Recorder, number: int, label: str | None = None) -> None:
    _original(recorder, number, label)
    if os.getpid() != recorder.pid:
        return
    tell(step=number)
    for index, fault in enumerate(_faults):
        if fault["rank"] != _rank or number < fault["at_step"]:
            continue
        if fault["kind"] == "slow" and number < fault["at_step"] + 20:
            _fire(index, number)
            commit("slow", fault["for_s"])
        elif _fire(index, number):
            commit(fault["kind"], fault["for_s"])


def _fire(index: int, step: int) -> bool:
    """True for the first caller over all lives of all ranks; leaves the time and step on disk first."""
    path = _folder / f"fired.{index}"
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as out:
        out.write(json.dumps({"at": time.time(), "step": step, "rank": _rank, "pid": os.getpid()}))
    return True


Recorder.step = _step  # type: ignore[assignment, method-assign]
