"""Asks NCCL's RAS service over TCP and reads its answer. A millisecond, no ptrace; MISMATCH alone proves nothing.

A healthy job also shows different operation counts for a moment: only counts that stand alike in the first and the
last answer are reported.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allranks.model.stacks import RasReply
from allranks.stacktraces.procfs import is_foreign_port

DEFAULT_ADDRESS = "127.0.0.1:28028"
LIMIT_S = 5.0
MAX_BYTES = 8 << 20
_BLOCK = re.compile(r"^\s*#(\d+-\d+) \([0-9a-fA-Fx]+\) \w+")
_MANY = re.compile(r"^\s*(\d+) ranks have (?:launched up to operation (\d+)|not launched any operation)")
_ONE = re.compile(
    r"^\s*Rank (\d+)(?: has)? (?:launched up to operation (\d+)|not launched any operations?)(?:.*?process (\d+))?"
)
_NAMED = re.compile(r"^\s*Rank (\d+) -- GPU .*?process (\d+)")
_SERIOUS = re.compile(r"\b(INCOMPLETE|DEAD|TIMEOUT|unreachable|unresponsive|considered dead|ERROR)\b")


@dataclass(frozen=True)
class OperationCount:
    """How far one rank of a communicator got. `rank` is its number in the communicator."""

    comm: str
    operation: int
    rank: int | None = None
    pid: int | None = None
    count: int = 1


def ask(
    address: str = DEFAULT_ADDRESS, *, of: Sequence[int] = (), as_json: bool = False, limit_s: float = LIMIT_S
) -> RasReply | None:
    """One verbose status, or None when nobody answers there.

    With the processes of a job (`of`) also None when another job of this machine answers: NCCL's port is the same for all.
    """
    host, _, port = address.rpartition(":")
    if of and port.isdigit() and host in ("127.0.0.1", "localhost", "") and is_foreign_port(int(port), of):
        return None
    question = ("SET FORMAT json\n" if as_json else "") + "VERBOSE STATUS\n"
    deadline = time.monotonic() + limit_s
    chunks: list[bytes] = []
    try:
        with socket.create_connection(
            (host or "127.0.0.1", int(port)), timeout=min(1.0, limit_s)
        ) as connection:
            connection.sendall(question.encode())
            while time.monotonic() < deadline and sum(map(len, chunks)) < MAX_BYTES:
                connection.settimeout(max(0.05, deadline - time.monotonic()))
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                chunks.append(chunk)
    except (OSError, ValueError):
        if not chunks:
            return None
    text = b"".join(chunks).decode("utf-8", "replace")
    return RasReply(address, time.time(), text) if text else None


def read_counts(text: str) -> tuple[OperationCount, ...]:
    """The operation counts of the communicators that RAS lists as different."""
    found: list[OperationCount] = []
    comm, operation = "", 0
    for line in text.splitlines():
        if block := _BLOCK.match(line):
            comm = block.group(1)
        elif many := _MANY.match(line):
            operation = int(many.group(2) or 0)
            found.append(OperationCount(comm, operation, count=int(many.group(1))))
        elif one := _ONE.match(line):
            pid = int(one.group(3)) if one.group(3) else None
            found.append(OperationCount(comm, int(one.group(2) or 0), int(one.group(1)), pid))
        elif named := _NAMED.match(line):
            found.append(OperationCount(comm, operation, int(named.group(1)), int(named.group(2))))
    return tuple(found)


def find_laggards(replies: Sequence[RasReply]) -> tuple[OperationCount, ...]:
    """Named ranks that are behind in the first and in the last answer alike; () with fewer than two answers."""
    if len(replies) < 2:
        return ()
    first, last = read_counts(replies[0].text), read_counts(replies[-1].text)
    if first != last:
        return ()
    most = {
        comm: max(one.operation for one in last if one.comm == comm) for comm in {one.comm for one in last}
    }
    return tuple(one for one in last if one.rank is not None and one.operation < most[one.comm])


def stood_still_s(replies: Sequence[RasReply]) -> float | None:
    """Seconds over which differing counts did not change; 0 when they did; None when RAS shows no difference."""
    if len(replies) < 2 or not read_counts(replies[-1].text):
        return None
    same = read_counts(replies[0].text) == read_counts(replies[-1].text)
    return replies[-1].at_s - replies[0].at_s if same else 0.0


def describe(replies: Sequence[RasReply]) -> tuple[str, ...]:
    """What RAS said, in sentences."""
    lines = []
    if replies and not find_laggards(replies):
        counts = read_counts(replies[-1].text)
        lines += ["counts differ but move: the job works"] if counts and stood_still_s(replies) == 0.0 else []
    for one in find_laggards(replies):
        most = max(c.operation for c in read_counts(replies[-1].text) if c.comm == one.comm)
        process = f" (process {one.pid})" if one.pid else ""
        lines.append(
            f"communicator #{one.comm}: rank {one.rank}{process} has launched up to operation {one.operation}, "
            f"others up to {most}, alike in {len(replies)} answers"
        )
    if len(replies) > 1:
        serious = [_serious_lines(reply.text) for reply in (replies[0], replies[-1])]
        lines += [line for line in serious[1] if line in serious[0]]
    return tuple(dict.fromkeys(lines))[:20]


def _serious_lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if _SERIOUS.search(line)]
