"""Forked ranks of tests: their port is theirs, and none ends while another still connects."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from allranks.channel.frames import HeldPort
from allranks.drill.ranks import Ranks


def _met(rank: int, world_size: int, ranks: list[Ranks]) -> list[bool]:
    return [ranks[0]._mark_path(other, "connected").exists() for other in range(world_size)]


def test_a_rank_begins_when_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends sooner breaks the connections that others still make ("Connection closed by peer")."""
    init = dist.init_process_group

    def slow_for_one(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        if dist.get_rank() == 1:
            time.sleep(0.5)  # it is slow

    monkeypatch.setattr(dist, "init_process_group", slow_for_one)
    itself: list[Ranks] = []
    ranks = Ranks(_met, 3, args=(itself,))
    itself.append(ranks)
    with ranks:
        assert ranks.values() == [[True] * 3] * 3


def test_a_held_port_goes_to_the_server_it_is_held_for_and_to_nobody_else() -> None:
    """Who asks for any port gets another; a store and a server that set SO_REUSEADDR can bind it."""
    held = HeldPort()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.number))
        store = dist.TCPStore("127.0.0.1", held.number, 1, is_master=True)
        store.set("a", "b")
        del store
        with socket.create_server(("127.0.0.1", held.number)) as server:
            assert server.getsockname()[1] == held.number
    finally:
        held.close()
