"""One page that tells an incident: what happened, who, why, what was done, how long it took. Pure rendering.

Self-contained HTML (no network, no script), readable in ten seconds: the sentence first, then a timeline in
proportion, then the evidence. Everything from outside is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape
from typing import Any

from allranks.model.incident import Incident, Moment

_STYLE = """
:root { --ink:#1b1f24; --soft:#57606a; --line:#d0d7de; --paper:#fff; --wash:#f6f8fa; --bad:#cf222e; --good:#1a7f37; --mid:#9a6700 }
@media (prefers-color-scheme: dark) { :root { --ink:#e6edf3; --soft:#8d96a0; --line:#30363d; --paper:#0d1117; --wash:#161b22; --bad:#ff7b72; --good:#3fb950; --mid:#d29922 } }
* { box-sizing:border-box } body { font:15px/1.5 system-ui,sans-serif; color:var(--ink); background:var(--paper); margin:0 auto; padding:28px 20px 60px; max-width:960px }
h1 { font-size:24px; line-height:1.3; margin:0 0 6px } h2 { font-size:16px; margin:30px 0 8px; color:var(--soft); font-weight:600 }
.who { color:var(--soft); margin:0 0 18px } .cards { display:flex; flex-wrap:wrap; gap:10px; margin:18px 0 }
.card { border:1px solid var(--line); border-radius:8px; padding:10px 14px; min-width:128px; background:var(--wash) }
.card b { display:block; font-size:20px } .card span { color:var(--soft); font-size:13px }
.badge { display:inline-block; border-radius:99px; padding:2px 10px; font-size:13px; font-weight:600; color:#fff; background:var(--bad) }
.badge.good { background:var(--good) } .badge.mid { background:var(--mid) }
ol { list-style:none; padding:0; margin:0; border-left:2px solid var(--line) } li { position:relative; padding:0 0 14px 18px }
li::before { content:""; position:absolute; left:-7px; top:6px; width:12px; height:12px; border-radius:50%; background:var(--soft) }
li.bad::before { background:var(--bad) } li.good::before { background:var(--good) }
time { color:var(--soft); font-variant-numeric:tabular-nums; margin-right:8px } li b { margin-right:6px }
pre { background:var(--wash); border:1px solid var(--line); border-radius:8px; padding:12px; overflow:auto; font:13px/1.45 ui-monospace,monospace }
table { border-collapse:collapse; width:100% } td,th { text-align:left; padding:5px 10px; border-bottom:1px solid var(--line); vertical-align:top } th { color:var(--soft); font-weight:600 }
tr.guilty td { color:var(--bad); font-weight:600 } svg { width:100%; height:64px } details { margin:8px 0 } summary { cursor:pointer }
"""

_GOOD = frozenset({"last good step", "recovered", "healed", "back to speed"})
_BAD = frozenset({"fault", "overdue", "died"})


def render_story(incident: Incident, report_lines: tuple[str, ...] = ()) -> str:
    """The whole page."""
    return "\n".join(_page(incident, report_lines))


def headline(incident: Incident) -> str:
    """The story in one sentence."""
    verdict = incident.verdict or {}
    sentence = str(verdict.get("sentence") or "") or incident.reason
    return sentence[:1].upper() + sentence[1:]


def _page(incident: Incident, report_lines: tuple[str, ...]) -> Iterator[str]:
    title = escape(headline(incident))
    yield "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
    yield "<meta name='viewport' content='width=device-width,initial-scale=1'>"
    yield f"<title>{escape(incident.id)}: {title}</title><style>{_STYLE}</style></head><body>"
    yield f"<p class='who'>{_badge(incident)} incident <b>{escape(incident.id)}</b> of job {escape(incident.job)}"
    yield f" on {escape(incident.node or 'this node')}, {_stamp(incident.opened)}</p><h1>{title}</h1>"
    yield from _cards(incident)
    yield from _timeline(incident.timeline)
    yield from _action(incident)
    yield from _ranks(incident)
    if incident.missing:
        yield "<h2>What did not answer</h2><ul>"
        yield from (f"<li>{escape(item)}</li>" for item in incident.missing)
        yield "</ul>"
    if report_lines:
        yield "<h2>The diagnosis in full</h2><pre>" + escape("\n".join(report_lines)) + "</pre>"
    yield f"<p class='who'>All evidence: <code>{escape(incident.folder)}</code> (read it again with"
    yield f" <code>allranks diagnose {escape(incident.folder)}</code>)</p></body></html>"


def _badge(incident: Incident) -> str:
    if incident.kind == "slow":
        return "<span class='badge mid'>slow, not hung</span>"
    if incident.closed is not None:
        return "<span class='badge good'>recovered</span>"
    return f"<span class='badge'>{escape(incident.kind)}</span>"


def _cards(incident: Incident) -> Iterator[str]:
    verdict = incident.verdict or {}
    facts: list[tuple[str, str]] = []
    if incident.ranks:
        facts.append(
            (
                ", ".join(map(str, incident.ranks)),
                "guilty rank" if len(incident.ranks) == 1 else "guilty ranks",
            )
        )
    if verdict.get("cause"):
        facts.append((str(verdict["cause"]).replace("_", " "), "cause"))
    if verdict.get("where"):
        facts.append((str(verdict["where"]), "where it is"))
    if verdict.get("confidence") is not None:
        facts.append((f"{float(verdict['confidence']):.0%}", "confidence"))
    names = {
        "noticed": "until noticed",
        "evidence": "collecting evidence",
        "recovered": "from action to training",
    }
    facts += [
        (_seconds(incident.durations_s[key]), text)
        for key, text in names.items()
        if key in incident.durations_s
    ]
    if facts:
        yield "<div class='cards'>"
        yield from (
            f"<div class='card'><b>{escape(value)}</b><span>{escape(name)}</span></div>"
            for value, name in facts
        )
        yield "</div>"


def _timeline(moments: tuple[Moment, ...]) -> Iterator[str]:
    if not moments:
        return
    begin, end = moments[0].at, max(m.at for m in moments)
    span = max(end - begin, 1e-6)
    yield "<h2>What happened when</h2><svg viewBox='0 0 1000 64' preserveAspectRatio='none' role='img' aria-label='timeline'>"
    yield "<line x1='10' y1='32' x2='990' y2='32' stroke='currentColor' stroke-opacity='.3' stroke-width='2'/>"
    ends = [m.at for m in moments if m.name in ("recovered", "healed", "back to speed")]
    stop = 10 + 980 * ((max(ends) if ends else end) - begin) / span
    yield f"<line x1='10' y1='32' x2='{stop:.1f}' y2='32' stroke='var(--bad)' stroke-opacity='.35' stroke-width='10'/>"
    for moment in moments:
        x = 10 + 980 * (moment.at - begin) / span
        colour = (
            "var(--good)" if moment.name in _GOOD else "var(--bad)" if moment.name in _BAD else "var(--soft)"
        )
        yield f"<circle cx='{x:.1f}' cy='32' r='7' fill='{colour}'><title>{escape(moment.name)}</title></circle>"
    yield "</svg><ol>"
    for moment in moments:
        css = "good" if moment.name in _GOOD else "bad" if moment.name in _BAD else ""
        offset = f"+{moment.at - begin:.3f} s" if span < 10 else f"+{moment.at - begin:.1f} s"
        yield f"<li class='{css}'><time>{offset}</time><b>{escape(moment.name)}</b>{escape(moment.text)}</li>"
    yield "</ol>"


def _action(incident: Incident) -> Iterator[str]:
    action = incident.action
    if action is None:
        return
    text = f"{action.reason}. {action.result}" if action.result else action.reason
    yield f"<h2>What was done</h2><p><b>{escape(action.kind.replace('_', ' '))}</b>: {escape(text)}</p>"


def _ranks(incident: Incident) -> Iterator[str]:
    ranks: dict[str, Any] = (incident.stacks or {}).get("ranks") or {}
    if not ranks:
        return
    yield "<h2>What each rank was doing</h2><table><tr><th>rank</th><th>cause</th><th>where</th><th>evidence</th></tr>"
    guilty = {str(rank) for rank in incident.ranks}
    for rank in sorted(ranks, key=lambda r: (r not in guilty, int(r)))[:256]:
        facts = ranks[rank]
        css = " class='guilty'" if rank in guilty else ""
        cells = "".join(
            f"<td>{escape(str(facts.get(key, '')))}</td>" for key in ("cause", "where", "evidence")
        )
        yield f"<tr{css}><td>{escape(rank)}</td>{cells}</tr>"
    yield "</table>"
    if len(ranks) > 256:
        yield f"<p class='who'>and {len(ranks) - 256} more in the evidence folder</p>"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
