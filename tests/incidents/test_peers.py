"""Evidence of other nodes: parts are bounded, go to the leader, and who does not answer is named."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.channel.keys import ChannelError
from allranks.errors import InputError
from allranks.incidents.loop import Watch
from allranks.incidents.peers import PeerAgents, pack_part, send_part, unpack_part
from allranks.incidents.pipeline import WatchOptions
from allranks.launch.node_agent import NodeAgent
from allranks.lighthouse.agents import Current, decide_gathering
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import FOLLOW_S, CollectEvidence, Evicted, Gathering
from allranks.supervise.replicas import Event, ReplicaOptions, Request, Supervisor
from boxes import write_box
from ports import held_port

from .test_node_losses import wait_until

TOKEN = "secret"


def alone() -> PeerAgents:
    """An agent without a lighthouse."""
    return PeerAgents(Client(ClientOptions(("127.0.0.1:1",), TOKEN, "agent-b")), TOKEN)


def test_a_part_arrives_as_it_was_sent_and_names_what_did_not_fit(tmp_path: Path) -> None:
    """Boxes come before what is too large; the receiver knows what was left out."""
    (tmp_path / "a" / "boxes").mkdir(parents=True)
    (tmp_path / "a" / "stacks").mkdir()
    (tmp_path / "a" / "boxes" / "0.box").write_bytes(b"box")
    (tmp_path / "a" / "stacks" / "large.json").write_bytes(bytes(5000))
    data = pack_part(tmp_path / "a", ["stacks of rank 3: gone"], limit=4000)
    missing = unpack_part(data, tmp_path / "b")
    assert (tmp_path / "b" / "boxes" / "0.box").read_bytes() == b"box"
    assert not (tmp_path / "b" / "stacks").exists()
    assert missing[0] == "stacks of rank 3: gone" and "large.json: left out" in missing[1]


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "incident.json", "boxes/../../evil", "boxes"])
def test_a_part_cannot_write_outside_its_places(tmp_path: Path, name: str) -> None:
    """A part comes over the network: it may add boxes and stacks, nothing else."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as pack:
        pack.writestr(name, "x")
    with pytest.raises(InputError):
        unpack_part(data.getvalue(), tmp_path / "in")
    assert not list(tmp_path.rglob("evil")) and not list(tmp_path.rglob("incident.json"))
    assert not (tmp_path / "in" / "boxes").is_file()  # or no other node could send any


def test_a_part_that_grows_when_unpacked_or_is_none_is_refused(tmp_path: Path) -> None:
    """A small file may hold gigabytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("boxes/0.box", bytes(100_000))
    for bad in (data.getvalue(), b"no zip"):
        with pytest.raises(InputError):
            unpack_part(bad, tmp_path, limit=10_000)


def test_the_mailbox_wants_the_token_and_takes_only_what_is_expected(tmp_path: Path) -> None:
    """An unknown client is refused, so is a part of an incident that is over; a silent node is named, a lost one not waited for."""
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "0.box").write_bytes(b"box")
    data = pack_part(tmp_path, [])
    box = alone()
    address = box.open()
    try:
        box.expect("i-1", tmp_path / "in")
        with pytest.raises(ChannelError, match="same job token"):
            send_part(address, "i-1", "agent-a", "wrong", data)
        heard = box._awaited["i-1"].received
        send_part(address, "i-1", "agent-a", TOKEN, data)
        wait_until(lambda: "agent-a" in heard)  # a moment after its sender has the reply
        assert box.wait(Gathering("i-1", "us", ("agent-a", "agent-b")), 0.0) == [
            "agent-b: no evidence within 0 s"
        ]
        box.expect("i-2", tmp_path / "in")
        box.give_up("agent-b")
        assert box.wait(Gathering("i-2", "us", ("agent-b",)), 3600.0) == ["agent-b: no evidence, it is gone"]
        with pytest.raises(ChannelError, match="not expected"):
            send_part(address, "i-1", "agent-b", TOKEN, data)
    finally:
        box.close()
    assert (tmp_path / "in" / "boxes" / "0.box").read_bytes() == b"box"


def test_a_part_counts_after_its_sender_has_the_reply(tmp_path: Path) -> None:
    """Whoever waits for the last part closes the connection: its sender logged that the part could not be sent."""
    mailbox = alone()
    mailbox.expect("i-1", tmp_path)
    heard = mailbox._awaited["i-1"].received
    replies: list[tuple[bool, set[str]]] = []
    mailbox.take("i-1", "agent-b", pack_part(tmp_path, []), lambda taken: replies.append((taken, {*heard})))
    assert (replies, heard) == ([(True, set())], {"agent-b"})


def test_a_part_that_is_unpacked_slowly_holds_up_nobody(tmp_path: Path) -> None:
    """The thread that talks to the lighthouse reports lost agents: while it waits, our own node counts as lost."""
    (tmp_path / "part" / "boxes").mkdir(parents=True)
    (tmp_path / "part" / "boxes" / "0.box").write_bytes(b"box")
    slow = tmp_path / "in" / "boxes" / "0.box"
    slow.parent.mkdir(parents=True)
    os.mkfifo(slow)  # a disk that takes nothing
    mailbox = alone()
    mailbox.expect("i-1", tmp_path / "in")
    data = pack_part(tmp_path / "part", [])
    replies: list[bool] = []
    taking = threading.Thread(target=mailbox.take, args=("i-1", "agent-b", data, replies.append), daemon=True)
    taking.start()
    wait_until(lambda: "agent-b" in mailbox._awaited["i-1"].unpacking)
    lost = threading.Thread(target=mailbox.give_up, args=("agent-c",), daemon=True)
    lost.start()
    lost.join(20)
    blocked = lost.is_alive()
    assert slow.read_bytes() == b"box"  # lets it go on
    for thread in (taking, lost):
        thread.join(60)
    assert not blocked
    assert mailbox.wait(Gathering("i-1", "us", ("agent-b", "agent-c")), 60) == [
        "agent-c: no evidence, it is gone"
    ]


def test_the_first_agent_that_notices_leads_until_it_is_gone_or_silent() -> None:
    """Others follow it; a command is served beside it; only agents are asked."""
    observers = {"agent-a", "agent-b", "command-x"}
    wanted = CollectEvidence("i-1", "hang", lead="agent-a")
    mine, new = decide_gathering(0.0, wanted, None, observers)
    assert (mine, new) == (Gathering("i-1", "agent-a", ("agent-b",)), True)
    later = CollectEvidence("i-2", "hang", lead="agent-b")
    assert decide_gathering(1.0, later, Current(mine, 0.0), observers) == (mine, False)
    assert decide_gathering(FOLLOW_S, later, Current(mine, 0.0), observers)[0].lead == "agent-b"
    assert decide_gathering(1.0, later, Current(mine, 0.0), {"agent-b"})[0].lead == "agent-b"
    another = CollectEvidence("i-2", "killed", lead="agent-b", follow_s=5.0)
    assert decide_gathering(1.0, another, Current(mine, 0.0), observers)[0].lead == "agent-a"
    assert decide_gathering(6.0, another, Current(mine, 0.0), observers)[0].lead == "agent-b"
    asked = CollectEvidence("i-3", "", lead="command-x", alone=False)
    assert decide_gathering(1.0, asked, Current(mine, 0.0), observers)[0].agents == ("agent-a", "agent-b")


def node(tmp_path: Path, name: str, lighthouse: Lighthouse) -> tuple[Client, Watch, NodeAgent]:
    """An agent with one rank's box; its watch is not started."""
    folder = tmp_path / name
    folder.mkdir()
    write_box(folder, ord(name) - ord("a"), 7)
    client = Client(
        ClientOptions((lighthouse.address,), TOKEN, f"agent-{name}", name, role="observer", beacon=False)
    ).start()
    options = WatchOptions(
        folder, tmp_path / "incidents", "job", name, mode="whole_job", collect_stacks=False
    )
    watch = Watch(options)
    agent = NodeAgent(watch, client, peers=PeerAgents(client, TOKEN))
    watch.join(agent.peers, lambda incident: None)
    client.subscribe(agent._on_notice)
    return client, watch, agent


def test_one_node_leads_and_gets_the_boxes_of_the_other(tmp_path: Path) -> None:
    """Its part comes by itself; when it asks for the same hang it is asked to follow. A third one that does not answer is asked too."""
    with Lighthouse(Options(), ServerOptions(token=TOKEN)) as lighthouse:
        nodes = [node(tmp_path, name, lighthouse) for name in "ab"]
        silent = Client(
            ClientOptions((lighthouse.address,), TOKEN, "agent-c", "c", role="observer", beacon=False)
        ).start()
        try:
            a, b = (agent for _, _, agent in nodes)
            assert a.peers is not None and b.peers is not None
            found = a.peers.ask("20260101-000000", "silence", tmp_path / "led")
            assert found is not None and found.agents == ("agent-b", "agent-c")
            assert b.peers.ask("20260101-000001", "silence", tmp_path) == found
            assert a.peers.wait(replace(found, agents=("agent-b",))) == []
            assert b.peers.took_part_in("20260101-000000")
            assert [box.name for box in (tmp_path / "led" / "boxes").iterdir()] == ["1.box"]
        finally:
            for client in (silent, *(client for client, _, _ in nodes)):
                client.close()
            for _, _, agent in nodes:
                agent.close()


def test_calls_that_differ_between_two_nodes_are_named(tmp_path: Path) -> None:
    """Rank 2, alone on its node, made another call than ranks 0 and 1: nobody could tell it on one node."""
    with Lighthouse(Options(), ServerOptions(token=TOKEN)) as lighthouse:
        nodes = [node(tmp_path, name, lighthouse) for name in "ab"]
        recorded = Path(__file__).parents[1] / "diagnose" / "recorded" / "different_operations.tar.gz"
        with tarfile.open(recorded) as tar:
            for member in (one for one in tar.getmembers() if one.name.endswith(".box")):
                data, name = tar.extractfile(member), Path(member.name).name
                assert data is not None
                (tmp_path / ("b" if ".r2." in name else "a") / name).write_bytes(data.read())
        for name in "ab":
            (tmp_path / name / f"{ord(name) - ord('a')}.box").unlink()
        try:
            _, watch, _ = nodes[0]
            watch.compare_nodes(("agent-b",))
            wait_until(lambda: watch.pipeline.diverged is not None)
            assert watch.pipeline.diverged is not None
            found = watch.pipeline.diverged[1]
            assert (found.cause, found.ranks) == ("type_mismatch", (2,))
        finally:
            for client, _, agent in nodes:
                client.close()
                agent.close()


class Replicas(Supervisor):
    """A supervisor that starts nothing and remembers what it is asked for."""

    def __init__(self) -> None:
        super().__init__(ReplicaOptions((), 2, first_replica=2, total_replicas=4))
        self.asked: list[Request] = []

    def request(self, request: Request) -> None:
        self.asked.append(request)


def test_a_replica_that_another_node_evicted_in_our_common_incident_is_started_again_here(
    tmp_path: Path,
) -> None:
    """What a person evicted stays out, and so does what is not ours."""
    ranks = Replicas()
    peers = alone()
    peers._contributed.append("20260101-000000")
    agent = NodeAgent(None, None, ranks, peers)
    for replica, reason in (
        ("replica-3", "20260101-000000: sleep of rank 3"),
        ("replica-2", "a person wants it so"),
        ("replica-0", "20260101-000000: sleep of rank 0"),
    ):
        agent._on_notice(Evicted(replica, reason))
    assert [(request.action, request.replica) for request in ranks.asked] == [("restart", 3)]


def test_the_supervisor_does_not_wait_for_a_lighthouse_that_is_frozen(tmp_path: Path) -> None:
    """A replica that finishes is reported; meanwhile the loop must notice the next death."""
    address = f"127.0.0.1:{held_port()}"
    command = [sys.executable, "-m", "allranks", "lighthouse", "--bind", address]
    lighthouse = subprocess.Popen(command, env={**os.environ, "ALLRANKS_TOKEN": TOKEN})
    client = Client(ClientOptions((address,), TOKEN, "agent-a", "a", role="observer", beacon=False)).start()
    ranks = Replicas()
    agent = NodeAgent(None, client, ranks)
    agent.start()
    try:
        lighthouse.send_signal(signal.SIGSTOP)
        handled = threading.Thread(target=agent._on_event, args=(Event("finished", 2),))
        handled.start()
        handled.join(5)
        assert not handled.is_alive()
    finally:
        lighthouse.send_signal(signal.SIGCONT)
        agent.close()
        client.close()
        lighthouse.kill()
        lighthouse.wait()
