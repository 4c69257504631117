"""One page that tells an incident: what happened, who, why, what was done, how long it took. Pure rendering.

Self-contained HTML, readable in ten seconds: the sentence first, then a timeline in proportion, then the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from allranks import pages
from allranks.model.diagnosis import Finding
from allranks.model.incident import Action, Incident, Moment
from allranks.pages.cards import StackCard, frame_lines, short, stack_card, without_stale
from allranks.report.rank_evidence import RankEvidence, rank_evidence

_GOOD = frozenset({"last good step", "recovered", "healed", "back to speed"})
_BAD = frozenset({"fault", "overdue", "died"})
_ENDS = frozenset({"recovered", "healed", "back to speed"})


def render_story(
    incident: Incident, report_lines: tuple[str, ...] = (), evidence: Sequence[RankEvidence] = ()
) -> str:
    """The whole page; without `evidence`, with what the incident itself knows of each rank."""
    verdict = incident.verdict or Finding("", (), "")
    status, mood = _status(incident)
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
        mood=mood,
        status=status,
        headline=headline(incident),
        about=about.rows(),
        facts=_facts(incident, verdict),
        advice=advice,
        commands=[*pages.commands([*advice, *missing]), *again],
        guilty_title=f"The guilty rank{'s' if len(incident.ranks) > 1 else ''}",
        guilty_stacks=_stacks(incident, verdict),
        moments=[_moment(moment, begin, span) for moment in incident.timeline],
        down=_down(incident.timeline, begin, span),
        action=_action(incident.action),
        evidence=evidence or rank_evidence(incident),
        missing=[*incident.missing, *missing],
        report="\n".join(report_lines),
        folder=incident.folder,
    )


def headline(incident: Incident) -> str:
    """The story in one sentence."""
    sentence = incident.verdict.sentence if incident.verdict is not None else ""
    return pages.upper(sentence or incident.reason)


def _status(incident: Incident) -> tuple[str, str]:
    if incident.kind == "slow":
        return "Slow, not hung", "warn"
    if incident.closed is not None:
        return "Recovered", "good"
    return incident.kind.capitalize(), "bad"


def _facts(incident: Incident, verdict: Finding) -> list[tuple[str, str]]:
    names = {
        "noticed": "Noticed after",
        "evidence": "Evidence in",
        "lasted": "Lasted",
        "recovered": "Recovered in",
    }
    facts = [
        ("Guilty rank" + ("s" if len(incident.ranks) > 1 else ""), short(incident.ranks)),
        ("Cause", verdict.cause.replace("_", " ")),
        ("Where", verdict.where),
        ("Confidence", f"{verdict.confidence:.0%}" if incident.verdict is not None else ""),
        *(
            (text, pages.seconds(incident.durations_s[key]))
            for key, text in names.items()
            if key in incident.durations_s
        ),
    ]
    return [(name, value) for name, value in facts if value]


def _stacks(incident: Incident, verdict: Finding) -> list[StackCard]:
    cards = []
    labels = (*verdict.stack_labels, *[""] * len(verdict.stacks))
    for (ranks, frames), label in zip(verdict.stacks, labels, strict=False):
        if set(ranks) & set(incident.ranks):
            lines = frame_lines((f.name, f.file, f.line) for f in frames)
            cards.append(stack_card(ranks, lines, label, guilty=True))
    return without_stale(cards)[:4]


def _moment(moment: Moment, begin: float, span: float) -> dict[str, str]:
    mood = "good" if moment.name in _GOOD else "bad" if moment.name in _BAD else ""
    offset = moment.at - begin
    return {
        "name": moment.name,
        "text": moment.text,
        "mood": mood,
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
