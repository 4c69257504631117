"""How long a rank usually stays where it is now, by the calls that it recorded. Runs in the agent.

A training loop passes the same places again and again, with or without step marks: a bucket of DDP, a layer of FSDP, a
message of a pipeline stage. A place that was passed before tells how long the way to the next call takes. A place that
is new (the first step, the first evaluation) tells nothing, and the rank may take its time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allranks.blackbox.header import read_header
from allranks.blackbox.reader import read_rows
from allranks.errors import InputError

PASSED = 2  # times that a place must have been passed before
_PLACE = ("op", "group", "stack", "peer")  # sizes may differ from step to step


@dataclass(frozen=True)
class Rhythm:
    """How long it took from earlier calls at the rank's place to the call after them, in seconds."""

    pauses_s: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the place was passed often enough to tell."""
        return len(self.pauses_s) >= PASSED


def read_rhythm(path: str) -> Rhythm:
    """Of the rank that writes this black box; an unreadable one knows nothing."""
    try:
        return measure_rhythm(read_rows(path, read_header(path)))
    except InputError:
        return Rhythm()


def measure_rhythm(rows: np.ndarray) -> Rhythm:
    """Of recorded calls in the order of their records."""
    if len(rows) <= PASSED:
        return Rhythm()
    same = np.ones(len(rows) - 1, bool)
    for column in _PLACE:
        same &= rows[column][:-1] == rows[column][-1]
    pauses = np.diff(rows["created_ns"])[same] / 1e9
    return Rhythm(tuple(float(pause) for pause in np.maximum(pauses, 0.0)))
