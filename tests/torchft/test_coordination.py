"""Lighthouse and manager servers and their clients over torchft's protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import ManagerError
from allranks.lighthouse.grpc_wire import decode_quorum_response, encode_quorum_response
from allranks.model.cluster import Member, Quorum
from allranks.torchft.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
)
from allranks.torchft.manager_service import (
    QuorumRequest,
    QuorumResult,
    decode_request,
    decode_result,
    encode_request,
    encode_result,
    quorum_results,
)

LONG = timedelta(seconds=60)
number = st.integers(-(2**63), 2**63 - 1)
place = st.integers(0, 2**31)


@given(st.builds(QuorumRequest, number, number, st.text(max_size=9), st.booleans(), st.booleans(), place))
@settings(max_examples=100, deadline=None)
def test_a_request_survives_the_wire(request: QuorumRequest) -> None:
    assert decode_request(encode_request(request)) == request


@given(
    st.builds(
        QuorumResult, number, place, place, st.text(max_size=9), number, st.none() | place, place, st.booleans(),
        st.text(max_size=9), st.none() | place, st.lists(place, max_size=4), place, st.lists(st.text(max_size=5), max_size=3),
    )
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_a_result_survives_the_wire(result: QuorumResult) -> None:
    """A rank 0 that is there is not the same as one that is not."""
    assert decode_result(encode_result(result)) == result


def test_a_quorum_is_read_as_it_was_written() -> None:
    quorum = Quorum(3, 0, (Member("a", "a", step=5, store="s:1", data='{"x": 1}'), Member("b", "b")))
    assert decode_quorum_response(encode_quorum_response(quorum, 2.5)) == (quorum, 2.5)


def quorum(**steps: int) -> Quorum:
    return Quorum(
        7,
        1,
        tuple(
            Member(name, step=step, address=f"m-{name}", store=f"s-{name}") for name, step in steps.items()
        ),
    )


def test_at_step_zero_all_take_the_state_of_the_primary() -> None:
    """The primary of rank 0 is the first, of rank 1 the second."""
    first, second = (quorum_results(quorum(a=0, b=0), "a", rank) for rank in (0, 1))
    assert (first.heal, first.recover_dst_replica_ranks, first.store_address) == (False, [1], "s-a")
    assert (second.heal, second.recover_src_replica_rank, second.store_address) == (True, 1, "s-b")


def test_without_init_sync_nobody_heals_at_step_zero() -> None:
    result = quorum_results(quorum(a=0, b=0), "b", 0, init_sync=False)
    assert (result.heal, result.max_replica_rank, result.max_world_size) == (False, 1, 2)


def test_those_behind_are_shared_among_those_ahead() -> None:
    """Round robin, beginning at another source for each rank; everybody sees the same assignment."""
    steps = {"a": 5, "b": 3, "c": 5, "d": 1}
    assert quorum_results(quorum(**steps), "a", 0).recover_dst_replica_ranks == [1]
    assert quorum_results(quorum(**steps), "c", 0).recover_dst_replica_ranks == [3]
    assert quorum_results(quorum(**steps), "a", 1).recover_dst_replica_ranks == [3]
    behind = quorum_results(quorum(**steps), "d", 0)
    assert (behind.recover_src_manager_address, behind.max_step, behind.max_replica_rank) == ("m-c", 5, None)


def test_a_replica_outside_the_quorum_is_told_so() -> None:
    with pytest.raises(ManagerError, match="x is not in quorum 7: a"):
        quorum_results(quorum(a=1), "x", 0)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    yield server.address()
    server.shutdown()


def test_a_client_gets_a_quorum_with_the_data_of_its_members(lighthouse: str) -> None:
    """And with little said, the defaults."""
    client = LighthouseClient(lighthouse, LONG)
    client.heartbeat("only")
    found = client.quorum(
        "only", LONG, address="m", store_address="s:1", step=4, world_size=2, data={"my": 1}
    )
    (member,) = found.participants
    assert (member.replica_id, member.step, member.data, found.quorum_id > 0) == ("only", 4, {"my": 1}, True)
    assert found.created.seconds > 1_700_000_000
    assert client.quorum("only", LONG).participants[0].data is None
    client.close()


def test_asking_for_a_quorum_is_a_sign_of_life() -> None:
    """Without a single heartbeat, five times as long as the heartbeat timeout: it waits, it is not dropped."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=100)
    try:
        client = LighthouseClient(server.address(), LONG)
        with pytest.raises(TimeoutError, match=r"Quorum was not answered within 0.5 s"):
            client.quorum("early", timedelta(seconds=0.5))
        client.close()
    finally:
        server.shutdown()


def test_nobody_listening_is_a_timeout_with_the_address() -> None:
    with pytest.raises(TimeoutError, match=r"no connection to http://127.0.0.1:1 within 0.2 s"):
        LighthouseClient("http://127.0.0.1:1", timedelta(seconds=0.2))


def test_the_ranks_of_a_replica_ask_and_vote_as_one(lighthouse: str) -> None:
    """Two ranks: one quorum, each other's metadata, and one no is a no for both."""
    server = ManagerServer(
        replica_id="r0", lighthouse_addr=lighthouse, hostname="127.0.0.1", bind="127.0.0.1:0", store_addr="s:1",
        world_size=2, heartbeat_interval=timedelta(milliseconds=100), connect_timeout=LONG, quorum_retries=0,
    )  # fmt: skip
    try:
        clients = [ManagerClient(server.address(), LONG) for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(client._quorum, rank, 3, f"meta-{rank}", False, LONG, 0)
                for rank, client in enumerate(clients)
            ]
            results = [each.result(60) for each in asked]
            assert [(each.replica_ids, each.max_step, each.heal) for each in results] == [
                (["r0"], 3, False)
            ] * 2
            assert clients[0]._checkpoint_metadata(1, LONG) == "meta-1"
            for votes in ((True, True), (True, False), (True, True)):
                cast = [
                    pool.submit(client.should_commit, rank, 3, vote, LONG)
                    for rank, (client, vote) in enumerate(zip(clients, votes, strict=True))
                ]
                assert [each.result(60) for each in cast] == [all(votes)] * 2
        with pytest.raises(TimeoutError, match="Timeout expired"):
            clients[0]._quorum(0, 4, "", False, timedelta(seconds=0.3), 0)
        with pytest.raises(RuntimeError, match="rank 9 of r0 has no checkpoint"):
            clients[0]._checkpoint_metadata(9, LONG)
        with pytest.raises(RuntimeError, match=r"PERMISSION_DENIED.*allranks lighthouse evict"):
            clients[0]._calls.call("Kill", b"", LONG)
    finally:
        server.shutdown()
        server.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "allranks-torchft-beat"]
