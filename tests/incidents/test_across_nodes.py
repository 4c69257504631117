"""Calls that differ between nodes are named while the job runs: real ranks, two agents, one lighthouse."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from allranks.drill.ranks import Ranks
from allranks.incidents.loop import Watch
from allranks.incidents.peers import PeerAgents
from allranks.incidents.pipeline import WatchOptions
from allranks.launch.node_agent import NodeAgent
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.watch.calls import read_calls
from diagnose.gallery_module import gallery

TOKEN = "secret"


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Path, Callable[[], Watch | None]]]:
    """Where ranks put their boxes, and the agent that has named a difference. Rank 0 is on node a, the others are on b."""
    boxes, over = folder / "boxes", threading.Event()
    boxes.mkdir()

    def share() -> None:
        """A box appears on its node at once: it is the same file."""
        while not over.wait(0.05):
            for box in boxes.glob("*.box"):
                there = folder / ("a" if re.search(r"\.r0\.", box.name) else "b") / box.name
                if not there.exists():
                    os.link(box, there)

    with ExitStack() as stack:
        lighthouse = stack.enter_context(Lighthouse(Options(), ServerOptions(token=TOKEN)))
        watches = []
        for name in "ab":
            (folder / name).mkdir()
            options = ClientOptions(
                (lighthouse.address,), TOKEN, f"agent-{name}", name, role="observer", beacon=False
            )
            client = stack.enter_context(Client(options))
            watch = Watch(
                WatchOptions(folder / name, folder / "incidents", "job", name, collect_stacks=False)
            )
            agent = NodeAgent(watch, client, peers=PeerAgents(client, TOKEN))
            agent.start()
            stack.callback(agent.close)
            watches.append(watch)
        thread = threading.Thread(target=share)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield boxes, lambda: next((w for w in watches if w.pipeline.diverged is not None), None)


def longest_wait(boxes: Path) -> float:
    """How long a rank has waited in a call."""
    traces = read_calls([str(box) for box in boxes.glob("*.box")])
    open_ns = [
        int(t) for trace in traces for t in trace.calls["created_ns"][trace.calls["completed_ns"] == 0]
    ]
    return (time.time_ns() - min(open_ns, default=time.time_ns())) / 1e9


def run(name: str, folder: Path, limit_s: float = 60.0) -> tuple[tuple[int, ...], str, float] | None:
    """The ranks and the line that were named for a program of the gallery, and how long a rank had waited then."""
    gallery.preload()
    case = gallery.truth()[name]
    with two_nodes(folder) as (boxes, named):
        env = {"ALLRANKS_DIR": str(boxes)}
        deadline = time.monotonic() + limit_s
        with Ranks(gallery._rank, case.processes, args=(str(case.script),), backend=None, env=env):
            while (watch := named()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            waited_s = longest_wait(boxes)
        if watch is None or watch.pipeline.diverged is None:
            return None
        found = watch.pipeline.diverged[1]
        return found.ranks, found.where, waited_s


@pytest.mark.parametrize("name", ["nan_skip", "inversion_of_two_groups"])
def test_a_difference_between_nodes_is_named(tmp_path: Path, name: str) -> None:
    """A rank that skips a step, and ranks that wait for each other in two groups."""
    pytest.importorskip("torch")
    found = run(name, tmp_path)
    assert found is not None
    ranks, where, _ = found
    assert ranks == gallery.truth()[name].ranks and where
