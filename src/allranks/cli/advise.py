"""`allranks advise`: changes that would raise the goodput of a job, from its ledger."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from allranks.cli.goodput import LedgerFlags, moment_of
from allranks.cli.parser import read_flags

FLAGS = (LedgerFlags,)


def main(args: argparse.Namespace) -> int:
    """0 no advice, 1 advice, 2 no ledger."""
    from allranks.api.functions import job_accounts
    from allranks.ledger.advice import advise, find_intervals

    flags = read_flags(LedgerFlags, args)
    found = [(one, advise(one)) for one in job_accounts(flags.jobs, moment_of(flags.since))]
    body: list[dict[str, object]] = []
    for one, advice in found:
        facts = {"advice": [asdict(line) for line in advice]}
        facts["intervals"] = [asdict(line) for line in find_intervals(one)]
        body.append({"schema": 1, "job": one.job, "goodput": one.goodput, **facts})
        prefix = f"{one.job}: " if len(found) > 1 else ""
        lines = [f"{prefix}+{line.gain:.1%}: {line.what}.\n    {line.why}." for line in advice]
        lines = lines or [
            f"{prefix}{one.goodput:.1%} useful; no change would gain more than 0.2% of the time."
        ]
        if not flags.json:
            print("\n".join(lines))
    if flags.json:
        print(json.dumps(body[0] if len(body) == 1 else body))
    return 1 if any(advice for _, advice in found) else 0
