"""Addresses on machines without IPv4 and with a name that nobody knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

ODD = """
import socket
from allranks.channel.frames import HeldPort, join_address, loopback, own_address, resolves
from allranks.checkpoint.stores.peer_store import KeeperClient, SnapshotServer
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse

assert loopback() == "::1"
assert not resolves(socket.gethostname())
assert join_address("0.0.0.0", 3) == join_address("::", 3) == "[::1]:3"
assert HeldPort().number
for host in ("127.0.0.1", "::", "::1"):
    with Lighthouse(Options(), ServerOptions(host=host, port=0, token="t" * 20)) as lighthouse:
        assert lighthouse.address.startswith("[::1]:"), lighthouse.address
        Client(ClientOptions((lighthouse.address,), "t" * 20, "replica-0", beacon=False)).start(timeout_s=20).close()
    keeper = SnapshotServer(token="t" * 20, bind=f"[{host}]:0" if ":" in host else f"{host}:0")
    keeper.start()
    client = KeeperClient(keeper.address, "t" * 20)
    client.put("key", [memoryview(b"bytes")], 5, {})
    assert bytes(client.get("key")[0]) == b"bytes"
    client.close()
    keeper.close()
print("all reached")
"""


@pytest.mark.needs_root
def test_a_machine_with_ipv6_alone_and_a_name_of_64_characters_reaches_itself() -> None:
    """Python cannot even look up a name of that length: its error is not an OSError."""
    prepare = f'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && hostname {"x" * 64} && exec "$@"'
    inside = ["unshare", "--net", "--uts", "sh", "-c", prepare, "sh", sys.executable, "-c", ODD]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=300)
    assert done.stdout == "all reached\n", done.stderr
