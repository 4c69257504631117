"""Replicas in network namespaces of their own, joined by one bridge, and cuts between any two of them. Needs root."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .cluster import Cluster, Job, Result, train


def possible() -> bool:
    return os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("nft"))


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True, timeout=30)


def _try(words: str) -> bool:
    return subprocess.run(words.split(), capture_output=True, timeout=30).returncode == 0


def _add_bridge(name: str) -> bool:
    """False: another world has this name."""
    return _try(f"ip link add {name} type bridge")


@dataclass
class Networks:
    """One namespace per name; `here` is our own address on the bridge, where a lighthouse may listen."""

    names: Sequence[str]
    number: int = -1  # of this world; several may be there at a time
    cuts: int = 0

    @property
    def here(self) -> str:
        return f"10.215.{self.number}.1"

    def address(self, name: str) -> str:
        return f"10.215.{self.number}.{10 + list(self.names).index(name)}"

    def namespace(self, name: str) -> str:
        return f"allranks-{self.number}-{name}"

    def open(self) -> None:
        self.number = next(number for number in random.sample(range(250), 250) if _add_bridge(f"arb{number}"))
        bridge = f"arb{self.number}"
        _run(f"ip addr add {self.here}/24 dev {bridge}")
        _run(f"ip link set {bridge} up")
        for place, name in enumerate(self.names):
            space, link = self.namespace(name), self._link(place)
            _run(f"ip netns add {space}")
            _run(f"ip link add {link} type veth peer name eth0 netns {space}")
            _run(f"ip link set {link} master {bridge} up")
            _run(f"ip -n {space} addr add {self.address(name)}/24 dev eth0")
            _run(f"ip -n {space} link set eth0 up")
            _run(f"ip -n {space} link set lo up")
            self._table(name)

    def _link(self, place: int) -> str:
        return f"arv{self.number}x{place}"

    def _table(self, name: str) -> None:
        self._nft(name, "add table inet cut")
        self._nft(name, "add chain inet cut input { type filter hook input priority 0 ; policy accept ; }")

    def _nft(self, name: str, words: str) -> None:
        _run(f"ip netns exec {self.namespace(name)} nft {words}")

    def cut(self, one: str, other: str, both: bool = True) -> None:
        """Drops what `other` sends to `one`, and the other way round."""
        self.cuts += 1
        self._nft(one, f"add rule inet cut input ip saddr {self.address(other)} drop")
        if both:
            self._nft(other, f"add rule inet cut input ip saddr {self.address(one)} drop")

    def mend(self) -> None:
        """Takes all cuts back."""
        for name in self.names:
            self._nft(name, "flush chain inet cut input")

    def close(self) -> None:
        """Takes the bridge, which keeps the number, away last."""
        if self.number < 0:
            return
        for place, name in enumerate(self.names):
            _try(f"ip link del {self._link(place)}")  # a process inside keeps a namespace and its link alive
            _try(f"ip netns del {self.namespace(name)}")
        _try(f"ip link del arb{self.number}")


@contextmanager
def networks(*names: str) -> Iterator[Networks]:
    found = Networks(names)
    try:
        found.open()
        yield found
    finally:
        found.close()


def train_inside(rank: int, world: int, address: str, name: str, job: Job, folder: str) -> Result:
    """As `train`, in the namespace of this replica."""
    options = dict(job.options)
    namespace = options.pop("namespace").format(name=name)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) == 0
    os.close(descriptor)
    return train(rank, world, address, name, replace(job, options=options), folder)


def watch_progress(cluster: Cluster, names: Sequence[str], until_s: float, steps: int = 0) -> float:
    """The longest time without a new step of anybody, over at least `until_s`, and until `steps` more are made."""
    began = last = time.monotonic()
    first = top = max(cluster.progress(name) for name in names)
    longest = 0.0
    while time.monotonic() - began < until_s or top < first + steps:
        time.sleep(0.02)
        found = max(cluster.progress(name) for name in names)
        now = time.monotonic()
        longest = max(longest, now - last)
        if found > top:
            top, last = found, now
        assert now - began < until_s + 120, f"no {steps} steps in {now - began:.0f} s"
    return longest
