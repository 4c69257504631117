"""What docs/understand/replicas.md promises to ranks and agents."""

from __future__ import annotations

import json
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from allranks.channel.keys import MAX_TOKEN_CHARS
from allranks.errors import (
    ConfigurationError,
    LighthouseError,
    LighthouseRefused,
    LighthouseUnreachable,
    QuorumTimeout,
    ReplicaEvicted,
)
from allranks.lighthouse.client import proxy_link
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import (
    CollectEvidence,
    Evicted,
    LetIn,
    Member,
    MemberLeft,
    MemberLost,
    Notice,
    PublishedIncident,
    Quorum,
    QuorumFormed,
    QuorumWanted,
    Superseded,
)

from .processes import Proxy
from .waiting import eventually

Embedded = Callable[..., Lighthouse]
Connect = Callable[..., Client]


def form(*clients: Client, step: int = 0, **values: object) -> Quorum:
    """All ask at the same time; one quorum for all."""
    tickets = [
        client.request_quorum(Member(client.options.replica, step=step, **values))  # type: ignore[arg-type]
        for client in clients
    ]
    quorums = [ticket.result(40) for ticket in tickets]
    assert all(quorum == quorums[0] for quorum in quorums)
    return quorums[0]


class Notices(list[Notice]):
    """Collects what a client is sent."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        client.subscribe(self.append)

    def wait(self, kind: type, **wanted: object) -> Notice:
        """The first notice of that kind."""
        return eventually(
            lambda: next(
                (
                    n
                    for n in list(self)
                    if isinstance(n, kind) and all(getattr(n, k) == v for k, v in wanted.items())
                ),
                None,
            )
        )


def test_members_get_the_same_quorum_with_what_everybody_said(embedded: Embedded, connect: Connect) -> None:
    """Sorted, ranked, with addresses, and told who heals from whom."""
    address = embedded(min_replicas=2).address
    b, a = connect(address, "b", node="host-b"), connect(address, "a", node="host-a")
    tickets = [
        a.request_quorum(
            Member("a", address="10.0.0.1:1", store="10.0.0.1:2", step=7, world_size=4, data="x")
        ),
        b.request_quorum(Member("b", address="10.0.0.2:1", store="10.0.0.2:2", step=3)),
    ]
    quorum = tickets[0].result(30)
    assert tickets[1].result(30) == quorum
    assert quorum.names == ("a", "b")
    assert (quorum.rank_of("b"), quorum.rank_of("c")) == (1, None)
    assert quorum.member("a") == Member("a", a.session, "host-a", "10.0.0.1:1", "10.0.0.1:2", 7, 4, data="x")
    assert quorum.max_step == 7
    assert a.quorum == b.quorum == quorum


def test_asking_again_keeps_the_number_and_a_failed_commit_raises_it(
    embedded: Embedded, connect: Connect
) -> None:
    """A higher number means: reconfigure."""
    address = embedded().address
    a, b = connect(address, "a"), connect(address, "b")
    first = form(a, b)
    assert form(a, b, step=1).number == first.number
    assert form(a, b, step=1, commit_failures=1).number == first.number + 1


def test_a_timeout_names_who_was_waited_for(embedded: Embedded, connect: Connect) -> None:
    """The sentence a person needs at night."""
    address = embedded().address
    a, b = connect(address, "a"), connect(address, "b")
    form(a, b)
    with pytest.raises(
        QuorumTimeout, match=r"after 0\.2 s: .*waiting for b \(b last heard \d+\.\d s ago\)"
    ) as caught:
        a.join(Member("a", step=1), timeout_s=0.2)
    assert caught.value.missing == ("b",)
    assert form(a, b, step=1).names == ("a", "b")  # it can ask again


def test_one_question_at_a_time(embedded: Embedded, connect: Connect) -> None:
    """A second one before the answer is a mistake of the caller."""
    client = connect(embedded(min_replicas=2).address, "a")
    ticket = client.request_quorum(Member("a"))
    with pytest.raises(LighthouseError, match="has requested a quorum already"):
        client.request_quorum(Member("a"))
    ticket.cancel()
    assert ticket.done()
    with pytest.raises(QuorumTimeout):
        ticket.result(1)
    client.request_quorum(Member("a")).cancel()


def test_a_ticket_calls_back_when_it_is_answered(embedded: Embedded, connect: Connect) -> None:
    """Also when the answer was there before."""
    client = connect(embedded().address, "a")
    answered: list[str] = []
    ticket = client.request_quorum(Member("a"))
    ticket.add_done_callback(lambda _: answered.append("first"))
    ticket.result(30)
    ticket.add_done_callback(lambda _: answered.append("second"))
    eventually(lambda: sorted(answered) == ["first", "second"])


def test_nobody_there_is_said_with_the_address() -> None:
    """And nothing is left behind."""
    with pytest.raises(LighthouseUnreachable, match=r"127\.0\.0\.1:1: Connection refused") as caught:
        Client(ClientOptions(addresses=("127.0.0.1:1",), replica="a")).start(0.3)
    assert caught.value.addresses == ("127.0.0.1:1",)


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is opened."""
    monkeypatch.delenv("ALLRANKS_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigurationError, match="needs a name"):
        ClientOptions()
    with pytest.raises(ConfigurationError, match="role"):
        ClientOptions(role="king")
    with pytest.raises(ConfigurationError, match="no address"):
        Client(ClientOptions(replica="a")).start(1)


def test_the_address_comes_from_the_environment(
    embedded: Embedded, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several, comma separated; the first that answers is taken."""
    monkeypatch.setenv("ALLRANKS_LIGHTHOUSE", f"127.0.0.1:1, {embedded().address}")
    with Client(ClientOptions(replica="a")) as client:
        assert client.join(Member("a"), 30).names == ("a",)


def test_leaving_is_told_as_such(embedded: Embedded, connect: Connect) -> None:
    """Nobody hears of a death, and the others go on at once."""
    address = embedded().address
    a, b = connect(address, "a"), connect(address, "b")
    notices = Notices(a)
    number = form(a, b).number
    b.leave("training finished")
    assert notices.wait(MemberLeft) == MemberLeft("b", "training finished", number)
    assert a.join(Member("a", step=1), 30).names == ("a",)
    assert not any(isinstance(notice, MemberLost) for notice in notices)


def test_members_are_called_when_somebody_waits_to_come_in(embedded: Embedded, connect: Connect) -> None:
    """And the newcomer heals from one of them."""
    address = embedded().address
    a, b = connect(address, "a"), connect(address, "b")
    notices = Notices(a)
    form(a, b, step=5)
    newcomer = connect(address, "c")
    ticket = newcomer.request_quorum(Member("c"))
    assert "c waits" in notices.wait(QuorumWanted).reason  # type: ignore[attr-defined]
    quorum = form(a, b, step=6)
    assert ticket.result(30) == quorum
    assert quorum.names == ("a", "b", "c")


def test_observers_see_everything_and_are_never_members(embedded: Embedded, connect: Connect) -> None:
    """Agents and pages."""
    address = embedded().address
    observer = connect(address, role="observer", node="host-a")
    notices = Notices(observer)
    a = connect(address, "a")
    quorum = a.join(Member("a"), 30)
    assert notices.wait(QuorumFormed) == QuorumFormed(quorum.number, quorum.epoch, ("a",), quorum.reason)
    with pytest.raises(LighthouseRefused, match="observer"):
        observer.join(Member("x"), 30)
    observer.accuse("a", "its agent saw it die")
    assert notices.wait(MemberLost).reason == "its agent saw it die"  # type: ignore[attr-defined]


def test_an_evicted_replica_stays_out_until_it_is_let_in(embedded: Embedded, connect: Connect) -> None:
    """A pending question is answered, a new life does not help, its fellows are notified."""
    address = embedded().address
    a, b = connect(address, "a"), connect(address, "b")
    told_a, told_b = Notices(a), Notices(b)
    number = form(a, b).number
    pending = b.request_quorum(Member("b", step=1))
    eventually(lambda: a.status()["waiting"])
    a.evict("b", "bad GPU")
    for notices in (told_a, told_b):
        assert notices.wait(Evicted) == Evicted("b", "bad GPU", number)
    with pytest.raises(ReplicaEvicted, match="bad GPU"):
        pending.result(30)
    b.close()
    reborn = connect(address, "b")
    with pytest.raises(ReplicaEvicted, match="bad GPU") as caught:
        reborn.join(Member("b"), 30)
    assert "readmit" in caught.value.hint
    assert a.join(Member("a", step=1), 30).names == ("a",)
    a.readmit("b")
    told_a.wait(LetIn, replica="b")
    ticket = reborn.request_quorum(Member("b"))
    told_a.wait(QuorumWanted)
    assert a.join(Member("a", step=2), 30).names == ("a", "b")
    assert ticket.result(30).names == ("a", "b")


def test_a_second_process_of_the_same_name_is_refused_while_the_first_lives(
    embedded: Embedded, connect: Connect
) -> None:
    """It learns at its start who has the name and which flag gives it another; the first trains on, undisturbed."""
    address = embedded().address
    a, first = connect(address, "a"), connect(address, "b", node="node-1")
    notices = Notices(a)
    number = form(a, first).number
    with pytest.raises(LighthouseRefused, match="b is the name of another process on node-1") as caught:
        connect(address, "b", node="node-2")
    assert caught.value.code == "taken" and "--first-replica" in caught.value.hint
    assert form(a, first, step=1).number == number and first.may_commit()
    assert not any(isinstance(notice, MemberLost) for notice in notices)


def test_a_name_is_free_as_soon_as_its_process_is_gone(embedded: Embedded, connect: Connect) -> None:
    """A restart takes the place of the process that has left, and gets a new number."""
    address = embedded().address
    a, old = connect(address, "a"), connect(address, "b")
    notices = Notices(a)
    number = form(a, old).number
    old._reactor.call(lambda: old._line.close())  # type: ignore[union-attr]  # as when its process is killed
    new = connect(address, "b")
    notices.wait(MemberLost)
    ticket = new.request_quorum(Member("b"))
    notices.wait(QuorumWanted)
    quorum = a.join(Member("a", step=1), 30)
    assert ticket.result(30) == quorum
    assert quorum.names == ("a", "b") and quorum.number == number + 1


def test_a_process_whose_name_was_given_away_learns_it_when_it_is_back(
    embedded: Embedded, connect: Connect, proxy: Callable[[str], Proxy]
) -> None:
    """Cut off for longer than its lease, it may not commit; another process gets the name; back, it is told to stop."""
    address = embedded(heartbeat_timeout_s=0.5, presume_dead_s=1.0).address
    between = proxy(address)
    old = connect(between.address, "b")
    notices = Notices(old)
    assert old.join(Member("b"), 30).names == ("b",) and old.may_commit()
    between.drop.update(up=True, down=True)
    new = connect(address, "b")
    assert new.join(Member("b"), 30).names == ("b",) and new.may_commit()
    assert not old.may_commit(), "two processes of one name could commit"
    assert between.dropped_bytes
    between.drop.update(up=False, down=False)
    notices.wait(Superseded)
    with pytest.raises(LighthouseRefused, match="has replaced this one"):
        old.join(Member("b"), 5)


def test_evidence_is_asked_of_agents_and_of_the_replicas_concerned(
    embedded: Embedded, connect: Connect
) -> None:
    """And what they find is shown."""
    address = embedded().address
    agent, a, b = connect(address, role="observer", node="host"), connect(address, "a"), connect(address, "b")
    told = [Notices(agent), Notices(a), Notices(b)]
    incident = b.collect("step 12 takes too long", ["a"])
    for notices in told[:2]:
        assert notices.wait(CollectEvidence) == CollectEvidence(incident, "step 12 takes too long", ("a",))
    agent.report_incident(
        PublishedIncident(
            incident, "rank 3 never entered all_reduce #5 (größe.py)", ("a",), "host", "/\udcfcbung"
        )
    )
    shown = b.status()["incidents"][0]
    assert shown["sentence"] == "rank 3 never entered all_reduce #5 (größe.py)"
    assert shown["path"] == "/?bung"  # a folder whose name is not UTF-8, as all but ASCII in the C locale
    assert not told[2]


def test_reports_travel_with_the_heartbeats(embedded: Embedded, connect: Connect) -> None:
    """Step, progress and health, as the page shows them."""
    a = connect(embedded(heartbeat_timeout_s=1.0).address, "a")
    a.report(step=12, progress=99, health="ok")
    row = eventually(lambda: next((r for r in a.status()["replicas"] if r["step"] == 12), None))
    assert (row["progress"], row["health"], row["state"]) == (99, "ok", "connected")


def test_a_notice_lost_with_its_connection_is_sent_again_and_told_once(
    embedded: Embedded, connect: Connect, proxy: Callable[[str], Proxy]
) -> None:
    """At least once on the wire, exactly once for the subscriber."""
    lighthouse = embedded(heartbeat_timeout_s=20, reset_grace_s=15)
    between = proxy(lighthouse.address)
    a, b = connect(between.address, "a"), connect(lighthouse.address, "b")
    observer = connect(lighthouse.address, role="observer")
    notices, seen = Notices(a), Notices(observer)
    form(a, b)
    between.drop.update(up=True, down=True)  # the notice gets lost on its way to a
    b.leave("bye")
    seen.wait(MemberLeft)
    eventually(lambda: between.dropped_bytes > 0)
    assert not any(isinstance(notice, MemberLeft) for notice in notices)
    between.drop.update(up=False, down=False)
    between.reset()
    notices.wait(MemberLeft, replica="b")
    between.reset()
    eventually(lambda: between.accepted == 3 and a.connected)
    a.status()
    assert sum(isinstance(notice, MemberLeft) for notice in notices) == 1


def test_an_answer_lost_with_its_connection_is_sent_again(
    embedded: Embedded, connect: Connect, proxy: Callable[[str], Proxy]
) -> None:
    """The others train already in the quorum that this member never heard of: it gets it, they are not kept."""
    lighthouse = embedded(heartbeat_timeout_s=20, reset_grace_s=15)
    between = proxy(lighthouse.address)
    a, b = connect(between.address, "a"), connect(lighthouse.address, "b")
    first = form(a, b)
    between.drop["down"] = True
    ticket = a.request_quorum(Member("a", step=1))
    second = b.join(Member("b", step=1), 30)
    eventually(lambda: between.dropped_bytes > 0)
    between.drop["down"] = False
    between.reset()
    assert ticket.result(30) == second
    assert second.number == first.number


def test_a_replica_of_several_ranks_asks_when_all_have_and_dies_with_any(
    embedded: Embedded, connect: Connect
) -> None:
    """Every rank has its own line; the replica is one."""
    address = embedded().address
    ranks = [connect(address, "a", session="life-1", rank=rank, connections=2) for rank in range(2)]
    b = connect(address, "b")
    notices = [Notices(b), Notices(ranks[1])]
    ticket = b.request_quorum(Member("b"))
    first = ranks[0].request_quorum(Member("a", step=2, world_size=2))
    assert not ticket.wait(0.3)  # rank 1 of replica a has not asked
    with pytest.raises(QuorumTimeout, match="only 1 of 2 ranks of a requested a quorum"):
        first.result(0.1)
    quorum = form(*ranks, step=2)
    assert ticket.result(30) == quorum
    assert quorum.names == ("a", "b")
    ranks[0]._reactor.call(ranks[0]._line.close)  # type: ignore[union-attr]  # its process dies
    assert notices[0].wait(MemberLost, replica="a").number == quorum.number  # type: ignore[attr-defined]
    notices[1].wait(MemberLost, replica="a")
    assert b.join(Member("b", step=3), 30).names == ("b",)


def test_a_client_works_without_msgspec(embedded: Embedded, connect: Connect) -> None:
    """As on a machine where only torch is installed; the beacon too."""
    address = embedded(min_replicas=2).address
    other = connect(address, "b")
    ticket = other.request_quorum(Member("b", step=3))
    code = """
import json, sys
sys.modules["msgspec"] = None
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.model.cluster import Member
with Client(ClientOptions(addresses=(sys.argv[1],), replica="ä", beacon=sys.argv[2] == "beacon")) as client:
    quorum = client.join(Member("ä", step=1), timeout_s=60)
    print(json.dumps([quorum.names, quorum.max_step]))
"""
    for kind in ("thread", "beacon"):
        done = subprocess.run(
            [sys.executable, "-c", code, address, kind],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert json.loads(done.stdout) == [["b", "ä"], 3]
        assert ticket.result(30).names == ("b", "ä")
        ticket = other.request_quorum(Member("b", step=3))
    ticket.cancel()


def test_the_client_brings_neither_torch_numpy_nor_asyncio() -> None:
    """A rank's import stays light, a beacon's start quick."""
    code = (
        "import sys, allranks.lighthouse.client.client, allranks.lighthouse.client.liveness_proxy;"
        "print(sorted({'torch', 'numpy', 'asyncio', 'grpc', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_killed_liveness_proxy_is_replaced_however_often(
    embedded: Embedded, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killing it costs the replica its place for a moment, not its line."""
    monkeypatch.setattr(proxy_link, "_PAUSE_S", 0.01)
    client = connect(embedded().address, "a", beacon=True)
    line = client._line
    assert isinstance(line, proxy_link.ProxyLink)
    for _ in range(6):
        assert line.process is not None
        before = line.process.pid
        os.kill(before, signal.SIGKILL)
        eventually(
            lambda before=before: line.process is not None and line.process.pid != before and client.connected
        )
    assert client.join(Member("a"), 30).names == ("a",)


def test_a_liveness_proxy_takes_the_longest_job_token(embedded: Embedded, connect: Connect) -> None:
    """What a client tells its proxy first is packed when it is long."""
    token = "".join(random.Random(1).choices(string.ascii_letters, k=MAX_TOKEN_CHARS))
    lighthouse = embedded(ServerOptions(token=token))
    assert connect(lighthouse.address, "a", token=token, beacon=True).status()["leading"] is True


def test_wall_clock_jumps_harm_nobody(
    embedded: Embedded, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All durations are monotonic: a day forth and back again loses nobody and changes no quorum."""
    lighthouse = embedded(heartbeat_timeout_s=2.0)
    a, b = connect(lighthouse.address, "a"), connect(lighthouse.address, "b")
    first = form(a, b)
    real = time.time
    for jump in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert abs(time.time() - real()) > 80000
        beats = lighthouse.status().up_s
        eventually(lambda beats=beats: lighthouse.status().up_s > beats + 1.0)
        assert form(a, b, step=1).number == first.number
    assert lighthouse.status().lost == {}


def test_threads_have_names(embedded: Embedded, connect: Connect) -> None:
    """So that a stack dump explains itself."""
    connect(embedded().address, "a")
    names = {thread.name for thread in threading.enumerate()}
    assert {"allranks-lighthouse", "allranks-lighthouse-server"} <= names
