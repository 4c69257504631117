"""`allranks page [JOB]`: the page of a running job, served by its lighthouse."""

from __future__ import annotations

import argparse
import socket
import sys

from allranks.cli.terminal import answer
from allranks.errors import InputError

ANSWER_S = 5.0  # a lighthouse that takes longer to accept a connection is taken for gone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "job",
        nargs="?",
        metavar="JOB",
        help="name of a job, folder of its black boxes, or HOST:PORT of a lighthouse (default: the newest job that "
        "runs here)",
    )
    add("--no-browser", action="store_true", help="only print the address")
    add("--json", action="store_true", help='print {"url": …}')


def main(args: argparse.Namespace) -> int:
    """0 opened or printed, 2 no such job or it has no lighthouse."""
    url = _url(args.job)
    answer(args.json, {"url": url}, url)
    if args.no_browser or args.json:
        return 0
    import webbrowser

    if not webbrowser.open(url):
        print("allranks page: no browser here; open the address above", file=sys.stderr)
    return 0


def _url(job: str | None) -> str:
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
