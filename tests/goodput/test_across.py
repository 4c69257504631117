"""Waits between nodes: each node's ledger has its own times, the account of all of them names who was waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from allranks.ledger.across import NodeLateness, choose, note_passed
from allranks.ledger.agent import LedgerKeeper
from allranks.ledger.file import NodeLedger, find_ledgers
from allranks.ledger.records import Booked, Record, RunStart
from allranks.ledger.summary import account
from goodput.test_slow import DDP, FSDP, STEP_S, T0, Plan, noise, record


def ledgers(plan: Plan, factors: np.ndarray, steps: int = 120) -> tuple[list[NodeLedger], float]:
    """Of two nodes with four ranks each, whose clocks differ; and how long a step takes."""
    traces, step_s = record(plan, factors, hosts="aaaabbbb", skew=(0, 0, 0, 0, 3, 3, 3, 3))
    end, found = steps * step_s, []
    for node, skew in (("a", 0.0), ("b", 3.0)):
        ranks = range(4) if node == "a" else range(4, 8)
        begin = T0 + skew
        passed = note_passed([traces[rank] for rank in ranks], begin, begin + end + 1.0)
        assert passed is not None and passed.calls == steps * len(plan)
        row = Booked(1, begin, begin + end, f"{ranks[0]}-{ranks[-1]}", {"useful": 4 * end}, steps)
        records: list[Record] = [RunStart(begin, "job", node, "whole_job"), row, passed]
        found.append(NodeLedger(Path(node), records))
    return found, step_s


@pytest.mark.parametrize("plan", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_the_others_wait_for_a_rank_of_another_node(plan: Plan) -> None:
    factors = noise(11, width=0.001)
    factors[5] *= 1.5
    nodes, step_s = ledgers(plan, factors)
    found = account(nodes)
    waited = found.by_node["a"]["waiting"] / (4 * 120 * step_s)
    assert waited == pytest.approx(0.5 * STEP_S / step_s, rel=0.1)
    assert list(found.waiting_for) == [5]
    assert found.by_node["b"].get("waiting", 0.0) == 0.0  # what waits inside a node its own agent books
    assert found.rank_seconds == pytest.approx(8 * 120 * step_s)


def test_nobody_waits_for_another_node_in_a_healthy_job() -> None:
    assert "waiting" not in account(ledgers(DDP, noise(12, width=0.0))[0]).seconds


def test_nodes_choose_the_same_collectives() -> None:
    first, second = choose(range(5000), 64), choose(range(200, 5100), 64)
    assert 16 < len(first) <= 64
    assert len(set(first) & set(second)) > 0.8 * min(len(first), len(second))
    assert len({key % 4 for key in first}) == 4  # not always the same one of a step


def test_two_agents_of_one_machine_have_a_ledger_each(tmp_path: Path) -> None:
    keepers = [LedgerKeeper(tmp_path, "job", "n1", "whole_job") for _ in range(2)]
    for keeper in keepers:
        keeper.start(T0)
    assert [path.name for path in find_ledgers(tmp_path)] == ["job.n1-2.ledger", "job.n1.ledger"]
    for keeper in keepers:
        keeper.close(T0 + 1)
    again = LedgerKeeper(tmp_path, "job", "n1", "whole_job")
    again.start(T0 + 2)
    again.close(T0 + 3)
    assert len(find_ledgers(tmp_path)) == 2


@pytest.mark.parametrize("slow", [True, False])
def test_a_node_that_becomes_slow_is_told_once(slow: bool) -> None:
    """All four ranks of node b become a fifth slower: within the node nobody is late."""
    factors = noise(13, steps=400, width=0.01)
    if slow:
        factors[4:, 200:] *= 1.2
    factors[0, ::25] *= 3.0  # rank 0 saves now and then
    traces, step_s = record(DDP, factors, hosts="aaaabbbb", skew=(0, 0, 0, 0, 3, 3, 3, 3))
    lateness, told = NodeLateness(), []
    for look in range(6, int(400 * step_s / 5)):
        now = T0 + look * 5.0
        notes = {
            "a": note_passed(traces[:4], now - 30.0, now),
            "b": note_passed(traces[4:], now - 29.0 + 3.0, now + 1.0 + 3.0),
        }
        told += lateness.add({name: note for name, note in notes.items() if note is not None})
    assert [(node, rank in range(4, 8)) for node, rank, _ in told] == ([("b", True)] if slow else [])
    assert all(share == pytest.approx(0.2 / 1.2, abs=0.05) for _, _, share in told)
