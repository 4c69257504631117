"""Two processes of one replica name: at most one of them can commit, whatever happens to the first."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allranks.lighthouse.options import Options
from lighthouse.processes import Proxy

from .cluster import LIMIT_S, Cluster, Job, LighthouseProcess

JOB = Job(until_told=True, timed=True, pause_s=0.02)
OLD, NEW = "b.1", "b.2"  # both are replica b
KINDS = ("healthy", "cut", "cut up", "cut down", "flapping", "frozen", "lighthouse")


class Relay:
    """The line of one process to the lighthouse, in a process of its own; `say` up, down (cut that way) or mend."""

    def __init__(self, target: str) -> None:
        told, self._orders = os.pipe()
        answers, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            self._serve(target, told, said)
        os.close(told)
        os.close(said)
        with os.fdopen(answers) as file:
            self.address = file.readline().strip()

    def _serve(self, target: str, told: int, said: int) -> None:
        proxy = Proxy(target)
        os.write(said, f"{proxy.address}\n".encode())
        with os.fdopen(told) as orders:
            for order in orders:
                for way in proxy.drop:
                    proxy.drop[way] = order.strip() != "mend" and (proxy.drop[way] or way == order.strip())
        os._exit(0)

    def say(self, *orders: str) -> None:
        os.write(self._orders, "".join(f"{order}\n" for order in orders).encode())

    def close(self) -> None:
        os.close(self._orders)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Line:
    """Where a cluster finds its lighthouse."""

    def __init__(self, address: str) -> None:
        self.address = address


@contextmanager
def disturbed(
    kind: str, cluster: Cluster, relay: Relay, lighthouse: LighthouseProcess, pauses: list[float]
) -> Iterator[None]:
    """Something happens to the first process or to its line; at the end it is undone."""
    if kind == "frozen":
        os.kill(cluster.pid(OLD), signal.SIGSTOP)
    elif kind in ("cut", "lighthouse", "flapping"):
        relay.say("up", "down")
    elif kind != "healthy":
        relay.say(kind.partition(" ")[2])
    if kind == "lighthouse":
        lighthouse.kill()
        lighthouse.start()
    for pause in pauses if kind == "flapping" else ():
        time.sleep(pause)
        relay.say("mend")
        time.sleep(0.1)
        relay.say("up", "down")
    try:
        yield
    finally:
        relay.say("mend")
        if kind == "frozen" and OLD in cluster.replicas:
            os.kill(cluster.pid(OLD), signal.SIGCONT)


def commits(cluster: Cluster, name: str) -> list[tuple[float, float]]:
    """When each step that this process committed began and ended."""
    path = Path(cluster.folder.name) / f"{name}.times"
    rows = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return [(float(began), float(ended)) for began, ended in rows]


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_owner(cluster: Cluster, second: Cluster) -> str:
    """Which of the two trains once the other is refused: it alone makes steps."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline, f"{OLD} and {NEW} both are there"
        if has_ended(second.pid(NEW)):
            return OLD
        if len(commits(cluster, NEW)) >= 3:
            return NEW
        time.sleep(0.02)


def play(seed: int) -> dict[str, object]:
    """One try: a second process of a name is started while something happens to the first, then all is mended."""
    choose = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    presume_dead_s = choose.choice((2.0, 3.0, 5.0))
    options = Options(
        heartbeat_timeout_s=1.0, presume_dead_s=presume_dead_s, join_timeout_s=1.0, start_grace_s=1.5
    )
    # a new lighthouse without etcd knows of the first process only what the other members tell it
    others = ("a", "c")[: choose.randint(int(kind == "lighthouse"), 2)]
    pauses = [choose.uniform(0.2, options.presume_dead_s + 1.0) for _ in range(2)]
    with LighthouseProcess(options) as lighthouse:
        relay = Relay(lighthouse.address)
        first = Cluster(Line(relay.address), JOB)  # type: ignore[arg-type]
        with first, Cluster(lighthouse, JOB, folder=first.folder) as second:
            second.start(*others)
            first.start(OLD)
            for cluster, names in ((first, (OLD,)), (second, others)):
                for name in names:
                    cluster.wait_for_progress(name, 5)
            with disturbed(kind, first, relay, lighthouse, pauses):
                time.sleep(choose.choice((0.0, 0.3, 1.0, options.presume_dead_s)))
                second.start(NEW)
                if kind != "healthy":
                    time.sleep(choose.uniform(0.5, 2 * options.presume_dead_s + 2))
            owner, other = (NEW, first) if wait_for_owner(first, second) == NEW else (OLD, second)
            gone = other.end(OLD if owner == NEW else NEW)
            kept = second if owner == NEW else first
            kept.wait_for_progress(owner, kept.progress(owner) + 5)
            times = commits(first, OLD), commits(first, NEW)
            kept.tell_to_stop()
            for cluster in (first, second):
                cluster.results()
        relay.close()
    assert "LighthouseRefused" in gone.error, f"{kind}: the other one ended with {gone.error[-500:]}"
    late = check(kind, *times)
    return {
        "kind": kind,
        "owner": owner,
        "others": len(others),
        "commits": [len(each) for each in times],
        "in_flight": late,
    }


def check(kind: str, old: list[tuple[float, float]], new: list[tuple[float, float]]) -> int:
    """No step of the first ends after the second's first one; but for one that was begun before, when it was frozen inside it."""
    if not new:
        return 0
    since = min(ended for _, ended in new)
    late = [(began, ended) for began, ended in old if ended > since]
    in_flight = [began for began, _ in late if kind == "frozen" and began < since]
    assert len(late) == len(in_flight) <= 1, (
        f"{kind}: {OLD} committed {len(late)} steps after {NEW} began to, first at {since}: {late[:3]}"
    )
    return len(in_flight)


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 103))])
def test_one_of_two_processes_of_a_name_commits(seed: int) -> None:
    """The other is refused, at its start or when its line is mended."""
    play(seed)
