"""A job's account as text, JSON and an HTML page with a waterfall and a timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allranks import pages
from allranks.ledger.records import IDLE, STATES, USEFUL, Outage
from allranks.ledger.summary import JobAccount, Seconds, by_window
from allranks.model.formatting import count, duration, rank_list

COLOURS = {
    USEFUL: "#2e9e5b", "waiting": "#e0a13a", "stalled": "#cf4136", "regrouping": "#8d6cc9", "healing": "#6c8fd6",
    "saving": "#3f8fb5", "restoring": "#62b5c9", "starting": "#8a97a6", "compiling": "#b0853f", "repeated": "#d2738a",
    "evaluation": "#5fae9e", "phase": "#9aa85c", IDLE: "#c5ccd4",
}  # fmt: skip
SHOWN = 8  # ranks, nodes, causes in a list
BINS = 120  # of the timeline


def cost_of(rank_seconds: float, gpu_hour: float) -> str:
    """ "1,234.00 $" for these GPU seconds at `gpu_hour` dollars per hour."""
    return f"{rank_seconds / 3600 * gpu_hour:,.2f} $"


def headline(found: JobAccount) -> str:
    """ "91.4 % of the time of 8 ranks was useful training (step 12,000, 2 failures in 3 h 10 min)"."""
    step = f"step {found.step:,}, " if found.step >= 0 else ""
    failures = f"{count(len(found.failures), 'failure')} in {duration(found.running_s)}"
    return f"{found.goodput:.1%} of the time of {count(found.ranks, 'rank')} was useful training ({step}{failures})"


def end_line(found: JobAccount) -> str:
    """The line at the end of a run: the useful share and the three largest losses."""
    lost = sorted((-s / found.rank_seconds, kind) for kind, s in found.seconds.items() if kind != USEFUL)
    parts = ", ".join(f"{kind} {-share:.1%}" for share, kind in lost[:3] if -share >= 0.001)
    return f"goodput {found.goodput:.1%}{f'; {parts}' if parts else ''}"


def render_text(found: JobAccount, gpu_hour: float = 0.0, window_s: float = 0.0) -> Iterator[str]:
    yield f"{headline(found)}."
    yield ""
    total = max(found.rank_seconds, 1e-9)

    def line(kind: str, seconds: float) -> str:
        cost = f" = {cost_of(seconds, gpu_hour)}" if gpu_hour else ""
        per_rank = duration(seconds / max(found.ranks, 1))
        return f"  {kind:<11} {seconds / total:>7.2%}  {per_rank:>12} per rank{cost}"

    for kind, about in STATES.items():
        if lost := found.seconds.get(kind, 0.0):
            yield f"{line(kind, lost)}  ({about})"
    yield line("sum", total)
    yield ""
    if found.tokens:
        yield f"{found.tokens:,.0f} tokens, {found.tokens / max(found.running_s, 1e-9):,.0f} per second."
    yield from _failures(found)
    waited = [f"rank {rank} {s / total:.2%}" for rank, s in found.waiting_for.items() if s >= 0.0005 * total]
    if waited:
        yield "Waited for: " + ", ".join(waited[:SHOWN])
    if len(found.by_node) > 1:
        shares = sorted((_share(states), node) for node, states in found.by_node.items())
        worst = ", ".join(f"{node} {share:.1%}" for share, node in shares[:SHOWN])
        yield f"Useful share by node, the lowest first: {worst}"
    if window_s:
        yield f"Useful share for each {duration(window_s)}:"
        for begin, states in by_window(found, window_s):
            yield f"  {pages.stamp(begin)}  {_share(states):.1%}"
    yield from _notes(found)


def _failures(found: JobAccount) -> Iterator[str]:
    if found.mtbf_s is None:
        yield f"No failure in {duration(found.running_s)}."
        return
    means = {
        "noticed after": found.mean_s("begin", "noticed"),
        "explained after": found.mean_s("begin", "explained"),
        "recovered after": found.mean_s("begin", "recovered"),
    }
    known = ", ".join(f"{name} {duration(value)}" for name, value in means.items() if value is not None)
    yield f"Mean time between failures {duration(found.mtbf_s)}; on average {known or 'no times known'}."
    for cause, (number, lost) in list(found.by_cause.items())[:SHOWN]:
        share = lost / max(found.rank_seconds, 1e-9)
        yield f"  {cause.replace('_', ' ')}: {count(number, 'incident')}, {share:.2%} of the time"


def _notes(found: JobAccount) -> Iterator[str]:
    if found.runs > 1:
        yield f"{count(found.runs, 'run')} of the same name; the time between them is not counted."
    if found.crashed:
        yield f"{count(found.crashed, 'agent')} ended without a last record (killed); the last seconds are not known."
    if found.damaged:
        yield f"{count(found.damaged, 'line')} of the ledger could not be read."


def _share(states: Seconds) -> float:
    return states.get(USEFUL, 0.0) / max(sum(states.values()), 1e-9)


def to_object(found: JobAccount, gpu_hour: float = 0.0, window_s: float = 0.0) -> dict[str, object]:
    """The account as `--json` prints it."""
    total = max(found.rank_seconds, 1e-9)
    return {
        "schema": 1,
        "job": found.job,
        "goodput": found.goodput,
        "ranks": found.ranks,
        "nodes": list(found.nodes),
        "begin": found.begin,
        "end": found.end,
        "running_s": found.running_s,
        "runs": found.runs,
        "step": found.step,
        "tokens": found.tokens,
        "rank_seconds": {kind: found.seconds.get(kind, 0.0) for kind in STATES},
        "shares": {kind: found.seconds.get(kind, 0.0) / total for kind in STATES},
        "failures": len(found.failures),
        "mtbf_s": found.mtbf_s,
        "mean_notice_s": found.mean_s("begin", "noticed"),
        "mean_explain_s": found.mean_s("begin", "explained"),
        "mean_recover_s": found.mean_s("begin", "recovered"),
        "causes": [
            {"cause": cause, "incidents": number, "rank_seconds": lost}
            for cause, (number, lost) in found.by_cause.items()
        ],
        "waiting_for": [{"rank": rank, "rank_seconds": lost} for rank, lost in found.waiting_for.items()],
        "by_node": {node: _share(states) for node, states in found.by_node.items()},
        "by_rank": {str(rank): _share(states) for rank, states in found.by_rank.items()},
        "windows": [
            {"begin": begin, "goodput": _share(states)} for begin, states in (by_window(found, window_s) if window_s else ())
        ],
        "cost": None if not gpu_hour else {
            "gpu_hour": gpu_hour,
            "total": total / 3600 * gpu_hour,
            "lost": (total - found.seconds.get(USEFUL, 0.0)) / 3600 * gpu_hour,
        },
        "damaged_lines": found.damaged,
    }  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A rectangle of a picture; `title` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str
    label: str = ""


def waterfall(found: JobAccount) -> list[Bar]:
    """One bar per state, each beginning where the one above ends; 1000 wide, 24 high each."""
    total, x = max(found.rank_seconds, 1e-9), 0.0
    bars: list[Bar] = []
    for kind in STATES:
        lost = found.seconds.get(kind, 0.0)
        if lost / total >= 0.0005:
            width = 1000 * lost / total
            title, y = (
                f"{kind}: {lost / total:.2%}, {duration(lost / max(found.ranks, 1))} per rank",
                24 * len(bars) + 2,
            )
            bars.append(Bar(round(x, 2), y, round(max(width, 1), 2), 20, COLOURS[kind], title, kind))
            x += width
    return bars


def timeline(found: JobAccount) -> list[Bar]:
    """Columns of equal time with the shares of their states; 1000 x 160."""
    length = max(found.end - found.begin, 1e-9)
    wide = round(1000 / BINS + 0.3, 2)
    bars: list[Bar] = []
    for begin, states in by_window(found, length / BINS):
        total, y = max(sum(states.values()), 1e-9), 160.0
        x = round(1000 * (begin - found.begin) / length, 2)
        for kind in STATES:
            if part := states.get(kind, 0.0) / total:
                y -= 160 * part
                title = f"{pages.stamp(begin)} {kind} {part:.1%}"
                bars.append(Bar(x, round(y, 2), wide, round(160 * part, 2), COLOURS[kind], title))
    return bars


def render_page(found: JobAccount, gpu_hour: float, made_s: float) -> str:
    total = max(found.rank_seconds, 1e-9)
    lost = {kind: found.seconds[kind] for kind in STATES if found.seconds.get(kind)}
    ranks = sorted((_share(states), rank) for rank, states in found.by_rank.items())[:200]
    waited, useful = found.waiting_for, found.seconds.get(USEFUL, 0.0)
    nodes = [(node, f"{_share(states):.2%}") for node, states in sorted(found.by_node.items())]
    facts = [("Useful", f"{found.goodput:.1%}"), ("Ranks", str(found.ranks))]
    facts += [("Running", duration(found.running_s))]
    facts += [("Time between failures", duration(found.mtbf_s))] if found.mtbf_s is not None else []
    if gpu_hour:
        facts += [("Cost", cost_of(total, gpu_hour)), ("Lost", cost_of(total - useful, gpu_hour))]
    bars = waterfall(found)
    return pages.render(
        "goodput.html",
        title=f"Goodput of {found.job}",
        kind="Goodput",
        level="good" if found.goodput >= 0.9 else "warn" if found.goodput >= 0.6 else "bad",
        status=f"{found.goodput:.1%}",
        headline=headline(found),
        about=pages.About(found.job, ", ".join(found.nodes[:4]), found.begin, "Began", made_s).rows(),
        facts=facts,
        waterfall=bars,
        waterfall_height=24 * len(bars) + 4,
        timeline=timeline(found),
        span=(pages.stamp(found.begin), pages.stamp(found.end)),
        legend=[(kind, COLOURS[kind]) for kind in lost],
        states=[
            pages.Row((kind, f"{s / total:.2%}", duration(s / max(found.ranks, 1)), STATES[kind]))
            for kind, s in lost.items()
        ],
        incidents=[_incident_row(one) for one in found.outages[-500:]],
        ranks=[
            pages.Row((str(r), f"{share:.2%}", f"{waited.get(r, 0.0) / total:.2%}")) for share, r in ranks
        ],
        nodes=[pages.Row(cells) for cells in nodes] if len(nodes) > 1 else [],
        notes=list(_notes(found)),
    )


def _incident_row(one: Outage) -> pages.Row:
    took = duration(one.recovered - one.begin) if one.begin and one.recovered else "not known"
    return pages.Row((one.id, one.cause.replace("_", " "), one.node, rank_list(one.ranks), took, one.text))
