"""`allranks status` and `allranks top`: ranks, steps, who waits for whom, incidents; once or live."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator

from allranks.model.job import JobView, RankRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "job",
        nargs="?",
        help="name of the job or folder of its black boxes (default: the newest on this node)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (with --watch: one per line)"
    )
    parser.add_argument(
        "--watch", "-w", action="store_true", help="go on until the job ends or Ctrl-C (`allranks top`)"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between looks (%(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    """0 ranks run, 1 none runs any more, 2 no such job."""
    from allranks.incidents.job_overview import Overview, find_job

    overview = Overview(find_job(args.job))
    live = args.watch or args.command == "top"
    view = overview.look()
    while True:
        _show(view, args.json, live)
        if not live or not view.running:
            return 0 if view.running else 1
        time.sleep(max(0.1, args.interval))
        view = overview.look()


def _show(view: JobView, as_json: bool, live: bool) -> None:
    if as_json:
        print(json.dumps(view.to_dict()), flush=True)
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if live and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")
    size = shutil.get_terminal_size() if sys.stdout.isatty() else os.terminal_size((10_000, 10_000))
    print("\n".join(render(view, colour=colour, height=size.lines, width=size.columns)), flush=True)


def render(
    view: JobView, *, colour: bool = False, height: int = 10_000, width: int = 10_000
) -> Iterator[str]:
    """The screen: a headline, the table (the most silent ranks first when it does not fit), incidents."""
    alive = [row for row in view.rows if row.alive]
    speeds = [row.steps_per_s for row in alive if row.steps_per_s is not None]
    speed = f", {sorted(speeds)[len(speeds) // 2]:.2f} steps/s" if speeds else ""
    step = max((row.step for row in view.rows), default=-1)
    yield f"{view.job}: {len(alive)} of {len(view.rows)} ranks run, step {step if step >= 0 else '-'}{speed}"
    if view.quorum:
        yield f"lighthouse {view.lighthouse}: {view.quorum}"
    yield f"{'rank':>5} {'pid':>8} {'step':>8} {'calls':>9} {'silent':>8}  doing"
    rows = list(view.rows)
    room = max(5, height - 6 - len(view.incidents))
    if len(rows) > room:
        rows = sorted(rows, key=lambda row: (row.alive, -(row.silent_s or 0.0)))[:room]
    waiters = Counter(rank for row in alive for rank in row.waits_for)
    for row in rows:
        yield _line(row, waiters[row.rank], colour, width)
    if len(rows) < len(view.rows):
        yield f"      … and {len(view.rows) - len(rows)} more"
    for text in view.incidents:
        yield _cut(f"incident {text}", width)


def _line(row: RankRow, waiters: int, colour: bool, width: int) -> str:
    """One rank; one that others wait for stands out."""
    silent = f"{row.silent_s:.1f} s" if row.silent_s is not None and row.alive else "-"
    waits = f", waits for rank {_ranks(row.waits_for)}" if row.waits_for else ""
    phase = f" [{row.phase}]" if row.phase else ""
    text = f"{row.rank:>5} {row.pid:>8} {row.step if row.step >= 0 else '-':>8} {row.calls_completed:>9} {silent:>8}  {row.doing}{waits}{phase}"
    if waiters and row.alive:
        text += f"  <- {waiters} {'rank waits' if waiters == 1 else 'ranks wait'} for it"
    text = _cut(text, width)
    if not colour:
        return text
    code = "31" if row.doing == "died" or (waiters and row.alive) else "2" if not row.alive else ""
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


def _cut(text: str, width: int) -> str:
    """Fits one line of the screen."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
