"""Snapshots in other nodes' memory: kept twice, guarded, bounded, and there when a node is not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.channel.frames import receive_json, send_json
from allranks.channel.keys import ChannelError, Keyring
from allranks.channel.server import MemberServer
from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier, SnapshotServer
from allranks.checkpoint.stores import StoreSpec, open_store
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.checkpoint.stores.peer_store import PURPOSE, KeeperClient, PeerBlobs, receive_bytes, send_bytes
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as mark

from .jobs import make_job, make_state, same, same_state, train_step

TOKEN = "a secret of the job"


@pytest.fixture
def keeper() -> Iterator[SnapshotServer]:
    """One node's snapshot keeper in this process."""
    server = SnapshotServer(TOKEN, bind="127.0.0.1:0", max_bytes=64 << 20)
    server.start()
    yield server
    server.close()


def _config(addresses: list[str], node: int = 0, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(
        nvme_path=None,
        peers=tuple(addresses),
        peer_token=TOKEN,
        node_rank=node,
        memory_snapshot_interval=1,
        **more,
    )


def test_a_snapshot_in_a_keeper_survives_the_rank(keeper: SnapshotServer) -> None:
    """A new process without any memory restores it; only the newest is kept."""
    model, optimizer = make_job()
    with CheckpointManager(_config([keeper.address])) as manager:
        for step in (1, 2, 3):
            train_step(model, optimizer, step)
            assert manager.step(step, model, optimizer) == (CheckpointTier.MEMORY, CheckpointTier.PEER)
            assert manager.wait_for_pending_saves(60)
    used = keeper.used_bytes
    other, other_optimizer = make_job(seed=7)
    with CheckpointManager(_config([keeper.address])) as manager:
        state = manager.restore(other, other_optimizer)
        assert state is not None and state.step == 3
    assert same(model.state_dict(), other.state_dict()) and same(
        optimizer.state_dict(), other_optimizer.state_dict()
    )
    assert 0 < used < 2 * sum(tensor.nbytes for tensor in model.state_dict().values()) * 3 + 100_000


def test_a_keeper_refuses_those_who_do_not_know_the_token(keeper: SnapshotServer) -> None:
    """Neither a wrong token nor an unknown client's bytes get anything, and the keeper lives on."""
    unknown = open_store(StoreSpec(f"peer://{keeper.address}/job", {"token": "guess"}))
    with pytest.raises(PermissionError, match="refused the token"):
        unknown.names()
    host, port = keeper.address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    friend = open_store(StoreSpec(f"peer://{keeper.address}/job", {"token": TOKEN}))
    assert friend.names() == []
    friend.close()


def test_silent_unknown_clients_cost_the_keeper_few_threads_and_nobody_else_anything(
    keeper: SnapshotServer,
) -> None:
    """Hundreds of them, at a time at which a helper wants to save."""
    host, _, port = keeper.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), 20))
        friend = open_store(StoreSpec(f"peer://{keeper.address}/job", {"token": TOKEN}))
        stack.callback(friend.close)
        assert friend.names() == []
        assert threading.active_count() < 150


def test_bytes_changed_on_the_way_are_refused() -> None:
    """The checksum after the bytes does not fit."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        send_bytes(sender, [memoryview(b"right")], "crc32")
        raw = bytearray(receiver.recv(4096))
        raw[0] ^= 1
        sender.sendall(raw)
        with pytest.raises(ChannelError, match="checksum mismatch"):
            receive_bytes(receiver, [memoryview(bytearray(5))], "crc32")


_ANSWERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a negative length": {"length": -1},
    "a petabyte": {"length": 1 << 50},
    "a length in words": {"length": "many"},
    "an unknown checksum": {"length": 2, "algorithm": "none"},
    "no list": {"keys": 5},
    "a list of something": {"keys": [[1], None]},
}


@pytest.mark.parametrize("answer", _ANSWERS.values(), ids=_ANSWERS)
def test_a_keeper_that_answers_nonsense_counts_as_one_that_does_not_answer(
    keeper: SnapshotServer, answer: dict[str, Any]
) -> None:
    """Another one has the snapshot; without another it is an OSError, which restores know."""
    whole = {"ok": True, "version": "1", "size": 2, "algorithm": "crc32", **answer}

    def lie(connection: socket.socket, purpose: str) -> None:
        while receive_json(connection):
            send_json(connection, whole)
            connection.sendall(bytes(64))

    lying = MemberServer(Keyring(TOKEN), PURPOSE, lie)
    listener = socket.create_server(("127.0.0.1", 0))
    lying.start(listener)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    every = [address], [address, keeper.address], [keeper.address]
    alone, two, good = (PeerBlobs(addresses, "job", TOKEN, 0) for addresses in every)
    try:
        good.put("a/x", [memoryview(b"{}")], 2)
        assert two.get("a/x")[0] == b"{}" and two.keys("")[0][0] == "a/x"
        for ask in (lambda: alone.get("a/x"), lambda: alone.keys(""), lambda: alone.size("a/x")):
            with pytest.raises(OSError, match=address):
                ask()
    finally:
        alone.close()
        two.close()
        good.close()
        lying.close()


def test_a_keeper_keeps_no_more_than_its_bound(keeper: SnapshotServer) -> None:
    """What does not fit is refused in the known words; what was there stays."""
    keeper.max_bytes = 1 << 20
    store = open_store(StoreSpec(f"peer://{keeper.address}/job", {"token": TOKEN}))
    assert isinstance(store, KeyedStore)
    store.blobs.put("a/x", [memoryview(bytearray(1 << 19))], 1 << 19)
    with pytest.raises(OSError, match=r"Cannot save snapshot: 1\.0MB required, but only 0\.5MB available"):
        store.blobs.put("a/y", [memoryview(bytearray(1 << 20))], 1 << 20)
    assert keeper.used_bytes == 1 << 19 and store.blobs.size("a/x") == 1 << 19
    store.close()


@pytest.mark.parametrize("drips", [False, True])
def test_bytes_that_were_announced_and_do_not_come_are_not_kept_room_for(drips: bool) -> None:
    """A node that froze in the middle of a save, or sends a byte now and then."""
    server, length = SnapshotServer(TOKEN, "127.0.0.1:0", 64 << 20, transfer_s=0.2), 1 << 20
    server.start()
    client = KeeperClient(server.address, TOKEN)
    try:
        with pytest.raises(OSError), client.connection() as sock:
            send_json(sock, {"do": "put", "key": "job/a/x", "length": length, "algorithm": "crc32"})
            assert receive_json(sock)["ok"] and server.used_bytes == length
            while drips:
                sock.sendall(b"x")
                time.sleep(0.02)
            receive_json(sock)
        deadline = time.monotonic() + 60
        while server.used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.used_bytes == 0
    finally:
        client.close()
        server.close()


def test_every_blob_lies_on_two_nodes_and_one_may_go(keeper: SnapshotServer) -> None:
    """A put goes to its own node's keeper and the next one's; reads find the one that is left."""
    second, third = (SnapshotServer(TOKEN, "127.0.0.1:0", 1 << 20) for _ in range(2))
    second.start()
    third.start()
    addresses = [keeper.address, second.address, third.address]
    blobs = PeerBlobs(addresses, "job", TOKEN, node=1)
    try:
        blobs.put("a/x", [memoryview(b"payload")], 7)
        assert (keeper.used_bytes, second.used_bytes, third.used_bytes) == (0, 7, 7)
        second.close()
        view = memoryview(bytearray(4))
        blobs.get_range("a/x", 3, [view])
        assert bytes(view) == b"load" and blobs.get("a/x")[0] == b"payload"
        assert [key for key, _ in blobs.keys("")] == ["a/x"]
        blobs.put("a/y", [memoryview(b"z")], 1)  # one home is down: the other has it
        assert third.used_bytes == 8
        third.close()
        with pytest.raises(OSError):
            blobs.put("a/z", [memoryview(b"z")], 1)
    finally:
        blobs.close()
        second.close()
        third.close()


AGENT = """
import sys
from allranks.checkpoint.stores.peer_store import SnapshotServer
server = SnapshotServer(sys.argv[1], "127.0.0.1:0", 64 << 20)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


def _agent() -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def _train(rank: int, world_size: int, addresses: list[str]) -> None:
    """Two nodes of two ranks with sharded state; waits to be killed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(12, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with CheckpointManager(_config(addresses, node=rank // 2)) as manager:
        manager.step(1, model, optimizer)
        assert manager.wait_for_pending_saves(60)
        mark("saved")
        signal.pause()


def _resume(rank: int, world_size: int, addresses: list[str]) -> Any:
    model = torch.nn.Linear(12, 12)
    with CheckpointManager(_config(addresses, node=0)) as manager:
        state = manager.restore(model)
        return None if state is None else (state.step, model.weight.flatten().tolist(), model.bias.tolist())


def test_losing_a_node_with_its_agent_and_ranks_loses_nothing(tmp_path: Path) -> None:
    """Node 1 dies whole; the other node's keeper has the shards of all four ranks."""
    (first, first_address), (second, second_address) = _agent(), _agent()
    try:
        addresses = [first_address, second_address]
        with Ranks(_train, 4, (addresses,)) as ranks:
            ranks.wait_for("saved", timeout_s=90)
            os.kill(second.pid, signal.SIGKILL)
            for rank in (2, 3):
                ranks.kill(rank)
            second.wait(20)
            for rank in (0, 1):
                ranks.kill(rank)
            ranks.join(20)
        with Ranks(_resume, 2, (addresses,)) as ranks:
            found = ranks.values(timeout_s=90)
        weights, bias = [float(n) for n in range(144)], [float(n) for n in range(12)]
        assert found == [(1, weights, bias)] * 2
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_agents_addresses_come_from_the_environment(
    keeper: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `allranks run` nothing has to be configured."""
    monkeypatch.setenv("ALLRANKS_SNAPSHOTS", keeper.address)
    monkeypatch.setenv("ALLRANKS_TOKEN", TOKEN)
    config = CheckpointConfig(nvme_path=None)
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(make_state(5), CheckpointTier.PEER)
        assert manager.wait_for_pending_saves(60)
        manager.clear_memory_snapshots()
        loaded = manager.load_checkpoint()
    assert loaded is not None and same_state(loaded, make_state(5))


def _one_part_is_missing(rank: int, world_size: int, address: str) -> list[bool]:
    with CheckpointManager(_config([address], commit_timeout_s=2.0, save_on_close=False)) as manager:
        manager.group.timeout_s = 60.0
        if rank == 1:
            saves = manager.saves
            saves.submit = lambda snapshot, job, future: saves.fail(job, OSError("no"), future)  # type: ignore[method-assign]
        model = torch.nn.Linear(256, 256)
        found = []
        for step in (1, 2, 3):
            manager.step(step, model)
            found.append(manager.wait_for_pending_saves(30))
        return found


def test_failed_snapshots_do_not_fill_the_keepers(keeper: SnapshotServer) -> None:
    """Each left its parts for a day: after a few of them no snapshot fitted any more."""
    with Ranks(_one_part_is_missing, 2, (keeper.address,)) as ranks:
        assert ranks.values(timeout_s=90) == [[False] * 3] * 2
    assert keeper.used_bytes < 10_000
