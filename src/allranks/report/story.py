"""One page that tells an incident: what happened, who, why, what was done, how long it took. Pure rendering.

Self-contained HTML, readable in ten seconds: the sentence first, then a timeline in proportion, then what each rank was doing
(its stack and its last calls).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from allranks import pages
from allranks.model.diagnosis import Action, Finding, Incident, Moment, confidence_text
from allranks.model.formatting import duration, rank_list
from allranks.model.stacks import is_user_file
from allranks.model.trace import Flag, RankTrace, State
from allranks.pages import Source, StackCard, frame_lines, read_source, without_stale
from allranks.report.html import timeline_values, verdict_cards
from allranks.report.text import clean

_GOOD = frozenset({"last good step", "recovered", "back", "healed", "ended"})
_BAD = frozenset({"fault", "overdue", "died"})
_ENDS = frozenset({"recovered", "healed", "ended"})


def render_story(
    incident: Incident,
    report_lines: tuple[str, ...] = (),
    evidence: Sequence[RankEvidence] = (),
    traces: Sequence[RankTrace] = (),
) -> str:
    """The whole page; without `evidence`, with what the incident itself knows of each rank; with the calls of `traces`."""
    drawn = [replace(trace, calls=trace.calls[-MAX_DRAWN:]) for trace in traces if len(trace.calls)]
    verdict = incident.verdict or Finding("", (), "")
    status, level = _status(incident)
    advice, missing = list(verdict.advice), list(verdict.missing_evidence)
    again = [(f"allranks diagnose {incident.folder}", "read the evidence again")] if incident.folder else []
    begin = min((moment.at for moment in incident.timeline), default=0.0)
    span = max([moment.at - begin for moment in incident.timeline] + [1e-6])
    step = str(incident.step) if incident.step >= 0 else ""
    about = pages.About(
        incident.job, incident.node, incident.opened, taken_name="Opened", facts=(("Step", step),)
    )
    return pages.render(
        "story.html",
        title=f"{incident.id}: {headline(incident)}"[:160],
        kind=f"Incident {incident.id}",
        level=level,
        status=status,
        headline=headline(incident),
        about=about.rows(),
        facts=_facts(incident, verdict),
        advice=advice,
        commands=[*pages.commands([*advice, *missing]), *again],
        guilty_title=f"The {'' if incident.kind == 'death' else 'guilty '}rank{'s' if len(incident.ranks) > 1 else ''}",
        guilty_stacks=_stacks(incident, verdict),
        moments=[_moment(moment, begin, span) for moment in incident.timeline],
        down=_down(incident.timeline, begin, span),
        action=_action(incident.action),
        evidence=evidence or rank_evidence(incident),
        missing=[*incident.missing, *missing],
        report="\n".join(report_lines),
        folder=incident.folder,
        scripts=("timeline.js",) if drawn else (),
        drawn=bool(drawn),
        **timeline_values(drawn, incident.verdict),
    )


def headline(incident: Incident) -> str:
    """The story in one sentence; a stall by how it ended, or by why it was noticed."""
    if incident.kind == "stall":
        ended = [moment.text for moment in incident.timeline if moment.name == "ended"]
        return pages.upper(ended[-1] if ended else incident.reason)
    sentence = incident.verdict.sentence if incident.verdict is not None else ""
    return pages.upper(sentence or incident.reason)


def lasted(incident: Incident, now: float) -> float:
    """Seconds from the first sign of trouble to its end, or until now."""
    begin = min((moment.at for moment in incident.timeline), default=incident.opened)
    ends = [moment.at for moment in incident.timeline if moment.name in _ENDS]
    return max(0.0, max(ends, default=incident.closed or now) - begin)


def decision(action: Action | None) -> str:
    """What the policy decided where nothing was done, in one short sentence; "" where something was."""
    if action is None or action.done:
        return ""
    if action.kind == "dry_run":
        return f"Nothing was done: --recovery on {action.reason.partition(':')[0]}"
    return f"Nothing was done: {action.reason}"


def _status(incident: Incident) -> tuple[str, str]:
    if incident.kind == "slow":
        return "Slow rank", "warn"
    if incident.kind == "stall":
        return ("Stalled", "warn") if incident.closed is None else ("Stall that ended", "warn")
    if incident.closed is not None:
        return "Recovered", "good"
    return incident.kind.capitalize(), "bad"


def _facts(incident: Incident, verdict: Finding) -> list[tuple[str, str]]:
    plural = "s" if len(incident.ranks) > 1 else ""
    facts = [
        (f"Rank{plural}" if incident.kind == "death" else f"Guilty rank{plural}", rank_list(incident.ranks)),
        ("Cause", verdict.cause.replace("_", " ")),
        ("Where", verdict.where),
        ("Confidence", confidence_text(verdict.confidence) if incident.verdict is not None else ""),
        *_times(incident),
    ]
    return [(name, value) for name, value in facts if value]


#: Moments of the timeline and what their distance to its beginning is called. Recovered: the others continue. Back: the
#: replica that was lost trains again.
_AFTER = {
    "noticed": "Noticed after",
    "evidence": "Evidence after",
    "verdict": "Verdict after",
    "recovered": "Others continued after",
    "back": "Back after",
    "ended": "Ended after",
}


def _times(incident: Incident) -> list[tuple[str, str]]:
    """From the timeline itself: cards and timeline are of one clock, and begin at the same moment."""
    begin = min((moment.at for moment in incident.timeline), default=0.0)
    first: dict[str, float] = {}
    for moment in incident.timeline:
        first.setdefault(moment.name, moment.at)
    return [(text, duration(first[name] - begin)) for name, text in _AFTER.items() if name in first]


def _stacks(incident: Incident, verdict: Finding) -> list[StackCard]:
    return without_stale([card for card in verdict_cards(verdict, incident.ranks) if card.guilty])[:4]


def _moment(moment: Moment, begin: float, span: float) -> dict[str, str]:
    level = "good" if moment.name in _GOOD else "bad" if moment.name in _BAD else ""
    offset = moment.at - begin
    return {
        "name": moment.name,
        "text": moment.text,
        "level": level,
        "at": f"{100 * offset / span:.2f}",
        "offset": f"+{offset:.3f} s" if span < 10 else f"+{offset:.1f} s",
    }


def _down(moments: tuple[Moment, ...], begin: float, span: float) -> str:
    """How far the red part of the line reaches, in percent."""
    ends = [moment.at for moment in moments if moment.name in _ENDS]
    return f"{100 * (max(ends) - begin) / span:.2f}" if ends else "100"


def _action(action: Action | None) -> dict[str, str] | None:
    if action is None:
        return None
    text = f"{action.reason}. {action.result}" if action.result else action.reason
    return {"name": action.kind.replace("_", " "), "text": text}


MAX_GROUPS = 64
MAX_TRACES = 8  # of which the last calls are shown
MAX_CALLS = 20
MAX_DRAWN = 200  # calls of each rank on the timeline
MAX_FRAMES = 40


@dataclass(frozen=True)
class RankEvidence:
    """Ranks that did the same. `calls` are of the first of them."""

    ranks: tuple[int, ...]
    title: str  # "Ranks 0-7, 9"
    guilty: bool
    cause: str
    where: str
    evidence: str
    stack: tuple[str, ...]  # innermost first
    calls: tuple[str, ...] = ()  # oldest first
    source: Source | None = None  # the code around the line where a guilty rank is
    log: tuple[str, ...] = ()  # the last lines of the output of the first of them

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def chosen_ranks(incident: Incident) -> frozenset[int]:
    """The ranks whose last calls are worth reading: the guilty ones, then one of each group."""
    groups = _groups(incident)
    ranks = [*incident.ranks, *(members[0] for _, members in groups)]
    return frozenset(list(dict.fromkeys(ranks))[:MAX_TRACES])


def rank_evidence(
    incident: Incident, traces: Sequence[RankTrace] = (), logs: Mapping[int, tuple[str, ...]] | None = None
) -> list[RankEvidence]:
    """One entry for all ranks with the same stack, the guilty ones first; at most MAX_GROUPS."""
    logs, sources = logs or {}, _sources(incident)
    calls = {trace.header.rank: last_calls(trace) for trace in traces if trace.header.rank is not None}
    groups = _groups(incident)[:MAX_GROUPS]
    known = {rank for _, ranks in groups for rank in ranks}
    for rank in sorted(rank for rank in calls if rank not in known and calls[rank]):
        groups.append(((rank in incident.ranks, "", "", "", ()), [rank]))
    found = []
    for (guilty, cause, where, evidence, stack), ranks in groups:
        recent = next((calls[rank] for rank in ranks if rank in calls), ())
        title = f"Rank{'s' if len(ranks) > 1 else ''} {rank_list(tuple(ranks))}"
        code = next((sources[rank] for rank in ranks if rank in sources), None)
        lines = next((logs[rank] for rank in ranks if rank in logs), ())
        told = (guilty, cause, where, evidence, stack[:MAX_FRAMES])
        found.append(RankEvidence(tuple(ranks), title, *told, recent, code, lines))
    return found


def _sources(incident: Incident) -> dict[int, Source]:
    """The code where the guilty ranks are, by rank, where its file is on this machine: of several stacks the first is the newest."""
    found: dict[int, Source] = {}
    for ranks, frames in incident.verdict.stacks if incident.verdict is not None else ():
        if set(ranks) & set(incident.ranks):
            code = read_source(frame_lines((f.name, f.file, f.line) for f in frames))
            found = found if code is None else dict.fromkeys(ranks, code) | found
    return found


def last_calls(trace: RankTrace, limit: int = MAX_CALLS) -> tuple[str, ...]:
    """The last calls of a rank, one line each, the newest last."""
    begin = max(0, len(trace.calls) - limit)
    return tuple(_call(trace, index) for index in range(begin, len(trace.calls)))


def _call(trace: RankTrace, index: int) -> str:
    call = trace.calls[index]
    name = f"{trace.names[int(call['op'])]} #{int(call['seq'])}"
    group = trace.groups[int(call["group"])]
    created, completed = int(call["created_ns"]), int(call["completed_ns"])
    if completed > created:
        state = f"finished in {duration((completed - created) / 1e9)}"
    elif int(call["state"]) == State.COMPLETED or int(call["flags"]) & Flag.RETIRED:
        state = "finished"
    else:
        open_s = max(0, trace.header.written_ns - created) / 1e9
        state = f"not finished after {duration(open_s)}" if open_s else "not finished"
    frames = trace.stacks[int(call["stack"])]
    line = next((frame for frame in frames if is_user_file(frame.file)), None)
    at = f", at {line.file.rpartition('/')[2]}:{line.line}" if line else ""
    return clean(f"{name} of {group.desc or group.name or 'a group'}: {state}{at}")


def _of_script(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Without our own outermost frames, which start the script."""
    ours = stack and stack[-1].rpartition("/")[2].startswith("rank_entry.py:")
    begin = next(
        (i for i, frame in enumerate(stack) if "__main__.py:" in frame and frame.endswith(" in _run")), 0
    )
    return stack[:begin] if ours and begin else stack


_Key = tuple[bool, str, str, str, tuple[str, ...]]


def _groups(incident: Incident) -> list[tuple[_Key, list[int]]]:
    ranks: Mapping[str, Mapping[str, object]] = (incident.stacks or {}).get("ranks") or {}
    same: dict[_Key, list[int]] = {}
    for rank, facts in ranks.items():
        cause, where, evidence = (str(facts.get(name) or "") for name in ("cause", "where", "evidence"))
        frames = facts.get("stack")
        stack = _of_script(tuple(map(str, frames)) if isinstance(frames, list | tuple) else ())
        key = (int(rank) in incident.ranks, cause.replace("_", " "), where, evidence, stack)
        same.setdefault(key, []).append(int(rank))
    return sorted(same.items(), key=lambda item: (not item[0][0], min(item[1])))
