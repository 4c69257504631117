"""`allranks page [JOB]`: the page of a running job, served by its lighthouse."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer
from allranks.model.options import argument, option


@dataclass(frozen=True)
class PageFlags:
    job: str | None = argument(
        None,
        "name of a job, folder of its black boxes, or HOST:PORT of a lighthouse (default: the newest job that runs here)",
        metavar="JOB",
    )
    no_browser: bool = option(False, "only print the address")
    json: bool = option(False, 'print {"url": …}')


FLAGS = (PageFlags,)


def main(args: argparse.Namespace) -> int:
    """0 opened or printed, 2 no such job or it has no lighthouse."""
    flags = read_flags(PageFlags, args)
    url = _url(flags.job)
    answer(flags.json, {"url": url}, url)
    if flags.no_browser or flags.json:
        return 0
    import webbrowser

    if not webbrowser.open(url):
        print("allranks page: no browser here; open the address above", file=sys.stderr)
    return 0


def _url(job: str | None) -> str:
    from allranks.incidents.job_overview import lighthouse_of

    address, _ = lighthouse_of(job)
    scheme = "https" if os.environ.get("ALLRANKS_CA") else "http"
    return address if "://" in address else f"{scheme}://{address}/"
