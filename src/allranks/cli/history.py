"""`allranks history`: what nodes did in earlier jobs, and which of them fail again and again."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict

from allranks.cli.goodput import read_accounts, seconds_of
from allranks.cli.terminal import answer
from allranks.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--node", default="", metavar="NAME", help="only this node")
    add("--cause", default="", metavar="CAUSE", help="only this cause, as in verdicts (rank_died, slow, …)")
    add("--job", default="", metavar="JOB", help="only this job")
    add("--week", action="store_true", help="only the last seven days")
    add(
        "--forgive-after",
        default="14d",
        metavar="TIME",
        help="older incidents do not count against a node (default: %(default)s)",
    )
    add("--slurm-exclude", action="store_true", help="print the bad nodes as Slurm's --exclude takes them")
    add(
        "--import",
        dest="ledgers",
        action="append",
        default=[],
        metavar="FOLDER",
        help="add the jobs whose ledgers are in this folder; repeatable",
    )
    add("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """0 no bad node, 1 there are some, 2 the history cannot be read. --slurm-exclude: always 0."""
    from allranks.ledger.history import NodeHistory, default_place

    place = default_place(os.environ)
    if not place:
        raise InputError(
            "the history is off (ALLRANKS_HISTORY=off)", hint="Set it to a file or a postgresql:// URL."
        )
    history, now, forgive_s = NodeHistory(place), time.time(), seconds_of(args.forgive_after)
    try:
        for folder in args.ledgers:
            for found in read_accounts([folder]):
                history.record_job(found)
        bad = [one for one in history.bad_nodes(now, forgive_s) if args.node in ("", one.node)]
        since = now - 7 * 86400 if args.week else 0.0
        events = history.events(since, args.node, args.cause, args.job)
    except OSError as error:
        raise InputError(str(error), hint="Jobs are remembered from the first `allranks run` on.") from error
    if args.slurm_exclude:
        print(",".join(one.node for one in bad))
        return 0
    facts = {"bad_nodes": [asdict(one) for one in bad], "events": [asdict(one) for one in events]}
    lines = [f"{one.node} is bad ({one.confidence:.0%} sure): {one.reason}." for one in bad]
    lines = lines or [f"No node has failed again and again (of {len(events)} incidents on record)."]
    for event in events[-50:]:
        at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(event.at))
        lines.append(
            f"  {at}  {event.node}  {event.job}  {event.cause.replace('_', ' ')}  {event.text[:100]}"
        )
    answer(args.json, facts, lines)
    return 1 if bad else 0
