"""Records every collective of a rank into a file (black box) that survives the process.

    import allranks
    allranks.record()               # before the first process group is created
    allranks.step(n)                # progress mark, once per training step
    with allranks.expect("checkpoint", up_to_s=300): ...

Runs in the rank. Importing this package has no side effects and does not need torch. `python -m allranks.recording train.py`
records an unchanged script.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from allranks.recording.comm_hook import FlightRecorderHook
    from allranks.recording.options import RecorderOptions
    from allranks.recording.recorder import Recorder

__all__ = [
    "FlightRecorderHook",
    "Recorder",
    "RecorderOptions",
    "current",
    "expect",
    "phase",
    "record",
    "step",
]

_current: Recorder | None = None


def record(
    *,
    folder: str | Path | None = None,
    job: str | None = None,
    capacity: int | None = None,
    stack_depth: int | None = None,
    **more: object,
) -> Recorder:
    """Starts this process's recorder, or returns the running one. `more` are the other fields of RecorderOptions.

    Does not raise: with a full disk or an unwritable folder it warns and records nothing; for an invalid setting it warns
    and uses the default. `ALLRANKS_RECORD=0` turns it off; `ALLRANKS_RECORD=auto` (`allranks record`) starts it without a
    call.
    """
    global _current
    if _current is not None and _current.active:
        return _current
    from allranks.recording.options import tolerant
    from allranks.recording.recorder import Recorder
    from allranks.recording.writer import warn_once

    given = {"folder": folder, "job": job, "capacity": capacity, "stack_depth": stack_depth, **more}
    options = {name: value for name, value in given.items() if value is not None}
    if _imported_by_spawn():
        options["enabled"] = False
    settings, complaints = tolerant(options)
    for complaint in complaints:
        warn_once(complaint)
    _current = Recorder(settings)
    return _current.start()


def _imported_by_spawn() -> bool:
    """Whether a spawned child, such as a DataLoader worker, is importing the main script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def current() -> Recorder | None:
    """The running recorder of this process, or None."""
    return _current if _current is not None and _current.active_process else None


def step(
    number: int,
    label: str | None = None,
    *,
    loss: float | None = None,
    tokens: float | None = None,
    flops: float | None = None,
) -> None:
    """Marks the start of training step `number`. Does nothing without a recorder.

    `loss` (a number, not a GPU tensor) is plotted on the job's page. `tokens` and `flops` are this rank's part of the step;
    from them the page shows tokens per second, and the MFU if the peak of the GPUs is known. Marks of one step are summed.
    """
    if _current is not None:
        _current.step(number, label, loss, tokens, flops)


def phase(name: str) -> None:
    """Sets the name of the current phase ("rollout", "reward"); "" for none. Does nothing without a recorder."""
    if _current is not None:
        _current.phase(name)


@contextlib.contextmanager
def expect(phase: str, up_to_s: float) -> Iterator[None]:
    """Declares that this block may take `up_to_s` seconds without progress, which is then not a hang."""
    with _current.expect(phase, up_to_s) if _current is not None else contextlib.nullcontext():
        yield


def announce(phase: str, up_to_s: float) -> None:
    """As `expect`, until the program exits or `up_to_s` seconds have passed."""
    if _current is not None:
        _current.announce(phase, up_to_s)


def given_up(works: Iterable[object], error: Exception) -> None:
    """Records the state of the calls of these works. Call it before their group is aborted."""
    if _current is not None:
        _current.given_up(works, error)


def __getattr__(name: str) -> object:
    """Imports heavier names on first use."""
    homes = {"Recorder": "recorder", "RecorderOptions": "options", "FlightRecorderHook": "comm_hook"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
