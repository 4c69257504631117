"""A lighthouse started by its command, and what it costs: CPU and memory of its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def rss_mb(pid: int) -> float:
    """Resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextmanager
def lighthouse(*words: str) -> Iterator[tuple[str, int]]:
    """(address, pid) of a lighthouse started by its command."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks", "lighthouse", "--json", "--no-token", "--bind", "127.0.0.1:0",
             "--log-level", "warning", "--start-grace-ms", "0", *words],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"], process.pid
        finally:
            process.terminate()
            process.wait(20)
