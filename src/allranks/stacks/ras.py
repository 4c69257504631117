"""Asks NCCL's RAS service over TCP and reads its answer. A millisecond, no ptrace; MISMATCH alone proves nothing.

A healthy job also shows different operation counts for a moment: only what two answers say alike is told.
"""

from __future__ import annotations

import re
import socket
import time

from allranks.model.stacks import RasReply

DEFAULT_ADDRESS = "127.0.0.1:28028"
LIMIT_S = 5.0
MAX_BYTES = 8 << 20
_TELLING = re.compile(
    r"launched up to operation|MISMATCH|INCOMPLETE|ERROR|TIMEOUT|FINALIZE|ABORT|missing|unresponsive|"
    r"unreachable|no response|dead peer|not responding", re.IGNORECASE,
)  # fmt: skip


def ask(
    address: str = DEFAULT_ADDRESS, *, as_json: bool = False, limit_s: float = LIMIT_S
) -> RasReply | None:
    """One verbose status, or None when nobody answers there."""
    host, _, port = address.rpartition(":")
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


def find_laggards(replies: list[RasReply] | tuple[RasReply, ...]) -> tuple[str, ...]:
    """Sentences that stand alike in the first and the last answer; () with fewer than two answers."""
    texts = [reply.text for reply in replies if not reply.text.lstrip().startswith(("{", "OK"))]
    if len(texts) < 2:
        return ()
    first, last = (_telling_lines(text) for text in (texts[0], texts[-1]))
    return tuple(line for line in last if line in first)


def _telling_lines(text: str) -> list[str]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if _TELLING.search(line)))[:20]
