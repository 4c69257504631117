"""Reads the evidence of a job from files, for the judge (incidents/judge.py).

An incident's folder holds black boxes, stacks and observed.json: how a process ended, which ranks have made no progress since
a regroup, when the copies were made. Any other folder, or a mix of files and archives, may hold dumps, stack captures, logs and
answers of NCCL. /proc shows which processes of this machine are gone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from allranks.blackbox.header import is_alive
from allranks.diagnosis.context import is_secondary
from allranks.errors import AllranksError, InputError
from allranks.incidents.rank_logs import read_end
from allranks.load import LoadOptions, LoadResult, load_paths
from allranks.load.sources import archive_of, unpack
from allranks.model.diagnosis import FileNote, Finding, RankNow
from allranks.model.files import write_atomically
from allranks.model.parsing import from_json, without_secrets
from allranks.model.stacks import IDLE_CHILD, RankState, StacksReport, is_user_file
from allranks.model.trace import Frame, RankTrace

if TYPE_CHECKING:  # only when there are captures: start-up counts
    from allranks.model.stacks import Capture

log = logging.getLogger("allranks.agent")

T = TypeVar("T")

FILE = "observed.json"
MAX_TEXT_BYTES = 4 << 20
#: Names of capture files, of `allranks stacks` and other tools.
_CAPTURE = re.compile(
    r"^bundle\.json$|^rank\d+(?:\.child\d+)?\.(?:pyspy|proc|gdb|cuda|pystack|faulthandler|progress\.jsonl)"
    r"|^(?:pyspy|cudagdb)_.+_\d+\.txt$"
)
_LOG = re.compile(r"\.(?:log|out|err|txt)$|^std(?:out|err)")
_LOG_RANK = re.compile(r"rank[_.-]?(\d{1,7})|[_/](\d{1,7})/std(?:out|err)")
#: The last line of a traceback, with or without torch's prefix; the end of a C++ program; messages of shells and kernels.
_ENDED = re.compile(
    r"^(?:\[rank(\d{1,7})\]:\s*)?((?:[\w.]+(?:Error|Exception|Interrupt)\b[^\n]{0,300})"
    r"|terminate called after throwing an instance of '[^'\n]{1,100}'(?:\s+what\(\):\s*[^\n]{0,300})?"
    r"|[^\n]{0,200}(?:Connection (?:closed|reset) by peer|\[enforce fail at|oom_kill event)[^\n]{0,200}"
    r"|Fatal Python error: [^\n]{0,200}|(?:Killed|Segmentation fault|Bus error|Aborted)[^\n]{0,80}"
    r"|Out of memory[^\n]{0,200})$",
    re.M,
)


@dataclass(frozen=True)
class Observed:
    """What the agent observed of an incident besides black boxes and stacks. Stored as observed.json."""

    taken_ns: int = 0  # epoch: when the black boxes were copied
    gone: tuple[int, ...] = ()  # ranks whose process exited without shutting down
    told: Finding | None = None  # known without a diagnosis: a death, a cut connection, a lost node
    reason: str = ""  # of the incident
    quiet_s: float = 0.0
    unmoved: tuple[int, ...] = ()  # ranks that have not retried their step, while others have
    marked: tuple[int, ...] = ()  # ranks that have made steps
    behind: tuple[int, ...] = ()  # ranks that the others continue without
    still_s: float = 10.0  # the silence that this job's watch takes for a stall
    looping: bool = False  # collectives are completed, steps are not
    left: tuple[int, ...] = ()  # ranks whose program ended by itself
    diverged: Finding | None = None  # calls that differed while the job still ran
    outcome: str = ""  # of a stall that is not, or not yet, a hang
    ended: bool = False  # the stall has ended, and the ranks move again

    def write(self, folder: Path) -> None:
        write_atomically(folder / FILE, json.dumps(asdict(self)))


def read_observed(folder: Path) -> Observed | None:
    """What the agent observed; None when the file is missing or unreadable."""
    try:
        return from_json((folder / FILE).read_bytes(), Observed)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True)
class Evidence:
    """All evidence of a job."""

    traces: Sequence[RankTrace] = ()
    files: Sequence[FileNote] = ()  # every file, with its use
    seen: tuple[RankNow, ...] = ()  # what stacks, logs and /proc show of ranks
    reports: tuple[StacksReport, ...] = ()
    logs: dict[int, str] = field(default_factory=dict)  # rank -> how its log ends, as a sentence
    ras: tuple[str, ...] = ()  # sentences about the report of NCCL's RAS service
    observed: Observed | None = None  # None: not the folder of an incident
    now_ns: int = 0  # epoch: time of the state in the black boxes; 0: not known
    ended: bool = False  # all processes are gone, at an unknown time
    captures: tuple[Capture, ...] = ()
    missing: tuple[str, ...] = ()  # evidence that could not be read
    copied: bool = False  # `now_ns` is the time of copies: the job may have stopped long before

    @property
    def report(self) -> StacksReport | None:
        """The report of the stacks; of several captures a hung one, else that with the most ranks."""
        return max(self.reports, key=lambda one: (one.hung is True, len(one.ranks)), default=None)


def is_incident(roots: Sequence[str]) -> bool:
    """Whether this is the folder of one incident."""
    return len(roots) == 1 and (Path(roots[0]) / FILE).is_file()


def read_incident(folder: Path) -> Evidence:
    """Reads the folder of an incident."""
    observed = read_observed(folder) or Observed()
    missing: list[str] = []
    loaded = attempt("black boxes", lambda: load_paths([str(folder / "boxes")], LoadOptions()), missing)
    captures, reports = _read_stacks(folder / "stacks", observed, missing)
    seen = {
        rank: _rank_now(state, native=False) for report in reports for rank, state in report.ranks.items()
    }
    seen |= {rank: RankNow(rank, "gone", "", "its process is gone") for rank in observed.gone}
    traces, files = (loaded.traces, loaded.files) if loaded is not None else ([], [])
    return Evidence(
        traces,
        files,
        tuple(seen.values()),
        reports,
        observed=observed,
        now_ns=observed.taken_ns,
        captures=captures,
        missing=tuple(missing),
    )


def _read_stacks(
    folder: Path, observed: Observed, missing: list[str]
) -> tuple[tuple[Capture, ...], tuple[StacksReport, ...]]:
    if not folder.exists():
        return (), ()
    from allranks.stacktraces import Stillness, classify, read_capture

    stillness = Stillness(still_s=min(observed.still_s, Stillness.still_s))

    def work() -> tuple[Capture, StacksReport]:
        capture = read_capture(folder)
        return capture, classify(capture, stillness=stillness, quiet_s=observed.quiet_s)

    found = attempt("stacks", work, missing)
    return ((), ()) if found is None else ((found[0],), (found[1],))


def _rank_now(state: RankState, native: bool) -> RankNow:
    frames = tuple(Frame(one.name, one.file, one.line) for one in state.stack if native or not one.native)
    return RankNow(state.rank, state.cause, nearest_line(state), state.evidence, frames, state.held_by)


def nearest_line(state: RankState) -> str:
    """The user's line nearest the hang: the worker's where a DataLoader worker hangs, else the rank's own."""
    if state.cause == "dataloader_wait":
        for child in state.children:
            file = child.where.split(":")[0]
            if child.cause not in (*IDLE_CHILD, "unknown") and is_user_file(file):
                return f"{child.where} (DataLoader worker {child.child})"
    return state.where


def attempt(what: str, work: Callable[[], T], missing: list[str]) -> T | None:
    """Reads one part of the evidence. A failure is added to `missing`, and the rest still counts."""
    try:
        return work()
    except (AllranksError, OSError) as error:
        missing.append(f"{what}: {error}")
    except Exception as error:  # a bug of ours
        log.exception("%s could not be read", what)
        missing.append(f"{what}: {error!r}")
    return None


def find_evidence(loaded: LoadResult, traces: list[RankTrace], roots: list[str]) -> Evidence:
    """Reads all evidence in the files. Notes name files relative to one of the `roots`."""
    paths = _Paths(roots)
    missing: list[str] = []
    with ExitStack() as stack:
        if any(note.status != "ok" and archive_of(note.path) for note in loaded.files):
            import tempfile

            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="allranks-"))
                paths.unpack(loaded.files, folder)
            except OSError as error:
                missing.append(f"stacks and logs in archives: {error}")
        return _find_evidence(loaded, traces, paths, missing)


def _find_evidence(
    loaded: LoadResult, traces: list[RankTrace], paths: _Paths, missing: list[str]
) -> Evidence:
    boxes = any(trace.kind.startswith("black box") for trace in traces)
    ended = boxes and _is_post_mortem(traces)
    found = {now.rank: now for now in _gone(traces)}
    used: dict[str, str] = {}
    captures = _captures(loaded.files, paths, used, missing)
    reports = _classify(captures)
    for report in reports:
        for rank, state in report.ranks.items():
            found.setdefault(rank, _rank_now(state, native=True))
    logs, ras = _texts(loaded.files, paths, used)
    here = {trace.header.rank for trace in traces}
    for rank, text in logs.items():  # of a rank without a dump
        if rank not in found and rank not in here and not is_secondary(text):
            found[rank] = RankNow(rank, "gone", "", f"its log ends with: {text}")
    files = [
        replace(note, status="ok", kind=used[note.path], note="used") if note.path in used else note
        for note in loaded.files
    ]
    seen = tuple(found[rank] for rank in sorted(found))
    now_ns, copied = _taken_ns(traces, paths.roots) if boxes and not ended else (0, False)
    return Evidence(
        traces, files, seen, reports, logs, ras, None, now_ns, ended, tuple(captures), tuple(missing), copied
    )


def _classify(captures: Sequence[Capture]) -> tuple[StacksReport, ...]:
    if not captures:
        return ()
    from allranks.stacktraces import classify

    return tuple(classify(capture) for capture in captures)


class _Paths:
    """Finds the files that notes name, relative to one of the roots or in an archive."""

    def __init__(self, roots: list[str]) -> None:
        self.roots = roots
        self._unpacked: dict[str, str] = {}

    def find(self, path: str) -> str:
        """The path of a file that can be opened; "" when there is none."""
        paths = (path, *(os.path.join(root, path) for root in self.roots))
        return self._unpacked.get(path) or next((one for one in paths if os.path.isfile(one)), "")

    def unpack(self, files: list[FileNote], folder: str) -> None:
        """Unpacks the files of archives that are not dumps into a folder."""
        wanted: dict[str, set[str]] = {}
        for note in files:
            if note.status != "ok" and (archive := archive_of(note.path)):
                wanted.setdefault(archive, set()).add(note.path)
        for archive, members in wanted.items():
            if path := self.find(archive):
                self._unpacked |= unpack(archive, path, members, folder)


def _texts(
    files: list[FileNote], paths: _Paths, used: dict[str, str]
) -> tuple[dict[int, str], tuple[str, ...]]:
    """(the ends of ranks' logs, the report of NCCL RAS) from the plain text files."""
    logs: dict[int, str] = {}
    reported: list[str] = []
    for note in files:
        if note.status == "ok" or note.path in used or not _LOG.search(Path(note.path).name.lower()):
            continue
        text = read_end(paths.find(note.path), MAX_TEXT_BYTES)
        counts = "launched up to operation" in text
        ends = list(_ENDED.finditer(text))
        if counts:
            from allranks.model.stacks import RasReply
            from allranks.stacktraces.ras import describe, read_counts

            if read_counts(text):
                used[note.path] = "NCCL RAS answer"
                reported += describe((RasReply("", 0.0, text), RasReply("", 0.0, text)))
        elif ends:
            named = _LOG_RANK.search(note.path)
            for end in ends:
                rank = end[1] or (named and (named[1] or named[2]))
                if rank is not None:
                    logs[int(rank)] = without_secrets(" ".join(end[2].split()))
                    used[note.path] = "log"
    return logs, tuple(dict.fromkeys(reported))


def _is_post_mortem(traces: list[RankTrace]) -> bool:
    """Whether all black boxes are of processes of this machine that are gone."""
    boxes = _local_boxes(traces)
    return bool(boxes) and len(boxes) == len(traces) and not any(_is_running(trace) for trace in boxes)


def _taken_ns(traces: list[RankTrace], roots: list[str]) -> tuple[int, bool]:
    """(time of the state in the black boxes, whether that is the time of copies): now if a process still writes to one of them,
    else the time of the copies; 0 if unknown, as for copies with the time of the original."""
    from allranks.blackbox.reader import boxes_of_process

    boxes = [trace for trace in traces if trace.kind.startswith("black box")]
    if taken := max((trace.header.taken_ns for trace in boxes), default=0):
        return taken, False
    files = {trace.path: place for trace in boxes if (place := _Paths(roots).find(trace.path))}
    for trace in _local_boxes(boxes):
        pid, file = trace.header.pid, files.get(trace.path)
        if _is_running(trace) and file is not None:
            # does the process write to this file? assumed if its maps may not be read
            hidden = not os.access(f"/proc/{pid}/maps", os.R_OK)
            if hidden or any(os.path.samefile(box, file) for box in boxes_of_process(pid)):
                return time.time_ns(), False
    newest = max((trace.header.written_ns for trace in boxes), default=0)
    copied = max((os.stat(place).st_mtime_ns for place in files.values()), default=0)
    return (copied, True) if copied > newest else (0, False)


def _gone(traces: list[RankTrace]) -> list[RankNow]:
    """Ranks of this machine whose process is gone while others still run. If all are gone, that is no evidence."""
    if _is_post_mortem(traces):
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
    """Now, or when its black box was copied."""
    return trace.header.taken_ns > 0 or is_alive(trace.header.pid, trace.header.start_ticks)


def _captures(
    files: list[FileNote], paths: _Paths, used: dict[str, str], missing: list[str]
) -> list[Capture]:
    """The captures among the files, joined if no rank is in two of them. Adds their files to `used`."""
    found = [
        note.path for note in files if note.kind == "stacks" or _CAPTURE.search(os.path.basename(note.path))
    ]
    held = {path: Path(place) for path in found if (place := paths.find(path))}
    if not held:
        return []
    from allranks.stacktraces import join, read_capture
    from allranks.stacktraces.raw_files import read_by_content

    captures = []
    named = {path: place for path, place in held.items() if _CAPTURE.search(place.name)}
    for folder in sorted({place.parent for place in named.values()}):
        try:
            captures.append(read_capture(folder, by_content=False))
            used.update((path, "stacks") for path, place in named.items() if place.parent == folder)
        except InputError as error:
            missing.append(f"stack captures in {folder}: {error}")
    others = {path: place for path, place in held.items() if path not in named}
    if (by_content := read_by_content(sorted(others.items()))).processes:
        captures.append(by_content)
        used.update(dict.fromkeys(others, "stacks"))
    ranks = [process.rank for capture in captures for process in capture.processes if process.child is None]
    whole = 0 < len(ranks) == len(set(ranks))
    return [join(captures)] if whole else captures
