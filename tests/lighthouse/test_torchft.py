"""Unmodified torchft clients on our lighthouse: the real package from the registry, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.channel.frames import HeldPort


@pytest.fixture(scope="module")
def torchft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchft 0.2.0 in a folder of its own, beside the torch that is here."""
    folder = tmp_path_factory.mktemp("torchft")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        str(folder),
        "torchft==0.2.0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(
            f"needs a wheel of torchft 0.2.0 for this machine: {done.stderr.strip().splitlines()[-1:]}"
        )
    return folder


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """`allranks lighthouse` with torchft's door; no timeout can tell a death here, only the closed connection."""
    held = HeldPort()
    bind = f"127.0.0.1:{held.number}"
    grpc_bind = bind if request.param == "one port" else "127.0.0.1:0"
    command = [
        sys.executable, "-m", "allranks", "lighthouse", "--bind", bind, "--grpc-bind", grpc_bind,
        "--no-token", "--min_replicas", "2", "--join_timeout_ms", "600000", "--heartbeat_timeout_ms", "600000", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0
        process.stdout.close()
        held.close()


CLIENT = """
import os, sys, time, types
from datetime import timedelta
# torchft's own compiled client; the package around it would import torch and opentelemetry for nothing here
package = sys.modules["torchft"] = types.ModuleType("torchft")
package.__path__ = [os.environ["PYTHONPATH"] + "/torchft"]
from torchft._torchft import LighthouseClient
address, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = LighthouseClient(address, connect_timeout=timedelta(seconds=20))
client.heartbeat(name)
print("alive", flush=True)
for step in range(rounds):
    sys.stdin.readline()
    client.heartbeat(name)
    begin = time.monotonic()
    quorum = client.quorum(name, timeout=timedelta(seconds=60), address="http://m", store_address="s:1", step=step, world_size=1)
    print(quorum.quorum_id, ",".join(p.replica_id for p in quorum.participants), f"{time.monotonic() - begin:.3f}", flush=True)
sys.stdin.readline()
"""


def client(torchft: Path, address: str, name: str, rounds: int) -> subprocess.Popen[str]:
    """A torchft client that is known to the lighthouse and asks for a quorum each time it gets a line."""
    env = {**os.environ, "PYTHONPATH": str(torchft)}
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, address, name, str(rounds)], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The next quorum that a client got."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    number, names, _ = line.split()
    return int(number), names


def go(process: subprocess.Popen[str]) -> None:
    """Lets a client ask again."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("lighthouse", ["one port"], indirect=True)
def test_torchft_clients_form_a_quorum_lose_a_member_and_regain_it(
    torchft: Path, lighthouse: dict[str, str]
) -> None:
    """kill -9 of one: the others' next quorum is formed without it long before a heartbeat timeout would tell."""
    names = ["a:1", "b:1", "c:1"]
    clients = [client(torchft, lighthouse["grpc"], name, 4) for name in names]
    late = None
    try:
        for each in clients:  # the first quorum waits for everybody who has been heard of
            assert each.stdout is not None
            assert each.stdout.readline() == "alive\n"
        for each in clients:
            go(each)
        assert {answer(c) for c in clients} == {(1, "a:1,b:1,c:1")}
        for each in clients:
            go(each)
        assert {answer(c) for c in clients} == {(1, "a:1,b:1,c:1")}, "the same members keep the number"
        clients[2].kill()
        clients[2].wait()
        for each in clients[:2]:
            go(each)
        assert {answer(c) for c in clients[:2]} == {(2, "a:1,b:1")}
        late = client(torchft, lighthouse["grpc"], "c:2", 1)
        assert late.stdout is not None
        assert late.stdout.readline() == "alive\n"
        go(late)
        waiting = True
        deadline = time.monotonic() + 120
        while waiting:
            assert time.monotonic() < deadline
            status = _status(lighthouse["http"])
            waiting = not any(
                row["replica"] == "c:2" and row["state"] == "asking" for row in status["replicas"]
            )
            time.sleep(0.05)
        for each in clients[:2]:
            go(each)
        assert {answer(c) for c in (*clients[:2], late)} == {(3, "a:1,b:1,c:2")}
        assert "Quorum 3" in _fetch(f"{lighthouse['grpc']}/status"), (
            "torchft's page is on the port of its calls"
        )
    finally:
        for each in [*clients, *([late] if late else [])]:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("lighthouse", ["two ports"], indirect=True)
def test_torchfts_calls_and_page_share_a_port_of_their_own(torchft: Path, lighthouse: dict[str, str]) -> None:
    """A browser at the port that torchft's clients use sees its fragment of HTML, with the client in it."""
    assert lighthouse["grpc"] != lighthouse["http"]
    only = client(torchft, lighthouse["grpc"], "a:1", 1)
    try:
        assert only.stdout is not None
        assert only.stdout.readline() == "alive\n"
        assert "a:1: step" in _fetch(f"{lighthouse['grpc']}/status")
    finally:
        only.kill()
        only.communicate()


def _status(address: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = json.loads(_fetch(f"{address}/api/status"))
    return found


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as stream:
        return str(stream.read(), "utf-8")
