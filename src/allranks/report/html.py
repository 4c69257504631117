"""The page of a diagnosis: the answer, what to do, the guilty rank's code, timeline, findings, groups, files.

Everything from a dump is data: it travels as JSON or typed columns and is put on the page as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from allranks import pages
from allranks.model.diagnosis import Diagnosis, Finding, confidence_text
from allranks.model.formatting import duration, rank_list, ranks_text, rename
from allranks.model.trace import RankTrace, World
from allranks.pages import Row, StackCard, frame_lines, stack_card, without_stale
from allranks.report.text import clean, headline_text
from allranks.report.timeline import MISSING, Timeline, build_timeline, pack

MAX_LISTED = 500
MAX_STACKS = 8
COLUMNS = ("starts", "lengths", "kinds", "seqs", "states", "stacks")
LEVELS = {"fault": "bad", "unclear": "warn", "ok": "good"}
STATUS = {"fault": "Fault found", "unclear": "Unclear", "ok": "Nothing wrong"}
SEVERITY = {"root": ("Root cause", "bad"), "consequence": ("Follows", ""), "warning": ("Note", "warn")}


def render(diagnosis: Diagnosis, traces: Sequence[RankTrace], made_s: float = 0.0) -> Iterator[str]:
    line = build_timeline(traces)
    verdict = diagnosis.verdict
    stacks = [] if verdict is None else without_stale(_cards(verdict))
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


def _cards(verdict: Finding) -> Iterator[StackCard]:
    labels = (*verdict.stack_labels, *("" for _ in verdict.stacks))
    for (ranks, frames), label in zip(verdict.stacks, labels, strict=False):
        lines = frame_lines((clean(f.name), clean(f.file), f.line) for f in frames)
        guilty = bool(set(ranks) & set(verdict.ranks))
        yield stack_card(ranks, lines, label, guilty)


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
