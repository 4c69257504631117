"""A job's account as text, JSON and one page with a waterfall and a timeline. Pure; the answer comes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allranks import pages
from allranks.ledger.records import IDLE, STATES, USEFUL
from allranks.ledger.summary import JobAccount, Seconds, by_window
from allranks.model.formatting import count, duration, rank_list

COLOURS = {
    USEFUL: "#2e9e5b", "waiting": "#e0a13a", "stalled": "#cf4136", "regrouping": "#8d6cc9", "healing": "#6c8fd6",
    "saving": "#3f8fb5", "restoring": "#62b5c9", "starting": "#8a97a6", "compiling": "#b0853f", "repeated": "#d2738a",
    "evaluation": "#5fae9e", "phase": "#9aa85c", IDLE: "#c5ccd4",
}  # fmt: skip
SHOWN = 8  # ranks, nodes, causes in a list
BINS = 120  # of the timeline


@dataclass(frozen=True)
class Price:
    """What a GPU hour costs; 0: not known. Ranks are taken for GPUs."""

    gpu_hour: float = 0.0

    def of(self, rank_seconds: float) -> str:
        """ " = 1,234 $", or "" without a price."""
        return f" = {rank_seconds / 3600 * self.gpu_hour:,.2f} $" if self.gpu_hour else ""


def headline(found: JobAccount) -> str:
    """ "91.4 % of the time of 8 ranks was useful training (step 12,000, 2 failures in 3 h 10 min)"."""
    step = f"step {found.step:,}, " if found.step >= 0 else ""
    failures = f"{count(len(found.failures), 'failure')} in {duration(found.running_s)}"
    return f"{found.goodput:.1%} of the time of {count(found.ranks, 'rank')} was useful training ({step}{failures})"


def end_line(found: JobAccount) -> str:
    """The line at the end of a run: the share, and the three largest losses."""
    lost = [
        (kind, s) for kind, s in sorted(found.seconds.items(), key=lambda item: -item[1]) if kind != USEFUL
    ]
    parts = ", ".join(
        f"{kind} {s / found.rank_seconds:.1%}" for kind, s in lost[:3] if s / found.rank_seconds >= 0.001
    )
    return f"goodput {found.goodput:.1%}{f'; {parts}' if parts else ''}"


def render_text(found: JobAccount, price: Price, window_s: float = 0.0) -> Iterator[str]:
    yield f"{headline(found)}."
    yield ""
    total = max(found.rank_seconds, 1e-9)
    for kind in STATES:
        if lost := found.seconds.get(kind, 0.0):
            yield f"  {kind:<11} {lost / total:>7.2%}  {duration(lost / max(found.ranks, 1)):>12} per rank{price.of(lost)}  ({STATES[kind]})"
    yield f"  {'sum':<11} {1:>7.2%}  {duration(total / max(found.ranks, 1)):>12} per rank{price.of(total)}"
    yield ""
    if found.tokens:
        yield f"{found.tokens:,.0f} tokens, {found.tokens / max(found.running_s, 1e-9):,.0f} per second."
    yield from _failures(found)
    most = [(rank, seconds) for rank, seconds in found.waiting_for.items() if seconds >= 0.0005 * total][
        :SHOWN
    ]
    if most:
        yield "Waited for: " + ", ".join(f"rank {rank} {seconds / total:.2%}" for rank, seconds in most)
    if len(found.by_node) > 1:
        shares = {node: _share(states) for node, states in found.by_node.items()}
        worst = sorted(shares.items(), key=lambda item: item[1])[:SHOWN]
        yield "Useful share by node, the lowest first: " + ", ".join(
            f"{node} {share:.1%}" for node, share in worst
        )
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
        yield f"{count(found.crashed, 'agent')} ended without a last record (killed); its last seconds are not known."
    if found.damaged:
        yield f"{count(found.damaged, 'line')} of the ledger could not be read."


def _share(states: Seconds) -> float:
    return states.get(USEFUL, 0.0) / max(sum(states.values()), 1e-9)


def to_object(found: JobAccount, price: Price, window_s: float = 0.0) -> dict[str, object]:
    """As `--json` prints it."""
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
        "cost": None if not price.gpu_hour else {
            "gpu_hour": price.gpu_hour,
            "total": total / 3600 * price.gpu_hour,
            "lost": (total - found.seconds.get(USEFUL, 0.0)) / 3600 * price.gpu_hour,
        },
        "damaged_lines": found.damaged,
    }  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A rectangle of a picture, in its own units, with what a pointer shows."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str
    label: str = ""


def waterfall(found: JobAccount) -> list[Bar]:
    """One bar for each state, each beginning where the one above ends; 1000 wide, 24 high each."""
    total, x = max(found.rank_seconds, 1e-9), 0.0
    bars: list[Bar] = []
    for kind in STATES:
        lost = found.seconds.get(kind, 0.0)
        if lost / total >= 0.0005:
            width = 1000 * lost / total
            title = f"{kind}: {lost / total:.2%}, {duration(lost / max(found.ranks, 1))} per rank"
            bars.append(
                Bar(round(x, 2), 24 * len(bars) + 2, round(max(width, 1), 2), 20, COLOURS[kind], title, kind)
            )
            x += width
    return bars


def timeline(found: JobAccount) -> list[Bar]:
    """Columns of equal time, each with the shares of its states; 1000 x 160."""
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


def render_page(found: JobAccount, price: Price, made_s: float) -> str:
    total = max(found.rank_seconds, 1e-9)
    lost = {kind: found.seconds[kind] for kind in STATES if found.seconds.get(kind)}
    incidents = [
        (
            one.id,
            one.cause.replace("_", " "),
            one.node,
            rank_list(one.ranks),
            _took(one.begin, one.recovered),
            one.text,
        )
        for one in found.outages[-500:]
    ]
    ranks = sorted((_share(states), rank) for rank, states in found.by_rank.items())[:200]
    waited = found.waiting_for
    nodes = [(node, f"{_share(states):.2%}") for node, states in sorted(found.by_node.items())]
    facts = [
        ("Useful", f"{found.goodput:.1%}"),
        ("Ranks", str(found.ranks)),
        ("Running", duration(found.running_s)),
    ]
    facts += [("Time between failures", duration(found.mtbf_s))] if found.mtbf_s is not None else []
    if price.gpu_hour:
        useful = found.seconds.get(USEFUL, 0.0)
        facts += [("Cost", price.of(total).strip(" =")), ("Lost", price.of(total - useful).strip(" ="))]
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
        incidents=[pages.Row(cells) for cells in incidents],
        ranks=[
            pages.Row((str(r), f"{share:.2%}", f"{waited.get(r, 0.0) / total:.2%}")) for share, r in ranks
        ],
        nodes=[pages.Row(cells) for cells in nodes] if len(nodes) > 1 else [],
        notes=list(_notes(found)),
    )


def _took(begin: float, end: float) -> str:
    return duration(end - begin) if begin and end else "not known"
