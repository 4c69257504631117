"""`allranks status` and `allranks top`: ranks, steps, who waits for whom, incidents; once or live."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from allranks.cli.terminal import full_screen, key_within, use_color
from allranks.model.cluster import JobView, Motion, RankRow
from allranks.model.formatting import count, rank_list, ranks_text
from allranks.model.parsing import printable

if TYPE_CHECKING:  # numpy comes with it
    from allranks.incidents.job_overview import Overview

UNLIMITED = 10_000
MANY_RANKS, MANY_LINES = 64, 16  # more ranks are summed up, in so many lines
WIDE = 80  # a narrower screen has fewer columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "job",
        nargs="?",
        metavar="JOB",
        help="name of a job, or folder of its black boxes (default: the newest one that runs here)",
    )
    add("--json", action="store_true", help="print one JSON object (with --watch: one per line)")
    add(
        "--watch",
        "-w",
        action="store_true",
        help="update until the job ends or q is pressed (`allranks top`)",
    )
    add(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="time between two updates (default: %(default)g)",
    )


def main(args: argparse.Namespace) -> int:
    """0 ranks run, 1 none runs any more, 2 no such job."""
    from allranks.incidents.job_overview import Overview, find_job

    overview = Overview(find_job(args.job))
    live = args.watch or args.command == "top"
    if live and not args.json and sys.stdout.isatty():
        return _watch(overview, max(0.1, args.interval))
    while True:
        view = overview.look()
        print(
            json.dumps(view.to_dict()) if args.json else "\n".join(render(view, colour=use_color())),
            flush=True,
        )
        if not live or not view.running:
            return 0 if view.running else 1
        time.sleep(max(0.1, args.interval))


def _watch(overview: Overview, interval_s: float) -> int:
    """The live screen; ends with q, with the job or with Ctrl-C, and leaves its last state behind."""
    lines: list[str] = []
    by_silence, paused, view = False, False, overview.look()
    with full_screen():
        while view.running:
            if not paused:
                size = shutil.get_terminal_size()
                shown = render(
                    view, colour=use_color(), height=size.lines - 1, width=size.columns, by_silence=by_silence
                )
                lines = list(shown)
                keys = f"q quit  s sort by {'rank' if by_silence else 'silence'}  p pause"
                sys.stdout.write("\x1b[H\x1b[2J" + "\n".join([*lines, _cut(keys, size.columns)]))
                sys.stdout.flush()
            key = key_within(interval_s).lower()
            if key in ("q", "\x04"):
                break
            by_silence, paused = by_silence ^ (key == "s"), paused ^ (key == "p")
            view = overview.look()
    print("\n".join(lines or render(view, colour=use_color())), flush=True)
    return 0 if view.running else 1


def render(
    view: JobView,
    *,
    colour: bool = False,
    height: int = UNLIMITED,
    width: int = UNLIMITED,
    by_silence: bool = False,
) -> Iterator[str]:
    """The screen: a headline, the table (the most silent ranks first when it does not fit), incidents. A narrow one
    leaves out pid and calls: who waits for whom is what matters."""
    yield _cut(_headline(view), width)
    said = _wrap(f"lighthouse {view.lighthouse}: {view.quorum}", width) if view.quorum else []
    yield from said
    waiters = Counter(rank for row in view.rows if row.alive for rank in row.waits_for)
    if height == UNLIMITED and len(view.rows) > MANY_RANKS:
        yield from _summary(view, waiters, colour)
        yield from (f"incident {printable(text, len(text))}" for text in view.incidents)
        return
    middle = f"{'pid':>8} {'step':>8} {'calls':>9}" if width >= WIDE else f"{'step':>7}"
    yield f"{'rank':>5} {middle} {'silent':>8}  doing"
    rows = list(view.rows)
    told = [line for text in view.incidents for line in _wrap(f"incident {text}", width)]
    room = max(5, height - 6 - len(said[1:]) - len(told))
    if len(rows) > room or by_silence:
        rows = sorted(rows, key=lambda row: (row.alive, -(row.silent_s or 0.0)))[:room]
    yield from (_line(row, waiters[row.rank], colour, width, view.motion) for row in rows)
    if len(rows) < len(view.rows):
        yield f"      … and {len(view.rows) - len(rows)} more"
    yield from told


def _summary(view: JobView, waiters: Counter[int], colour: bool) -> Iterator[str]:
    """A large job: ranks that do the same are one line; below, those that died or that others wait for."""
    alike: dict[tuple[str, tuple[int, ...]], list[RankRow]] = {}
    odd = [row for row in view.rows if row.doing == "died" or (row.alive and waiters[row.rank])]
    for row in view.rows:
        if row not in odd:
            alike.setdefault((row.doing, row.waits_for), []).append(row)
    groups = sorted(alike.items(), key=lambda each: -len(each[1]))
    for (doing, waits), rows in groups[:MANY_LINES]:
        ranks = ranks_text(row.rank for row in rows)
        tail = f", {'waits' if len(rows) == 1 else 'wait'} for {ranks_text(waits, limit=8)}" if waits else ""
        yield printable(f"{count(len(rows), 'rank')} ({ranks.partition(' ')[2]}): {doing}{tail}", 1000)
    if len(groups) > MANY_LINES:
        yield f"… and {sum(len(rows) for _, rows in groups[MANY_LINES:]):,} more that do other things"
    yield from (_line(row, waiters[row.rank], colour, UNLIMITED, view.motion) for row in odd[:MANY_LINES])
    if len(odd) > MANY_LINES:
        yield f"… and {len(odd) - MANY_LINES:,} more that died or that others wait for"


def _headline(view: JobView) -> str:
    alive = [row for row in view.rows if row.alive]
    speeds = sorted(row.steps_per_s for row in alive if row.steps_per_s is not None)
    speed = f", {speeds[len(speeds) // 2]:.2f} steps/s" if speeds else ""
    step = max((row.step for row in view.rows), default=-1)
    return f"{view.job}: {len(alive)} of {len(view.rows)} ranks run, step {step if step >= 0 else '-'}{speed}"


_COLOURS: dict[Motion, str] = {"moving": "", "stalled": "33", "hung": "31"}


def _line(row: RankRow, waiters: int, colour: bool, width: int, motion: Motion) -> str:
    """One rank; one that others wait for is amber while the job is stalled, and red when it is hung."""
    held = row.alive and waiters > 0
    silent = f"{row.silent_s:.1f} s" if row.silent_s is not None and row.alive else "-"
    step = str(row.step) if row.step >= 0 else "-"
    tail = _doing(row, waiters if held else 0, narrow=width < WIDE)
    if width >= WIDE:
        text = f"{row.rank:>5} {row.pid:>8} {step:>8} {row.calls_completed:>9} {silent:>8}  {tail}"
    else:
        text = f"{row.rank:>5} {step:>7} {silent:>8}  {tail}"
    code = "31" if row.doing == "died" else _COLOURS[motion] if held else "" if row.alive else "2"
    return f"\x1b[{code}m{_cut(text, width)}\x1b[0m" if colour and code else _cut(text, width)


def _doing(row: RankRow, waiters: int, narrow: bool) -> str:
    """What it does, and who waits for whom; on a narrow screen that comes first."""
    phase = f" [{row.phase}]" if row.phase else ""
    held = f"<- {waiters} {'rank waits' if waiters == 1 else 'ranks wait'} for it" if waiters else ""
    waits = rank_list(row.waits_for, limit=8)
    if narrow:
        first = held or (f"waits for {waits}" if waits else "")
        return f"{first}: {row.doing}{phase}" if first else f"{row.doing}{phase}"
    return f"{row.doing}{f', waits for rank {waits}' if waits else ''}{phase}" + (f"  {held}" if held else "")


def _wrap(text: str, width: int) -> list[str]:
    """The whole text in lines of the screen: an answer is not cut."""
    return textwrap.wrap(printable(text, len(text)), width, subsequent_indent="  ")


def _cut(text: str, width: int) -> str:
    """Fits one line of the screen, and does not steer it: names and reasons are words of others."""
    text = printable(text, len(text))
    return text if len(text) <= width else f"{text[: width - 1]}…"
