"""torchft.coordination: lighthouse and manager servers inside a program, and their clients, over torchft's gRPC.

Both ways: torchft's clients can use these servers, these clients torchft's servers. The manager of allranks uses
none of this in a rank: a gRPC channel and forked DataLoader workers do not go together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta

from allranks.channel.frames import split_address
from allranks.errors import MissingExtra
from allranks.lighthouse.grpc_wire import (
    decode_quorum_response,
    encode_heartbeat_request,
    encode_quorum_request,
    number_field,
)
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse, OtherProtocol
from allranks.lighthouse.web import http_protocol
from allranks.model.cluster import Member
from allranks.torchft.manager_server import ManagerServer
from allranks.torchft.manager_service import (
    GrpcCalls,
    QuorumRequest,
    QuorumResult,
    decode_result,
    encode_request,
    read,
)

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
]

log = logging.getLogger("allranks.torchft")


@dataclass
class QuorumMember:
    """A replica in a quorum.

    Args:
        replica_id: its name
        address: of its manager server
        store_address: host:port of its TCPStore
        step: last committed step
        world_size: ranks inside the replica
        shrink_only: nobody new may join with this quorum
        data: what it handed in, for all to read
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Hashable, object] | None = None


@dataclass
class Timestamp:
    """Since 1970."""

    seconds: int
    nanos: int


@dataclass
class Quorum:
    """Who trains together.

    Args:
        quorum_id: grows whenever the members change
        participants: sorted by name
        created: when it was formed
    """

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


class LighthouseServer:
    """Listens at once, as torchft's does, on one port for allranks' and torchft's managers.

    Args:
        bind: HOST:PORT; port 0 takes any
        min_replicas: a quorum has at least so many members
        join_timeout_ms: how long those who ask wait for those who are alive (100)
        quorum_tick_ms: how often time alone may change a decision (100)
        heartbeat_timeout_ms: silence after which a replica is gone (5000)
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        min_replicas: int = 1,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        host, port = split_address(bind.removeprefix("http://"))
        heartbeat_s = (5000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms) / 1e3
        options = Options(
            min_replicas=min_replicas,
            join_timeout_s=(100 if join_timeout_ms is None else join_timeout_ms) / 1e3,
            quorum_tick_s=(100 if quorum_tick_ms is None else quorum_tick_ms) / 1e3,
            heartbeat_timeout_s=heartbeat_s,
            reset_grace_s=min(0.1, heartbeat_s),
            presume_dead_s=0.0,  # torchft's rule: who is silent is gone
        )
        page = http_protocol()
        server = ServerOptions(host=host, port=port)
        self._lighthouse = Lighthouse(options, server, http=page, protocols=_grpc()).start()

    def address(self) -> str:
        """For TORCHFT_LIGHTHOUSE."""
        return f"http://{self._lighthouse.address}"

    def shutdown(self) -> None:
        """Any number of times."""
        self._lighthouse.close()

    def __enter__(self) -> str:
        return self.address()

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _grpc() -> list[OtherProtocol]:
    from allranks.lighthouse.grpc_server import torchft_protocol

    try:
        return [torchft_protocol("", 0)]
    except MissingExtra as missing:
        log.warning("torchft's own clients cannot connect: %s", missing)
        return []


class LighthouseClient:
    """Asks a lighthouse, ours or torchft's. The constructor connects.

    Args:
        addr: http://host:port
        connect_timeout: limit of connecting
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._calls = GrpcCalls("LighthouseService", addr, connect_timeout)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Hashable, object] | None = None,
    ) -> Quorum:
        """Waits until a quorum with this replica is formed."""
        member = Member(
            replica=replica_id,
            address=address or "",
            store=store_address or "",
            step=step or 0,
            world_size=world_size or 0,
            shrink_only=bool(shrink_only),
            data=json.dumps(data) if data else "",
        )
        answer = self._calls.call("Quorum", encode_quorum_request(member), timeout)
        quorum, created_s = decode_quorum_response(answer)
        seconds = int(created_s)
        return Quorum(
            quorum.number,
            [_participant(member) for member in quorum.members],
            Timestamp(seconds, int((created_s - seconds) * 1e9)),
        )

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        self._calls.call("Heartbeat", encode_heartbeat_request(replica_id), timeout)

    def close(self) -> None:
        """Ends the connection: a lighthouse of ours takes that for the end of the replica."""
        self._calls.close()


class ManagerClient:
    """One rank's connection to the manager server of its replica, or of another one. The constructor connects.

    Args:
        addr: http://host:port
        connect_timeout: limit of connecting
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._calls = GrpcCalls("ManagerService", addr, connect_timeout)

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int,
        init_sync: bool = True,
    ) -> QuorumResult:
        """Waits until all ranks of the replica have asked and a quorum is formed."""
        request = QuorumRequest(
            group_rank, step, checkpoint_metadata, shrink_only, init_sync, commit_failures
        )
        return decode_result(self._calls.call("Quorum", encode_request(request), timeout))

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """What that rank handed in with its last request."""
        return read(self._calls.call("CheckpointMetadata", number_field(1, rank), timeout))[1].get(1, "")

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """True when every rank of the replica says so."""
        vote = number_field(1, int(should_commit)) + number_field(2, group_rank) + number_field(3, step)
        return bool(read(self._calls.call("ShouldCommit", vote, timeout))[0].get(1))


def _participant(member: Member) -> QuorumMember:
    return QuorumMember(
        member.replica,
        member.address,
        member.store,
        member.step,
        member.world_size,
        member.shrink_only,
        json.loads(member.data) if member.data else None,
    )
