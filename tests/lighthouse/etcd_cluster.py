"""A real etcd of one or three nodes on private ports, for tests that kill and restart it."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from allranks.channel.frames import HeldPort
from allranks.errors import EtcdError
from allranks.etcd import Etcd


class EtcdCluster:
    """Nodes are children of this process; `kill(i)` and `start(i)` keep the data. It lies in memory, unless `data` names a
    folder: leases of a second must not depend on a disk that others use.
    """

    def __init__(self, folder: Path, size: int, data: Path | str = "/dev/shm") -> None:
        self._folder = folder
        self._data = tempfile.TemporaryDirectory(prefix="allranks-etcd-", dir=data)
        self._held = [HeldPort() for _ in range(2 * size)]
        ports = [held.number for held in self._held]
        self._clients, self._peers = ports[:size], ports[size:]
        self.nodes: list[subprocess.Popen[bytes] | None] = [None] * size
        for index in range(size):
            self.start(index)
        self.wait()

    @property
    def endpoints(self) -> str:
        return ",".join(f"http://127.0.0.1:{port}" for port in self._clients)

    def start(self, index: int) -> None:
        cluster = ",".join(f"n{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers))
        client, peer = f"http://127.0.0.1:{self._clients[index]}", f"http://127.0.0.1:{self._peers[index]}"
        with (self._folder / f"etcd-{index}.log").open("ab") as log:
            self.nodes[index] = subprocess.Popen(
                ["etcd", "--name", f"n{index}", "--data-dir", f"{self._data.name}/{index}",
                 "--listen-client-urls", client, "--advertise-client-urls", client,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", cluster, "--initial-cluster-state", "new",
                 "--heartbeat-interval", "50", "--election-timeout", "250"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until it answers a write."""
        etcd, deadline = Etcd(tuple(self.endpoints.split(","))), time.monotonic() + timeout_s
        while True:
            try:
                etcd.put("/probe", b"x")
                etcd.close()
                return
            except EtcdError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def leader(self) -> int:
        """Index of the raft leader."""
        for index, port in enumerate(self._clients):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v3/maintenance/status", b"{}")
            with urllib.request.urlopen(request, timeout=5) as answer:
                status = json.load(answer)
            if status["leader"] == status["header"]["member_id"]:
                return index
        raise AssertionError("etcd has no leader")

    def kill(self, index: int) -> None:
        node = self.nodes[index]
        assert node is not None
        node.send_signal(signal.SIGKILL)
        node.wait(20)
        self.nodes[index] = None

    def close(self) -> None:
        for node in self.nodes:
            if node is not None:
                node.kill()
                node.wait(20)
        for held in self._held:
            held.close()
        self._data.cleanup()
