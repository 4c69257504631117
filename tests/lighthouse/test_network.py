"""Real packet loss: a replica in its own network namespace, its packets dropped by nftables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from .processes import LighthouseProcess, Victim
from .test_faults import come_in, form

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.skipif(not shutil.which("ip") or not shutil.which("nft"), reason="needs ip and nft"),
]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


class Namespace:
    """A network namespace joined to ours by a veth pair; `cut` drops what nftables is told to."""

    def __init__(self) -> None:
        number = os.getpid() % 200
        self.name = f"allranks{os.getpid()}"
        self.host, self.guest = f"10.213.{number}.1", f"10.213.{number}.2"
        self._link = f"ar{os.getpid() % 100000}"

    def open(self) -> None:
        inside = ("ip", "netns", "exec", self.name)
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "addr", "add", f"{self.host}/24", "dev", self._link)
        _run("ip", "link", "set", self._link, "up")
        _run(*inside, "ip", "addr", "add", f"{self.guest}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "nft", "add", "table", "inet", "cut")

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def cut(self, hook: str) -> None:
        """hook: input (nothing comes in) or output (nothing goes out)."""
        chain = f"{{ type filter hook {hook} priority 0; policy drop; }}"
        _run(*self.prefix, "nft", "add", "chain", "inet", "cut", hook, chain)

    def mend(self) -> None:
        _run(*self.prefix, "nft", "flush", "ruleset")
        _run(*self.prefix, "nft", "add", "table", "inet", "cut")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, timeout=30)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, timeout=30)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace()
    try:
        namespace.open()
    except (subprocess.CalledProcessError, OSError) as error:
        namespace.close()
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)!r}")
    try:
        yield namespace
    finally:
        namespace.close()


@pytest.mark.parametrize(
    ("hooks", "beacon"), [(("input", "output"), True), (("output",), False), (("input",), False)],
    ids=["both ways", "nothing out", "nothing in"],
)  # fmt: skip
def test_a_partitioned_replica_is_lost_and_comes_back(
    run_lighthouse: Callable[..., LighthouseProcess],
    victims: Callable[..., list[Victim]],
    namespace: Namespace,
    hooks: tuple[str, ...],
    beacon: bool,
) -> None:
    """Packets vanish, no socket is closed; one side falls silent; mended, all are in one quorum of one epoch."""
    lighthouse = run_lighthouse("--heartbeat-timeout-ms", "2500", host=namespace.host)
    (a,) = victims(lighthouse.address, "a")
    (b,) = victims(lighthouse.address, "b", prefix=namespace.prefix, beacon=beacon)
    first = form([a, b])
    for hook in hooks:
        namespace.cut(hook)
    notice = a.notice("MemberLost", replica="b")
    assert notice["number"] == first["quorum"]
    second = form([a], step=1)
    assert second["members"] == ["a"]
    namespace.mend()
    lighthouse.wait_log("b is back")
    third = come_in(b, [a])
    assert first["quorum"] < second["quorum"] < third["quorum"]
    assert first["epoch"] == second["epoch"] == third["epoch"]
    assert third["members"] == ["a", "b"]
    for quorum in (second, third):
        lighthouse.wait_log(str(quorum["reason"]))


def test_the_namespace_really_cuts(namespace: Namespace) -> None:
    """The fault fires: nothing connects while the rules are in place, everything after they are gone."""
    probe = f"import socket; socket.create_connection(({namespace.host!r}, 9), 1)"

    def error() -> str:
        done = subprocess.run(
            [*namespace.prefix, sys.executable, "-c", probe], capture_output=True, text=True, timeout=30
        )
        return done.stderr.strip().splitlines()[-1]

    assert "refused" in error()
    namespace.cut("output")
    assert "refused" not in error()
    namespace.mend()
    assert "refused" in error()
