"""A replica in a network of its own, which is cut while all its connections stay open. Needs root and `ip`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from allranks.lighthouse.options import Options

from .cluster import Cluster, Job, LighthouseProcess, Result, train
from .test_failures import assert_equal_states


@dataclass(frozen=True)
class Network:
    """A namespace joined to ours by one cable."""

    name: str
    here: str
    there: str

    def switch(self, state: str) -> None:
        """Pulls the cable ("down") or puts it back ("up")."""
        _ip(f"-n {self.name} link set eth0 {state}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    number = os.getpid() % 250
    found = Network(f"allranks-{os.getpid()}", f"10.214.{number}.1", f"10.214.{number}.2")
    try:
        _ip(f"netns add {found.name}")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces cannot be made here")
    try:
        _ip(f"link add at{number} type veth peer name eth0 netns {found.name}")
        _ip(f"addr add {found.here}/30 dev at{number}")
        _ip(f"link set at{number} up")
        _ip(f"-n {found.name} addr add {found.there}/30 dev eth0")
        _ip(f"-n {found.name} link set lo up")
        found.switch("up")
        yield found
    finally:
        _ip(f"netns delete {found.name}")


def _train_there(rank: int, world: int, address: str, name: str, job: Job, folder: str) -> Result:
    """Replica b moves into the namespace before it opens anything."""
    namespace = job.options.pop("namespace")
    if name == "b":
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) == 0
        os.close(descriptor)
    return train(rank, world, address, name, job, folder)


@pytest.mark.soak
def test_a_replica_whose_network_is_cut_is_left_behind_and_heals_when_it_is_back(network: Network) -> None:
    """No connection closes: the heartbeats stop, the other continues; with the cable back both train together."""
    options: dict[str, Any] = {"namespace": network.name}
    job = Job(script=(2, 1, 2), stay=5, pause_s=0.01, options=options, timeout_s=30.0)
    lighthouse = LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=1.0), host=network.here)
    with lighthouse, Cluster(lighthouse, job, function=_train_there) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("act 0", "a", "b")
        cluster.wait_for_progress("b", cluster.progress("b") + 3)
        network.switch("down")
        cluster.wait_for("act 1", "a")
        network.switch("up")
        results = cluster.results()
    assert_equal_states(results)
