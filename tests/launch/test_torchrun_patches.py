"""The private doors of torchrun: there in this torch, and no loss of the job where one is missing."""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from allranks.launch import torchrun_patches
from allranks.launch.torchrun_patches import ATTEMPTS, TorchrunPatches, count_departed


class OneNode(RendezvousHandler):
    """A rendezvous of this node alone that fails as often as it is told."""

    def __init__(self, failures: int, error: Exception | None = None, backend: str = "etcd-v3") -> None:
        self.failures = failures
        self.error = error or dist.DistStoreError("wait timeout after 15000ms")
        self.backend = backend
        self.held = 0

    def get_backend(self) -> str:
        return self.backend

    def next_rendezvous(self) -> RendezvousInfo:
        self.held += 1
        if self.held <= self.failures:
            raise self.error
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 29500))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "doors"

    def shutdown(self) -> bool:
        return True


@contextlib.contextmanager
def in_place() -> Iterator[TorchrunPatches]:
    """All of them, and what they have seen."""
    patches = TorchrunPatches()
    with patches.in_place():
        yield patches


def _meet(handler: OneNode) -> Any:
    """One rendezvous by torchrun's own agent; its worker group."""
    spec = WorkerSpec("default", 2, handler, entrypoint="true")
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    group = agent.get_worker_group()
    agent._rendezvous(group)
    return group


@pytest.fixture
def closed_door() -> Iterator[Any]:
    """A torch without the method behind the first door."""
    module, _, place = torchrun_patches.RENDEZVOUS.partition(":")
    owner = getattr(importlib.import_module(module), place.split(".")[0])
    ordinary = owner._rendezvous
    del owner._rendezvous
    yield owner
    owner._rendezvous = ordinary


@pytest.mark.parametrize("door", torchrun_patches.WITHOUT)
def test_every_door_is_there_and_is_left_as_it_was(door: str) -> None:
    """A new torch without one is noticed here first."""
    module, _, place = door.partition(":")
    owner_name, _, name = place.rpartition(".")
    found = importlib.import_module(module)
    owner = getattr(found, owner_name) if owner_name else found
    ordinary = getattr(owner, name)
    with torchrun_patches.replaced(door, lambda *given: given):
        assert getattr(owner, name)(1) == (ordinary, 1)
    assert getattr(owner, name) is ordinary


def test_a_meeting_that_falls_apart_is_held_again(caplog: pytest.LogCaptureFixture) -> None:
    """Twice a member does not speak up; the third meeting gives every rank its number."""
    handler = OneNode(failures=2)
    with caplog.at_level(logging.WARNING), in_place() as meetings:
        group = _meet(handler)
    assert handler.held == 3 and meetings.held == 1
    assert caplog.text.count("repeating it") == 2
    assert [worker.global_rank for worker in group.workers] == [0, 1]


def test_nodes_that_never_meet_are_an_error() -> None:
    """The last failure is torch's own."""
    handler = OneNode(failures=1000)
    with in_place() as meetings, pytest.raises(dist.DistStoreError):
        _meet(handler)
    assert handler.held == ATTEMPTS and meetings.held == 0


@pytest.mark.parametrize("backend", ["etcd-v3", "c10d"])
def test_an_etcd_that_is_away_is_waited_for_and_a_lost_host_is_not(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """etcd comes back; the store of a c10d rendezvous does not."""
    handler = OneNode(1, RendezvousConnectionError("nobody answers"), backend)
    with caplog.at_level(logging.WARNING), in_place() as meetings:
        if backend == "c10d":
            with pytest.raises(RendezvousConnectionError):
                _meet(handler)
            return
        _meet(handler)
    assert meetings.held == 1
    assert "does not answer (nobody answers)" in caplog.text and "answers again" in caplog.text


def test_a_missing_door_is_one_warning(closed_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is put in its place, and what is lost is said."""
    with caplog.at_level(logging.WARNING), in_place() as meetings:
        assert not hasattr(closed_door, "_rendezvous")
    assert meetings.held == 0
    assert [record.message for record in caplog.records] == [
        "this torch has no SimpleElasticAgent._rendezvous: a rendezvous that fails will not be repeated"
    ]


def test_a_node_that_left_counts_unless_the_job_is_over() -> None:
    """Nodes that met less nodes that are there."""
    assert [count_departed(3, present, closed=False) for present in (3, 2, 4)] == [0, 1, 0]
    assert count_departed(3, 1, closed=True) == 0
    assert count_departed(0, 2, closed=False) == 0, "before the first meeting"


@contextlib.contextmanager
def _taken(port: int) -> Iterator[bool]:
    """Another process that wants this port and may have it if the system would give it away."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError:
            yield False
        else:
            yield True


@pytest.mark.parametrize("round_", [1, 2])
def test_nobody_takes_the_port_of_the_ranks_store_before_rank_0_binds_it(round_: int) -> None:
    with in_place():
        for _ in range(round_):  # each restart chooses again
            port = RendezvousStoreInfo.build(0, dist.HashStore(), "127.0.0.1").master_port
        with _taken(port) as taken:
            assert not taken
            store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)  # as rank 0 does
            store.set("key", "value")
            assert store.get("key") == b"value"


def test_who_is_waited_for_is_said_with_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """One of two ranks does not end; nothing is said when none is left."""
    ranks = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])]
    ranks[1].wait()
    try:
        torchrun_patches._log_remaining(ranks, 30)
    finally:
        ranks[0].kill()
        ranks[0].wait()
    torchrun_patches._log_remaining(ranks, 30)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for 1 of 2 ranks to end; they are killed after 30 s (--shutdown-timeout)"
    ]


def test_a_signal_whose_exception_was_swallowed_is_raised_again_at_the_next_look() -> None:
    """As by a log handler, which catches every Exception; torchrun alone would never end then."""
    agent = LocalElasticAgent(WorkerSpec("default", 1, OneNode(0), entrypoint="true"), DefaultLogsSpecs())
    before = signal.getsignal(signal.SIGUSR2)
    with in_place():
        with pytest.raises(AssertionError):  # torch's own: no rank was started
            agent._monitor_workers(agent.get_worker_group())
        try:
            signal.signal(signal.SIGUSR2, api._terminate_process_handler)
            with contextlib.suppress(api.SignalException):
                signal.raise_signal(signal.SIGUSR2)
                raise AssertionError("it was not raised the first time")
            with pytest.raises(api.SignalException) as raised:
                agent._monitor_workers(agent.get_worker_group())
        finally:
            signal.signal(signal.SIGUSR2, before)
    assert raised.value.sigval == signal.SIGUSR2
