"""What is every rank doing? Finds processes, looks at them without stopping them, merges, and says the cause.

Runs outside the ranks, in the command or the agent; needs no torch. In: live processes or files; out: the
types of `allranks.model.stacks`.

    capture = collect(find_targets(Selection()), CollectOptions())    # live
    capture = read_capture("backtraces/")                             # from files
    report = classify(capture)                                        # pure
"""

from __future__ import annotations

from pathlib import Path

from allranks.model.stacks import StacksReport
from allranks.stacktraces.bundle import join, read_capture, write_bundle
from allranks.stacktraces.classify import classify
from allranks.stacktraces.collect import CollectOptions, collect
from allranks.stacktraces.find import Selection, Target, find_targets, targets_of
from allranks.stacktraces.progress import Stillness

__all__ = [
    "CollectOptions",
    "Selection",
    "Stillness",
    "Target",
    "classify",
    "collect",
    "find_targets",
    "join",
    "read_bundle",
    "read_capture",
    "targets_of",
    "write_bundle",
]


def read_bundle(path: str | Path) -> StacksReport:
    """What every rank was doing when a bundle or a folder of raw captures was taken."""
    return classify(read_capture(path))
