"""The black box of a rank: records every collective into a file that outlives the process.

    import allranks
    allranks.record()               # before the first process group is made; that is all
    allranks.step(n)                # once per training step: the progress mark
    with allranks.expect("checkpoint", up_to_s=300): ...

Runs in the rank. Importing does nothing and needs no torch. `python -m allranks.recording train.py` records a script
that knows nothing of us.
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
    """Starts this process's recorder, or returns the one that runs. `more` are the other fields of RecorderOptions.

    Never stops a training: a full disk or an unwritable folder is one warning and recording is off; a setting that makes
    no sense is one warning and its default is used.
    `ALLRANKS_RECORD=0` turns it off; `ALLRANKS_RECORD=auto` (`allranks record`) starts it without a call.
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
    """Whether we are at the top of a script that a spawned child (a DataLoader worker) imports a second time."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def current() -> Recorder | None:
    """The recorder of this process, if one runs."""
    return _current if _current is not None and _current.active_process else None


def step(
    number: int,
    label: str | None = None,
    *,
    loss: float | None = None,
    tokens: float | None = None,
    flops: float | None = None,
) -> None:
    """The progress mark: training step `number` begins now. Nothing happens when nothing is recorded.

    `loss`, a number and not a tensor on a GPU, is drawn on the page of the job. `tokens` and `flops` are this rank's part of the
    step: the job shows tokens per second, and its MFU where the peak of its GPUs is known. Marks of one step are added up.
    """
    if _current is not None:
        _current.step(number, label, loss, tokens, flops)


def phase(name: str) -> None:
    """Names what the program does from now on ("rollout", "reward"); "" for nothing. Nothing happens when nothing is
    recorded."""
    if _current is not None:
        _current.phase(name)


@contextlib.contextmanager
def expect(phase: str, up_to_s: float) -> Iterator[None]:
    """Declares a silence: this block may take `up_to_s` seconds without being taken for a hang."""
    with _current.expect(phase, up_to_s) if _current is not None else contextlib.nullcontext():
        yield


def announce(phase: str, up_to_s: float) -> None:
    """Declares a silence that ends with the program, or after `up_to_s` seconds."""
    if _current is not None:
        _current.announce(phase, up_to_s)


def given_up(works: Iterable[object], error: Exception) -> None:
    """The group of these works is about to be aborted. Before it is: their calls are looked at now, and not again."""
    if _current is not None:
        _current.given_up(works, error)


def __getattr__(name: str) -> object:
    """Heavier names are imported when they are first asked for."""
    homes = {"Recorder": "recorder", "RecorderOptions": "options", "FlightRecorderHook": "comm_hook"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
