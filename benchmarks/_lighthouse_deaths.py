"""How long until every survivor knows: a replica killed, frozen, or cut off with its whole machine."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _lighthouse_crowd import LOST, Crowd
from _lighthouse_netns import Namespace
from _lighthouse_server import lighthouse

SURVIVORS = 20
_VICTIM = """
import sys, time
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.model.cluster import Member
client = Client(ClientOptions(addresses=(sys.argv[1],), replica="victim", beacon=sys.argv[2] == "beacon")).start(60)
ticket = client.request_quorum(Member("victim"))
print("asked", flush=True)
ticket.result(60)
print("member", flush=True)
time.sleep(600)
"""


def deaths(rounds: tuple[int, int], say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds (or milliseconds) from the fault until the last survivor has read the notice; medians.

    `rounds` of kills, and of faults that only silence tells.
    """
    kills, silences = rounds
    numbers: dict[str, Any] = {}
    for kind in ("thread", "beacon"):
        times = [struck(_kill, 30.0, kind) for _ in range(kills)]
        numbers[f"kill_to_all_survivors_ms_{kind}"] = round(1000 * statistics.median(times), 2)
    numbers["kill_s"] = numbers["kill_to_all_survivors_ms_thread"] / 1000
    frozen = [struck(_freeze, 1.0, "beacon") for _ in range(silences)]
    numbers["sigstop_s"] = round(statistics.median(frozen), 3)
    try:
        with Namespace() as namespace:
            cut = [struck(namespace.cut, 1.0, "beacon", namespace) for _ in range(silences)]
        numbers["cut_network_s"] = round(statistics.median(cut), 3)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"no network namespace here ({error}): the cut network is left out")
    numbers["sigstop_and_cut_limit_s"] = 1.2  # heartbeat timeout 1 s + one beat of 0.2 s
    return numbers


def struck(
    strike: Callable[[int], None], timeout_s: float, kind: str, namespace: Namespace | None = None
) -> float:
    """Seconds from the blow to a real replica process until every survivor has the notice."""
    host, prefix = (namespace.host, namespace.prefix) if namespace else ("127.0.0.1", ())
    words = ("--min-replicas", str(SURVIVORS + 1), "--heartbeat-timeout-ms", str(int(timeout_s * 1000)))
    with lighthouse("--bind", f"{host}:0", *words) as (address, _):
        victim = subprocess.Popen(
            [*prefix, sys.executable, "-c", _VICTIM, address, kind],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        crowd = None
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "asked\n"
            crowd = Crowd(address, SURVIVORS, beat_s=0.1)
            crowd.join_all(0)
            assert victim.stdout.readline() == "member\n"
            _keep_beating(crowd, 0.3)
            began = time.perf_counter()
            strike(victim.pid)
            crowd.wait(LOST, set(crowd.lights), timeout_s * 3 + 20)
            return time.perf_counter() - began
        finally:
            _end(victim)
            if namespace is not None:
                namespace.mend()
            if crowd is not None:
                crowd.close()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _freeze(pid: int) -> None:
    """The whole machine is frozen: its beacon too."""
    for each in [pid, *_children(pid)]:
        os.kill(each, signal.SIGSTOP)


def _end(victim: subprocess.Popen[str]) -> None:
    for pid in [*_children(victim.pid), victim.pid]:
        try:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    victim.wait(20)


def _keep_beating(crowd: Crowd, seconds: float) -> None:
    """A job in peace."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        crowd.beat_if_due()
        crowd.pump(0.02)


def _children(pid: int) -> list[int]:
    """Direct children, of all threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(each) for each in task.read_text().split()]
        except OSError:
            continue
    return found
