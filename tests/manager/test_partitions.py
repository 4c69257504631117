"""Replicas that cannot reach each other while all reach the lighthouse: nobody healthy stops for long, and none exits."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from allranks.lighthouse.options import Options

from .cluster import Cluster, Job, LighthouseProcess
from .networks import Networks, networks, possible, train_inside, watch_progress
from .test_failures import assert_equal_states

pytestmark = [pytest.mark.needs_root, pytest.mark.skipif(not possible(), reason="needs root, ip and nft")]

STILL_S = 5.0  # no healthy training waits longer for a replica that cannot be reached


@pytest.fixture
def three() -> Iterator[Networks]:
    with networks("a", "b", "c") as found:
        yield found


def start(found: Networks) -> tuple[LighthouseProcess, Cluster]:
    job = Job(until_told=True, pause_s=0.02, options={"namespace": found.namespace("{name}")})
    lighthouse = LighthouseProcess(Options(), host=found.here).start()
    return lighthouse, Cluster(lighthouse, job, function=train_inside)


def status(lighthouse: LighthouseProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{lighthouse.address}/api/status", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def wait_for_state(lighthouse: LighthouseProcess, replica: str, state: str) -> None:
    deadline = time.monotonic() + 150
    while True:
        rows = {row["replica"]: row["state"] for row in status(lighthouse)["replicas"]}
        if rows.get(replica) == state:
            return
        assert time.monotonic() < deadline, f"{replica} is {rows.get(replica)}, not {state}: {rows}"
        time.sleep(0.05)


def test_a_newcomer_that_the_members_cannot_reach_stops_nobody(three: Networks) -> None:
    """It reaches the lighthouse, connections to it are dropped; it waits, and joins when the network is mended."""
    lighthouse, cluster = start(three)
    with lighthouse, cluster:
        cluster.start("a", "b")
        for one in ("a", "b"):
            wait_for_state(lighthouse, one, "member")
        cluster.wait_for_progress("b", 10)
        number = status(lighthouse)["number"]
        for other in ("a", "b"):
            three.cut("c", other, both=False)
        cluster.job = replace(cluster.job, timeout_s=4.0)  # it waits for longer than it would for a quorum
        cluster.start("c")
        wait_for_state(lighthouse, "c", "unreachable")
        assert watch_progress(cluster, ("a", "b"), 10.0) < STILL_S
        assert status(lighthouse)["number"] == number, "members regrouped for one that they cannot reach"
        three.mend()
        wait_for_state(lighthouse, "c", "member")
        cluster.wait_for_progress("c", cluster.progress("a") + 5)
        cluster.tell_to_stop()
        assert_equal_states(cluster.results())


def test_the_line_between_two_of_three_is_cut_and_the_largest_set_continues(three: Networks) -> None:
    """One of the two is left out, with a reason; nobody exits; mended, all three train together again."""
    lighthouse, cluster = start(three)
    with lighthouse, cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for_progress("a", 10)
        for one in ("b", "c"):
            wait_for_state(lighthouse, one, "member")
        number = status(lighthouse)["number"]
        three.cut("a", "b")
        assert watch_progress(cluster, ("a", "b", "c"), 8.0, steps=20) < STILL_S
        wait_for_state(lighthouse, "b", "unreachable")
        found = status(lighthouse)
        assert sorted(member["replica"] for member in found["quorum"]["members"]) == ["a", "c"]
        assert "left out: b (cannot connect to a" in found["reason"]
        assert number < found["number"] < number + 5
        three.mend()
        wait_for_state(lighthouse, "b", "member")
        cluster.wait_for_progress("b", cluster.progress("a") + 5)
        cluster.tell_to_stop()
        assert_equal_states(cluster.results())


def test_at_the_start_two_of_three_that_cannot_connect_do_not_stop_the_third(three: Networks) -> None:
    """The first quorum contains all; it fails within moments, and the next one is the largest set that can be formed."""
    lighthouse, cluster = start(three)
    three.cut("a", "b", both=False)
    with lighthouse, cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for_progress("c", 10)
        three.mend()
        for name in ("a", "b", "c"):
            wait_for_state(lighthouse, name, "member")
        cluster.wait_for_progress("b", cluster.progress("c") + 5)
        cluster.tell_to_stop()
        assert_equal_states(cluster.results())


def cut_at_random(found: Networks, choose: random.Random) -> str:
    """One partition of all kinds; says which."""
    names, kind = list(found.names), choose.choice(("full", "one-way", "pairwise", "flapping"))
    if kind == "full":
        choose.shuffle(names)
        size = choose.randint(1, len(names) - 1)
        for one, other in itertools.product(names[:size], names[size:]):
            found.cut(one, other)
        return f"full {sorted(names[:size])} | {sorted(names[size:])}"
    pairs = choose.sample(list(itertools.combinations(names, 2)), choose.randint(1, 2))
    if kind == "flapping":
        threading.Thread(target=flap, args=(found, pairs, choose), name="flap").start()
        return f"{kind} {pairs}"
    for one, other in pairs:
        found.cut(one, other, both=kind != "one-way")
    return f"{kind} {pairs}"


def flap(found: Networks, pairs: list[tuple[str, str]], choose: random.Random) -> None:
    """Cuts and mends for less than 10 s."""
    for _ in range(3):
        for one, other in pairs:
            found.cut(one, other)
        time.sleep(choose.choice((0.3, 1.0, 2.5)))
        found.mend()
        time.sleep(choose.choice((0.1, 0.5)))


def play(seed: int) -> dict[str, object]:
    """3 to 6 replicas, full, one-way, pairwise and flapping cuts: somebody always trains, nobody exits, all end equal."""
    choose, cuts = random.Random(seed), {}
    with networks(*"abcdef"[: choose.randint(3, 6)]) as found:
        lighthouse, cluster = start(found)
        with lighthouse, cluster:
            cluster.start(*found.names)
            for name in found.names:
                cluster.wait_for_progress(name, 5)
            for _ in range(2):
                happened = cut_at_random(found, choose)
                longest = watch_progress(cluster, found.names, 10.0, steps=10)
                cuts[happened] = round(longest, 2)
                print(f"{happened}: longest pause {longest:.2f} s, quorum {status(lighthouse)['number']}")
                assert longest < STILL_S, f"{longest:.1f} s without a step: {happened}"
                found.mend()
            for name in found.names:
                wait_for_state(lighthouse, name, "member")
            top = max(cluster.progress(name) for name in found.names)
            for name in found.names:
                cluster.wait_for_progress(name, top + 5)
            cluster.tell_to_stop()
            assert_equal_states(cluster.results())
        assert found.cuts
    return {"replicas": len(found.names), "cuts": cuts}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_no_partition_stops_or_ends_the_training_of_the_others(seed: int) -> None:
    play(seed)
