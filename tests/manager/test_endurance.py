"""Many reconfigurations leak nothing; random faults with a seed leave equal replicas."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allranks.drill.ranks import Ranks
from allranks.errors import GroupAborted
from allranks.lighthouse.options import Options
from allranks.manager.groups.gloo import cut_connected
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.group_spec import GroupSpec
from allranks.manager.prepared_group import open_store

from .cluster import LIMIT_S, Cluster, Job, LighthouseProcess
from .faults import PLACES, Fault
from .test_failures import assert_equal_states


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0, flap_limit=10_000)) as running:
        yield running


def _reconfigure(rank: int, world: int, folder: Path, rounds: int) -> tuple[int, int, float]:
    """Makes, uses and aborts a group many times: growth of descriptors, threads and memory (MB)."""
    torch.set_num_threads(1)
    group = ProcessGroupGloo(timeout=30, host="127.0.0.1")
    ports = dist.FileStore(str(folder / "ports"), world)
    ports.set(str(rank), group.mesh.listener)
    others = tuple(ports.get(str(other)).decode() for other in range(world) if other != rank)
    before = (0, 0, 0.0)
    for number in range(rounds):
        store = dist.FileStore(str(folder / f"round{number}"), world)
        group.reconfigure(GroupSpec(store, rank, world, number, others))
        value = torch.ones(1000)
        group.allreduce([value]).wait()
        assert value[0].item() == world
        if number == 20:
            before = _held()
    group.shutdown()
    after = _held()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _held() -> tuple[int, int, float]:
    for _ in range(100):  # burials are aside
        if not any(
            thread.name in ("allranks-teardown", "allranks-making") for thread in threading.enumerate()
        ):
            break
        threading.Event().wait(0.02)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    )


def test_200_reconfigurations_leak_no_descriptor_thread_or_memory(tmp_path: Path) -> None:
    """The group is made anew 200 times over three ranks; nothing grows."""
    with Ranks(_reconfigure, 3, args=(tmp_path, 220), backend=None) as ranks:
        for descriptors, threads, megabytes in ranks.values(LIMIT_S):
            assert descriptors <= 2
            assert threads <= 2
            assert megabytes < 15


def _abort_blocked(rank: int, world: int, folder: Path) -> str:
    torch.set_num_threads(1)
    group = ProcessGroupGloo(timeout=60, host="127.0.0.1")
    ports = dist.FileStore(str(folder / "ports"), world)
    ports.set(str(rank), group.mesh.listener)
    others = tuple(ports.get(str(other)).decode() for other in range(world) if other != rank)
    group.reconfigure(GroupSpec(dist.FileStore(str(folder / "s"), world), rank, world, 1, others))
    if rank == 1:
        ports.get("aborted")  # never enters the collective
        return "stayed away"
    work = group.allreduce([torch.ones(10)])
    threading.Timer(0.2, lambda: group.abort("the test says so")).start()
    try:
        work.wait()
        return "finished"
    except RuntimeError:
        ports.set("aborted", "1")
    try:
        group.allreduce([torch.ones(10)])
    except GroupAborted as error:
        return str(error)
    return "usable"


def test_a_blocked_collective_ends_when_its_group_is_aborted(tmp_path: Path) -> None:
    """gloo's own abort wakes nobody; ours does, and later calls say why."""
    with Ranks(_abort_blocked, 2, args=(tmp_path,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == ["the test says so", "stayed away"]


def _abort_beside(rank: int, world: int, folder: Path) -> str:
    """Rank 0 is connected to another host that has the same port as rank 1's group."""
    torch.set_num_threads(1)
    group = ProcessGroupGloo(timeout=60, host="127.0.0.1")
    ports = dist.FileStore(str(folder / "ports"), world)
    ports.set(str(rank), group.mesh.listener)
    others = tuple(ports.get(str(other)).decode() for other in range(world) if other != rank)
    group.reconfigure(GroupSpec(dist.FileStore(str(folder / "s"), world), rank, world, 1, others))
    if rank == 1:
        ports.set("met", "1")
        ports.get("aborted")
        return ""
    ports.get("met")  # or it would still be connecting
    with (
        socket.create_server(("127.0.0.2", int(others[0].rpartition(":")[2]))) as server,
        socket.create_connection(server.getsockname()) as line,
        server.accept()[0] as other,
    ):
        group.abort("the test says so")
        ports.set("aborted", "1")
        other.sendall(b"still there")
        return line.recv(100).decode()


def test_an_abort_cuts_no_connection_of_others_to_a_port_of_the_same_number(tmp_path: Path) -> None:
    """On another host anybody may have it: storage, a group inside the replica."""
    with Ranks(_abort_beside, 2, args=(tmp_path,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == ["still there", ""]


def test_a_wait_at_the_store_of_a_meeting_ends_when_its_line_is_cut() -> None:
    """torch's sockets are IPv6 for IPv4 addresses, too."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reached: list[str] = []
    client = open_store(f"127.0.0.1:{server.port}", LIMIT_S, reached.append)
    assert reached == [f"127.0.0.1:{server.port}"]
    threading.Timer(0.2, lambda: cut_connected((), reached)).start()
    with pytest.raises(dist.DistNetworkError):  # not the error of a wait that took too long
        client.get("never set")


def _abort_forming(rank: int, world: int, folder: Path) -> str:
    group = ProcessGroupGloo(timeout=600, host="127.0.0.1")
    store = dist.FileStore(str(folder / "s"), world)
    if rank == 1:
        store.get("aborted")  # never comes
        return "stayed away"
    threading.Timer(0.2, lambda: group.abort("the test says so")).start()
    try:
        group.reconfigure(GroupSpec(store, rank, world, 1))
        return "met"
    except GroupAborted as error:
        store.set("aborted", "1")
        return str(error)


def test_waiting_for_a_member_that_never_comes_ends_when_the_group_is_aborted(tmp_path: Path) -> None:
    """There is no socket to cut, and gloo listens to nobody: the waiting is left behind."""
    with Ranks(_abort_forming, 2, args=(tmp_path,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == ["the test says so", "stayed away"]


def run_random_faults(lighthouse: LighthouseProcess, seed: int, rounds: int) -> None:
    """Three replicas; each round one or two die, freeze shortly, leave or err somewhere, and come back."""
    choice = random.Random(seed)
    places = [place for place in PLACES if "state" not in place and place not in ("regrouping", "connecting")]
    base = Job(own_weights=True, until_told=True, pause_s=0.002)
    names = ["a", "b", "c"]
    with Cluster(lighthouse, base) as cluster:
        cluster.start(*names)
        for name in names:
            cluster.wait_for_progress(name, 3)
        for _ in range(rounds):
            victims = choice.sample(names, choice.choice([1, 1, 1, 2]))
            safe = next(name for name in names if name not in victims)
            for victim in victims:
                os.kill(cluster.pid(victim), 9)
                assert cluster.end(victim).exit_code == -9
            at = cluster.progress(safe)
            for victim in victims:
                fault = Fault(choice.choice(["error", "cut"]), victim, 0, choice.choice(places))
                cluster.start(victim, job=replace(base, faults=(fault,), arm_at=2))
            cluster.wait_for_progress(safe, at + 5)
            for victim in victims:
                cluster.wait_for_progress(victim, at + 1)
                cluster.wait_for_progress(victim, cluster.progress(victim) + 2)
        cluster.tell_to_stop()
        results = cluster.results()
    assert_equal_states(results)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.everything)])
def test_random_faults_leave_equal_replicas(lighthouse: LighthouseProcess, seed: int) -> None:
    """A few rounds of kills at random moments, errors and cut connections."""
    run_random_faults(lighthouse, seed, rounds=4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10, 16))
def test_hundreds_of_random_faults_leave_equal_replicas(lighthouse: LighthouseProcess, seed: int) -> None:
    """The same for much longer."""
    run_random_faults(lighthouse, seed, rounds=40)
