"""`allranks page [JOB]`: the page of a running job, served by its lighthouse."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer
from allranks.errors import InputError
from allranks.model.options import argument, option

ANSWER_S = 5.0  # a lighthouse that takes longer to accept a connection is taken for gone


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
    import socket

    from allranks.incidents.job_overview import lighthouse_of

    address, folder = lighthouse_of(job)
    if folder is not None:
        host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except (OSError, ValueError) as error:
            raise InputError(
                f"the lighthouse of job {folder.name} at {address} does not answer ({error}); the job has probably ended",
                hint=f"`allranks status {folder.name}` shows what its black boxes hold.",
            ) from error
    return address if "://" in address else f"http://{address}/"
