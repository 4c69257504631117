"""`allranks status` and `allranks top`: ranks, steps, who waits for whom, incidents; once or live."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags
from allranks.cli.terminal import use_color, wrap
from allranks.model.formatting import count, duration, ranks_text
from allranks.model.job_state import inside_line
from allranks.model.options import argument, option
from allranks.model.parsing import printable

if TYPE_CHECKING:
    from allranks.model.cluster import JobView, RankRow

UNLIMITED = 10_000
CLEAR = "\x1b[H\x1b[2J"  # the whole screen
MANY_RANKS, MANY_LINES = 64, 16  # more ranks are summed up, in so many lines
WIDE = 80  # a narrower screen has fewer columns


@dataclass(frozen=True)
class StatusFlags:
    job: str | None = argument(
        None,
        "name of a job, or folder of its black boxes (default: the newest one that runs here)",
        metavar="JOB",
    )
    json: bool = option(False, "print one JSON object (`top`: one per line, until the job ends)")
    interval: float = option(1.0, "time between two updates of `top`", unit="s", above=0)


FLAGS = (StatusFlags,)


def main(args: argparse.Namespace) -> int:
    """0 ranks run, 1 none runs any more, 2 no such job."""
    from allranks.incidents.job_overview import Overview, find_job

    overview, flags = Overview(find_job(args.job)), read_flags(StatusFlags, args)
    live, interval_s = args.command == "top", max(0.1, flags.interval)
    screen = live and not flags.json and sys.stdout.isatty()
    if screen and sys.stdin.isatty() and importlib.util.find_spec("textual") is not None:
        from allranks.cli.top import run

        return run(overview, interval_s)
    while True:
        view, size = overview.look(), shutil.get_terminal_size()
        room = {"height": size.lines - 1, "width": size.columns} if screen and view.running else {}
        lines = [json.dumps(view.to_dict())] if flags.json else render(view, colour=use_color(), **room)
        print(CLEAR * screen + "\n".join(lines), flush=True)
        if not live or not view.running:
            return 0 if view.running else 1
        time.sleep(interval_s)


LEVELS = {"good": "32", "warn": "33", "bad": "31"}


def render(
    view: JobView,
    *,
    colour: bool = False,
    height: int = UNLIMITED,
    width: int = UNLIMITED,
) -> Iterator[str]:
    """The screen: the state of the job, the table (the most silent ranks first when it does not fit), incidents. A narrow
    one leaves out node, pid and calls: who waits for whom is what matters."""
    yield _cut(headline(view), width)
    said = _wrap(view.line, width)
    yield from (f"\x1b[{LEVELS[view.level]}m{line}\x1b[0m" if colour else line for line in said)
    if not view.rows:
        yield from incident_lines(view)
        return
    waiters = count_waiters(view)
    if height == UNLIMITED and len(view.rows) > MANY_RANKS:
        yield from _summary(view, waiters, colour)
        yield from incident_lines(view)
        return
    columns = chosen_columns(view) if width >= WIDE else ("step", "silent")
    yield f"{'rank':>5} " + "".join(f"{name:>{WIDTHS[name]}} " for name in columns) + " doing"
    rows = list(view.rows)
    told = [line for text in incident_lines(view) for line in _wrap(text, width)]
    room = max(5, height - 6 - len(said[1:]) - len(told))
    if len(rows) > room:
        rows = sorted(rows, key=lambda row: (row.alive, -(row.silent_s or 0.0)))[:room]
    yield from (_line(row, waiters[row.rank], columns, colour, width, view) for row in rows)
    if len(rows) < len(view.rows):
        yield f"      … and {len(view.rows) - len(rows):,} more"
    yield from told


def incident_lines(view: JobView, evidence: str = "") -> Iterator[str]:
    """One for each incident; the sentence that the line of the job already has is replaced by the way to the evidence."""
    evidence = (
        evidence
        or f"`allranks diagnose {view.job}` prints the evidence, `allranks page {view.job}` opens the page"
    )
    for text in view.incidents:
        name, _, sentence = text.partition("): ")
        told = bool(sentence) and inside_line(sentence) in view.line
        yield f"incident {printable(f'{name}): {evidence}' if told else text, 10_000)}"


def count_waiters(view: JobView) -> Counter[int]:
    """How many ranks wait for each; none while the detector says that the job moves."""
    return Counter(rank for row in view.rows if row.alive and view.still for rank in row.waits_for)


WIDTHS = {"node": 16, "pid": 8, "step": 9, "calls": 11, "silent": 10, "GPU": 16}


def chosen_columns(view: JobView) -> tuple[str, ...]:
    """Nodes where there are several, GPUs where they are known."""
    several = len({row.host for row in view.rows if row.host}) > 1
    known = any(row.gpu for row in view.rows)
    return (*(["node"] if several else []), "pid", "step", "calls", "silent", *(["GPU"] if known else []))


def cell(row: RankRow, column: str) -> str:
    """What stands in a column, the same in `status`, `top` and on a narrow screen."""
    if column == "silent":
        return duration(row.silent_s) if row.silent_s is not None and row.alive else "-"
    if column == "step":
        return f"{row.step:,}" if row.step >= 0 else "-"
    if column == "calls":
        return f"{row.calls_completed:,}"
    return {"node": row.host[:16], "pid": str(row.pid), "GPU": row.gpu or "-"}[column]


def _summary(view: JobView, waiters: Counter[int], colour: bool) -> Iterator[str]:
    """A large job: ranks that do the same are one line; below, those that died or that others wait for."""
    alike: dict[tuple[str, tuple[int, ...]], list[RankRow]] = {}
    odd = [row for row in view.rows if row.doing == "died" or (row.alive and waiters[row.rank])]
    exceptions = {row.rank for row in odd}
    for row in view.rows:
        if row.rank not in exceptions:
            alike.setdefault((row.doing, row.waits_for if view.still else ()), []).append(row)
    groups = sorted(alike.items(), key=lambda each: -len(each[1]))
    for (doing, waits), rows in groups[:MANY_LINES]:
        ranks = ranks_text(row.rank for row in rows)
        tail = f", {'waits' if len(rows) == 1 else 'wait'} for {ranks_text(waits, limit=8)}" if waits else ""
        yield printable(f"{count(len(rows), 'rank')} ({ranks.partition(' ')[2]}): {doing}{tail}", 1000)
    if len(groups) > MANY_LINES:
        yield f"… and {sum(len(rows) for _, rows in groups[MANY_LINES:]):,} more that do other things"
    columns = chosen_columns(view)
    yield from (_line(row, waiters[row.rank], columns, colour, UNLIMITED, view) for row in odd[:MANY_LINES])
    if len(odd) > MANY_LINES:
        yield f"… and {len(odd) - MANY_LINES:,} more that died or that others wait for"


def headline(view: JobView) -> str:
    if not view.rows:
        return f"{view.job}: no rank has started"
    alive = sum(row.alive for row in view.rows)
    return f"{view.job}: {alive:,} of {count(len(view.rows), 'rank')} {'runs' if alive == 1 else 'run'}"


def _line(row: RankRow, waiters: int, columns: Sequence[str], colour: bool, width: int, view: JobView) -> str:
    """One rank; one that others wait for has the colour of the job's state."""
    held = row.alive and waiters > 0
    text = f"{row.name or row.rank:>5} " + "".join(f"{cell(row, name):>{WIDTHS[name]}} " for name in columns)
    text += " " + doing_text(row, waiters if held else 0, view.still)
    code = "31" if row.doing == "died" else LEVELS[view.level] if held else "" if row.alive else "2"
    return f"\x1b[{code}m{_cut(text, width)}\x1b[0m" if colour and code else _cut(text, width)


def doing_text(row: RankRow, waiters: int, still: bool) -> str:
    """Who waits for whom, then what it does: a narrow screen cuts the end."""
    held = f"<- {waiters:,} {'rank waits' if waiters == 1 else 'ranks wait'} for it: " if waiters else ""
    waits = f"waits for {ranks_text(row.waits_for, limit=8)}: " if still and row.waits_for else ""
    doing = "ended" if row.doing == "exit" else row.doing
    return f"{held or waits}{doing}{f' [{row.phase}]' if row.phase and row.alive else ''}"


def _wrap(text: str, width: int) -> list[str]:
    """The whole text in lines of the screen: an answer is not cut."""
    return wrap(printable(text, len(text)), width) or [""]


def _cut(text: str, width: int) -> str:
    """Fits one line of the screen, and does not steer it: names and reasons are words of others."""
    text = printable(text, len(text))
    return text if len(text) <= width else f"{text[: width - 1]}…"
