"""Which nodes the lighthouse asks to compare their calls."""

from __future__ import annotations

from dataclasses import replace

from allranks.lighthouse.ranks import RankTable
from allranks.model.cluster import NodeReport


def report(agent: str, rank: int, calls: int, doing: str = "c", **windows: dict[int, int]) -> NodeReport:
    """Of a node with one rank."""
    return NodeReport(
        agent, agent, (rank,), pids=(1,), doing=doing, steps=(0,), calls=(calls,), windows=windows
    )


def test_nodes_whose_calls_hash_differently_are_asked_once_in_a_while() -> None:
    """The one that told another hash is named; a program that is meant to differ is looked at less and less often."""
    table = RankTable()
    assert table.note(report("agent-a", 0, 10, g={0: 1, 1: 2}), 0.0).compare == ()
    assert table.note(report("agent-b", 1, 10, g={1: 2}), 0.5).compare == ()
    assert table.note(report("agent-b", 1, 11, g={2: 4}, h={0: 1}), 1.5).compare == ()
    assert table.note(report("agent-a", 0, 11, g={2: 3}), 1.6).compare == ("agent-b",)
    times = [now for now in range(2, 200) if table.note(report("agent-a", 0, now, g={2: 3}), now).compare]
    assert times == [12, 32, 72, 152]


def test_one_node_whose_own_ranks_differ_looks_and_not_all_of_them() -> None:
    """In a large job every node may see the same. A node without others decides by itself."""
    table = RankTable()
    odd = replace(report("agent-a", 0, 10), differs=True)
    assert table.note(odd, 0.0).compare == ("agent-a",)
    for number in range(20):
        table.note(report(f"agent-b{number:02}", 1 + number, 10), 1.0)
    assert table.note(odd, 20.0).compare == tuple(f"agent-b{number:02}" for number in range(8))
    assert table.note(replace(odd, agent="agent-b01"), 20.1).compare == ()
    assert len(table.note(replace(odd, agent="agent-b01"), 40.0).compare) == 8


def test_all_are_asked_when_every_rank_waits_for_longer_than_ever() -> None:
    """Not while one of them works, and not for a wait that the job has survived before."""

    def looks(table: RankTable, begin: float, end: float, calls: int, doing: str = "ww") -> list[float]:
        """When a look was wanted; both nodes report every second."""
        found, now = [], begin
        while now < end:
            for rank, agent in enumerate(("agent-a", "agent-b")):
                if table.note(report(agent, rank, calls, doing[rank]), now).compare:
                    found.append(now - begin)
            now += 1.0
        return found

    table = RankTable()
    assert looks(table, 0.0, 60.0, 1, "wc") == []
    assert looks(table, 100.0, 107.0, 2) == [2.0, 3.0, 5.0]
    assert looks(table, 107.0, 113.0, 3) == []  # seven seconds were survived
    assert looks(table, 113.0, 133.0, 4) == [7.0, 14.0]


def test_one_node_has_nobody_to_compare_with() -> None:
    """Its own agent compares its ranks."""
    table = RankTable()
    waiting = replace(report("agent-a", 0, 1, "w"), windows={"g": {0: 1}})
    assert [table.note(waiting, float(now)).compare for now in range(20)] == [()] * 20
