"""High availability on a real etcd: leaders and etcd nodes are killed, training and numbers go on."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from allranks.errors import EtcdError
from allranks.etcd import Etcd, parse_endpoints
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.model.cluster import LeaderMoved, Member, MemberLost, Notice, Quorum

from .etcd_cluster import EtcdCluster
from .processes import LighthouseProcess
from .waiting import eventually

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")

RunLighthouse = Callable[..., LighthouseProcess]


@pytest.fixture
def etcd(stack: ExitStack, tmp_path: Path) -> Callable[[int], EtcdCluster]:
    """etcd(3) starts a cluster of three."""

    def start(size: int) -> EtcdCluster:
        cluster = EtcdCluster(tmp_path, size)
        stack.callback(cluster.close)
        return cluster

    return start


class Replicas:
    """Clients in this process that know all lighthouses, and every notice they got."""

    def __init__(self, stack: ExitStack, addresses: tuple[str, ...], *names: str) -> None:
        self.notices: list[Notice] = []
        self.clients = []
        for name in names:
            client = Client(ClientOptions(addresses=addresses, replica=name)).start(60)
            client.subscribe(self.notices.append)
            stack.callback(client.close)
            self.clients.append(client)

    def form(self, step: int, timeout_s: float = 60.0, failed: int = 0) -> Quorum:
        """All ask; one quorum for all."""
        tickets = [
            client.request_quorum(Member(client.options.replica, step=step, commit_failures=failed))
            for client in self.clients
        ]
        quorums = [ticket.result(timeout_s) for ticket in tickets]
        assert all(quorum == quorums[0] for quorum in quorums)
        return quorums[0]


def _pair(run_lighthouse: RunLighthouse, cluster: EtcdCluster) -> tuple[LighthouseProcess, LighthouseProcess]:
    """(leader, standby)."""
    words = ("--etcd", cluster.endpoints, "--lease-s", "3", "--heartbeat-timeout-ms", "8000")
    first = run_lighthouse(*words)
    first.wait_log("leading in epoch")
    second = run_lighthouse(*words)
    return first, second


def test_a_standby_takes_over_when_the_leader_is_killed(
    stack: ExitStack, run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster]
) -> None:
    """Clients move over by themselves, nobody is lost, number and epoch only grow, an eviction stays."""
    leader, standby = _pair(run_lighthouse, etcd(1))
    replicas = Replicas(stack, (standby.address, leader.address), "a", "b", "c")
    assert all(client.lighthouse == leader.address for client in replicas.clients)  # the standby named it
    replicas.form(0)
    first = replicas.form(1, failed=1)
    replicas.clients[0].evict("z", "bad GPU")
    leader.kill()
    standby.wait_log("leading in epoch 2")
    standby.wait_log(f"took over quorum {first.number}")
    again = replicas.form(2)
    assert again.number == first.number
    assert again.epoch == first.epoch + 1
    bumped = replicas.form(2, failed=1)
    assert bumped.number == first.number + 1
    assert replicas.clients[0].status()["evicted"] == {"z": "bad GPU"}
    assert all(client.lighthouse == standby.address for client in replicas.clients)
    assert sum(isinstance(notice, LeaderMoved) for notice in replicas.notices) == 3
    assert not [notice for notice in replicas.notices if isinstance(notice, MemberLost)]


@pytest.mark.soak
def test_a_leader_that_was_frozen_past_its_lease_leads_nobody_when_it_wakes(
    stack: ExitStack, run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster]
) -> None:
    """It believes to lead when it thaws; the standby has led on, and there is one quorum of one epoch."""
    words = ("--etcd", etcd(1).endpoints, "--lease-s", "1", "--heartbeat-timeout-ms", "2000")
    leader = run_lighthouse(*words)
    leader.wait_log("leading in epoch 1")
    standby = run_lighthouse(*words)
    replicas = Replicas(stack, (leader.address, standby.address), "a", "b")
    first = replicas.form(0)
    leader.kill(signal.SIGSTOP)
    standby.wait_log("leading in epoch 2")
    second = replicas.form(1, failed=1)
    assert (second.number, second.epoch) == (first.number + 1, 2)
    leader.kill(signal.SIGCONT)
    leader.wait_log("no longer leading")
    third = replicas.form(2, failed=1)
    assert (third.number, third.epoch) == (second.number + 1, 2)
    assert all(client.lighthouse == standby.address for client in replicas.clients)
    assert not [notice for notice in replicas.notices if isinstance(notice, MemberLost)]
    assert f"quorum {second.number}:" not in leader.log() and f"quorum {third.number}:" not in leader.log()


def test_a_leader_that_is_stopped_hands_over_without_waiting_for_its_lease(
    stack: ExitStack, run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster]
) -> None:
    """SIGTERM gives the lease back; a pending question is answered by the next leader."""
    leader, standby = _pair(run_lighthouse, etcd(1))
    replicas = Replicas(stack, (leader.address, standby.address), "a", "b")
    first = replicas.form(0)
    pending = replicas.clients[0].request_quorum(Member("a", step=1))
    eventually(lambda: replicas.clients[1].status()["waiting"])
    assert leader.close() == 0
    second = replicas.clients[1].join(Member("b", step=1), timeout_s=60)
    assert pending.result(60) == second
    assert second.number == first.number and second.epoch > first.epoch


def test_training_goes_on_when_etcd_itself_is_killed_and_restarted(
    stack: ExitStack, run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster]
) -> None:
    """Without etcd no new number is given out; when it is back the job has one leader and continues."""
    cluster = etcd(1)
    leader, standby = _pair(run_lighthouse, cluster)
    replicas = Replicas(stack, (leader.address, standby.address), "a", "b")
    first = replicas.form(0)
    cluster.kill(0)
    leader.wait_log("no longer leading")
    pending = [
        client.request_quorum(Member(client.options.replica, step=1, commit_failures=1))
        for client in replicas.clients
    ]
    assert not any(ticket.wait(0.5) for ticket in pending)  # nobody leads, nothing is promised
    cluster.start(0)
    cluster.wait()
    quorums = [ticket.result(60) for ticket in pending]
    assert quorums[0] == quorums[1]
    assert quorums[0].number == first.number + 1
    assert quorums[0].epoch > first.epoch
    assert not [notice for notice in replicas.notices if isinstance(notice, MemberLost)]


def test_the_leader_keeps_its_place_when_the_leader_of_etcd_is_killed(
    stack: ExitStack, run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster]
) -> None:
    """Two of three etcd nodes go on; the lighthouse waits out their election within its lease."""
    cluster = etcd(3)
    words = ("--etcd", cluster.endpoints, "--lease-s", "10", "--heartbeat-timeout-ms", "8000")
    leader = run_lighthouse(*words)
    leader.wait_log("leading in epoch 1")
    replicas = Replicas(stack, (leader.address,), "a", "b")
    first = replicas.form(0)
    killed = cluster.leader()
    cluster.kill(killed)
    second = replicas.form(1, failed=1)
    assert second.number == first.number + 1
    assert second.epoch == first.epoch
    assert "no longer leading" not in leader.log()


def test_two_lighthouses_that_start_together_agree_on_one_leader(
    run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster]
) -> None:
    """Exactly one wins; the other sends clients there."""
    cluster = etcd(1)
    words = ("--etcd", cluster.endpoints, "--lease-s", "10")
    both = [run_lighthouse(*words), run_lighthouse(*words)]
    eventually(lambda: any("leading in epoch 1" in each.log() for each in both))
    leaders = [each for each in both if "leading in epoch" in each.log()]
    assert len(leaders) == 1
    (other,) = [each for each in both if each not in leaders]
    with Client(ClientOptions(addresses=(other.address,), replica="a")) as client:
        assert client.lighthouse == leaders[0].address


def test_a_damaged_state_in_etcd_is_named_with_its_key(
    run_lighthouse: RunLighthouse, etcd: Callable[[int], EtcdCluster], stack: ExitStack
) -> None:
    """Nobody leads over it, and it is said why; without it a lighthouse leads again."""
    cluster = etcd(1)
    client = Etcd(parse_endpoints(cluster.endpoints))
    stack.callback(client.close)
    client.put("/allranks/job/state", b"not packed")
    lighthouse = run_lighthouse("--etcd", cluster.endpoints, "--lease-s", "1")
    lighthouse.wait_log("the state saved in etcd under /allranks/job/state is damaged")
    client.delete("/allranks/job/state")
    lighthouse.wait_log("leading job job in epoch 1")


_NONSENSE = [
    b'{"kvs": 5}',
    b'{"kvs": [5]}',
    b'{"kvs": [{"key": "%%%", "value": "x"}]}',
    b'{"ID": "x", "TTL": []}',
]
_NONSENSE += [b'{"succeeded": true}', b'{"deleted": "all", "result": 5, "ID": 1, "kvs": {"a": 1}}']


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"[" * 50_000, b"\xff", *_NONSENSE])
def test_a_server_that_is_no_etcd_is_an_error_that_says_so(body: bytes) -> None:
    with _answering(body) as client:
        calls = [
            lambda: client.get("/a"),
            lambda: client.get_prefix("/a"),
            lambda: client.grant(5),
            lambda: client.keep_alive(5),
            lambda: client.put_guarded("/a", 0, "/b", b""),
        ]
        failed = 0
        for call in calls:
            try:
                call()
            except EtcdError as error:
                failed += "is not an etcd" in str(error)
        assert failed >= (1 if body in _NONSENSE else len(calls))


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n{", b"HTTP/1.1 200 OK\r\nX: "]
)
def test_a_server_that_drips_its_answer_is_given_up_in_time(head: bytes) -> None:
    """A limit for each read alone would hold the lighthouse's election for as long as the server likes."""
    with _answering(head, drip=True) as client, pytest.raises(EtcdError, match="no etcd answers"):
        client.get("/a")


@contextmanager
def _answering(body: bytes, drip: bool = False) -> Iterator[Etcd]:
    """A client of a server that answers everything with this body; with `drip` blanks follow what is a head then."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with suppress(OSError):
                if not drip:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                self.wfile.write(body)
                while drip and not over.wait(0.1):
                    self.wfile.write(b" ")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client = Etcd((f"http://127.0.0.1:{server.server_port}",), timeout_s=0.5 if drip else 5.0)
        try:
            yield client
        finally:
            over.set()
            client.close()
            server.shutdown()
            thread.join(20)
