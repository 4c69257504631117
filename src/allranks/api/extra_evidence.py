"""What `diagnose` is told besides the dumps: stack captures among the files, and processes that are gone.

Reads files and /proc; makes `RankNow`. Used by the diagnose command.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import InputError
from allranks.load import LoadResult
from allranks.model.diagnosis import RankNow
from allranks.model.trace import Frame, RankTrace

if TYPE_CHECKING:  # only when there are captures: start-up counts
    from allranks.model.stacks import StackFrame, StacksReport, ThreadStack

#: Python's own stack dumps, as people write them beside their dumps: stack_2.txt, rank2.stack.txt
_PLAIN = re.compile(r"stacks?[_.-]?(?:rank)?[_.-]?(\d{1,7})\.txt$|rank[_.-]?(\d{1,7})\.stacks?\.txt$")
MAX_TEXT_BYTES = 4 << 20


def find_seen(loaded: LoadResult, traces: list[RankTrace], roots: list[str]) -> list[RankNow]:
    """One entry per rank of which something is known. Notes name files as seen from one of the `roots`."""
    found = {now.rank: now for now in _gone(traces)}
    for report in [*_bundles(loaded.other), *_plain_texts((note.path for note in loaded.files), roots)]:
        for rank, state in report.ranks.items():
            if rank not in found:
                found[rank] = RankNow(rank, state.cause, state.where, state.evidence, _frames(state.stack))
    return [found[rank] for rank in sorted(found)]


def is_post_mortem(traces: list[RankTrace]) -> bool:
    """Whether all black boxes are of this machine and their processes are gone: then nothing runs any more."""
    boxes = _local_boxes(traces)
    return bool(boxes) and len(boxes) == len(traces) and not any(_is_running(trace) for trace in boxes)


def taken_ns(traces: list[RankTrace], roots: list[str]) -> int:
    """When black boxes were as they are: now, where one of them is still written to; the time of the copies where
    none is; 0 when nothing tells (a copy that kept the time of the original)."""
    boxes = [trace for trace in traces if trace.kind.startswith("black box")]
    files = {trace.path: file for trace in boxes if (file := _file_of(trace.path, roots)) is not None}
    for trace in _local_boxes(boxes):
        if _is_running(trace) and trace.path in files and _is_mapped(trace.header.pid, files[trace.path]):
            return time.time_ns()
    newest = max((trace.header.written_ns for trace in boxes), default=0)
    copied = max((file.stat().st_mtime_ns for file in files.values()), default=0)
    return copied if copied > newest else 0


def _file_of(path: str, roots: list[str]) -> Path | None:
    """The file of a trace, whose path may be as seen from one of the `roots`."""
    places = [Path(path), *(Path(root) / path for root in roots)]
    return next((place for place in places if place.is_file()), None)


def _is_mapped(pid: int, file: Path) -> bool:
    """Whether the process writes to this very file; True where we may not look."""
    from allranks.blackbox.reader import boxes_of_process

    if not os.access(f"/proc/{pid}/maps", os.R_OK):
        return True
    return any(os.path.samefile(box, file) for box in boxes_of_process(pid))


def _gone(traces: list[RankTrace]) -> list[RankNow]:
    """Ranks of this machine whose process is gone while others still run. When all are gone it tells nothing."""
    if is_post_mortem(traces):
        return []
    return [
        RankNow(trace.header.rank, "gone", "", f"its process {trace.header.pid} is gone")
        for trace in _local_boxes(traces)
        if trace.header.rank is not None and not _is_running(trace)
    ]


def _local_boxes(traces: list[RankTrace]) -> list[RankTrace]:
    here = os.uname().nodename  # the socket module would take longer than the diagnosis
    return [
        t for t in traces if t.kind.startswith("black box") and t.header.host == here and t.header.pid > 0
    ]


def _is_running(trace: RankTrace) -> bool:
    return os.path.exists(f"/proc/{trace.header.pid}")


def _bundles(paths: list[str]) -> list[StacksReport]:
    """Reports of the folders that hold captures."""
    if not paths:
        return []
    from allranks.stacks import read_bundle

    reports = []
    for folder in sorted({Path(path).parent for path in paths}):
        try:
            reports.append(read_bundle(folder))
        except InputError as error:
            print(f"stack captures in {folder} left out: {error}", file=sys.stderr)
    return reports


def _plain_texts(paths: Iterable[str], roots: list[str]) -> list[StacksReport]:
    """Reports of texts that faulthandler wrote, one file per rank."""
    named = [(path, match) for path in paths if (match := _PLAIN.search(Path(path).name.lower()))]
    if not named:
        return []
    from allranks.model.stacks import Capture, ProcessCapture, Snapshot
    from allranks.stacks import classify

    captures = []
    for path, match in named:
        places = [Path(path), *(Path(root) / path for root in roots)]
        stacks = next((read for place in places if (read := _read_plain(place))), ())
        if stacks:
            captures.append(
                ProcessCapture(int(match[1] or match[2]), snapshots=(Snapshot(0, stacks=stacks),))
            )
    return [classify(Capture(tuple(captures)))] if captures else []


def _read_plain(path: Path) -> tuple[ThreadStack, ...]:
    from allranks.stacks.other_output import parse_faulthandler

    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ()
    return parse_faulthandler(text) if "most recent call first" in text else ()


def _frames(stack: tuple[StackFrame, ...]) -> tuple[Frame, ...]:
    return tuple(Frame(frame.name, frame.file, frame.line) for frame in stack)
