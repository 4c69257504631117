"""Evidence that `diagnose` uses besides the dumps: stack captures, logs and NCCL's own answers among the files, processes that are gone.

Reads files and /proc; makes `RankNow` and lines of evidence. Used by the diagnose command.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.diagnose.phrasing import is_secondary, ranks_text
from allranks.errors import InputError
from allranks.load import LoadResult
from allranks.load.sources import archive_of, unpack
from allranks.model.diagnosis import Diagnosis, FileNote, Finding, RankNow
from allranks.model.parsing import without_secrets
from allranks.model.trace import Frame, RankTrace

if TYPE_CHECKING:  # only when there are captures: start-up counts
    from allranks.model.stacks import StackFrame, StacksReport

MAX_TEXT_BYTES = 4 << 20
#: Files of captures, as `allranks stacks` and people name them.
_CAPTURE = re.compile(
    r"^bundle\.json$|^rank\d+(?:\.child\d+)?\.(?:pyspy|proc|gdb|cuda|pystack|faulthandler|progress\.jsonl)"
    r"|^(?:pyspy|cudagdb)_.+_\d+\.txt$"
)
_LOG = re.compile(r"\.(?:log|out|err|txt)$|^std(?:out|err)")
_LOG_RANK = re.compile(r"rank[_.-]?(\d{1,7})|[_/](\d{1,7})/std(?:out|err)")
#: The last line of a traceback, perhaps behind torch's prefix; how a program in C++ ends; what shells and kernels say of a death.
_ENDED = re.compile(
    r"^(?:\[rank(\d{1,7})\]:\s*)?((?:[\w.]+(?:Error|Exception|Interrupt)\b[^\n]{0,300})"
    r"|terminate called after throwing an instance of '[^'\n]{1,100}'(?:\s+what\(\):\s*[^\n]{0,300})?"
    r"|[^\n]{0,200}(?:Connection (?:closed|reset) by peer|\[enforce fail at|oom_kill event)[^\n]{0,200}"
    r"|Fatal Python error: [^\n]{0,200}|(?:Killed|Segmentation fault|Bus error|Aborted)[^\n]{0,80}"
    r"|Out of memory[^\n]{0,200})$",
    re.M,
)


@dataclass(frozen=True)
class Evidence:
    """What was found besides the dumps."""

    seen: list[RankNow]  # one entry per rank of which something is known
    files: list[FileNote]  # every file, with those that were used named as such
    logs: dict[int, str]  # rank → how its log ends, as a sentence
    ras: tuple[str, ...]  # what NCCL's RAS service reported, as sentences
    captures: tuple[StacksReport, ...] = ()


class Places:
    """Where the files of a load are: notes name them as seen from one of the roots, or in an archive."""

    def __init__(self, roots: list[str]) -> None:
        self.roots = roots
        self._unpacked: dict[str, str] = {}

    def find(self, path: str) -> str:
        """A file that can be opened; "" when there is none."""
        places = (path, *(os.path.join(root, path) for root in self.roots))
        return self._unpacked.get(path) or next((place for place in places if os.path.isfile(place)), "")

    def unpack(self, files: list[FileNote], folder: str) -> None:
        """Those of the archives that are no dumps, into a folder."""
        wanted: dict[str, set[str]] = {}
        for note in files:
            if note.status != "ok" and (archive := archive_of(note.path)):
                wanted.setdefault(archive, set()).add(note.path)
        for archive, members in wanted.items():
            if place := self.find(archive):
                self._unpacked |= unpack(archive, place, members, folder)


def find_evidence(loaded: LoadResult, traces: list[RankTrace], roots: list[str]) -> Evidence:
    """Everything in the files that is not a dump. Notes name files as seen from one of the `roots`."""
    places = Places(roots)
    with ExitStack() as stack:
        if any(note.status != "ok" and archive_of(note.path) for note in loaded.files):
            import tempfile

            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="allranks-"))
                places.unpack(loaded.files, folder)
            except OSError as error:
                print(f"stacks and logs in archives left out: {error}", file=sys.stderr)
        return _find_evidence(loaded, traces, places)


def _find_evidence(loaded: LoadResult, traces: list[RankTrace], places: Places) -> Evidence:
    found = {now.rank: now for now in _gone(traces)}
    used: dict[str, str] = {}
    captures = _captures(loaded.files, places, used)
    for report in captures:
        for rank, state in report.ranks.items():
            if rank not in found:
                found[rank] = RankNow(rank, state.cause, state.where, state.evidence, _frames(state.stack))
    logs, ras = _texts(loaded.files, places, used)
    here = {trace.header.rank for trace in traces}
    for rank, text in logs.items():  # of a rank without a dump its log is all there is
        if rank not in found and rank not in here and not is_secondary(text):
            found[rank] = RankNow(rank, "gone", "", f"its log ends with: {text}")
    files = [
        replace(note, status="ok", kind=used[note.path], note="used") if note.path in used else note
        for note in loaded.files
    ]
    return Evidence([found[rank] for rank in sorted(found)], files, logs, ras, tuple(captures))


def judge_stacks(result: Diagnosis, captures: tuple[StacksReport, ...]) -> Diagnosis:
    """The diagnosis where there is no dump: what the stacks say, which lie there alone."""
    report = max(captures, key=lambda one: (one.hung is True, len(one.ranks)))
    culprits = tuple(rank for rank in report.culprits if report.ranks[rank].cause != "unknown")
    if not culprits:  # nobody is accused because a capture of it could not be read
        seen = Finding("unclear", (), report.sentence, severity="warning", confidence=0.2)
        read = any(state.stack for state in report.ranks.values())
        findings: tuple[Finding, ...] = (seen,) if read and report.hung is not False else ()
    else:
        guilty = report.ranks[culprits[0]]
        finding = Finding(
            guilty.cause,
            culprits,
            report.sentence,
            severity="warning" if report.hung is False else "root",
            confidence=0.4 if report.hung is None else 0.8,
            where=guilty.where,
            stacks=tuple(((rank,), _frames(report.ranks[rank].stack)) for rank in culprits),
            evidence=tuple(dict.fromkeys((report.reason, guilty.evidence, *report.notes))),
            missing_evidence=("the calls of the ranks: start the job with `allranks run`",),
            stack_labels=("live",) * len(culprits),
        )
        findings = (finding,)
    return replace(
        result,
        status=report.status,
        verdict=findings[0] if culprits and report.hung is not False else None,
        findings=findings,
        summary=(f"stacks of {ranks_text(report.ranks)}, no recorded calls",),
    )


def with_evidence(result: Diagnosis, evidence: Evidence) -> Diagnosis:
    """The diagnosis with what logs and NCCL say of the guilty ranks."""
    if result.verdict is None:
        return result
    named = [rank for rank in result.verdict.ranks if rank in evidence.logs]
    if result.verdict.cause == "rank_died":  # others noticed that it was gone
        others = [rank for rank, text in evidence.logs.items() if is_secondary(text)]
        named += [rank for rank in others if rank not in named][:2]
    lines = [f"the log of rank {rank} ends with: {evidence.logs[rank]}" for rank in named]
    lines += [f"NCCL RAS: {line}" for line in evidence.ras]
    if not lines:
        return result
    verdict = replace(result.verdict, evidence=(*result.verdict.evidence, *lines))
    findings = tuple(verdict if f is result.verdict else f for f in result.findings)
    return replace(result, verdict=verdict, findings=findings)


def _texts(
    files: list[FileNote], places: Places, used: dict[str, str]
) -> tuple[dict[int, str], tuple[str, ...]]:
    """(how the logs of ranks end, what NCCL RAS reported) among the files that are plain text."""
    logs: dict[int, str] = {}
    reported: list[str] = []
    for note in files:
        if note.status == "ok" or note.path in used or not _LOG.search(Path(note.path).name.lower()):
            continue
        text = _tail(places.find(note.path))
        counts = "launched up to operation" in text
        ends = list(_ENDED.finditer(text))
        if counts:
            from allranks.model.stacks import RasReply
            from allranks.stacks.ras import describe, read_counts

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


def _tail(path: str) -> str:
    """The end of a text file; "" when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_TEXT_BYTES))
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def is_post_mortem(traces: list[RankTrace]) -> bool:
    """Whether all black boxes are of this machine and their processes are gone: then nothing runs any more."""
    boxes = _local_boxes(traces)
    return bool(boxes) and len(boxes) == len(traces) and not any(_is_running(trace) for trace in boxes)


def taken_ns(traces: list[RankTrace], roots: list[str]) -> tuple[int, bool]:
    """When black boxes were as they are, and whether that is the time of copies: now, where one of them is still written to; the time of the copies where
    none is; 0 when nothing tells (a copy that kept the time of the original)."""
    from allranks.blackbox.reader import boxes_of_process

    boxes = [trace for trace in traces if trace.kind.startswith("black box")]
    files = {trace.path: place for trace in boxes if (place := Places(roots).find(trace.path))}
    for trace in _local_boxes(boxes):
        pid, file = trace.header.pid, files.get(trace.path)
        if _is_running(trace) and file is not None:
            # whether the process writes to this very file; taken for true where we may not look
            hidden = not os.access(f"/proc/{pid}/maps", os.R_OK)
            if hidden or any(os.path.samefile(box, file) for box in boxes_of_process(pid)):
                return time.time_ns(), False
    newest = max((trace.header.written_ns for trace in boxes), default=0)
    copied = max((os.stat(place).st_mtime_ns for place in files.values()), default=0)
    return (copied, True) if copied > newest else (0, False)


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


def _captures(files: list[FileNote], places: Places, used: dict[str, str]) -> list[StacksReport]:
    """Reports of the captures among the files, one for all folders that do not repeat a rank; notes which files they were made of."""
    found = [
        note.path for note in files if note.kind == "stacks" or _CAPTURE.search(os.path.basename(note.path))
    ]
    held = {path: Path(place) for path in found if (place := places.find(path))}
    if not held:
        return []
    from allranks.stacks import classify, join, read_capture
    from allranks.stacks.raw_files import read_by_content

    captures = []
    named = {path: place for path, place in held.items() if _CAPTURE.search(place.name)}
    for folder in sorted({place.parent for place in named.values()}):
        try:
            captures.append(read_capture(folder, by_content=False))
            used.update((path, "stacks") for path, place in named.items() if place.parent == folder)
        except InputError as error:
            print(f"stack captures in {folder} left out: {error}", file=sys.stderr)
    others = {path: place for path, place in held.items() if path not in named}
    if (by_content := read_by_content(sorted(others.items()))).processes:
        captures.append(by_content)
        used.update(dict.fromkeys(others, "stacks"))
    # parts of one, by folder or node, where no rank is in two of them
    ranks = [process.rank for capture in captures for process in capture.processes if process.child is None]
    whole = 0 < len(ranks) == len(set(ranks))
    return [classify(capture) for capture in ([join(captures)] if whole else captures)]


def _frames(stack: tuple[StackFrame, ...]) -> tuple[Frame, ...]:
    return tuple(Frame(frame.name, frame.file, frame.line) for frame in stack)
