"""torchft's gRPC service of managers: calls of bytes, its messages, and what one rank does in a quorum by torchft's rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from allranks.errors import ManagerError, require
from allranks.lighthouse.grpc_wire import fields, read_message, signed, write_message
from allranks.model.cluster import Quorum

if TYPE_CHECKING:
    import grpc

# ---- calls: TimeoutError when time is up, RuntimeError otherwise, as torchft raises them ----

OPTIONS = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection per client: its end is the client's end
    ("grpc.so_reuseport", 0),
)


class GrpcCalls:
    """A connection to one service. The constructor connects, as torchft's clients do."""

    def __init__(self, service: str, address: str, connect_timeout: timedelta) -> None:
        require("grpc", feature="torchft's protocol", extra="grpc")
        import grpc

        self._service = service
        self._channel = grpc.insecure_channel(address.removeprefix("http://").rstrip("/"), options=OPTIONS)
        limit_s = connect_timeout.total_seconds()
        try:
            grpc.channel_ready_future(self._channel).result(timeout=limit_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise TimeoutError(f"no connection to {address} within {limit_s:g} s") from None

    def call(self, method: str, request: bytes, timeout: timedelta) -> bytes:
        import grpc

        function = self._channel.unary_unary(f"/torchft.{self._service}/{method}")
        try:
            answer: bytes = function(request, timeout=timeout.total_seconds())
        except grpc.RpcError as error:
            raise _translated(error, method, timeout) from None
        return answer

    def close(self) -> None:
        """Ends the connection; calls that wait end with an error."""
        self._channel.close()


def _translated(error: grpc.RpcError, method: str, timeout: timedelta) -> Exception:
    import grpc

    code, text = error.code(), error.details() or ""
    late = code is grpc.StatusCode.DEADLINE_EXCEEDED or (
        code is grpc.StatusCode.CANCELLED and "timeout" in text.lower()
    )
    if late:
        wanted = f"{method} was not answered within {timeout.total_seconds():g} s"
        # scripts look for these words
        return TimeoutError(f"status: Cancelled, message: {wanted}: Timeout expired")
    return RuntimeError(f"{method} failed: {code.name}: {text}")


# ---- from a quorum to what one rank of one replica does in it. Pure ----


@dataclass
class QuorumResult:
    """What a manager is told. Ranks are indices among the replicas, sorted by name."""

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    store_address: str = ""  # of the replica whose store the new group meets in
    max_step: int = 0
    max_replica_rank: int | None = None  # our place among those at the highest step; None: we are behind
    max_world_size: int = 1  # how many are at the highest step
    heal: bool = False  # we take our state from somebody
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)  # who takes it from us
    commit_failures: int = 0
    replica_ids: list[str] = field(default_factory=list)


def quorum_results(quorum: Quorum, replica_id: str, group_rank: int, init_sync: bool = True) -> QuorumResult:
    """Everybody computes the same assignment from the same quorum; sources take turns by rank."""
    members = sorted(quorum.members, key=lambda member: member.replica)
    names = [member.replica for member in members]
    if replica_id not in names:
        raise ManagerError(f"{replica_id} is not in quorum {quorum.number}: {', '.join(names)}")
    me = names.index(replica_id)
    top = max(member.step for member in members)
    at_top = [place for place, member in enumerate(members) if member.step == top]
    primary = at_top[group_rank % len(at_top)]
    behind = [
        place
        for place, member in enumerate(members)
        if member.step != top or (init_sync and top == 0 and place != primary)
    ]
    sources = [place for place in range(len(members)) if place not in behind]
    source_of = {place: sources[(turn + group_rank) % len(sources)] for turn, place in enumerate(behind)}
    source = source_of.get(me)
    return QuorumResult(
        quorum_id=quorum.number,
        replica_rank=me,
        replica_world_size=len(members),
        store_address=members[primary].store,
        max_step=top,
        max_replica_rank=at_top.index(me) if me in at_top else None,
        max_world_size=len(at_top),
        heal=source is not None,
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[place for place, src in source_of.items() if src == me],
        commit_failures=max(member.commit_failures for member in members),
        replica_ids=names,
    )


# ---- the messages of ManagerService, written and read by hand. Pure ----


@dataclass(frozen=True)
class QuorumRequest:
    """ManagerQuorumRequest."""

    group_rank: int
    step: int
    checkpoint_metadata: str = ""
    shrink_only: bool = False
    init_sync: bool = False
    commit_failures: int = 0


#: Names of the fields, in the order of their numbers.
_REQUEST = "group_rank step checkpoint_metadata shrink_only init_sync commit_failures"
_RESULT = (
    "quorum_id recover_src_manager_address recover_src_replica_rank recover_dst_replica_ranks store_address "
    "max_step max_replica_rank max_world_size replica_rank replica_world_size heal commit_failures "
    "replica_ids"
)


def encode_request(request: QuorumRequest) -> bytes:
    return write_message(request, _REQUEST)


def decode_request(data: bytes) -> QuorumRequest:
    return read_message(QuorumRequest, _REQUEST, data)


def encode_result(result: QuorumResult) -> bytes:
    """ManagerQuorumResponse."""
    return write_message(result, _RESULT)


def decode_result(data: bytes) -> QuorumResult:
    return read_message(QuorumResult, _RESULT, data)


def read(data: bytes) -> tuple[dict[int, int], dict[int, str]]:
    """The last number and the last text of every field."""
    numbers: dict[int, int] = {}
    texts: dict[int, str] = {}
    for tag, value in fields(data):
        if isinstance(value, int):
            numbers[tag] = signed(value)
        else:
            texts[tag] = value.decode("utf-8", "replace")
    return numbers, texts
