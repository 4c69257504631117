"""Replicas regroup: what an earlier group left unfinished does not explain the present."""

from __future__ import annotations

from dataclasses import replace

from allranks.diagnosis import diagnose
from allranks.diagnosis.divergence import find_divergence
from allranks.model.trace import RankTrace

from .histories import STUCK, Do, run


def named(traces: list[RankTrace], name: str) -> list[RankTrace]:
    """The same job with its one group under another name."""
    return [
        replace(t, groups=tuple(replace(g, name=name) if g.name else g for g in t.groups)) for t in traces
    ]


def job(stuck: int, quorum: int) -> list[RankTrace]:
    """Three replicas; `stuck` never enters the fifth all_reduce of this quorum's group."""
    programs = {
        rank: [Do("all_reduce", group="world")] * 4
        + ([STUCK] if rank == stuck else [Do("all_reduce", group="world")])
        for rank in range(3)
    }
    return named(run({"world": (0, 1, 2)}, programs, backend="nccl").traces(), f"replicas/{quorum}")


def after(earlier: list[RankTrace], later: list[RankTrace]) -> list[RankTrace]:
    """One trace per rank that holds the calls of both groups."""
    import numpy as np

    joined = []
    for old, new in zip(earlier, later, strict=True):
        groups = (*new.groups, *(g for g in old.groups if g.name))
        place = {index: len(new.groups) + index - 1 for index in range(1, len(old.groups))}
        calls = old.calls.copy()
        calls["group"] = [place[int(group)] for group in calls["group"]]
        joined.append(replace(new, groups=groups, calls=np.concatenate([calls, new.calls])))
    return joined


def test_the_fault_of_an_earlier_quorum_is_history() -> None:
    """Rank 1 hung in quorum 1 and was replaced; now rank 2 hangs in quorum 2 and is the only one named."""
    assert diagnose(job(1, 1)).verdict is not None
    verdict = diagnose(after(job(1, 1), job(2, 2))).verdict
    assert verdict is not None
    assert (verdict.ranks, verdict.group) == ((2,), "replicas/2")


def test_groups_of_any_other_name_are_never_forgotten() -> None:
    """Only the groups of replicas carry the number of a quorum."""
    verdict = diagnose(after(named(job(1, 1), "dp/1"), job(-1, 2))).verdict
    assert verdict is not None and verdict.ranks == (1,)


def test_a_replica_that_reduces_another_size_is_named_while_it_runs() -> None:
    """In the newest quorum only, and not because it is at another step, as one that heals is."""

    def replicas(quorum: int, odd: int, step: int) -> list[RankTrace]:
        programs = {rank: [Do("all_reduce", size=3 if rank == odd else 4)] * 4 for rank in range(3)}
        traces = named(run({"world": (0, 1, 2)}, programs, backend="nccl").traces(), f"replicas/{quorum}")
        traces[1].calls["step"] = step
        return traces

    assert find_divergence(replicas(2, -1, 7), 10**18, of_replicas=True) is None
    assert find_divergence(after(replicas(1, 2, 0), replicas(2, -1, 0)), 10**18, of_replicas=True) is None
    found = find_divergence(after(replicas(1, -1, 0), replicas(2, 2, 0)), 10**18, of_replicas=True)
    assert found is not None and (found.cause, found.ranks) == ("size_mismatch", (2,))
    assert find_divergence(replicas(2, 2, 0), 10**18) is None  # inside replicas nothing differs
