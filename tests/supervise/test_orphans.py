"""Nothing that a rank has started outlives the agent, however the agent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from proc import gone

#: An agent with two "ranks", each with a child in its process group; the second one is no longer guarded.
AGENT = """
import subprocess, sys, time
from allranks.supervise.orphans import Guard
guard = Guard()
guard.start()
rank = "sleep 3600 & echo $!; exec >&-; wait"
ranks = [subprocess.Popen(["sh", "-c", rank], stdout=subprocess.PIPE, start_new_session=True) for _ in range(2)]
children = [int(r.stdout.readline()) for r in ranks]
for r in ranks:
    guard.add(r.pid)
guard.remove(ranks[1].pid)
print(*children, *(r.pid for r in ranks), guard._process.pid, flush=True)
sys.stdin.readline()
guard.close()
"""


def _wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_what_a_rank_has_started_ends_with_the_agent(end: str) -> None:
    """kill -9 of the agent, or its orderly end: the guarded group is gone, the other one is let alone."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    child, free, rank, other, guard = map(int, agent.stdout.readline().split())
    try:
        assert not gone(child) and not gone(guard)
        if end == "killed":
            agent.kill()
        agent.communicate("\n" if end == "closed" else None, timeout=300)
        _wait_until_gone(rank, child, guard)
        assert not gone(free) and not gone(other)
    finally:
        os.killpg(other, signal.SIGKILL)
    _wait_until_gone(free, other)
