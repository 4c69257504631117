"""`allranks history`: incidents of nodes in earlier jobs, and which nodes fail repeatedly."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass

from allranks.cli.goodput import seconds_of
from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer
from allranks.errors import InputError
from allranks.model.formatting import count, one_line
from allranks.model.options import option


@dataclass(frozen=True)
class HistoryFlags:
    node: str = option("", "only this node", metavar="NAME")
    cause: str = option("", "only this cause, as in verdicts (rank_died, slow, …)", metavar="CAUSE")
    job: str = option("", "only this job", metavar="JOB")
    week: bool = option(False, "only the last seven days")
    forgive_after: str = option("14d", "older incidents do not count against a node", metavar="TIME")
    slurm_exclude: bool = option(False, "print the bad nodes as Slurm's --exclude takes them")
    ledgers: tuple[str, ...] = option(
        (),
        "add the jobs whose ledgers are in this folder; repeatable",
        flags="--import",
        metavar="FOLDER",
    )
    json: bool = option(False, "print one JSON object")


FLAGS = (HistoryFlags,)


def main(args: argparse.Namespace) -> int:
    """0 no bad node, 1 bad nodes, 2 the history cannot be read. With --slurm-exclude always 0."""
    from allranks.api.functions import job_accounts
    from allranks.ledger.history import NodeHistory, default_place

    flags, place = read_flags(HistoryFlags, args), default_place(os.environ)
    if not place:
        raise InputError(
            "the history is off (ALLRANKS_HISTORY=off)", hint="Set it to a file or a postgresql:// URL."
        )
    history, now, forgive_s = NodeHistory(place), time.time(), seconds_of(flags.forgive_after)
    try:
        for folder in flags.ledgers:
            for found in job_accounts([folder]):
                history.record_job(found)
        bad = [one for one in history.bad_nodes(now, forgive_s) if flags.node in ("", one.node)]
        since = now - 7 * 86400 if flags.week else 0.0
        events = history.events(since, flags.node, flags.cause, flags.job)
    except OSError as error:
        raise InputError(str(error), hint="Jobs are remembered from the first `allranks run` on.") from error
    if flags.slurm_exclude:
        print(",".join(one.node for one in bad))
        return 0
    facts = {"bad_nodes": [asdict(one) for one in bad], "events": [asdict(one) for one in events]}
    lines = [f"{one.node} is bad ({one.confidence:.0%} sure): {one.reason}." for one in bad]
    lines = lines or [
        f"No node fails repeatedly ({count(len(events), 'incident')} on record)."
        if events
        else f"No incident{' that fits these flags' if flags.node or flags.cause or flags.job or flags.week else ''} is on record."
    ]
    for event in events[-50:]:
        at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(event.at))
        lines.append(
            f"  {at}  {event.node}  {event.job}  {event.cause.replace('_', ' ')}  {one_line(event.text, 100)}"
        )
    answer(flags.json, facts, lines)
    return 1 if bad else 0
