"""`allranks goodput`: where the time of a job went, from its ledger."""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from dataclasses import dataclass

from allranks.cli.parser import read_flags
from allranks.cli.terminal import check_target, write_whole
from allranks.errors import InputError
from allranks.model.options import argument, option

UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class LedgerFlags:
    """The ledgers to read."""

    jobs: tuple[str, ...] = argument(
        (),
        "name of a job, folder of incidents, or ledger file (default: ./allranks-incidents)",
        metavar="JOB|FOLDER",
    )
    since: str = option("", "only the time after it: 24h, 7d, or 2026-11-18T14:00 (UTC)", metavar="TIME")
    json: bool = option(False, "print one JSON object")


@dataclass(frozen=True)
class GoodputFlags(LedgerFlags):
    window: str = option("", "also the share of each window of this length: 1h, 1d", metavar="TIME")
    gpu_hour: float | None = option(None, "price of a GPU hour in dollars, for the cost", metavar="PRICE")
    html: str = option("", "write a page with pictures", metavar="FILE")
    force: bool = option(False, "overwrite FILE")


FLAGS = (GoodputFlags,)


def main(args: argparse.Namespace) -> int:
    """0 with a ledger, 2 without one."""
    from allranks.api.functions import job_accounts
    from allranks.ledger.report import render_page, render_text, to_object

    gc.disable()  # the ledger of a month has a million small objects and no garbage
    flags = read_flags(GoodputFlags, args)
    check_target(flags.html, flags.force)
    price = flags.gpu_hour or 0.0
    window_s = seconds_of(flags.window) if flags.window else 0.0
    accounts = job_accounts(flags.jobs, moment_of(flags.since))
    if flags.html:
        write_whole(flags.html, [render_page(accounts[-1], price, time.time())])
    if flags.json:
        found = [to_object(one, price, window_s) for one in accounts]
        print(json.dumps(found[0] if len(found) == 1 else found))
        return 0
    for number, one in enumerate(accounts):
        if len(accounts) > 1:
            print(f"{chr(10) if number else ''}job {one.job}")
        print("\n".join(render_text(one, price, window_s)))
    return 0


def seconds_of(text: str) -> float:
    """ "90s", "24h", "7d" in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)?", text.strip())
    if found is None or (found[2] or "s") not in UNITS:
        raise InputError(f"{text!r} is not a length of time", hint="For example 90s, 30m, 24h, 7d.")
    return float(found[1]) * UNITS[found[2] or "s"]


def moment_of(text: str) -> float:
    """Epoch seconds of "24h" (ago), "2026-11-18" or "2026-11-18T14:00" (UTC); 0 for ""."""
    if not text:
        return 0.0
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"):
        try:
            import calendar

            return float(calendar.timegm(time.strptime(text, form)))
        except ValueError:
            continue
    return time.time() - seconds_of(text)
