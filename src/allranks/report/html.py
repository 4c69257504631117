"""The page of a diagnosis: the answer, what to do, the guilty rank's code, timeline, findings, groups, files.

Everything from a dump is data: it travels as JSON or typed columns and is put on the page as text. The calls on the time line are
compact columns: 17 bytes a call before compression, no object per call.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from allranks import pages
from allranks.model.diagnosis import Diagnosis, Finding, confidence_text
from allranks.model.formatting import duration, rank_list, ranks_text, rename
from allranks.model.trace import Flag, Frame, RankTrace, State, World
from allranks.pages import Row, StackCard, frame_lines, stack_card, without_stale
from allranks.report.text import MISSING, clean, frame_text, headline_text

#: More calls than this make a page slow; then only the newest of every rank are drawn.
MAX_CALLS = 3_000_000
MAX_TEXT = 300
OPEN, DONE, FAILED, UNKNOWN = 0, 1, 2, 3
MAX_LISTED = 500
MAX_STACKS = 8
COLUMNS = ("starts", "lengths", "kinds", "seqs", "states", "stacks")
LEVELS = {"fault": "bad", "unclear": "warn", "ok": "good"}
STATUS = {"fault": "Fault found", "unclear": "Unclear", "ok": "Nothing wrong"}
SEVERITY = {"root": ("Root cause", "bad"), "consequence": ("Follows", ""), "warning": ("Note", "warn")}


def render(diagnosis: Diagnosis, traces: Sequence[RankTrace], made_s: float = 0.0) -> Iterator[str]:
    line = build_timeline(traces)
    verdict = diagnosis.verdict
    stacks = [] if verdict is None else without_stale(verdict_cards(verdict, verdict.ranks))
    stacks = [replace(card, title=rename(card.title, diagnosis.worlds)) for card in stacks]
    advice = () if verdict is None else verdict.advice
    missing = () if verdict is None else verdict.missing_evidence
    yield pages.render(
        "diagnose.html",
        scripts=("timeline.js",),
        title=clean(f"{STATUS[diagnosis.status]}: {headline_text(diagnosis)}")[:160],
        kind="Diagnosis",
        level=LEVELS[diagnosis.status],
        status=STATUS[diagnosis.status],
        headline=pages.upper(clean(headline_text(diagnosis))),
        about=_about(diagnosis, traces, made_s).rows(),
        facts=_facts(verdict, diagnosis.worlds),
        advice=advice,
        commands=pages.commands((*advice, *missing)),
        guilty_title=_guilty_title(verdict),
        guilty_stacks=[card for card in stacks if card.guilty][:MAX_STACKS],
        waiting_stacks=[card for card in stacks if not card.guilty][:MAX_STACKS],
        evidence=() if verdict is None else verdict.evidence,
        missing=missing,
        findings=[_finding(finding, diagnosis.worlds) for finding in diagnosis.findings[:MAX_LISTED]],
        **_groups(diagnosis),
        **_files(diagnosis),
        summary="; ".join(diagnosis.summary)
        + (f"; the timeline leaves out the oldest {line.left_out:,} calls" if line.left_out else ""),
        **_drawn(line, verdict),
    )


def timeline_values(traces: Sequence[RankTrace], verdict: Finding | None) -> dict[str, Any]:
    """What a page with a timeline of these calls needs."""
    return _drawn(build_timeline(traces), verdict)


def _drawn(line: Timeline, verdict: Finding | None) -> dict[str, Any]:
    columns = [(name, pack(getattr(line, name))) for name in COLUMNS]
    return {"timeline": _meta(line, verdict), "columns": columns}


def _about(diagnosis: Diagnosis, traces: Sequence[RankTrace], made_s: float) -> pages.About:
    headers = [trace.header for trace in traces]
    hosts = list(dict.fromkeys(header.host for header in headers if header.host))
    jobs = list(dict.fromkeys(header.job for header in headers if header.job))
    versions = dict(version for header in headers[:1] for version in header.versions)
    taken = max((header.written_ns for header in headers), default=0) / 1e9
    ranks = f"{len(diagnosis.ranks):,} of {diagnosis.world_size or len(diagnosis.ranks):,}"
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "nccl") if versions.get(name))
    facts = (("Ranks", ranks), ("Software", clean(software)))
    host = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3:,} more" if len(hosts) > 3 else "")
    return pages.About(clean(", ".join(jobs[:4])), clean(host), taken, made_s=made_s, facts=facts)


def _facts(verdict: Finding | None, worlds: Sequence[World]) -> list[tuple[str, str]]:
    if verdict is None:
        return []
    call = f"{verdict.group}{'' if verdict.sequence is None else f' #{verdict.sequence}'}"
    waiting = f"{len(verdict.waiting):,}" + (
        f", {duration(verdict.waited_s)}" if verdict.waited_s is not None else ""
    )
    facts = [
        ("Cause", verdict.cause.replace("_", " ")),
        ("Guilty rank" + ("s" if len(verdict.ranks) > 1 else ""), _names(verdict.ranks, worlds)),
        ("Ranks waiting", waiting if verdict.waiting else ""),
        ("Group and call", call),
        ("Where", verdict.where),
        ("Confidence", confidence_text(verdict.confidence)),
    ]
    return [(name, clean(value)) for name, value in facts if value]


def _names(ranks: Sequence[int], worlds: Sequence[World]) -> str:
    """ "0, 2"; with their roles in a job of several worlds."""
    return rename(ranks_text(ranks), worlds) if worlds and ranks else rank_list(ranks)


def _guilty_title(verdict: Finding | None) -> str:
    if verdict is None or not verdict.ranks:
        return "Where it happened"
    return f"The guilty rank{'s' if len(verdict.ranks) > 1 else ''}"


def verdict_cards(verdict: Finding, guilty: Sequence[int]) -> Iterator[StackCard]:
    """The stacks of a verdict, as cards."""
    labels = (*verdict.stack_labels, *("" for _ in verdict.stacks))
    for (ranks, frames), label in zip(verdict.stacks, labels, strict=False):
        lines = frame_lines((clean(f.name), clean(f.file), f.line) for f in frames)
        yield stack_card(ranks, lines, label, bool(set(ranks) & set(guilty)))


def _finding(finding: Finding, worlds: Sequence[World]) -> Row:
    name, level = SEVERITY[finding.severity]
    number = "" if finding.sequence is None else f" #{finding.sequence}"
    sure = f" ({finding.confidence:.0%})" if finding.severity == "root" else ""
    ranks = _names(finding.ranks, worlds)
    return Row((name, clean(finding.sentence + sure), ranks, clean(f"{finding.group}{number}")), level)


def _groups(diagnosis: Diagnosis) -> dict[str, Any]:
    rows = []
    for group in sorted(diagnosis.groups, key=lambda g: (not g.behind, g.label))[:MAX_LISTED]:
        calls = "" if group.first_sequence is None else f"#{group.first_sequence} to #{group.last_sequence}"
        members = f"{rank_list(group.members)}{'' if group.members_known else ' (as seen in calls)'}"
        cells = (
            clean(group.label),
            clean(group.backend or "unknown"),
            members,
            calls,
            rank_list(group.behind),
        )
        rows.append(Row(cells, "bad" if group.behind else ""))
    return {"groups": rows, "group_count": f"{len(diagnosis.groups):,}"}


def _files(diagnosis: Diagnosis) -> dict[str, Any]:
    ordered = sorted(diagnosis.files, key=lambda note: note.status == "ok")[:MAX_LISTED]
    rows = []
    for note in ordered:
        rank = "" if note.rank is None else str(note.rank)
        cells = (clean(note.path), rank, clean(note.kind), note.status, clean(note.note))
        rows.append(Row(cells, "" if note.status == "ok" else "warn"))
    bad = any(row.level for row in rows)
    return {"files": rows, "file_count": f"{len(diagnosis.files):,}", "files_open": bad and len(rows) < 60}


def _meta(line: Timeline, verdict: Finding | None) -> dict[str, object]:
    fault: dict[str, object] | None = None
    if verdict is not None:
        fault = {"ranks": list(verdict.ranks), "waiting": list(verdict.waiting), "sequence": verdict.sequence}
        fault |= {"missing": verdict.cause in MISSING, "group": verdict.group}
    return {
        "ranks": line.ranks,
        "names": line.names,
        "hosts": line.hosts,
        "counts": line.counts,
        "base_ns": str(line.base_ns),
        "unit_ns": line.unit_ns,
        "end": line.end_units,
        "kinds": line.kind_table,
        "stacks": line.stack_table,
        "fault": fault,
    }


@dataclass
class Timeline:
    """Columns over all calls, rank after rank; `counts` says how many belong to each."""

    ranks: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of ranks of several worlds; none otherwise
    hosts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    base_ns: int = 0
    unit_ns: int = 1000
    end_units: int = 0
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # difference to the call before
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    kinds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))  # index into `kind_table`
    seqs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    stacks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))  # index into `stack_table`
    kind_table: list[tuple[str, str, str]] = field(default_factory=list)  # (operation, group, sizes)
    stack_table: list[list[str]] = field(default_factory=list)
    left_out: int = 0


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """The columns of all traces, in rank order."""
    ordered = sorted(traces, key=lambda trace: trace.header.rank if trace.header.rank is not None else -1)
    total = sum(len(trace.calls) for trace in ordered)
    keep = MAX_CALLS // max(1, len(ordered)) if total > MAX_CALLS else None
    line = Timeline(kind_table=[("", "", "")], stack_table=[[]])
    tables = _Tables(line)
    parts = [(trace, trace.calls[-keep:] if keep else trace.calls) for trace in ordered]
    line.left_out = total - sum(len(calls) for _, calls in parts)
    _time_frame(line, [calls for _, calls in parts])
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    for trace, calls in parts:
        line.ranks.append(trace.header.rank if trace.header.rank is not None else -1)
        line.names += [trace.header.name] if trace.header.worlds else []
        line.hosts.append(trace.header.host)
        line.counts.append(len(calls))
        for name, column in _columns(line, tables, trace, calls).items():
            columns[name].append(column)
    for name, chunks in columns.items():
        if chunks:
            setattr(line, name, np.concatenate(chunks))
    return line


def _time_frame(line: Timeline, parts: list[np.ndarray]) -> None:
    created = [calls["created_ns"] for calls in parts if len(calls)]
    if not created:
        return
    first = min(int(column[column > 0].min()) if (column > 0).any() else 0 for column in created)
    last = max(
        max(int(calls["created_ns"].max()), int(calls["completed_ns"].max())) for calls in parts if len(calls)
    )
    span = max(1, last - first)
    line.base_ns, line.unit_ns = first, max(1000, span >> 30)
    line.end_units = span // line.unit_ns + max(1, span // line.unit_ns // 20)


def _columns(line: Timeline, tables: _Tables, trace: RankTrace, calls: np.ndarray) -> dict[str, np.ndarray]:
    starts = np.clip((calls["created_ns"] - line.base_ns) // line.unit_ns, 0, line.end_units)
    ends = np.where(calls["completed_ns"] > 0, (calls["completed_ns"] - line.base_ns) // line.unit_ns, starts)
    states = _states(calls)
    lengths = np.where(states == OPEN, line.end_units - starts, np.clip(ends - starts, 0, line.end_units))
    return {
        "starts": np.diff(starts, prepend=0).astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "kinds": tables.kinds(trace, calls),
        "seqs": np.clip(calls["seq"], -1, 2**31 - 1).astype(np.int32),
        "states": states,
        "stacks": tables.stacks(trace, calls),
    }


def _states(calls: np.ndarray) -> np.ndarray:
    flags, state = calls["flags"], calls["state"]
    retired = (flags & int(Flag.RETIRED)) != 0
    found = np.full(len(calls), OPEN, np.uint8)
    found[state == int(State.COMPLETED)] = DONE
    found[(state == int(State.FAILED)) | (state == int(State.TIMED_OUT))] = FAILED
    undone = (state == int(State.SCHEDULED)) | (state == int(State.STARTED))
    found[undone & retired] = UNKNOWN
    found[(flags & int(Flag.COALESCED_PART | Flag.CAPTURED)) != 0] = UNKNOWN
    return found


class _Tables:
    """Interns kinds and stacks over all ranks."""

    def __init__(self, line: Timeline) -> None:
        self._line = line
        self._kinds: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self._stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self._maps: dict[int, tuple[object, np.ndarray]] = {}

    def kinds(self, trace: RankTrace, calls: np.ndarray) -> np.ndarray:
        packed = calls["group"].astype(np.int64) << 48 | calls["op"].astype(np.int64) << 28 | calls["shapes"]
        values, inverse = np.unique(packed, return_inverse=True)
        numbers = [
            self._kind(trace, int(v) >> 48, int(v) >> 28 & 0xFFFFF, int(v) & 0xFFFFFFF) for v in values
        ]
        found: np.ndarray = np.array(numbers, np.uint16)[inverse] if len(values) else np.zeros(0, np.uint16)
        return found

    def _kind(self, trace: RankTrace, group: int, op: int, shapes: int) -> int:
        known, shape = trace.groups[group], trace.shapes[shapes]
        sizes = f"{[list(size) for size in shape.inputs]} → {[list(size) for size in shape.outputs]}"
        types = "/".join(dict.fromkeys(shape.input_dtypes or shape.output_dtypes))
        label = known.name if known.desc in ("", "undefined") else f"{known.desc} ({known.name})"
        name, label, text = (clean(t)[:MAX_TEXT] for t in (trace.names[op], label, f"{sizes} {types}"))
        table, key = self._line.kind_table, (name, label, text)
        if key not in self._kinds:
            if len(table) > 0xFFFF:
                return 0
            self._kinds[key] = len(table)
            table.append(key)
        return self._kinds[key]

    def stacks(self, trace: RankTrace, calls: np.ndarray) -> np.ndarray:
        known = self._maps.get(id(trace.stacks))
        if known is None or known[0] is not trace.stacks:
            used = np.array([self._stack(stack) for stack in trace.stacks] or [0], np.uint16)
            known = self._maps[id(trace.stacks)] = (trace.stacks, used)
        found: np.ndarray = known[1][calls["stack"]]
        return found

    def _stack(self, stack: tuple[Frame, ...]) -> int:
        found = self._stacks.get(stack)
        if found is None:
            lines = [frame_text(frame)[:MAX_TEXT] for frame in stack[:24]]
            found = self._stacks[stack] = min(len(self._line.stack_table), 0xFFFF)
            if found == len(self._line.stack_table):
                self._line.stack_table.append(lines)
        return found if found < len(self._line.stack_table) else 0


def pack(column: np.ndarray) -> str:
    """Little-endian bytes, deflated, in base64."""
    data = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")
