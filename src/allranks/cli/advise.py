"""`allranks advise`: what would raise the goodput of a job, from its own ledger."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from allranks.cli.goodput import LedgerFlags, moment_of
from allranks.cli.parser import read_flags

FLAGS = (LedgerFlags,)


def main(args: argparse.Namespace) -> int:
    """0 nothing to change, 1 there is advice, 2 no ledger."""
    from allranks.api.functions import job_accounts
    from allranks.ledger.advice import advise, find_intervals

    flags = read_flags(LedgerFlags, args)
    accounts = job_accounts(flags.jobs, moment_of(flags.since))
    found = {one.job: advise(one) for one in accounts}
    if flags.json:
        body = [
            {
                "schema": 1,
                "job": one.job,
                "goodput": one.goodput,
                "advice": [asdict(line) for line in found[one.job]],
                "intervals": [asdict(line) for line in find_intervals(one)],
            }
            for one in accounts
        ]
        print(json.dumps(body[0] if len(body) == 1 else body))
        return 1 if any(found.values()) else 0
    for one in accounts:
        prefix = f"{one.job}: " if len(accounts) > 1 else ""
        if not found[one.job]:
            print(f"{prefix}{one.goodput:.1%} useful; no change is worth more than 0.2% of the time.")
        for line in found[one.job]:
            print(f"{prefix}+{line.gain:.1%}: {line.what}.\n    {line.why}.")
    return 1 if any(found.values()) else 0
