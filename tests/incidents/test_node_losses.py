"""A whole node goes, agent and ranks together: one of the others tells it, once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.incidents.deaths import describe
from allranks.incidents.folder import read_incidents
from allranks.lighthouse.agents import Nodes
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import Failover, Presence
from allranks.watch.nodes import Loss, NodeMonitor

from .node_process import TOKEN


@contextmanager
def node(name: str, folder: Path, mode: str, ranks: str, *lighthouse: str) -> Iterator[tuple[Any, str]]:
    """A node that the lighthouse knows, and the address of its lighthouse."""
    command = [sys.executable, "-m", "incidents.node_process", name, str(folder), mode, ranks, *lighthouse]
    log = folder / f"{name}.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, log.read_text()
        yield process, address
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def wait_for_story(folder: Path, word: str) -> list[dict[str, Any]]:
    """The incidents that say this, once there are any."""
    deadline = time.monotonic() + 60
    while True:
        stories = [story for story in read_incidents(folder) if word in str(story)]
        if stories:
            return stories
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["whole_job", "replica"])
def test_a_node_that_dies_with_its_agent_is_told_once_with_its_ranks(tmp_path: Path, mode: str) -> None:
    """Node b with ranks 2 and 3 goes; a and c are left, and one of them tells it with the boxes of both."""
    with Lighthouse(Options(), ServerOptions(token=TOKEN)) as lighthouse, ExitStack() as nodes:
        start = [("a", "0,1"), ("b", "2,3"), ("c", "4")]
        a, b, c = (
            nodes.enter_context(node(name, tmp_path, mode, ranks, lighthouse.address))[0] for name, ranks in start
        )  # fmt: skip
        b.kill()
        b.wait(20)
        (story,) = wait_for_story(tmp_path / "incidents", "noticed")
        assert (story["kind"], story["node"], story["ranks"]) == ("death", "b", [2, 3])
        assert story["step"] in (41, 44)  # as the ranks of the one that tells it say
        assert story["verdict"]["cause"] == "rank_died" and story["verdict"]["ranks"] == [2, 3]
        exited = "node b was lost with ranks 2, 3: its agent exited"
        cut = "node b with ranks 2, 3 is dead, frozen or cut off: its agent's connection was cut"  # it had not read all
        assert story["verdict"]["sentence"].startswith((exited, cut))
        assert story["action"]["kind"] == ("restart_job" if mode == "whole_job" else "none")
        wait_for_story(tmp_path / "incidents", "lost node")
        for process in (a, c):  # they end in good order: their nodes are not lost
            process.stdin.close()
            assert process.wait(60) == 0
    (story,) = read_incidents(tmp_path / "incidents")
    boxes = {box.name for box in (tmp_path / "incidents" / story["id"] / "boxes").iterdir()}
    assert boxes == {"0.box", "1.box", "4.box"}
    assert "black boxes of ranks 2, 3: they are on the lost node" in story["missing"]


def test_a_lighthouse_that_goes_with_its_node_is_missed_and_one_agent_tells_it(tmp_path: Path) -> None:
    """Node h held the lighthouse; the successor that it had named opens the incident, the other one only logs it."""
    with ExitStack() as nodes:
        held, address = nodes.enter_context(node("h", tmp_path, "whole_job", "0,1"))
        for name, rank in (("a", "2"), ("c", "3")):
            nodes.enter_context(node(name, tmp_path, "whole_job", rank, address))

        held.kill()
        (story,) = wait_for_story(tmp_path / "incidents", "noticed")
        assert (story["node"], story["ranks"]) == ("h", [0, 1])
        assert "its agent held the lighthouse" in story["reason"]
        deadline = time.monotonic() + 60
        while "filed by agent-a" not in (tmp_path / "c.log").read_text():  # it may notice later than a
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert len(read_incidents(tmp_path / "incidents")) == 1


def test_a_lighthouse_that_ends_in_good_order_with_its_agent_is_not_missed() -> None:
    """Its agent says good-bye first: those that are left know that nothing was lost."""
    lighthouse = Lighthouse(Options(), ServerOptions(token=TOKEN)).start()
    clients = [
        Client(ClientOptions((lighthouse.address,), TOKEN, f"agent-{name}", name, role="observer", beacon=False)).start()
        for name in "hb"
    ]  # fmt: skip
    host, left = clients
    gone: list[str] = []
    met = NodeMonitor(left, lambda: (2,), "b", holds_lighthouse=False, on_left=gone.append)
    left.subscribe(met.noticed)
    try:
        host.present(Presence("agent-h", "h", (0, 1), lighthouse=True))
        met.start()
        wait_until(lambda: met._host() is not None)
        host.leave("stopped by a signal")
        wait_until(lambda: gone == ["agent-h"])
        host.close()
        lighthouse.close()
        wait_until(lambda: not left.connected)
        assert not met.host_is_away
    finally:
        met.close()
        left.close()
        host.close()
        lighthouse.close()


def wait_until(true: Callable[[], bool]) -> None:
    """Looks often, for a limited time."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_successor_is_the_first_agent_that_does_not_hold_the_lighthouse() -> None:
    """Who leaves in good order is not a successor, and of the lost the ranks stay known."""
    nodes = Nodes()
    host = Presence("agent-h", "h", (0, 1), lighthouse=True)
    assert nodes.note(host) == Failover(host, "")
    assert nodes.note(Presence("agent-x", "x", (4,))).successor == "agent-x"
    assert nodes.note(Presence("agent-b", "b", (2, 3))).successor == "agent-b"
    nodes.leave("agent-b")
    assert nodes.find("agent-b") is None
    assert nodes.note(Presence("agent-x", "x", (4,))).successor == "agent-x"
    assert nodes.lose("agent-x", "x").ranks == (4,) and nodes.find("agent-x") is not None
    assert nodes.lose("agent-new", "n") == Presence("agent-new", "n")


def test_a_loss_is_described_with_its_ranks_and_its_doubt() -> None:
    """A closed connection is a death; silence may be a cut network."""
    many = Presence("agent-b", "b", tuple(range(8, 16)))
    assert describe(Loss(many, "gone", 0.0)) == "node b was lost with ranks 8-15: gone"
    silent = Loss(Presence("agent-b", "b", (3,)), "nothing heard", 0.0, certain=False)
    assert describe(silent) == "node b with rank 3 is dead, frozen or cut off: nothing heard"
    assert "with all its ranks" in describe(Loss(Presence("agent-b", "b"), "gone", 0.0))
